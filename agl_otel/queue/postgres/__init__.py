"""The shared engine: PostgreSQL, used by any number of queue services at once. Needs the extra `agl-otel[postgres]`.

dialect.py says what differs in the SQL, address.py where the server is, session.py runs operations on one connection, signals.py signals
to the other services, schema.py makes the tables, engine.py puts it together. No rule about rollouts is in here.

psycopg and not asyncpg: operations are plain functions, so the driver is used from worker threads, where psycopg (C, libpq) needs about
60 % of asyncpg's CPU time for a claim and none of its event loops; and it pipelines, so that a claim is three round trips and not ten,
which is what counts when the server is another machine.
"""

from __future__ import annotations

from agl_otel.queue.postgres.engine import PostgresEngine

__all__ = ["PostgresEngine"]
