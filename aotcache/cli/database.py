"""The service's database, on the service's own host: `db upgrade`, `db check`, `db reindex`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer

from aotcache.cli.output import JsonFlag, count, emit_json, print_lines
from aotcache.cli.serve import served_store
from aotcache.config import settings
from aotcache.errors import ConfigError
from aotcache.store import ObjectStore, open_store

if TYPE_CHECKING:
    from aotcache.db.engine import Database

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="sqlite:////absolute/file.db or postgresql://...  [default: AOTCACHE_DATABASE]",
    ),
]

ServedOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="What the service serves: a directory or bucket.  [default: AOTCACHE_STORE, else <home>/service/store]",
    ),
]

db = typer.Typer(
    name="db",
    no_args_is_help=True,
    rich_markup_mode=None,
    short_help="Upgrade, check or reindex a service's database.",
    help="The database of a service on this host: upgrade, check and reindex it.",
)


@contextmanager
def opened(url: str | None) -> Iterator[Database]:
    """The database of a command, closed at its end.

    Raises:
        ConfigError: if the address is no database's, or what the service needs is not installed.
    """
    try:
        from aotcache.db.engine import Database
    except ImportError as error:
        raise ConfigError(
            f"the service's packages are not installed ({error}): pip install 'aotcache[server]'"
        ) from error
    database = Database(settings().database if url is None else url)
    try:
        yield database
    finally:
        database.close()


@db.command("upgrade")
def upgrade(database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Make the tables, or bring them to this release. `aotcache serve` does so by itself."""
    with opened(database) as found:
        from aotcache.db import migrate

        before, after = migrate.current(found), migrate.upgrade(found)
        if as_json:
            emit_json({"database": found.url, "before": before, "version": after})
        elif before == after:
            print_lines([f"{found.url} is at version {after} already"])
        else:
            print_lines([f"{found.url} is at version {after} now; it was {before or 'empty'}"])


@db.command("check")
def check(database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Compare the tables with what this release expects; exit code 1 if they differ."""
    with opened(database) as found:
        from aotcache.db import migrate

        problems = migrate.check(found)
        if as_json:
            emit_json({"database": found.url, "ok": not problems, "problems": problems})
        else:
            print_lines(problems or [f"{found.url} is as it must be"])
    if problems:
        raise typer.Exit(1)


@db.command("reindex")
def reindex(store: ServedOption = None, database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Enter what the store has and take out what it has not; the service may run meanwhile.

    Builds, tokens and counts of hits are not in the store: they stay as they are.
    """
    with opened(database) as found:
        from aotcache.service.index import Index

        source = open_store(store or served_store(settings()), tier=False)
        if not isinstance(source, ObjectStore):
            raise ConfigError(
                f"store {source.url}: expected the directory or bucket that the service keeps its entries in, "
                "not the service itself"
            )
        if (
            source.url.startswith("file://")
            and not (folder := Path(unquote(urlsplit(source.url).path))).is_dir()
        ):
            # Taken for an empty store it would empty the index.
            raise ConfigError(
                f"{folder} is no directory, and the index is left as it is; say with --store what the service serves"
            )
        counts = Index(found).reindex(source)
        if as_json:
            emit_json({"database": found.url, "store": source.url, **asdict(counts)})
        else:
            print_lines([f"{source.url}: added {counts.added}, removed {counts.removed}, kept {counts.kept}"])
            if counts.unusable:
                unusable = count(counts.unusable, "ref")
                print_lines([f"{unusable} cannot be used: aotcache verify --store {source.url} says why"])
