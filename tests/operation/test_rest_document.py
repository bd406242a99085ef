"""docs/rest.md: every example is run against a real service, every table compared with the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aotcache.api.errors import _STATUS
from aotcache.recall_list import SignedList, next_list
from aotcache.store.http import HttpStore
from aotcache.store.session import ServiceSession
from aotcache.trust import sign
from tests.manifests import make_manifest
from tests.services.serving import Serving, serving

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "rest.md").read_text()
SPEC = """
[drafter]
name    = "drafter"
factory = "drafters:build"
batch   = "drafters:batch"
regions = ["layers.*"]
modes   = ["train"]

[buckets]
seq = [256]
"""

Example = tuple[str, str | None]

_ROUTE = r"^\| `((?:GET|HEAD|PUT|POST|DELETE) [^`]+)` \| (\w*)"


def examples() -> list[Example]:
    """Each command, and the JSON that the document says it answers."""
    found = re.findall(r"```sh\n(.*?)```\n(?:\n```json\n(.*?)```\n)?", DOCUMENT, re.DOTALL)
    return [(command, answer or None) for command, answer in found]


@dataclass
class Shell:
    """Runs the examples in one folder, with the variables that the document names."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], **self.variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("rest")
    (folder / "drafter.toml").write_text(SPEC)
    options = ("--spec", str(folder / "drafter.toml"), "--no-builder")
    with serving(folder / "service", arguments=options) as running:
        yield running


@pytest.fixture(scope="module")
def shell(service: Serving, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """With one artifact published, and another one missing."""
    from aotcache.trust import SigningKey, TrustedKeys

    folder = tmp_path_factory.mktemp("shell")
    token = service.token("admin")
    key = SigningKey.generate()
    TrustedKeys(service.config_home / "trusted").add(key.public, "builder-1")
    data = b"an archive for the examples"
    manifest = sign(make_manifest(data), key)
    archive = folder / "published.pt2"
    archive.write_bytes(data)
    store = HttpStore(service.url, ServiceSession(service.url, token))
    assert store.publish(manifest, archive)
    store.session.close()
    (folder / "envelope.json").write_bytes(manifest.document())
    recalled = next_list([], recall={"b" * 64: "wrong gradients"}, now=1.7e9, seconds=86400.0)
    (folder / "recall.json").write_bytes(SignedList.make(recalled, key).document)
    variables = {
        "URL": service.url,
        "TOKEN": token,
        "KEY": manifest.key,
        "DIGEST": manifest.digest,
        "MISSING": "0" * 64,
        "SPEC": "drafter",
        "GIT": "c" * 40,
    }
    return Shell(folder, variables)


def alike(found: Any, shown: Any, where: str = "$") -> None:
    """What was answered has the shape, and the short plain values, of what the document shows."""
    if isinstance(shown, dict) and isinstance(found, dict):
        placeholders = len(shown) == 1 and next(iter(shown)).endswith("...")
        if placeholders:
            alike(next(iter(found.values())), next(iter(shown.values())), where)
            return
        assert set(found) == set(shown), where
        for name in shown:
            alike(found[name], shown[name], f"{where}.{name}")
    elif isinstance(shown, list) and isinstance(found, list):
        assert bool(found) == bool(shown), where
        for one, other in zip(found, shown, strict=False):
            alike(one, other, where)
    elif isinstance(shown, bool) or shown is None or where.endswith((".type", ".state")):
        assert found == shown, where
    else:
        assert type(found) is type(shown) or {type(found), type(shown)} == {int, float}, where


@pytest.mark.parametrize("example", examples(), ids=lambda example: example[0].split("$URL")[-1][:32].strip())
def test_every_example_runs_and_answers_what_is_shown(shell: Shell, example: Example) -> None:
    command, shown = example
    answer = shell.run(command)
    if shown is not None:
        found = json.loads(answer)
        alike(found, json.loads(shown))
        if "v1/builds" in command and found.get("state") == "queued":
            shell.variables["BUILD"] = found["id"]
    elif "/events" in command:
        assert "cancelled" in answer.rstrip().splitlines()[-1]
    elif "Range" in command:
        assert answer.strip() == "2"
    else:
        assert "OK" in answer


def rows(pattern: str) -> list[tuple[str, ...]]:
    """The cells in parentheses of every table row."""
    return re.findall(pattern, DOCUMENT, re.MULTILINE)


def test_every_error_type_is_in_the_table_with_its_status() -> None:
    assert {name: int(status) for name, status in rows(r"^\| `(\w+)` \| (\d+) \|")} == _STATUS


def test_every_route_is_in_the_table_and_no_other(service: Serving) -> None:
    with urllib.request.urlopen(f"{service.url}/openapi.json", timeout=30) as answer:
        paths = json.load(answer)["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {route for route, _ in rows(_ROUTE)} == served


def test_the_scope_of_every_route_is_the_one_in_the_table(service: Serving) -> None:
    weak = {scope: service.token(scope) for scope in ("read", "publish", "build")}
    bodies = {
        "/v1/resolve": {"keys": []},
        "/v1/deaths": {"deaths": []},
        "/v1/keys/{key}/why": {},
        "/v1/leases": {"key": "0" * 64, "variant": "v", "holder": "h"},
        "/v1/leases/{id}": {"token": 1},
        "/v1/builds": {
            "spec": "s",
            "key": "0" * 64,
            "target": "cpu:x86_64-avx2",
            "toolchain": {"torch": "2", "git": "c" * 40},
        },
        "/v1/builds/claim": {"specs": [], "variants": [], "holder": "h"},
        "/v1/builds/{id}/events": {"lease": "l", "token": 1, "stage": "s"},
        "/v1/builds/{id}/finish": {"lease": "l", "token": 1},
    }
    for route, scope in rows(_ROUTE):
        method, path = route.split()
        other = "read" if scope != "read" else "build"  # one that must not be enough
        headers = {"Content-Type": "application/json"}
        if scope:
            headers["Authorization"] = f"Bearer {weak[other]}"
        filled = path.replace("{key}", "0" * 64).replace("{digest}", "0" * 64).replace("{id}", "0" * 32)
        filled = filled.replace("{what}", "0" * 64)
        body = json.dumps(bodies.get(path, {})).encode() if method in ("POST", "PUT") else None
        request = urllib.request.Request(service.url + filled, method=method, headers=headers, data=body)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status, error = answer.status, {}
        except urllib.error.HTTPError as refused:
            with refused:
                status = refused.code
                error = {} if method == "HEAD" else json.load(refused)["error"]
        if scope:
            assert status == 403, route
            assert method == "HEAD" or error["details"]["scope"] == scope, route
        else:
            assert status == 200, route
