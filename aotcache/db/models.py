"""The tables. They can be rebuilt from the store, all but builds, tokens and counters.

Times are seconds since the epoch by the database's own clock (`engine.now`). Names and
limits are checked by the code that writes: a table here has no rule that only one of the
two databases knows, but for the partial index that makes builds single flight.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

STATES = ("queued", "running", "done", "failed", "cancelled")
"""The states of a build."""

ACTIVE = ("queued", "running")
"""States that a build can leave."""

COUNTERS = ("fencing", "hits", "misses", "saved_milliseconds", "worker_deaths")
"""Rows of `counters`, which the first migration makes."""


def _name(length: int) -> String:
    # Pages are cut by comparing names. A language's own order, which PostgreSQL takes by default,
    # differs from host to host and cannot be used by an index as it is.
    plain = String(length)
    return plain.with_variant(String(length, collation="C"), "postgresql")


_HEX64 = _name(64)
_ID = _name(32)
_VARIANT = _name(255)


class Base(DeclarativeBase):
    """Root of the models; names every constraint, so that migrations can change them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class ArtifactRow(Base):
    """One ref of the store.

    The primary key holds what `resolve` answers with: on SQLite the table lies in its order, on
    PostgreSQL these columns ride in its index. Each other index starts with what is asked for, goes
    on in the order of pages (key, variant) and holds what the other filters need: a page is found in
    one index, and only its own rows are read.
    """

    __tablename__ = "artifacts"
    __table_args__ = (
        PrimaryKeyConstraint("key", "variant", postgresql_include=["digest", "size", "document"]),
        Index("ix_artifacts_region", "region", "key", "variant", "mode", "target", "torch"),
        Index("ix_artifacts_mode", "mode", "key", "variant", "region", "target", "torch"),
        Index("ix_artifacts_target", "target", "key", "variant", "region", "mode", "torch"),
        Index("ix_artifacts_torch", "torch", "key", "variant", "region", "mode", "target"),
        Index("ix_artifacts_digest", "digest"),
        {"sqlite_with_rowid": False},
    )

    key: Mapped[str] = mapped_column(_HEX64)
    variant: Mapped[str] = mapped_column(_VARIANT)
    digest: Mapped[str] = mapped_column(_HEX64)
    size: Mapped[int] = mapped_column(BigInteger)
    document: Mapped[str] = mapped_column(_HEX64)
    region: Mapped[str] = mapped_column(_name(512))
    mode: Mapped[str] = mapped_column(_name(16))
    bucket: Mapped[dict[str, int]] = mapped_column(JSON)
    target: Mapped[str] = mapped_column(_name(64))
    torch: Mapped[str] = mapped_column(_name(64))
    build_seconds: Mapped[float] = mapped_column(Double)
    created: Mapped[float] = mapped_column(Double)
    modified: Mapped[float] = mapped_column(Double)


