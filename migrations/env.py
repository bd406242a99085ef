"""How alembic runs these migrations: on a connection that `aotcache.db.migrate` has opened and locked."""

from alembic import context

from aotcache.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # All steps are in the one transaction that the caller ends: half an upgrade is never seen.
    transactional_ddl=True,
    # SQLite cannot alter most things in place; batch steps copy the table.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
