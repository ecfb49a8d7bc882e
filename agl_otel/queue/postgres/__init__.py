"""The shared engine: PostgreSQL, used by any number of queue services at once. Needs the extra `agl-otel[postgres]`.

dialect.py adapts the SQL, address.py parses the URL, session.py runs operations on one connection, signals.py notifies the other
services, schema.py creates the tables, engine.py combines them. Rules about rollouts do not belong here.

Why psycopg and not asyncpg: operations are plain functions, so the driver runs in worker threads, where psycopg (C, libpq) needs no
event loop and about 60 % of asyncpg's CPU time for a claim. It also pipelines: a claim takes three round trips instead of ten, which
matters most when the server is another machine.
"""

from __future__ import annotations

from agl_otel.queue.postgres.engine import PostgresEngine

__all__ = ["PostgresEngine"]
