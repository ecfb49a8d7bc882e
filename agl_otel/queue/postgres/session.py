"""One connection that runs operations as pipelined transactions: a statement without rows is sent along with the next that returns some.

A transaction that loses a conflict (deadlock, serialization, unique index) is run again. A broken connection is replaced, and the
operation runs again unless its COMMIT had been sent: then the outcome is unknown, and the caller's retry finds it by its request id.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg import errors
from psycopg.adapt import Buffer, Dumper

from agl_otel.errors import AglError, ConflictError, DiskFullError, UnavailableError, UsageError
from agl_otel.queue.engine import Operation, Params, RunTallies, Signals, tally_changes
from agl_otel.queue.postgres.address import Address
from agl_otel.queue.rows import Row
from agl_otel.queue.statements import Statements
from agl_otel.service.retry import Backoff

T = TypeVar("T")
LOOK_UP: Final = b"SET enable_hashjoin = off; SET enable_mergejoin = off"
"""For writes, which only look rows up by index: a cached plan from when the tables were small would otherwise go on joining whole tables
while they grow (see address.SESSION)."""
PLAN_EACH: Final = b"SET plan_cache_mode = force_custom_plan"
"""For reads, whose conditions vary: plan each one for the current tables."""
WRITE: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
READ: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
TRIES: Final = 10
BACKOFF: Final = Backoff(0.004, 0.2, jitter=1.0)
ROWS: Final = "%(rows)s"  # a statement with this parameter takes all rows at once, as JSON
_LOST: Final = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
_log = logging.getLogger(__name__)


class _Int(Dumper):
    """Sends integers untyped, so that a statement is prepared once and not once for each width of integer."""

    oid = 0

    def dump(self, obj: Any) -> Buffer | None:
        """Return the decimal text."""
        return str(int(obj)).encode()


class _Float(Dumper):
    oid = 0

    def dump(self, obj: Any) -> Buffer | None:
        """Return the shortest text that reads back as the same number."""
        return repr(float(obj)).encode()


class _Str(Dumper):
    oid = 0

    def dump(self, obj: Any) -> Buffer | None:
        """Return UTF-8 with NUL, which PostgreSQL's text cannot hold, as the replacement character."""
        return str(obj).replace("\0", "\ufffd").encode()


class PostgresTransaction:
    """A connection inside a transaction and a pipeline."""

    def __init__(self, connection: psycopg.Connection[Any], pipeline: psycopg.Pipeline, statements: Statements) -> None:
        self.statements = statements
        self.signals = Signals()
        self.tallies: Counter[str] = Counter()
        self.runs = RunTallies()
        self._connection = connection
        self._pipeline = pipeline
        self._silent = connection.cursor()

    def rows(self, name: str, params: Params = {}) -> list[tuple[Any, ...]]:  # noqa: B006 - read only
        """All rows of the named query."""
        return self.rows_of(self.statements[name], params)

    def rows_of(self, sql: str, params: Params) -> list[tuple[Any, ...]]:
        """All rows of a composed query."""
        return self._connection.cursor().execute(sql.encode(), params).fetchall()

    def run(self, name: str, params: Params = {}) -> None:  # noqa: B006 - read only
        """Run the named statement; it is sent with the next one that returns rows."""
        self.send(self.statements[name].encode(), params)

    def changed(self, name: str, params: Params = {}) -> int:  # noqa: B006 - read only
        """Run the named statement; return how many rows it changed."""
        cursor = self._connection.cursor().execute(self.statements[name].encode(), params)
        self._pipeline.sync()
        return cursor.rowcount

    def run_many(self, name: str, params: Sequence[Params] | Sequence[Row]) -> None:
        """Run the named statement once for each row, or once for all if it takes `:rows`."""
        if not params:
            return
        sql = self.statements[name]
        if ROWS in sql:
            self.send(sql.encode(), {"rows": rows_json(params)})
        else:
            self._silent.executemany(sql.encode(), [*map(_named, params)])

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Wait until other transactions that locked one of these keys have ended, then lock them."""
        self.run("keys_held", {"keys": json.dumps(keys)})

    def lock_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Lock these rollouts until the transaction ends."""
        self.run("rollouts_held", {"rollout_ids": json.dumps([*rollout_ids])})

    def send(self, sql: bytes, params: Params | None = None) -> None:
        """Send a statement without waiting for its result."""
        self._silent.execute(sql, params)


