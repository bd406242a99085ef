"""How statements reach their rows at 100,000 entries: what they cost must not grow with the table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, text

from aotcache.db.engine import Database
from aotcache.db.models import ArtifactRow, BlobRow, DeathRow, KeyComponentRow, UsageRow
from aotcache.service.gc import Collector
from aotcache.service.index import Index
from aotcache.service.leases import Leases
from aotcache.store import ObjectStore, open_store
from aotcache.store.evict import Limits
from tests.services.postgres import Postgres

ROWS = 100_000
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1")
TARGETS = ("cpu:x86_64-avx2", "cpu:x86_64-avx512", "cuda:sm_90", "cuda:sm_100")


NUMBERS = {
    "sqlite": f"WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < {ROWS - 1})",
    "postgresql": f"WITH s(n) AS (SELECT generate_series(0, {ROWS - 1}))",
}
DIGEST = {"sqlite": "digest({})", "postgresql": "encode(sha256(convert_to(({})::text, 'UTF8')), 'hex')"}


EMPTY = {"sqlite": "'[]'", "postgresql": "CAST('[]' AS json)"}


def entries(dialect: str) -> list[str]:
    """Statements that make the entries: two variants of each of 50,000 keys."""
    numbers, digest = NUMBERS[dialect], DIGEST[dialect]
    key, own = digest.format("n / 2"), digest.format("n")
    target, torch = choice(TARGETS, "n % 4"), choice(TORCHES, "n / 4 % 4")
    variant = f"replace({target}, ':', '-') || '+torch' || {torch} || '-cccccccc-cpu'"
    mode = choice(("train", "infer"), "n % 2")
    region = f"'layers.' || (n % 64), {mode}, '{{\"seq\": 256}}', {target}, {torch}, 1.0, n, n"
    component = f"{key}, 0, 'code', {digest.format('n / 1000')}, {EMPTY[dialect]}"
    return [
        f"INSERT INTO key_components {numbers} SELECT {component} FROM s WHERE n % 2 = 0",
        f"INSERT INTO blobs {numbers} SELECT {own}, 1000, n FROM s",
        f"INSERT INTO artifacts {numbers} SELECT {key}, {variant}, {own}, 1000, {own}, {region} FROM s",
        f"INSERT INTO usage {numbers} SELECT {key}, {variant}, n % 7, n * 7919 % {ROWS} FROM s",
        f"INSERT INTO deaths {numbers} SELECT substr({own}, 1, 32), {own}, 'run', n, n FROM s WHERE n % 4 = 0",
    ]


def choice(values: tuple[str, ...], which: str) -> str:
    cases = " ".join(f"WHEN {number} THEN '{value}'" for number, value in enumerate(values))
    return f"(CASE {which} {cases} END)"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    if request.param == "sqlite":
        from aotcache.db import migrate

        database = Database(f"sqlite:///{tmp_path_factory.mktemp('plans') / 'filled.db'}")
        migrate.upgrade(database)
        yield from _fill(database)
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = server.create(request.getfixturevalue("migrated_postgres"))
    yield from _fill(Database(server.url(name)))
    server.drop(name)


def _fill(database: Database) -> Iterator[Database]:
    tables = [model.__table__ for model in (BlobRow, ArtifactRow, UsageRow, KeyComponentRow, DeathRow)]
    indexes = [index for table in tables for index in table.indexes]
    with database.connection(write=True) as connection:
        if database.dialect == "sqlite":
            connection.connection.driver_connection.create_function(
                "digest", 1, lambda n: hashlib.sha256(str(n).encode()).hexdigest(), deterministic=True
            )
        else:
            # Without looking up every foreign key.
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        # Sorted at the end, an index is made in a fraction of the time.
        for index in indexes:
            index.drop(connection)
        for statement in entries(database.dialect):
            connection.connection.driver_connection.execute(f"{statement} ORDER BY 1")
        for index in indexes:
            index.create(connection)
    raw = database._engine.raw_connection()
    try:
        raw.driver_connection.rollback()
        if database.dialect == "postgresql":
            raw.driver_connection.autocommit = True
            # Index-only scans need to know which pages everybody may see.
            raw.driver_connection.execute("VACUUM ANALYZE")
    finally:
        raw.invalidate()
        raw.close()
    yield database
    database.close()


def plans(database: Database, call: Callable[[], Any]) -> list[str]:
    """One line per step of the plan of every statement that the call makes."""
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        seen.append((statement, parameters))

    event.listen(database._engine, "before_cursor_execute", note)
    call()
    event.remove(database._engine, "before_cursor_execute", note)
    found: list[str] = []
    with database.connection() as connection:
        for statement, parameters in seen:
            if not statement.startswith(("BEGIN", "PRAGMA")):
                found += _explain(database, connection, statement, parameters)
    assert found
    return found


def _explain(database: Database, connection: Any, statement: str, parameters: Any) -> list[str]:
    if database.dialect == "sqlite":
        return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    [[plan]] = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).all()
    steps: list[str] = []
    pending = [(plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]]
    while pending:
        step = pending.pop()
        place = step.get("Index Name") or step.get("Relation Name") or ""
        steps.append(f"{step['Node Type']} {place}".strip())
        pending += step.get("Plans", [])
    return steps


def reads(database: Database, steps: list[str]) -> list[str]:
    """The steps that read a table or an index."""
    if database.dialect == "postgresql":
        return [
            step for step in steps if "Scan" in step and "Subquery" not in step and "Function" not in step
        ]
    return [
        step
        for step in steps
        if step.startswith(("SCAN", "SEARCH")) and "json_each" not in step and "anon_" not in step
    ]


def only(database: Database, index: str) -> Callable[[str], bool]:
    """Whether a step reads this index and not the table; on SQLite the primary key is the table."""
    if database.dialect == "postgresql":
        return lambda step: step == f"Index Only Scan {index}"
    if index == "pk_artifacts":
        return lambda step: "USING PRIMARY KEY" in step or step == "SCAN artifacts"
    return lambda step: f"USING COVERING INDEX {index}" in step


def some_keys(count: int) -> list[Any]:
    return [hashlib.sha256(str(n).encode()).hexdigest() for n in range(0, count * 2, 2)]


def test_resolve_reads_one_index_and_no_table(filled: Database) -> None:
    index, keys = Index(filled), some_keys(1000)
    assert sum(map(len, index.resolve(keys).values())) == 2000
    steps = reads(filled, plans(filled, lambda: index.resolve(keys)))
    assert [only(filled, "pk_artifacts")(step) for step in steps] == [True], steps


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"region": "layers.5"}, ["ix_artifacts_region"]),
        ({"mode": "train"}, ["ix_artifacts_mode"]),
        ({"target": "cuda:sm_90"}, ["ix_artifacts_target"]),
        ({"torch": "2.13.0"}, ["ix_artifacts_torch"]),
        # Both have all that is asked for; without statistics SQLite takes the one that was made first.
        ({"region": "layers.5", "torch": "2.12.0"}, ["ix_artifacts_region", "ix_artifacts_torch"]),
        ({}, ["pk_artifacts"]),
    ],
)
def test_a_page_finds_its_rows_in_one_index_alone(filled: Database, filters: Any, names: list[str]) -> None:
    index = Index(filled)
    first = index.page(limit=100, **filters)
    middle = index.page(limit=100, cursor=first.next, **filters)
    assert len(middle.artifacts) == 100
    for cursor in (None, first.next):
        steps = plans(filled, lambda cursor=cursor: index.page(limit=100, cursor=cursor, **filters))
        found = reads(filled, steps)
        in_one = [step for step in found if any(only(filled, name)(step) for name in names)]
        assert in_one, steps
        # What else is read are the page's own rows, by their keys, and the deaths with their archives.
        rest = [step for step in found if step not in in_one]
        known = ("pk_", "PRIMARY KEY", "ix_deaths_digest")
        assert all(any(name in step for name in known) for step in rest), steps


def test_a_page_of_one_code_finds_its_keys_in_one_index_alone(filled: Database) -> None:
    index, code = Index(filled), hashlib.sha256(b"7").hexdigest()
    first = index.page(limit=100, code=code)
    rest = index.page(limit=1000, code=code, cursor=first.next)
    assert (len(first.artifacts), len(rest.artifacts)) == (100, 900)
    found = reads(filled, plans(filled, lambda: index.page(limit=100, code=code, cursor=first.next)))
    assert any("ix_key_components_same" in step for step in found), found
    assert not any(step.startswith(("SCAN artifacts", "Seq Scan")) for step in found), found


def test_the_oldest_are_read_from_indexes_alone(filled: Database) -> None:
    index = Index(filled)
    assert len(index.oldest(1000)) == 1000
    last = index.oldest(40_000)[-1]
    after = (last.last_used, last.key, last.variant)
    assert [c.last_used for c in index.oldest(2, after)] == [40_000.0, 40_001.0]
    first, second = only(filled, "ix_usage_oldest"), only(filled, "pk_artifacts")
    for place in (None, after):
        steps = reads(filled, plans(filled, lambda place=place: index.oldest(1000, place)))
        assert len(steps) == 2, steps
        assert any(map(first, steps)), steps
        assert any(map(second, steps)), steps


def test_a_collection_finds_entries_that_share_archives_by_these(filled: Database) -> None:
    store = open_store("memory:///")
    assert isinstance(store, ObjectStore)
    collector = Collector(filled, Index(filled), Leases(filled), store)
    digests = frozenset(row.digest for row in Index(filled).oldest(500))
    assert sum(map(len, collector._groups(digests).values())) == 500
    steps = reads(filled, plans(filled, lambda: collector._groups(digests)))
    assert any("ix_artifacts_digest" in step for step in steps), steps
    assert not any(step.startswith(("SCAN", "Seq Scan")) for step in steps), steps


def test_a_collection_of_a_few_reads_a_few(filled: Database) -> None:
    """A dry run down to 500 archives less than there are: a page or two of the index, and no more."""
    store = open_store("memory:///")
    assert isinstance(store, ObjectStore)
    collector = Collector(filled, Index(filled), Leases(filled), store)
    done = collector.round(Limits(max_bytes=(ROWS - 500) * 1000), dry_run=True)
    assert (len(done.decisions), done.before - done.after, done.over) == (500, 500_000, 0)


def test_the_tables_are_as_large_as_they_must_be_for_this(filled: Database) -> None:
    with filled.connection() as connection:
        assert connection.execute(text("SELECT count(*) FROM artifacts")).scalar_one() == ROWS
