"""Whatever is given to a parser, it answers or raises a typed error; hypothesis makes what is given."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotcache.errors import AotcacheError
from tests.faults import mutations
from tests.fuzz.parsers import PARSERS, Parser, feed

EXAMPLES = 100
"""Of each parser and kind; `make fuzz` goes on from there."""

quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)

each = pytest.mark.parametrize("parser", PARSERS.values(), ids=lambda parser: parser.name)


@each
def test_seeds_are_read(parser: Parser) -> None:
    """Else the other tests would show how garbage is refused, and no more."""
    for seed in parser.seeds():
        try:
            parser.read(seed)
        except parser.allowed:
            pass


@each
@quick
@given(data=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(parser: Parser, data: bytes) -> None:
    feed(parser, data)


def damaged(seed: bytes, number: int) -> bytes:
    """A document that was written well and came to harm, once to three times."""
    chance = random.Random(number)
    for _ in range(chance.randint(1, 3)):
        damages = mutations.BYTES if chance.random() < 0.4 else mutations.FIELDS
        try:
            seed = chance.choice(damages)(chance, seed)
        except (ValueError, RecursionError):
            seed = chance.choice(mutations.BYTES)(chance, seed)
    return seed


@each
@quick
@given(st.data())
def test_damaged_documents_are_read_or_refused(parser: Parser, data: Any) -> None:
    seed = data.draw(st.sampled_from(list(parser.seeds())))
    feed(parser, damaged(seed, data.draw(st.integers(0, 1 << 32))))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["0" * 64, "train"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def fields(document: Any) -> list[tuple[Any, Any]]:
    """Every place in a document."""
    return list(mutations._places(document))


@each
@quick
@given(st.data())
def test_documents_with_other_values_are_read_or_refused(parser: Parser, data: Any) -> None:
    """The right names, with values of any kind."""
    try:
        document = json.loads(data.draw(st.sampled_from(list(parser.seeds()))))
    except ValueError:
        document = {}
    places = fields(document)
    for _ in range(data.draw(st.integers(1, 3)) if places else 0):
        owner, name = data.draw(st.sampled_from(places))
        if isinstance(owner, dict) or (isinstance(name, int) and name < len(owner)):
            owner[name] = data.draw(values)
    feed(parser, json.dumps(document).encode())


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"payloadType":', '{"components":[', '{"found":'])
@each
def test_documents_nested_without_end_are_refused(parser: Parser, opening: str) -> None:
    for depth in (900, 100_000):
        feed(parser, opening.encode() * depth)
        feed(parser, (opening * depth + "1" + ("]" if opening == "[" else "}") * depth).encode())


@each
def test_numbers_beyond_all_bounds_are_refused(parser: Parser) -> None:
    for seed in parser.seeds():
        for number in ("9" * 5000, "1e999", "-1e999", "NaN", "-Infinity", "1" + "0" * 400):
            feed(parser, seed.replace(b":1", b":" + number.encode()).replace(b": 1", b": " + number.encode()))


PEM = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK1VwBCIEIAcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcH
-----END PRIVATE KEY-----
"""
"""Of a kind of key that nobody knows: no Ed25519 key by one letter."""

FOUND = {
    "recorded calls": [
        b'{"source":"s","run":null,"calls":[],"keys":{"k":{"mode":"train","regions":{},"components":["d"]}},'
        b'"components":{"d":{"name":"code","items":%b}},"outside":{},"left_out":{},"format":1}' % items
        for items in (b"0.5", b"[1]", b"[[1]]", b"null", b'"ab"')
    ],
    "signing key": [PEM],
}
"""What `make fuzz` has found: each ended its parser in another way than by a typed error once."""


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, found in FOUND.items() for data in found])
def test_what_was_found_once_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(AotcacheError):
        PARSERS[name].read(data)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("following", ["NaN", "7", "[]", '"the same"'])
def test_a_listing_that_never_ends_is_given_up(following: str) -> None:
    """A cursor that is not even equal to itself led to the same page for ever."""
    seed = PARSERS["answer of a service"].seeds()[0]
    feed(PARSERS["answer of a service"], seed.replace(b'"next": null', b'"next": ' + following.encode()))
