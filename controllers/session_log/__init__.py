"""The durable session log: what it accepts, how it is encrypted, and how it is kept in SQLite or in Redis."""
