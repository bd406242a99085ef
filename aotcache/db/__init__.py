"""The database of the service: tables, engine, migrations."""
