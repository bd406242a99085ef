"""Publishes that have begun, so that an archive is not taken from one that was broken off."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def _name(length: int) -> sa.String:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "publishes",
        sa.Column("id", _name(32), nullable=False),
        sa.Column("key", _name(64), nullable=False),
        sa.Column("variant", _name(255), nullable=False),
        sa.Column("digest", _name(64), nullable=False),
        sa.Column("began", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_publishes"),
    )
    op.create_index("ix_publishes_digest", "publishes", ["digest"])
    op.create_index("ix_publishes_began", "publishes", ["began"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("publishes")
