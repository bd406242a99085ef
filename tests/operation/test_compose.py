"""docker-compose.yml against the compose specification's schema, and against what a team may expect of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    """Against the schema of the compose specification (Apache-2.0) that check-jsonschema ships."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_is_valid_by_the_compose_specification() -> None:
    done = validate(FILE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_refuses_what_compose_would_not_understand(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(FILE.read_text().replace("healthcheck:", "health_check:", 1))
    assert "health_check" in validate(broken).stdout


def test_it_has_the_four_parts() -> None:
    assert set(SERVICES) == {"api", "builder", "postgres", "s3"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_watched_and_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries"} <= set(service["healthcheck"])
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["options"]["max-size"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    tag = SERVICES[name]["image"].partition(":")[2]
    assert re.match(r"\d+\.\d+", tag), f"{name}: {SERVICES[name]['image']}"


def test_our_images_carry_our_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {SERVICES[name]["image"] for name in ("api", "builder")} == {
        f"aotcache-{name}:{version[1]}" for name in ("api", "builder")
    }


@pytest.mark.parametrize("name", SERVICES)
def test_what_must_last_is_in_named_volumes(name: str) -> None:
    mounts = [text.split(":") for text in SERVICES[name]["volumes"]]
    lasting = [source for source, *_ in mounts if not source.startswith(".")]
    assert lasting
    assert set(lasting) <= set(COMPOSE["volumes"])
    for _, _, *mode in (mount for mount in mounts if mount[0].startswith(".")):
        assert mode == ["ro"]


def test_no_secret_is_written_down() -> None:
    for name, service in SERVICES.items():
        for variable, value in service["environment"].items():
            if any(word in variable for word in ("PASSWORD", "SECRET", "TOKEN", "ACCESS_KEY", "DATABASE")):
                without = re.sub(r"\$\{\w+:(\?[^}]*|-)\}", "", str(value))
                assert without != value or variable == "POSTGRES_DB", f"{name}: {variable} has no ${{...}}"
                assert not re.search(r":[^/:@]+@", without), f"{name}: {variable} has a password in it"


def test_an_unset_secret_is_an_error_and_not_an_empty_password() -> None:
    named = set(re.findall(r"\$\{(\w+):\?", FILE.read_text()))
    assert named == {"AOTCACHE_DATABASE_PASSWORD", "AOTCACHE_S3_KEY", "AOTCACHE_S3_SECRET"}


def test_every_variable_of_the_file_is_in_the_example() -> None:
    example = set(re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert set(re.findall(r"\$\{(\w+)", FILE.read_text())) == example


def test_only_the_api_is_reached_from_outside_and_by_default_from_this_machine_alone() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["api"]
    assert SERVICES["api"]["ports"] == ["${AOTCACHE_LISTEN:-127.0.0.1}:8400:8400"]


def test_services_start_when_what_they_need_is_healthy() -> None:
    needs = {
        name: {other: how["condition"] for other, how in service.get("depends_on", {}).items()}
        for name, service in SERVICES.items()
    }
    assert needs["api"] == {"postgres": "service_healthy", "s3": "service_healthy"}
    assert needs["builder"] == {"api": "service_healthy"}


@pytest.mark.parametrize("name", ["api", "builder"])
def test_ours_run_with_nothing_they_do_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
