"""The application: its commands, and what an error becomes.

Exit codes: 0 done; 1 the thing asked for failed, or is not covered; 2 wrong usage,
which includes a spec or a setting that cannot be understood. A caller of
`warm --check` can so tell "not warm" from "the question was wrong".
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from aotcache.cli import (
    builder,
    bundled,
    database,
    doctor,
    entries,
    gc,
    keys,
    recall,
    record,
    serve,
    signing,
    tokens,
    transfer,
    warming,
)
from aotcache.cli.output import emit_json, err, plain
from aotcache.errors import AotcacheError, ConfigError, SpecError

FAILED = 1
USAGE = 2
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""
_JSON = "aotcache.json"


class _Commands(TyperGroup):
    """Turns aotcache's own errors into one message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args  # what follows is another program's
        ctx.meta[_JSON] = "--json" in own
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AotcacheError as error:
            report(error, as_json=ctx.meta[_JSON])
            code = USAGE if isinstance(error, ConfigError | SpecError) else FAILED
            raise typer.Exit(code) from error
        except KeyboardInterrupt:
            err().print(
                "interrupted: what was finished stays, nothing half done does; run it again for the rest"
            )
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of a pipe left (`aotcache ls | head`): nothing is wrong, and
            # Python must not try to flush into it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None


def report(error: AotcacheError, *, as_json: bool) -> None:
    """Print an error: as a JSON document to stdout, or as text to stderr."""
    if as_json:
        emit_json({"error": {"type": type(error).__name__, "message": str(error), "details": error.details}})
        return
    console = err()
    console.print(f"[bold red]{type(error).__name__}[/]:", end=" ")
    console.print(plain(str(error)), markup=False)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"aotcache {version('aotcache')}\n")
        raise typer.Exit


def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile drafter regions before training; train on threads that never trace."""


app = typer.Typer(
    name="aotcache",
    cls=_Commands,
    callback=_root,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# A first sentence that is longer than a line of the list would be cut in the middle of a word.
app.command("warm", short_help="Build what a spec asks for and the store lacks.")(warming.warm)
app.command(
    "record",
    short_help="Run a program and record the calls it makes.",
    context_settings={"allow_interspersed_args": False},
)(record.record)
app.command("ls", short_help="List what a store holds.")(entries.ls)
app.command("show", short_help="Show the manifests of one key.")(entries.show)
app.command("why", short_help="Explain a miss, or a rejected artifact.")(entries.why)
app.command("fetch", short_help="Copy artifacts to a store or a folder.")(transfer.fetch)
app.command("verify", short_help="Check stored artifacts; opens none.")(transfer.verify)
app.command("recall", short_help="Take artifacts back: nobody opens them again.")(recall.recall)
app.command("gc", short_help="Remove what a store need not hold any more.")(gc.gc)
app.command("pin", short_help="Keep an entry whatever gc's limits say.")(gc.pin)
app.command("keygen", short_help="Make the key that signs what this host publishes.")(keys.keygen)
app.command("sign", short_help="Add a new key's signature to what a store holds.")(signing.sign)
app.add_typer(keys.trust)
app.add_typer(tokens.token)
app.add_typer(database.db)
app.command("serve", short_help="Serve a store over HTTP, and build on request.")(serve.serve)
app.command("builder", short_help="Build what a service is asked for.")(builder.builder)
app.command("doctor", short_help="Report what this host can do.")(doctor.doctor)
app.command("demo", short_help="Warm the bundled drafters and train one.")(bundled.demo)
