"""docs/operations.md names what the service has: metrics, commands, the compose file's parts."""

from __future__ import annotations

import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from aotcache.cli.app import app
from aotcache.config import PREFIX, Settings
from tests.services.serving import Serving, serving

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("operations")) as running:
        yield running


def test_every_metric_is_in_the_table_with_its_labels_and_no_other(service: Serving) -> None:
    for path in ("/healthz", "/v1/artifacts"):
        urllib.request.urlopen(service.url + path, timeout=30).close()
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    served: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        if name.endswith("_created"):
            continue
        labels = {label for sample in family.samples for label in sample.labels}
        served[name] = labels - {"le"}
    shown = re.findall(r"^\| `(aotcache_\w+)` \| ([\w, ]*)\|", DOCUMENT, re.MULTILINE)
    documented = {name: set(re.findall(r"\w+", labels)) for name, labels in shown}
    assert documented == served


def commands() -> list[list[str]]:
    """Every `aotcache ...` line of the examples, and what compose hands to its images."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)).splitlines()
    found = []
    for line in lines:
        words = shlex.split(line.partition("  #")[0])
        if words[:1] == ["aotcache"]:
            found.append(words[1:])
        elif words[:4] == ["docker", "compose", "run", "--rm"]:
            rest = [word for word in words[4:] if word != "--no-deps"]
            found.append(rest[1:])
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_of_the_document_exists_with_its_options(command: list[str]) -> None:
    here = get_command(app)
    words = list(command)
    while words and hasattr(here, "commands") and words[0] in here.commands:
        here = here.commands[words.pop(0)]
    assert not hasattr(here, "commands"), f"aotcache {' '.join(command)}"
    options = {text for parameter in here.params for text in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_first_start_uses_services_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    named = re.findall(r"^docker compose (?:run --rm (?:--no-deps )?|exec )(\w+)", DOCUMENT, re.MULTILINE)
    assert named
    assert set(named) <= set(services)


def test_every_variable_it_names_is_a_setting_or_of_the_compose_file() -> None:
    example = set(re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", DOCUMENT)) <= settings | example
