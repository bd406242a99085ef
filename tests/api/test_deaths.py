"""POST /v1/deaths: what workers died with, in the listing and in the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Api

ID = "0f" * 16


def death(api: Api, **changes: Any) -> dict[str, Any]:
    return {"id": ID, "digest": "a" * 64, "stage": "open", "at": 1.0} | changes


def test_a_death_is_listed_and_counted(api: Api) -> None:
    manifest = api.publish()
    body = {"deaths": [death(api, digest=manifest.digest), death(api, id="1" * 32)]}
    for recorded in (1, 0):
        answer = api.client.post("/v1/deaths", json=body)
        assert (answer.status_code, answer.json()) == (200, {"recorded": recorded})
    (row,) = api.client.get("/v1/artifacts").json()["artifacts"]
    assert row["deaths"] == 1
    api.service.metrics.totals(api.service.index.totals())
    assert "aotcache_worker_deaths_total 1.0" in api.client.get("/metrics").text.splitlines()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "short"},
        {"digest": "no digest"},
        {"stage": "lunch"},
        {"at": -1.0},
        {"at": 1e300},
        {"more": 1},
    ],
)
def test_what_is_no_death_is_refused(api: Api, changes: dict[str, Any]) -> None:
    answer = api.client.post("/v1/deaths", json={"deaths": [death(api, **changes)]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid")


def test_one_request_tells_of_a_hundred_at_most(api: Api) -> None:
    body = {"deaths": [death(api, id=f"{n:032x}") for n in range(101)]}
    assert api.client.post("/v1/deaths", json=body).status_code == 422
