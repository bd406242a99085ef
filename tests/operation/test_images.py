"""What the Dockerfile promises, as far as it can be tried without Docker."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

from aotcache.types import sha256
from tests.services.serving import serving

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()

_HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"{{name}} is hidden from this process", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/requirements.py."""
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "scripts" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without_torch(script: ModuleType, tmp_path: Path) -> dict[str, str]:
    """Variables of a process that has what the API's image has: nothing that the script leaves out."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    names = {{"pyelftools": "elftools"}.get(name, name) for name in script.WITHOUT} | {"numpy", "triton"}
    (hidden / "sitecustomize.py").write_text(_HIDE.format(names=sorted(names)))
    return {"PYTHONPATH": f"{hidden}{os.pathsep}{ROOT}"}


def test_the_hiding_hides(without_torch: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, **without_torch},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "torch is hidden from this process" in done.stderr


def test_the_api_serves_and_is_administered_where_there_is_no_torch(
    without_torch: dict[str, str], tmp_path: Path
) -> None:
    body = b"an archive"
    digest = sha256(body)
    with serving(tmp_path / "service", environment=without_torch) as service:
        put = urllib.request.Request(f"{service.url}/v1/blobs/{digest}", data=body, method="PUT")
        with urllib.request.urlopen(put, timeout=30) as answer:
            assert answer.status == 201
        with urllib.request.urlopen(f"{service.url}/v1/blobs/{digest}", timeout=30) as answer:
            assert answer.read() == body
        for command in (
            ["keygen"],
            ["trust", "list"],
            ["token", "create", "--scope", "admin", "--name", "me", "--database", service.database],
            ["db", "check", "--database", service.database],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "aotcache", *command, "--json"],
                env={**service.environment, "AOTCACHE_CONFIG_HOME": str(tmp_path / "other")},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            json.loads(done.stdout)


def test_the_images_install_the_lists_of_pyproject(script: ModuleType) -> None:
    api, builder = script.requirements("api"), script.requirements("builder")
    named = {re.split(r"[^\w-]", line)[0] for line in api}
    assert not named & script.WITHOUT
    assert {"httpx", "fastapi", "uvicorn", "sqlalchemy", "psycopg"} <= named
    torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert f"torch=={torch[1]}+cpu" in builder
    assert {"cryptography", "httpx", "obstore"} <= {re.split(r"[^\w-]", line)[0] for line in builder}


def stages() -> dict[str, str]:
    """The text of each stage."""
    parts = re.split(r"^FROM .+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_both_images_run_as_a_user_without_rights() -> None:
    assert "useradd --uid 10001" in stages()["base"]
    for name in ("api", "builder"):
        lines = stages()[name].splitlines()
        last = [line for line in lines if line.startswith(("RUN", "USER"))][-1]
        assert last == "USER aotcache", name


def test_only_the_builder_has_a_compiler() -> None:
    assert "g++" in stages()["builder"]
    assert "apt-get" not in stages()["api"] + stages()["base"]


def test_the_base_is_pinned_and_no_secret_can_get_into_a_layer() -> None:
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE) == ["PYTHON"]
    assert not re.search(r"TOKEN|SECRET|PASSWORD", DOCKERFILE)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert ignored[0] == "*"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    }
    assert copied == sent