def _named(row: Params | Row) -> Params:
    return row._asdict() if isinstance(row, tuple) else row


def rows_json(params: Sequence[Params] | Sequence[Row]) -> str:
    """Encode rows for json_populate_recordset; NUL is replaced as in _Str, infinity and NaN are written as text that PostgreSQL reads."""
    rows = [*map(_named, params)]
    try:
        text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps([{name: _finite(value) for name, value in row.items()} for row in rows], ensure_ascii=False)
    if "\\u0000" in text:  # or the text contains the escape literally
        text = json.dumps([{name: _without_nul(value) for name, value in row.items()} for row in rows], ensure_ascii=False)
    return text


def _finite(value: object) -> object:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _without_nul(value: object) -> object:
    return value.replace("\0", "\ufffd") if isinstance(value, str) else _finite(value)


class Done(NamedTuple):
    """The result of a committed operation, and its signals."""

    result: Any
    signals: Signals


class Session:
    """A connection, opened on first use, for one thread."""

    def __init__(self, address: Address, statements: Statements, planner: bytes) -> None:
        self._address = address
        self._statements = statements
        self._planner = planner
        self._connection: psycopg.Connection[Any] | None = None
        self._committing = False

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def run(self, operation: Operation[Any], begin: bytes) -> Done:
        """Run an operation as one transaction.

        Raises what it raises, ConflictError for a refused row, UsageError for a value that PostgreSQL cannot hold, UnavailableError.
        """
        for number in itertools.count(1):
            fresh = self._connection is None
            try:
                return self._once(operation, begin)
            except _LOST as error:
                if number >= TRIES:
                    raise self._refused(error) from error
            except psycopg.Error as error:
                broken = self._connection is not None and self._connection.closed
                if isinstance(error, errors.ReadOnlySqlTransaction) or broken:
                    self.close()  # the next operation resolves the server again: its address may have changed
                if not broken or fresh or self._committing:
                    raise self._refused(error) from error
            time.sleep(BACKOFF.jittered(number))
        raise AssertionError("unreachable")

    def _once(self, operation: Operation[Any], begin: bytes) -> Done:
        connection = self._connected()
        self._committing = False
        try:
            with connection.pipeline() as pipeline:
                transaction = PostgresTransaction(connection, pipeline, self._statements)
                transaction.send(begin)
                result = operation(transaction)
                if transaction.tallies:
                    transaction.run_many("tally_add", tally_changes(transaction.tallies))
                transaction.run_many("run_tally_add", transaction.runs.changes())
                self._committing = True
                transaction.send(b"COMMIT")
        except BaseException:
            self._roll_back(connection)
            raise
        return Done(result, transaction.signals)

    def _roll_back(self, connection: psycopg.Connection[Any]) -> None:
        try:
            if not connection.closed and connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                connection.execute(b"ROLLBACK")
        except psycopg.Error as error:
            _log.debug("roll back: %s", self._address.words(error))
            connection.close()  # then the server rolls back

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            try:
                connection = self._address.connect(self._planner)
            except AglError as error:  # to a running service even a changed password means that the database is unavailable
                raise UnavailableError(str(error)) from None
            connection.adapters.register_dumper(int, _Int)
            connection.adapters.register_dumper(float, _Float)
            connection.adapters.register_dumper(str, _Str)
            self._connection = connection
        return self._connection

    def _refused(self, error: psycopg.Error) -> AglError:
        text = self._address.words(error)
        if isinstance(error, errors.IntegrityError):
            return ConflictError(f"the queue's database refused a row: {text}")
        if isinstance(error, errors.DataError):
            return UsageError(f"the queue's database cannot hold a value: {text}")
        _log.error("queue database %s: %s", self._address.shown, text)
        if isinstance(error, errors.DiskFull):
            return DiskFullError.of(f"the queue's database {self._address.shown}", text)
        return UnavailableError(f"the queue's database {self._address.shown} cannot be used now ({text}): try again")
