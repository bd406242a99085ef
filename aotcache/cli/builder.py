"""The builder of a service: `builder`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aotcache.cli.output import print_lines
from aotcache.cli.serve import named_specs

if TYPE_CHECKING:
    from aotcache.build.builder import Builder


def builder(
    service: Annotated[
        str, typer.Option("--service", metavar="URL", help="The service whose builds it takes, http(s)://...")
    ],
    spec: Annotated[
        list[Path],
        typer.Option(
            "--spec", metavar="PATH", help="A spec that may be asked for by its name, or a folder; repeat."
        ),
    ],
    as_child: Annotated[
        bool, typer.Option("--as-child", hidden=True, help="End when stdin is closed: with who started it.")
    ] = False,
) -> None:
    """Take the builds that wait at a service, build and publish them, until ended.

    `aotcache serve --spec` starts one by itself. Start more on hosts with other processors or
    GPUs: each takes what it can build. It needs a signing key that the service trusts, and where
    the service has tokens one with the right to publish. SIGTERM or Ctrl-C ends it; what it was
    building goes back.
    """
    from aotcache.build.builder import Builder
    from aotcache.spec import load_spec

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    made = Builder([load_spec(path) for path in named_specs(spec).values()], service)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: made.stop())
    if as_child:
        threading.Thread(target=_stop_with_stdin, args=(made,), name="aotcache-stdin", daemon=True).start()
    print_lines([f"building {', '.join(made.names)} for {service}"])
    made.run()


def _stop_with_stdin(running: Builder) -> None:
    # Not through sys.stdin, whose lock this thread would hold when the program ends.
    while os.read(0, 1024):
        pass
    running.stop()
