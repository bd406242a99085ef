"""`ls` and `show` tell of the processes that died with an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aotcache.store import Store
from tests.cli.conftest import publish


def leave(home: Path, digest: str, number: int) -> None:
    """What was found of deaths on this host."""
    folder = home / "deaths"
    folder.mkdir(parents=True, exist_ok=True)
    known = {"digest": digest, "key": "b" * 64, "region": "layers.0", "count": number, "stage": "backward"}
    known |= {"last": 86400.0, "mark": "c" * 32, "reports": []}
    (folder / f"{digest}.json").write_text(json.dumps(known))


def test_ls_has_a_column_of_deaths(run: Any, store: Store, tmp_path: Path) -> None:
    first = publish(store, tmp_path, "one", call="a")
    second = publish(store, tmp_path, "two", call="b")
    leave(tmp_path / "home", first.digest, 3)
    entries = run("ls", "--store", store.url, "--json").json["entries"]
    assert {e["digest"]: e["deaths"] for e in entries} == {first.digest: 3, second.digest: 0}
    lines = run("ls", "--store", store.url).out.splitlines()
    at = lines[0].index("deaths")
    shown = {line.split()[0]: line[at:].split()[0] for line in lines[1:3]}
    assert shown == {first.key[:12]: "3", second.key[:12]: "-"}


def test_show_says_how_many_died_when_and_in_what(run: Any, store: Store, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path)
    assert "deaths" not in run("show", manifest.key, "--store", store.url).out
    leave(tmp_path / "home", manifest.digest, 2)
    (line,) = [
        line
        for line in run("show", manifest.key, "--store", store.url).out.splitlines()
        if line.startswith("deaths")
    ]
    assert "2 processes of this host died with it" in line
    assert "first ran the backward of it" in line
    (shown,) = run("show", manifest.key, "--store", store.url, "--json").json
    assert shown["deaths"] == {"number": 2, "stage": "backward", "last": 86400.0}
