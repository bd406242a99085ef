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

    Scenarios of a family that were not counted this time keep their lines.

    Raises:
        ValueError: the document has no markers for a family.
    """
    families: dict[str, list[Tally]] = {}
    for tally in tallies:
        families.setdefault(tally.family, []).append(tally)
    text = document.read_text()
    for family, counted in families.items():
        begin, end = f"<!-- {family}: begin -->", f"<!-- {family}: end -->"
        pattern = re.compile(f"{re.escape(begin)}(.*?){re.escape(end)}", re.DOTALL)
        found = pattern.search(text)
        if found is None:
            raise ValueError(f"{document} has no {begin} ... {end}")
        made = f"{begin}\n{table(counted, found[1])}\n\nCounted on {machine()}.\n{end}"
        text = pattern.sub(lambda _, made=made: made, text)  # type: ignore[misc]
    document.write_text(text)


_HEAD = ["scenario", "rounds", "hit", "acknowledged", *KINDS, "slowest / limit", "also counted"]
_ALL = "**all**"


def table(tallies: list[Tally], before: str = "") -> str:
    """Markdown: a line for each scenario, and one for all of them.

    Args:
        tallies: What was counted.
        before: An earlier table, whose other lines are kept.
    """
    lines = {cells[0]: cells for cells in map(_cells, before.splitlines()) if len(cells) == len(_HEAD)}
    for name in (_HEAD[0], "---", _ALL):
        lines.pop(name, None)
    for tally in tallies:
        lines[tally.name] = [
            tally.name,
            str(tally.rounds),
            str(tally.hit),
            str(tally.acknowledged),
            *(str(tally.counts[kind]) for kind in KINDS),
            f"{tally.slowest:.1f} / {tally.limit:g} s" if tally.limit else "",
            ", ".join(f"{number} {what}" for what, number in tally.notes.items() if number),
        ]
    sums = [str(sum(int(cells[column]) for cells in lines.values())) for column in range(1, 4 + len(KINDS))]
    rule = ["---", *["---:"] * (len(_HEAD) - 2), "---"]
    rows = [_HEAD, rule, *lines.values(), [_ALL, *sums, "", ""]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


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
