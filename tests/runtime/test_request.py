"""`on_miss="request"`: eager until a refresh, one build for each key, and ranks that swap together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotcache
from aotcache.errors import ConfigError
from aotcache.recall import Recalls, publish_list
from aotcache.runtime.attach import Handle
from tests.build.specs import serviced
from tests.loops.ranks import run
from tests.services.building import Building, building, client_of, until, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, importable: None) -> Iterator[Building]:
    with building(tmp_path_factory.mktemp("service"), "abz") as made:
        yield made


@pytest.fixture
def client(served: Building, tmp_path: Path) -> Iterator[Building]:
    with client_of(served, tmp_path / "home"):
        yield served


def call(model: serviced.Drafter) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(3, serviced.WIDTH))


def counts(handle: Handle) -> dict[str, Any]:
    stats = handle.stats()
    return {name: stats[name] for name in ("hits", "eager_calls", "requested", "pending", "failed")}


def ready(handle: Handle) -> int:
    assert handle.requests is not None
    return len(handle.requests.ready())


def test_the_callback_of_the_trainer_refreshes_before_each_step(client: Building, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trainer = pytest.importorskip("aotcache.integrations.trainer")
    model, state = serviced.build("a").eval(), transformers.TrainerState()
    spec = write_spec(tmp_path / "here", "a")
    with trainer.AotcacheCallback(spec, on_miss="request") as callback:
        callback.on_train_begin(None, state, None, model=model)
        callback.on_step_begin(None, state, None)
        want = call(model)
        until(lambda: ready(callback.handle) == 1)
        callback.on_substep_end(None, state, None)
        call(model)
        assert (counts(callback.handle)["hits"], counts(callback.handle)["eager_calls"]) == (0, 2)
        callback.on_step_begin(None, state, None)
        torch.testing.assert_close(call(model), want)
        assert (counts(callback.handle)["hits"], counts(callback.handle)["pending"]) == (1, 0)


def test_a_call_runs_eagerly_until_the_artifact_is_swapped_in(
    client: Building, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = serviced.build("bz").eval()
    spec = write_spec(tmp_path / "here", "bz")
    caplog.set_level(logging.WARNING, "aotcache.runtime.request")
    with aotcache.attach(model, spec, on_miss="request") as handle:
        want = call(model.layers["b"])
        call(model.layers["z"])
        assert counts(handle) == {"hits": 0, "eager_calls": 2, "requested": 2, "pending": 2, "failed": 0}
        until(lambda: ready(handle) == 1 and handle.stats()["failed"] == 1)
        torch.testing.assert_close(call(model.layers["b"]), want)
        # Open, and not in use: nothing changes between two refreshes.
        assert counts(handle) == {"hits": 0, "eager_calls": 3, "requested": 2, "pending": 1, "failed": 1}
        handle.refresh()
        torch.testing.assert_close(call(model.layers["b"]), want)
        call(model.layers["z"])
        handle.refresh()
        call(model.layers["z"])
        assert counts(handle) == {"hits": 1, "eager_calls": 5, "requested": 2, "pending": 0, "failed": 1}
        assert handle.stats()["traces"] == 0
    (told,) = [r.getMessage() for r in caplog.records if r.name == "aotcache.runtime.request"]
    assert "region 'layers.z' stays eager" in told
    assert "UnsupportedGraph" in told
    assert "serviced.py" in told


def test_ranks_swap_in_what_all_of_them_have_and_nothing_before(client: Building, tmp_path: Path) -> None:
    store = aotcache.open_store(client.url)
    spec = write_spec(tmp_path / "here", "ab")
    digests = {m.region: m.digest for m in store.list()}
    environments = []
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        environments.append({**client.environment, "AOTCACHE_HOME": str(tmp_path / f"rank{rank}")})
    wanted = [digests["layers.a"], digests["layers.b"]]
    found = run("tests.runtime.requesting:ranks", environments, str(spec.path), wanted, seconds=240)
    assert [rank["ready"] for rank in found] == [2, 0]
    for rank in found:
        # Hits and eager calls after each step: nothing, nothing, one layer, both.
        assert rank["steps"] == [[0, 2], [0, 4], [1, 5], [3, 5]]
        assert {k: rank["stats"][k] for k in ("requested", "pending", "failed", "traces")} == {
            "requested": 2,
            "pending": 0,
            "failed": 0,
            "traces": 0,
        }


def test_a_service_that_is_away_is_waited_for(
    client: Building, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = serviced.build("a").eval()
    spec = write_spec(tmp_path / "here", "a")
    with aotcache.attach(model, spec, store="http://127.0.0.1:9", on_miss="request") as handle:
        x = torch.ones(3, serviced.WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(model.layers["a"](x), torch.relu(x) * model.layers["a"].factor)
        until(lambda: any("not asked for now" in record.getMessage() for record in caplog.records))
        handle.refresh()
        assert counts(handle) == {"hits": 0, "eager_calls": 1, "requested": 1, "pending": 1, "failed": 0}


def test_what_is_recalled_in_a_run_is_dropped_and_asked_for_again(client: Building, tmp_path: Path) -> None:
    model, key = serviced.build("a").eval(), client.server.signing_key
    spec = write_spec(tmp_path / "here", "a")
    store, operator = aotcache.open_store(client.url), Recalls(tmp_path / "operator")
    with aotcache.attach(model, spec, on_miss="request") as handle:
        want = call(model)
        # Another test may have had it built already.
        until(lambda: ready(handle) == 1 or counts(handle)["hits"] == 1)
    with aotcache.attach(model, spec, on_miss="request") as handle:
        torch.testing.assert_close(call(model), want)
        assert (counts(handle)["hits"], counts(handle)["requested"]) == (1, 0)
        (digest,) = handle.resolver.served.values()
        publish_list(store, key, operator, recall={digest: "bad"}, seconds=86400.0)

        def dropped() -> bool:
            handle.refresh()  # a service that is slow to answer is heard at the next one
            return not handle.resolver.served

        until(dropped)
        torch.testing.assert_close(call(model), want)
        assert (counts(handle)["hits"], counts(handle)["requested"]) == (1, 1)
        # The builder makes the same bytes, which nobody may publish; but it was all a mistake.
        publish_list(store, key, operator, lift=[digest], seconds=86400.0)
    with aotcache.attach(model, spec, on_miss="request") as handle:
        torch.testing.assert_close(call(model), want)
        assert counts(handle)["hits"] == 1
    store.remote.session.close()  # type: ignore[attr-defined]


def test_a_store_that_is_no_service_is_refused(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a")
    with pytest.raises(ConfigError, match="is none"):
        aotcache.attach(serviced.build("a"), spec, store=str(tmp_path / "store"), on_miss="request")
    with aotcache.attach(serviced.build("a"), spec, store=str(tmp_path / "store")) as handle:
        with pytest.raises(ConfigError, match="process group"):
            handle.refresh(group="world")
