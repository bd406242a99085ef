"""The tables of the service's first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _name(length: int) -> sa.String:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    """Make them, and the counters at zero."""
    _index_tables()
    _recall_tables()
    _build_tables()
    _access_tables()


def _index_tables() -> None:
    op.create_table(
        "artifacts",
        sa.Column("key", _name(64), nullable=False),
        sa.Column("variant", _name(255), nullable=False),
        sa.Column("digest", _name(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("document", _name(64), nullable=False),
        sa.Column("region", _name(512), nullable=False),
        sa.Column("mode", _name(16), nullable=False),
        sa.Column("bucket", sa.JSON(), nullable=False),
        sa.Column("target", _name(64), nullable=False),
        sa.Column("torch", _name(64), nullable=False),
        sa.Column("build_seconds", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("modified", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint(
            "key", "variant", name="pk_artifacts", postgresql_include=["digest", "size", "document"]
        ),
        sqlite_with_rowid=False,
    )
    for name, columns in {
        "region": ["region", "key", "variant", "mode", "target", "torch"],
        "mode": ["mode", "key", "variant", "region", "target", "torch"],
        "target": ["target", "key", "variant", "region", "mode", "torch"],
        "torch": ["torch", "key", "variant", "region", "mode", "target"],
        "digest": ["digest"],
    }.items():
        op.create_index(f"ix_artifacts_{name}", "artifacts", columns)
    op.create_table(
        "key_components",
        sa.Column("key", _name(64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", _name(64), nullable=False),
        sa.Column("digest", _name(64), nullable=False),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("key", "position", name="pk_key_components"),
    )
    op.create_index("ix_key_components_same", "key_components", ["name", "digest", "key"])
    op.create_table(
        "usage",
        sa.Column("key", _name(64), nullable=False),
        sa.Column("variant", _name(255), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("last_used", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", "variant", name="pk_usage"),
        sa.ForeignKeyConstraint(
            ["key", "variant"],
            ["artifacts.key", "artifacts.variant"],
            name="fk_usage_key_variant",
            ondelete="CASCADE",
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_usage_oldest", "usage", ["last_used", "key", "variant", "hits"])
    op.create_table(
        "blobs",
        sa.Column("digest", _name(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("stored", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_blobs"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "deaths",
        sa.Column("id", _name(32), nullable=False),
        sa.Column("digest", _name(64), nullable=False),
        sa.Column("stage", _name(16), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("told", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deaths"),
        sa.ForeignKeyConstraint(["digest"], ["blobs.digest"], name="fk_deaths_digest", ondelete="CASCADE"),
    )
    op.create_index("ix_deaths_digest", "deaths", ["digest"])


def _recall_tables() -> None:
    op.create_table(
        "recall_lists",
        sa.Column("signer", _name(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("digest", _name(64), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("signer", "number", "digest", name="pk_recall_lists"),
    )
    op.create_table(
        "recalled",
        sa.Column("what", _name(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("what", name="pk_recalled"),
        sqlite_with_rowid=False,
    )


def _build_tables() -> None:
    active = sa.text("state IN ('queued', 'running')")
    op.create_table(
        "builds",
        sa.Column("id", _name(32), nullable=False),
        sa.Column("spec", _name(256), nullable=False),
        sa.Column("key", _name(64), nullable=False),
        sa.Column("variant", _name(255), nullable=False),
        sa.Column("state", _name(16), nullable=False),
        sa.Column("stage", sa.Text(), nullable=True),
        sa.Column("expected_seconds", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("lease", _name(32), nullable=True),
        sa.Column("error_type", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_builds"),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name=op.f("ck_builds_state")
        ),
    )
    op.create_index(
        "uq_builds_active",
        "builds",
        ["key", "variant"],
        unique=True,
        sqlite_where=active,
        postgresql_where=active,
    )
    op.create_index("ix_builds_entry", "builds", ["key", "variant", "created"])
    op.create_index("ix_builds_queue", "builds", ["state", "created", "id"])
    op.create_index("ix_builds_page", "builds", ["created", "id"])
    op.create_table(
        "build_events",
        sa.Column("build_id", _name(32), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", _name(16), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("build_id", "sequence", name="pk_build_events"),
        sa.ForeignKeyConstraint(
            ["build_id"], ["builds.id"], name="fk_build_events_build_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "leases",
        sa.Column("id", _name(32), nullable=False),
        sa.Column("key", _name(64), nullable=False),
        sa.Column("variant", _name(255), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sa.UniqueConstraint("key", "variant", name="uq_leases_key_variant"),
    )


def _access_tables() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", _name(32), nullable=False),
        sa.Column("name", _name(128), nullable=False),
        sa.Column("hash", _name(64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("last_used", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
    )
    op.create_table(
        "specs",
        sa.Column("name", _name(256), nullable=False),
        sa.Column("registered", sa.Double(), nullable=False),
        sa.Column("seen", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_specs"),
    )
    counters = op.create_table(
        "counters",
        sa.Column("name", _name(32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.bulk_insert(
        counters,
        [
            {"name": name, "value": 0}
            for name in ("fencing", "hits", "misses", "saved_milliseconds", "worker_deaths")
        ],
    )


def downgrade() -> None:
    """Drop them all."""
    for table in (
        "counters",
        "specs",
        "tokens",
        "leases",
        "build_events",
        "builds",
        "recalled",
        "recall_lists",
        "deaths",
        "blobs",
        "usage",
        "key_components",
        "artifacts",
    ):
        op.drop_table(table)
