"""The service's database: tables, connections and migrations. SQLite or PostgreSQL."""
