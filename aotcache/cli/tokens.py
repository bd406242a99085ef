"""Who may use a service, on the service's own host: `token create`, `token list`, `token revoke`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotcache.cli.database import DatabaseOption, opened
from aotcache.cli.output import JsonFlag, emit_json, err, human_time, print_lines, print_table
from aotcache.cli.quantities import duration
from aotcache.errors import ConfigError

if TYPE_CHECKING:
    from aotcache.service.tokens import Token

token = typer.Typer(
    name="token",
    no_args_is_help=True,
    rich_markup_mode=None,
    short_help="Create, list or revoke a service's tokens.",
    help="Who may use a service on this host: create, list and revoke tokens.",
)


@token.command("create", short_help="Make a token and show it, once.")
def create(
    scope: Annotated[
        str,
        typer.Option(
            "--scope",
            metavar="SCOPE,...",
            help="What it allows: read, publish, build (ask for builds), admin (everything).",
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="What to call it in lists, and to revoke it by.")],
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="30d", help="How long it lasts.  [default: for ever]")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a token and show it: nobody can show it again, for only its hash is kept.

    From the first token on the service answers nobody without one. Clients have it in
    AOTCACHE_TOKEN, or in a file that only they can read.
    """
    lasts = None if expires is None else duration(expires)
    scopes = [part for part in re.split(r"[,\s]+", scope) if part]
    with opened(database) as found:
        from aotcache.db import migrate
        from aotcache.service.tokens import Tokens

        migrate.upgrade(found)
        text, made = Tokens(found).create(name, scopes, lasts)
        if as_json:
            emit_json({"token": text, **_row(made)})
            return
        print_lines([text])
        ends = "never" if made.expires is None else human_time(made.expires)
        err().print(
            f"{made.name} ({made.id}) may {', '.join(made.scopes)}; it expires: {ends}. It is not shown again",
            markup=False,
        )


@token.command("list")
def show(database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """List all tokens, those that ended too; the texts themselves are nowhere."""
    with opened(database) as found:
        from aotcache.db.engine import moment
        from aotcache.service.tokens import Tokens

        with found.session() as session:
            now = moment(session)
        tokens = Tokens(found).list()
    if as_json:
        emit_json({"tokens": [_row(one) | {"state": _state(one, now)} for one in tokens]})
        return
    if not tokens:
        print_lines(["there are no tokens: the service answers on loopback alone, and everybody there"])
        return
    rows = (
        (
            one.id,
            one.name,
            ",".join(one.scopes),
            _state(one, now),
            human_time(one.created),
            "never" if one.expires is None else human_time(one.expires),
            "never" if one.last_used is None else human_time(one.last_used),
        )
        for one in tokens
    )
    print_table(("id", "name", "scopes", "state", "created", "expires", "last used"), rows)


@token.command("revoke")
def revoke(
    which: Annotated[str, typer.Argument(metavar="TOKEN", help="Its id, or its name; not its text.")],
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """End a token: no request with it is answered from now on."""
    with opened(database) as found:
        from aotcache.service.tokens import Tokens

        gone = Tokens(found).revoke(which)
    if not gone:
        raise ConfigError(f"no valid token has the id or name {which[:80]!r}: aotcache token list shows them")
    if as_json:
        emit_json({"revoked": [_row(one) for one in gone]})
    else:
        print_lines(f"revoked: {one.name} ({one.id})" for one in gone)


def _row(one: Token) -> dict[str, Any]:
    return {**asdict(one), "scopes": list(one.scopes)}


def _state(one: Token, now: float) -> str:
    if one.revoked is not None:
        return "revoked"
    return "expired" if one.expires is not None and one.expires <= now else "valid"
