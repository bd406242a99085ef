"""The documents name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from aotcache.cli.app import app
from aotcache.config import PREFIX, Settings
from aotcache.key import COMPONENTS

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


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
