"""`aotcache serve` as a process: what it needs, what it refuses, how it ends, and what it keeps."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from aotcache.cli.serve import named_specs
from aotcache.db.engine import Database
from aotcache.service.tokens import Tokens
from aotcache.trust import sign
from tests.manifests import TOOLCHAIN, make_manifest
from tests.services.s3 import s3_server
from tests.services.serving import ROOT, Serving, make_token, serving

SECONDS = 60.0
KEY = "1" * 64
BUILD: dict[str, Any] = {
    "spec": "drafter",
    "key": KEY,
    "target": "cpu:x86_64-avx2",
    "toolchain": {"torch": TOOLCHAIN.torch, "git": TOOLCHAIN.git, "cuda": None},
}


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A serve that is not expected to stay."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")}
    environment |= {
        "AOTCACHE_HOME": str(folder / "home"),
        "AOTCACHE_CONFIG_HOME": str(folder / "config"),
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-m", "aotcache", "serve", "--port", "0", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def register(server: Serving, client: httpx.Client) -> None:
    """Registers the spec as a builder does that has nothing to do."""
    body = {"specs": ["drafter"], "variants": ["none"], "holder": "tests"}
    assert client.post("/v1/builds/claim", json=body).status_code == 204


def test_it_needs_no_configuration_and_ends_in_good_order(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AOTCACHE_")}
    environment |= {"AOTCACHE_HOME": str(tmp_path / "home"), "AOTCACHE_CONFIG_HOME": str(tmp_path / "config")}
    with subprocess.Popen(
        [sys.executable, "-m", "aotcache", "serve", "--port", "0"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            url = next(word for word in said.split() if word.startswith("http://"))
            assert httpx.get(f"{url}/readyz", timeout=SECONDS).json() == {"status": "ok"}
            assert len(httpx.get(f"{url}/v1/trust", timeout=SECONDS).json()["keys"]) == 1
            process.terminate()
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
    assert (tmp_path / "home/service/aotcache.db").stat().st_mode & 0o077 == 0
    assert (tmp_path / "config/signing.pem").stat().st_mode & 0o077 == 0


def test_everybody_reachable_and_no_token_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "aotcache token create" in done.stderr
    assert done.stdout == ""


def test_a_service_is_not_served_again(tmp_path: Path) -> None:
    done = command(tmp_path, AOTCACHE_STORE="http://127.0.0.1:1")
    assert done.returncode == 2
    assert "--store" in done.stderr
    by_option = command(tmp_path, "--store", "http://127.0.0.1:1")
    assert by_option.returncode != 0
    assert "cannot be served" in by_option.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = command(tmp_path, "--port", str(port))
    assert done.returncode == 2
    assert str(port) in done.stderr


def test_a_builder_without_a_spec_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "--builder")
    assert done.returncode == 2
    assert "--spec" in done.stderr


def test_a_builder_that_dies_is_started_again_with_a_new_token_and_ends_with_the_server(
    tmp_path: Path,
) -> None:
    spec = tmp_path / "gone.toml"
    spec.write_text((ROOT / "examples/eagle3/eagle3-8b.toml").read_text())
    database = f"sqlite:///{tmp_path / 'aotcache.db'}"
    token = make_token(database, "admin", name="mine")
    with serving(tmp_path, database=database, arguments=["--spec", str(spec)]) as server:
        spec.unlink()  # The builder reads it when it is up, and cannot.
        ends = time.monotonic() + SECONDS
        while server.log.count("the builder ended with status 2") < 2:
            assert time.monotonic() < ends, server.log
            time.sleep(0.05)
        names = {"Authorization": f"Bearer {token}"}
        specs = httpx.get(f"{server.url}/v1/specs", headers=names, timeout=SECONDS).json()["specs"]
        assert [row["name"] for row in specs] == list(named_specs([ROOT / "examples/eagle3/eagle3-8b.toml"]))
        assert server.close() == 0
    opened = Database(database)
    rows = Tokens(opened).list()
    opened.close()
    assert len(rows) >= 3
    assert {row.name for row in rows if row.revoked is None} == {"mine"}


def test_torch_is_never_loaded(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        manifest = sign(make_manifest(b"archive"), server.signing_key)
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            client.put(f"/v1/blobs/{manifest.digest}", content=b"archive")
            assert client.put(f"/v1/artifacts/{manifest.key}", content=manifest.document()).status_code == 201
            client.post(f"/v1/keys/{KEY}/why", json={"components": list(manifest.components)})
            client.get("/metrics")
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "/sqlalchemy/" in mapped
        assert "/torch/" not in mapped


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        manifest = sign(make_manifest(b"archive"), server.signing_key)
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            client.put(f"/v1/blobs/{manifest.digest}", content=b"archive")
            client.put(f"/v1/artifacts/{manifest.key}", content=manifest.document())
            register(server, client)
            build = client.post("/v1/builds", json=BUILD).json()
        server.kill()
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        assert client.get(f"/v1/builds/{build['id']}").json() == build
        # The spec came from a builder that has not been heard of since.
        assert client.post("/v1/builds", json={**BUILD, "key": "cd" * 32}).status_code == 202
        assert client.get(f"/v1/blobs/{manifest.digest}").content == b"archive"
        found = client.post("/v1/resolve", json={"keys": [manifest.key]}).json()["found"]
        assert list(found) == [manifest.key]


def test_a_watched_build_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        register(server, client)
        build = client.post("/v1/builds", json=BUILD).json()["id"]
        with client.stream("GET", f"/v1/builds/{build}/events") as answer:
            lines = answer.iter_lines()
            assert next(lines) == "id: 1"
            began = time.monotonic()
            server.process.terminate()
            for _ in lines:
                pass
        assert server.process.wait(SECONDS) == 0
        # Far less than the time that requests get to end in.
        assert time.monotonic() - began < 10


def test_a_watcher_sees_stages_as_they_come(tmp_path: Path) -> None:
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        register(server, client)
        build = client.post("/v1/builds", json=BUILD).json()
        claim = {"specs": ["drafter"], "variants": [build["variant"]], "holder": "tests"}
        with client.stream("GET", f"/v1/builds/{build['id']}/events") as answer:
            data = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            assert next(data)["state"] == "queued"
            lease = client.post("/v1/builds/claim", json=claim).json()
            assert next(data)["state"] == "running"
            hold = {"lease": lease["lease"], "token": lease["token"]}
            client.post(f"/v1/builds/{build['id']}/events", json={**hold, "stage": "compile"})
            assert next(data)["stage"] == "compile"
            error = {"type": "CompileFailed", "message": "no"}
            client.post(f"/v1/builds/{build['id']}/finish", json={**hold, "error": error})
            last = next(data)
            assert (last["state"], last["error"]) == ("failed", error)
            assert next(data, None) is None


def test_archives_in_a_bucket_are_redirected_to_and_checked_by_whoever_follows(tmp_path: Path) -> None:
    data = b"in a bucket" * 1000
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    with s3_server(tmp_path / "s3") as s3:
        with serving(tmp_path / "service", store=s3.bucket(), environment=s3.environment) as server:
            with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
                assert client.put(path, content=data).status_code == 201
                assert client.put(path, content=data).json() == {"stored": False}
                assert client.put(path, content=data + b"!").status_code == 422
                head = client.head(path, headers={"Accept-Encoding": "identity"})
                assert (head.status_code, head.headers["content-length"]) == (200, str(len(data)))
                answer = client.get(path)
                assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
                address = answer.headers["location"]
                assert address.startswith(s3.url)
                assert "X-Amz-Expires=600" in address
                assert httpx.get(address, timeout=SECONDS).content == data
                part = httpx.get(address, headers={"Range": "bytes=3-10"}, timeout=SECONDS)
                assert (part.status_code, part.content) == (206, data[3:11])
                assert client.get(f"/v1/blobs/{'0' * 64}").status_code == 404
        assert "X-Amz-Signature" not in server.log
        assert not list((tmp_path / "service/home/service/uploads").iterdir())
