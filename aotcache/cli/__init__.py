"""The command line: `aotcache <command>`, one file per group of commands."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process and end it with the command's exit code."""
    from aotcache.cli.app import app

    app()
