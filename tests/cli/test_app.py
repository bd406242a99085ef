"""Exit codes, errors, and what a command costs to start."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "aotcache"]


def test_every_command_of_the_issue_is_there_and_speaks_json(run: Any) -> None:
    listed = run("--help").out
    for command in ("warm", "record", "ls", "show", "why", "fetch", "verify", "doctor", "demo"):
        assert f"  {command} " in listed
        assert "--json" in run(command, "--help").out


def test_version(run: Any) -> None:
    assert run("--version").out == f"aotcache {version('aotcache')}\n"


def test_wrong_usage_exits_two(run: Any) -> None:
    assert run("ls", "--no-such-option").code == 2
    assert run("no-such-command").code == 2
    assert run("show").code == 2
    assert run("warm", "--jobs", "0").code == 2


def test_a_spec_that_is_not_there_is_wrong_usage(run: Any, tmp_path: Path) -> None:
    for command in (["warm", "--check"], ["why", "--spec"]):
        done = run(*command, tmp_path / "nowhere.toml")
        assert done.code == 2
        assert "SpecError" in done.err
        assert "nowhere.toml" in done.err
        assert done.out == ""


def test_a_wrong_setting_is_wrong_usage(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("AOTCACHE_LOCK_SECONDS", "soon")
    done = run("ls")
    assert done.code == 2
    assert "AOTCACHE_LOCK_SECONDS" in done.err


def test_an_error_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "ls", "--store", "ftp://x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("StoreError: ")
    assert "Traceback" not in done.stderr


def test_an_error_is_json_where_json_was_asked_for(run: Any, tmp_path: Path) -> None:
    done = run("show", "0123", "--json", "--store", tmp_path / "empty")
    assert done.code == 1
    assert done.json["error"]["type"] == "NotStored"
    assert "0123" in done.json["error"]["message"]
    assert done.json["error"]["details"] == {"key": "0123"}


def test_listing_a_store_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from aotcache.cli.app import app\n"
        f"app(['ls', '--store', {str(tmp_path)!r}], standalone_mode=False)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "ls", "--store", str(tmp_path)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""