class KeyComponentRow(Base):
    """One named component of a key, for explaining a miss."""

    __tablename__ = "key_components"
    __table_args__ = (Index("ix_key_components_same", "name", "digest", "key"),)

    key: Mapped[str] = mapped_column(_HEX64, primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(_name(64))
    digest: Mapped[str] = mapped_column(_HEX64)
    items: Mapped[list[list[str]]] = mapped_column(JSON)


class UsageRow(Base):
    """How an entry was asked for. Made with the entry, so that what nobody ever asked for has a row too."""

    __tablename__ = "usage"
    __table_args__ = (
        ForeignKeyConstraint(["key", "variant"], ["artifacts.key", "artifacts.variant"], ondelete="CASCADE"),
        Index("ix_usage_oldest", "last_used", "key", "variant", "hits"),
        {"sqlite_with_rowid": False},
    )

    key: Mapped[str] = mapped_column(_HEX64, primary_key=True)
    variant: Mapped[str] = mapped_column(_VARIANT, primary_key=True)
    hits: Mapped[int] = mapped_column(BigInteger)
    last_used: Mapped[float] = mapped_column(Double)


class BlobRow(Base):
    """One archive that entries name."""

    __tablename__ = "blobs"
    __table_args__ = ({"sqlite_with_rowid": False},)

    digest: Mapped[str] = mapped_column(_HEX64, primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    stored: Mapped[float] = mapped_column(Double)


class PublishRow(Base):
    """One publish whose ref may be written and whose row in `artifacts` is not. Gone when it is."""

    __tablename__ = "publishes"
    __table_args__ = (Index("ix_publishes_digest", "digest"), Index("ix_publishes_began", "began"))

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    key: Mapped[str] = mapped_column(_HEX64)
    variant: Mapped[str] = mapped_column(_VARIANT)
    digest: Mapped[str] = mapped_column(_HEX64)
    began: Mapped[float] = mapped_column(Double)


class DeathRow(Base):
    """One worker that died with an archive. `at` is by its own clock; `id` is its own, so that none counts twice."""

    __tablename__ = "deaths"
    __table_args__ = (Index("ix_deaths_digest", "digest"),)

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    digest: Mapped[str] = mapped_column(_HEX64, ForeignKey("blobs.digest", ondelete="CASCADE"))
    stage: Mapped[str] = mapped_column(_name(16))
    at: Mapped[float] = mapped_column(Double)
    told: Mapped[float] = mapped_column(Double)


class BuildRow(Base):
    """One request to build an entry; at most one of them is active for a key and variant."""

    __tablename__ = "builds"
    __table_args__ = (
        CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name="state"),
        Index(
            "uq_builds_active",
            "key",
            "variant",
            unique=True,
            sqlite_where=text("state IN ('queued', 'running')"),
            postgresql_where=text("state IN ('queued', 'running')"),
        ),
        Index("ix_builds_entry", "key", "variant", "created"),
        Index("ix_builds_queue", "state", "created", "id"),
        Index("ix_builds_page", "created", "id"),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    spec: Mapped[str] = mapped_column(_name(256))
    key: Mapped[str] = mapped_column(_HEX64)
    variant: Mapped[str] = mapped_column(_VARIANT)
    state: Mapped[str] = mapped_column(_name(16))
    stage: Mapped[str | None] = mapped_column(Text)
    expected_seconds: Mapped[float | None] = mapped_column(Double)
    attempts: Mapped[int] = mapped_column(Integer)
    holder: Mapped[str | None] = mapped_column(Text)
    lease: Mapped[str | None] = mapped_column(_ID)
    error_type: Mapped[str | None] = mapped_column(Text)
    error_message: Mapped[str | None] = mapped_column(Text)
    log: Mapped[str] = mapped_column(Text)
    sequence: Mapped[int] = mapped_column(Integer)
    created: Mapped[float] = mapped_column(Double)
    updated: Mapped[float] = mapped_column(Double)
    expires: Mapped[float | None] = mapped_column(Double)


class BuildEventRow(Base):
    """One thing that happened to a build; numbered from 1 within it."""

    __tablename__ = "build_events"

    build_id: Mapped[str] = mapped_column(_ID, ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True)
    sequence: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Double)
    kind: Mapped[str] = mapped_column(_name(16))
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class LeaseRow(Base):
    """The right to build and publish one entry, until it expires."""

    __tablename__ = "leases"
    __table_args__ = (UniqueConstraint("key", "variant"),)

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    key: Mapped[str] = mapped_column(_HEX64)
    variant: Mapped[str] = mapped_column(_VARIANT)
    token: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str] = mapped_column(Text)
    expires: Mapped[float] = mapped_column(Double)


class RecallListRow(Base):
    """A recall list, as it was signed. One for each signer, as a rule; see `service/recalls.py`."""

    __tablename__ = "recall_lists"

    signer: Mapped[str] = mapped_column(_HEX64, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    digest: Mapped[str] = mapped_column(_HEX64, primary_key=True)
    document: Mapped[str] = mapped_column(Text)


class RecalledRow(Base):
    """A key or digest that is recalled: what these lists come to."""

    __tablename__ = "recalled"
    __table_args__ = ({"sqlite_with_rowid": False},)

    what: Mapped[str] = mapped_column(_HEX64, primary_key=True)
    reason: Mapped[str] = mapped_column(Text)


class TokenRow(Base):
    """A client's right. The text that proves it is nowhere: only its sha256."""

    __tablename__ = "tokens"
    __table_args__ = (UniqueConstraint("hash"),)

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str] = mapped_column(_name(128))
    hash: Mapped[str] = mapped_column(_HEX64)
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created: Mapped[float] = mapped_column(Double)
    expires: Mapped[float | None] = mapped_column(Double)
    revoked: Mapped[float | None] = mapped_column(Double)
    last_used: Mapped[float | None] = mapped_column(Double)


class SpecRow(Base):
    """A spec that builds may name. `seen` is when a server or a builder last had it."""

    __tablename__ = "specs"

    name: Mapped[str] = mapped_column(_name(256), primary_key=True)
    registered: Mapped[float] = mapped_column(Double)
    seen: Mapped[float] = mapped_column(Double)


class CounterRow(Base):
    """A number that only grows, whatever is deleted elsewhere; see `COUNTERS`."""

    __tablename__ = "counters"

    name: Mapped[str] = mapped_column(_name(32), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)
