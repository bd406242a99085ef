"""Progress on a terminal and off it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from aotcache.cli.output import Progress, human_bytes, human_time, print_lines, print_table

PROGRAM = """
from aotcache.cli.output import Progress
with Progress("warm", 2) as progress:
    progress.say("export [layers.0]")
    progress.step("one")
    progress.step("two")
"""


def test_off_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("warm", 2) as progress:
        progress.say("export [layers.0]")
        progress.step("one")
        progress.step("two")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split("s  ", 1)[1] for line in lines] == ["export [layers.0]", "[1/2] one", "[2/2] two"]
    assert "\x1b" not in captured.err


def on_a_terminal(program: str, columns: int) -> bytes:
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    subprocess.run([sys.executable, "-c", program], stderr=terminal, check=True, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # Linux: the other end is closed and all is read
            break
        if not data:
            break
        shown += data
    os.close(main)
    return shown


def test_on_a_terminal_progress_is_a_bar() -> None:
    shown = on_a_terminal(PROGRAM, 100)
    assert b"\x1b[" in shown
    assert "━".encode() in shown
    assert b"2/2" in shown
    assert b"export [layers.0]" in shown


def test_a_narrow_terminal_cuts_what_is_being_done_and_not_how_far_it_is() -> None:
    shown = on_a_terminal(PROGRAM.replace("[layers.0]", "a very long name of a region " * 3), 60)
    assert b"0/2" in shown
    assert b"0:00:0" in shown
    assert b"export a very long" in shown
    assert b"name of a region a very" not in shown


def test_a_text_with_line_breaks_begins_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(["region a\nsigned by somebody trusted", "next"])
    assert capsys.readouterr().out == "region a\n    signed by somebody trusted\nnext\n"


def test_a_table_has_one_line_per_row_and_no_blanks_behind(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key", "what"), [("a", "[b]"), ("long key", "c")])
    assert capsys.readouterr().out == "key       what\na         [b]\nlong key  c\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1650, "1.6 kB"), (2_000_000_000_000, "2.0 TB")],
)
def test_sizes_are_decimal(size: int | None, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize("moment", [1e300, -1e300, float("inf"), float("nan"), 1e12])
def test_what_is_no_time_is_shown_all_the_same(moment: float) -> None:
    assert human_time(moment)
