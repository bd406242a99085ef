"""The tables of docs/reliability.md, from what was counted."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.faults.tally import KINDS, Tally

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def write_tables(tallies: Iterable[Tally], document: Path = DOCUMENT) -> None:
    """Put a table for each family that was counted between its markers; the others stay as they are.

    Raises:
        ValueError: the document has no markers for a family.
    """
    families: dict[str, list[Tally]] = {}
    for tally in tallies:
        families.setdefault(tally.family, []).append(tally)
    text = document.read_text()
    for family, found in families.items():
        begin, end = f"<!-- {family}: begin -->", f"<!-- {family}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if pattern.search(text) is None:
            raise ValueError(f"{document} has no {begin} ... {end}")
        made = f"{begin}\n{table(found)}\n\nCounted on {machine()}.\n{end}"
        text = pattern.sub(lambda _, made=made: made, text)  # type: ignore[misc]
    document.write_text(text)


def table(tallies: list[Tally]) -> str:
    """Markdown: a line for each scenario, and one for all of them."""
    head = ["scenario", "rounds", "hit", "acknowledged", *KINDS, "slowest / limit"]
    lines = [
        [
            tally.name + _notes(tally),
            str(tally.rounds),
            str(tally.hit),
            str(tally.acknowledged),
            *(str(tally.counts[kind]) for kind in KINDS),
            f"{tally.slowest:.1f} / {tally.limit:g} s",
        ]
        for tally in tallies
    ]
    whole = [
        str(sum(getattr(tally, what) for tally in tallies)) for what in ("rounds", "hit", "acknowledged")
    ]
    problems = [str(sum(tally.counts[kind] for tally in tallies)) for kind in KINDS]
    lines.append(["**all**", *whole, *problems, ""])
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _notes(tally: Tally) -> str:
    said = ", ".join(f"{number} {what}" for what, number in tally.notes.items() if number)
    return f" ({said})" if said else ""


def machine() -> str:
    """The machine in general words: cores, memory, file system of temporary files."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, files on {_file_system()}, shared with other work"


def _file_system() -> str:
    place = os.path.realpath(tempfile.gettempdir())
    best, kind = "", "an unknown file system"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found = line.split()[:3]
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind
