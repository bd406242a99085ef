from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotcache.errors import ManifestError
from aotcache.key import Component, KeyParts
from aotcache.manifest import InputSlot, Manifest
from aotcache.types import Target
from tests.manifests import make_manifest

texts = st.text(max_size=12)
items = st.tuples(texts, texts)
components = st.builds(Component, texts, st.lists(items, max_size=4).map(tuple))
# Components of a key have names of their own.
parts = st.lists(components, max_size=5, unique_by=lambda c: c.name).map(lambda found: KeyParts(tuple(found)))
sizes = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
slots = st.builds(
    InputSlot,
    st.sampled_from(["parameter", "buffer", "input", "lifted"]),
    texts,
    texts,
    sizes,
    sizes,
    st.booleans(),
)


@given(parts, st.lists(slots, max_size=4), texts, st.dictionaries(texts, st.integers(1, 1 << 40), max_size=3))
def test_a_manifest_survives_its_own_json(
    key: KeyParts, inputs: list[InputSlot], region: str, bucket: dict[str, int]
) -> None:
    manifest = replace(
        make_manifest(),
        key=key.key,
        components=tuple(key.to_json()),
        inputs=tuple(inputs),
        region=region,
        bucket=bucket,
    )
    data = manifest.to_json()
    found = Manifest.from_json(data, where="here")
    assert found == manifest
    assert found.to_json() == data
    assert found.parts == key


@given(parts, parts)
def test_equal_keys_mean_equal_components(one: KeyParts, other: KeyParts) -> None:
    assert (one.key == other.key) == (one == other)


@given(parts)
def test_a_key_does_not_differ_from_itself(key: KeyParts) -> None:
    assert key.diff(key) == []


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[1]", b"{}", b'{"schema": 1}', b'{"schema": 2}', b"\xff", b"[" * 99999]
)
def test_what_is_no_manifest_is_a_typed_error_that_says_where(data: bytes) -> None:
    with pytest.raises(ManifestError, match="over there"):
        Manifest.from_json(data, where="over there")


def test_a_key_that_is_not_the_hash_of_the_components_is_refused() -> None:
    """Case D7: an edited component cannot pass under the old key."""
    document = json.loads(make_manifest().to_json())
    document["components"][0]["items"][0][1] = "edited"
    with pytest.raises(ManifestError, match="hash to"):
        Manifest.from_json(json.dumps(document).encode(), where="x")


def test_unknown_fields_are_refused() -> None:
    document = json.loads(make_manifest().to_json())
    document["extra"] = 1
    with pytest.raises(ManifestError, match="extra"):
        Manifest.from_json(json.dumps(document).encode(), where="x")


@pytest.mark.parametrize(
    "target",
    [
        Target("../../../cpu", "x"),
        Target("cpu", "a/b"),
        Target("cpu", "a\0b"),
        Target("cpu", "x" * 200),
        Target("cpu", "\n"),
    ],
    ids=["up", "folder", "nul", "long", "line"],
)
def test_a_variant_that_would_not_stay_in_its_folder_is_refused(target: Target) -> None:
    with pytest.raises(ManifestError, match="make up the name"):
        Manifest.from_json(replace(make_manifest(), target=target).to_json(), where="here")


@pytest.mark.parametrize(
    "changes", [{"digest": "../../x"}, {"digest": "A" * 64}, {"digest": ""}, {"size": -1}]
)
def test_an_archive_that_cannot_be_one_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="its archive is"):
        Manifest.from_json(replace(make_manifest(), **changes).to_json(), where="here")


def test_a_bare_document_ends_with_its_own_digest_and_is_still_json() -> None:
    manifest = make_manifest()
    data = manifest.document()
    assert json.loads(data).pop("unsigned_sha256") == hashlib.sha256(manifest.to_json()).hexdigest()
    assert Manifest.from_json(data, where="here") == manifest
    assert Manifest.from_json(data + b"\n", where="here").document() == data
    assert json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode() == data


def test_a_contract_with_one_wrong_digit_is_another_contract_to_nobody() -> None:
    """It would be JSON, and a manifest: nothing but its digest tells."""
    data = make_manifest().document()
    changed = data.replace(b'"intermediates":1', b'"intermediates":2')
    assert changed != data
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.from_json(changed, where="here")
    found = Manifest.from_json(changed[: changed.rindex(b',"unsigned_sha256"')] + b"}", where="here")
    assert found.pair is not None
    assert found.pair.intermediates == 2
