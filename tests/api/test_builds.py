"""Builds and leases over HTTP; what they do under races is tested where they are made."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from aotcache.store.sse import parse_events
from tests.api.conftest import Api
from tests.manifests import TOOLCHAIN

KEY = "1" * 64
TARGET = "cpu:x86_64-avx2"
VARIANT = f"cpu-x86_64-avx2+{TOOLCHAIN}"
WANTED: dict[str, Any] = {
    "spec": "drafter",
    "key": KEY,
    "target": TARGET,
    "toolchain": {"torch": TOOLCHAIN.torch, "git": TOOLCHAIN.git, "cuda": None},
}
CLAIM = {"specs": ["drafter"], "variants": [VARIANT], "holder": "builder-1"}


def ask(api: Api, **changes: Any):  # type: ignore[no-untyped-def]
    return api.client.post("/v1/builds", json={**WANTED, **changes})


def claim(api: Api) -> dict[str, Any]:
    answer = api.client.post("/v1/builds/claim", json=CLAIM)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(api: Api, build: str, after: int | None = None) -> list[tuple[int, str, dict[str, Any]]]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    answer = api.client.get(f"/v1/builds/{build}/events", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [(int(e["id"]), e["event"], e["data"]) for e in parse_events(answer.iter_lines())]


def test_everybody_who_asks_gets_the_same_build(api: Api) -> None:
    first, second = ask(api), ask(api)
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json()["id"] == second.json()["id"]
    assert (first.json()["state"], first.json()["variant"]) == ("queued", VARIANT)


def test_a_build_goes_its_way_and_every_step_is_an_event(api: Api) -> None:
    build = ask(api).json()["id"]
    claimed = claim(api)
    assert claimed["build"]["id"] == build
    hold = {"lease": claimed["lease"], "token": claimed["token"]}
    assert api.client.post("/v1/builds/claim", json=CLAIM).status_code == 204
    told = api.client.post(
        f"/v1/builds/{build}/events", json={**hold, "stage": "compile", "expected_seconds": 4.5}
    )
    assert told.json() == {"cancelled": False, "seconds": claimed["seconds"]}
    running = api.client.get(f"/v1/builds/{build}").json()
    assert (running["state"], running["stage"], running["expected_seconds"]) == ("running", "compile", 4.5)

    failure = {"type": "CompileFailed", "message": "g++ ended with 1"}
    done = api.client.post(f"/v1/builds/{build}/finish", json={**hold, "error": failure, "log": "the log\n"})
    assert (done.json()["state"], done.json()["error"], done.json()["log"]) == (
        "failed",
        failure,
        "the log\n",
    )
    assert done.json()["expires"] > done.json()["updated"]
    # It stays the answer to everybody who asks.
    again = ask(api)
    assert (again.status_code, again.json()["id"], again.json()["error"]) == (202, build, failure)

    story = events(api, build)
    assert [number for number, _, _ in story] == [1, 2, 3, 4]
    assert [(kind, data.get("state") or data.get("stage")) for _, kind, data in story] == [
        ("state", "queued"),
        ("state", "running"),
        ("stage", "compile"),
        ("state", "failed"),
    ]
    assert events(api, build, after=2) == story[2:]
    assert events(api, build, after=4) == []


def test_a_builder_publishes_under_its_lease_and_the_build_is_done(api: Api) -> None:
    manifest = api.manifest(b"archive")
    build = ask(api, key=manifest.key).json()["id"]
    claimed = claim(api)
    hold = {"lease": claimed["lease"], "token": claimed["token"]}
    api.client.put(f"/v1/blobs/{manifest.digest}", content=b"archive")
    published = api.client.put(
        f"/v1/artifacts/{manifest.key}",
        content=manifest.document(),
        headers={"Aotcache-Lease": f"{claimed['lease']}:{claimed['token']}"},
    )
    assert published.status_code == 201
    done = api.client.post(f"/v1/builds/{build}/finish", json=hold)
    assert done.json()["state"] == "done"
    there = ask(api, key=manifest.key)
    assert (there.status_code, there.json()["state"]) == (200, "done")


def test_cancelling_tells_the_builder(api: Api) -> None:
    build = ask(api).json()["id"]
    claimed = claim(api)
    assert api.client.delete(f"/v1/builds/{build}").json()["state"] == "cancelled"
    hold = {"lease": claimed["lease"], "token": claimed["token"], "stage": "compile"}
    assert api.client.post(f"/v1/builds/{build}/events", json=hold).json()["cancelled"] is True
    assert events(api, build)[-1][2]["state"] == "cancelled"


def test_a_builder_without_the_lease_changes_nothing(api: Api) -> None:
    build = ask(api).json()["id"]
    claimed = claim(api)
    wrong = {"lease": claimed["lease"], "token": claimed["token"] + 1}
    for path, body in (("events", {**wrong, "stage": "compile"}), ("finish", wrong)):
        answer = api.client.post(f"/v1/builds/{build}/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "lease_lost")
    assert api.client.get(f"/v1/builds/{build}").json()["state"] == "running"


def test_only_registered_specs_are_built_and_builders_register_theirs(api: Api) -> None:
    assert [row["name"] for row in api.client.get("/v1/specs").json()["specs"]] == ["drafter"]
    unknown = ask(api, spec="other")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found")
    api.client.post("/v1/builds/claim", json={**CLAIM, "specs": ["other"]})
    assert ask(api, spec="other").status_code == 202


@pytest.mark.parametrize(
    "change",
    [
        {"target": "tpu:v5"},
        {"target": "cpu"},
        {"key": "x"},
        {"toolchain": {"torch": "2", "git": "zz"}},
        {"factory": "os:system"},
    ],
)
def test_a_request_that_says_something_else_is_refused(api: Api, change: dict[str, Any]) -> None:
    assert ask(api, **change).status_code in (400, 422)
    assert api.client.get("/v1/builds").json()["builds"] == []


def test_builds_are_listed_page_by_page_without_logs(api: Api) -> None:
    made = [ask(api, key=f"{n:064x}").json()["id"] for n in range(5)]
    first = api.client.get("/v1/builds", params={"limit": 3}).json()
    second = api.client.get("/v1/builds", params={"limit": 3, "cursor": first["next"]}).json()
    listed = [build["id"] for build in first["builds"] + second["builds"]]
    assert listed == made[::-1]
    assert second["next"] is None
    assert first["builds"][0]["log"] is None
    assert api.client.get("/v1/builds", params={"state": "running"}).json()["builds"] == []


def test_a_lease_is_taken_renewed_and_given_back(api: Api) -> None:
    body = {"key": KEY, "variant": VARIANT, "holder": "host-1"}
    taken = api.client.post("/v1/leases", json=body)
    assert taken.status_code == 201
    lease = taken.json()
    held = api.client.post("/v1/leases", json={**body, "holder": "host-2"})
    assert (held.status_code, held.json()["error"]["type"]) == (409, "conflict")
    details = held.json()["error"]["details"]
    assert details["holder"] == "host-1"
    assert 0 < details["expires_in"] <= lease["seconds"]

    path = f"/v1/leases/{lease['lease']}"
    assert api.client.put(path, json={"token": lease["token"]}).json() == {"seconds": lease["seconds"]}
    assert api.client.put(path, json={"token": lease["token"] + 1}).status_code == 409
    assert api.client.delete(path, params={"token": lease["token"] + 1}).status_code == 204
    assert api.client.post("/v1/leases", json=body).status_code == 409
    assert api.client.delete(path, params={"token": lease["token"]}).status_code == 204
    assert api.client.put(path, json={"token": lease["token"]}).json()["error"]["type"] == "lease_lost"
    after = api.client.post("/v1/leases", json=body).json()
    assert after["token"] > lease["token"]


def test_many_watchers_are_one_look_at_the_database(api: Api) -> None:
    build = ask(api).json()["id"]
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "build_events" in statement:
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    with ThreadPoolExecutor(20) as pool:
        stories = [pool.submit(events, api, build) for _ in range(20)]
        time.sleep(2.5)
        event.remove(Engine, "before_cursor_execute", note)
        api.client.delete(f"/v1/builds/{build}")
    assert {story.result()[-1][2]["state"] for story in stories} == {"cancelled"}
    # Each read them when it came; every 0.3 s would be 160.
    assert 20 <= len(seen) <= 60
    assert api.service.watching._watched == {}


def test_a_watcher_of_events_to_come_is_told_of_the_end(api: Api) -> None:
    build = ask(api).json()["id"]
    with ThreadPoolExecutor(1) as pool:
        story = pool.submit(events, api, build, 1000)
        time.sleep(0.5)
        api.client.delete(f"/v1/builds/{build}")
        assert story.result(20) == []
