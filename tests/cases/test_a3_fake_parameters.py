"""A3: drafters built on the meta device or in a FakeTensorMode warm as any other, all at once too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aotcache
from aotcache.errors import CallRefused
from tests.cases import tiny
from tests.cases.conftest import Warm
from tests.cases.support import answers, assert_close, make_batch, start, write_spec
from tests.homes import new_home


def test_four_processes_get_one_artifact_under_one_key(specs: Path, tmp_path: Path) -> None:
    kinds = ["meta", "meta", "meta", "fake"]
    written = [
        write_spec(specs / f"without_memory_{i}.toml", modes=["infer"], meta=kind)
        for i, kind in enumerate(kinds)
    ]
    home = new_home(tmp_path / "home")
    processes = [
        start("warming_at_once", str(spec.path), kind == "fake", environment={"AOTCACHE_HOME": str(home)})
        for spec, kind in zip(written, kinds, strict=True)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = answers(processes)
    assert [answer["error"] for answer in found] == [[]] * 4
    assert all(answer["cells"] == found[0]["cells"] for answer in found)
    assert len(found[0]["cells"]) == 1
    assert sum(answer["compiled"] for answer in found) == 1

    key, digest = found[0]["cells"][0]
    store = aotcache.open_store((home / "store").as_uri())
    assert [(m.key, m.digest) for m in store.list()] == [(key, digest)]
    model = tiny.build()
    with aotcache.attach(model, written[0], store=store) as handle, torch.no_grad():
        assert_close(model(**make_batch()), tiny.build()(**make_batch()))
        assert handle.stats()["hits"] == 1


@pytest.mark.parametrize("meta", ["meta", "fake"])
def test_parameters_without_memory_are_refused_in_a_worker(tiny_d: Warm, meta: str) -> None:
    model = tiny.build(meta=meta)
    with aotcache.attach(model, tiny_d.spec, store=tiny_d.store) as handle:
        with pytest.raises(CallRefused, match=r"norm\.weight"), torch.no_grad():
            model(**make_batch())
        assert handle.stats()["loads"] == 0
