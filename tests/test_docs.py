"""The documents name what the code has."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from typer.main import get_command

import aotcache
from aotcache.cli.app import app
from aotcache.config import PREFIX, Settings
from aotcache.key import COMPONENTS
from aotcache.runtime.stats import Stats
from aotcache.spec import CompileOptions, Drafter

ROOT = Path(__file__).resolve().parents[1]


def first_cells(document: str) -> set[str]:
    """What stands in backticks in the first column of any table."""
    text = (ROOT / document).read_text()
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def test_every_setting_is_documented_and_no_other() -> None:
    assert first_cells("docs/settings.md") == {PREFIX + name.upper() for name in Settings.model_fields}


def test_every_key_component_is_documented() -> None:
    assert set(COMPONENTS) <= first_cells("docs/cache-key.md")


def test_every_command_is_in_the_readme() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    readme = (ROOT / "README.md").read_text()
    assert {name for name in commands if f"aotcache {name}" not in readme} == set()


def test_every_key_of_a_spec_is_documented_and_no_other() -> None:
    tables = (Drafter, CompileOptions)
    assert first_cells("docs/spec.md") == {field.name for table in tables for field in fields(table)}


def test_every_argument_of_attach_is_documented() -> None:
    assert set(inspect.signature(aotcache.attach).parameters) <= first_cells("docs/training.md")


def test_every_counter_is_documented() -> None:
    training = (ROOT / "docs/training.md").read_text()
    snapshot = Stats().snapshot(traces=0)
    assert {name for name in snapshot if name != "regions" and f"`{name}`" not in training} == set()


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_document_is_listed_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {
        path.name for path in (ROOT / "docs").glob("*.md") if f"(docs/{path.name})" not in readme
    } == set()
