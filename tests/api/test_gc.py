"""`POST /v1/gc` and `/v1/pins`, and the client's side of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from aotcache.api.app import create_app
from aotcache.api.state import ServiceConfig
from aotcache.db.engine import Database
from aotcache.db.migrate import upgrade
from aotcache.manifest import Manifest
from aotcache.service import gc
from aotcache.trust import SigningKey, TrustedKeys
from tests.api.conftest import Api
from tests.faults.disks import fill, mounted

KEY = "0" * 64


def age(api: Api, manifest: Manifest, seconds: float) -> None:
    with api.service.database.session(write=True) as session:
        session.execute(
            text("UPDATE usage SET last_used = last_used - :seconds WHERE key = :key"),
            {"seconds": seconds, "key": manifest.key},
        )


def collect(api: Api, **body: Any) -> dict[str, Any]:
    answer = api.client.post("/v1/gc", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def listed(api: Api) -> set[str]:
    return {row["key"] for row in api.client.get("/v1/artifacts").json()["artifacts"]}


def test_a_collection_removes_entries_and_says_what_and_why(api: Api) -> None:
    old, young = api.publish(b"old", call="old"), api.publish(b"young", call="young")
    age(api, old, 500.0)
    for dry_run in (True, False):
        found = collect(api, max_age=100.0, dry_run=dry_run)
        [row] = found.pop("decisions")
        assert found == {"before": 8, "after": 5, "over": 0, "next": None, "notes": []}
        assert row.pop("last_used") > 0
        assert row == {
            "kind": "entry",
            "key": old.key,
            "variant": str(old.variant),
            "digest": old.digest,
            "size": 3,
            "what": "layers.0 train seq=256",
            "remove": True,
            "reason": "age",
        }
        assert (old.key in listed(api)) is dry_run
    assert listed(api) == {young.key}
    assert api.client.get(f"/v1/artifacts/{old.key}").status_code == 404
    assert api.client.get(f"/v1/blobs/{old.digest}").status_code == 404


def test_what_was_asked_for_a_moment_ago_is_not_old(api: Api) -> None:
    """Hits are written every few seconds; a collection waits for none of that."""
    manifest = api.publish()
    age(api, manifest, 500.0)
    api.client.post("/v1/resolve", json={"keys": [manifest.key]})
    assert collect(api, max_age=100.0)["decisions"] == []


def test_a_full_disk_is_no_obstacle(tmp_path: Path) -> None:
    """Nothing can be written there, not even which entries were asked for."""
    with mounted(tmp_path / "disk", "size=4m,mode=700") as disk:
        config = ServiceConfig(
            store=(disk / "store").as_uri(),
            database=f"sqlite:///{disk}/aotcache.db",
            trusted=TrustedKeys(tmp_path / "trusted"),
            uploads=disk / "uploads",
        )
        key = SigningKey.generate()
        config.trusted.add(key.public, "tests")
        upgrade(Database(config.database))
        app = create_app(config)
        with TestClient(app, base_url="http://127.0.0.1") as client:
            api = Api(app, client, config, key)
            made = [api.publish(bytes([n]) * 100_000, call=f"{n}") for n in range(3)]
            fill(disk)
            client.post("/v1/resolve", json={"keys": [made[0].key]})
            found = collect(api, max_bytes=100_000)
            assert (found["after"], len(found["notes"])) == (100_000, 1), found["notes"]
            assert len(listed(api)) == 1


def test_pins_are_made_listed_and_removed(api: Api) -> None:
    manifest = api.publish()
    put = api.client.put(f"/v1/pins/{manifest.key}", json={"reason": "release 4"})
    assert (put.status_code, put.json()["reason"]) == (200, "release 4")
    api.client.put(f"/v1/pins/{KEY}", json={})
    pins = api.client.get("/v1/pins").json()["pins"]
    assert [(pin["what"], pin["reason"]) for pin in pins] == sorted([(KEY, ""), (manifest.key, "release 4")])
    found = collect(api, max_bytes=0)
    assert ([row["reason"] for row in found["decisions"]], found["over"]) == (["pinned"], 7)
    assert api.client.delete(f"/v1/pins/{manifest.key}").json() == {"deleted": 1}
    assert api.client.delete(f"/v1/pins/{manifest.key}").json() == {"deleted": 0}
    collect(api, max_bytes=0)
    assert listed(api) == set()


def test_what_is_built_right_now_and_what_a_lock_file_names_stay(api: Api) -> None:
    built, locked = api.publish(b"built", call="built"), api.publish(b"locked", call="locked")
    lease = {"key": built.key, "variant": str(built.variant), "holder": "builder"}
    assert api.client.post("/v1/leases", json=lease).status_code == 201
    found = collect(api, max_bytes=0, locked=[locked.digest])
    assert sorted(row["reason"] for row in found["decisions"]) == ["leased", "locked"]
    assert listed(api) == {built.key, locked.key}


@pytest.mark.parametrize(
    "body",
    [
        {"max_bytes": -1},
        {"max_bytes": 1.5},
        {"max_age": -1.0},
        {"max_age": "30d"},
        {"locked": ["x"]},
        {"max_size": 1},
        {"cursor": "no cursor!"},
    ],
)
def test_a_request_that_is_wrong_removes_nothing(api: Api, body: dict[str, Any]) -> None:
    manifest = api.publish()
    assert api.client.post("/v1/gc", json=body).status_code == 422
    assert api.client.post("/v1/gc", json={"cursor": "W10"}).status_code == 400
    assert api.client.put("/v1/pins/x", json={}).status_code == 422
    assert api.client.put(f"/v1/pins/{KEY}", json={"reason": "x" * 501}).status_code == 422
    assert listed(api) == {manifest.key}


def test_rounds_are_gone_on_with_by_their_cursor(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "MOST", 2 - gc._KEPT)
    made = [api.publish(b"%d" % n, call=f"{n}") for n in range(5)]
    for n, manifest in enumerate(made):
        age(api, manifest, 1000.0 - n)
    cursor, removed = None, []
    for _ in range(10):
        found = collect(api, max_bytes=1, cursor=cursor)
        removed += [row["key"] for row in found["decisions"]]
        cursor = found["next"]
        if cursor is None:
            break
    assert removed == [manifest.key for manifest in made[:4]]
    assert listed(api) == {made[4].key}
