"""Opens the ClickHouse at a URL, embedded or a server, with its schema.

The embedded one is opened at once and its schema created. A server may be down: then its schema is created before its first use, because
a collector accepts and logs data meanwhile. A wrong password or a missing right is an error at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from agl_otel.errors import SettingsError, UnavailableError
from agl_otel.service.mapped import unmap_unused
from agl_otel.traces.address import EXAMPLE, SCHEMES, ServerAddress
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.engine import ClickHouseError, Engine
from agl_otel.traces.retention import apply_retention
from agl_otel.traces.schema import create_schema

CHDB_SCHEME: Final = "chdb:///"
_logger = logging.getLogger(__name__)


class TraceStore(Engine, Protocol):
    """An engine that also runs users' queries."""

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run SQL that the guard has accepted, limited and read-only. Raises ClickHouseError."""
        ...

    def check_disk(self) -> list[str]:
        """Return what is wrong with its disk: full, or damaged parts whose rows may be lost. Raises ClickHouseError, UnavailableError."""
        ...


def open_store(url: str, *, retention_days: int | None = None) -> TraceStore:
    """Open the store at `url`, which keeps rows for `retention_days` days (0: for ever; None: unchanged).

    Raises SettingsError, InUseError or ConflictError, but nothing if a server is down.
    """
    if url.startswith(CHDB_SCHEME):
        return _open_chdb(Path("/" + url.removeprefix(CHDB_SCHEME).lstrip("/")), retention_days)
    if url.partition("://")[0] not in SCHEMES:
        raise SettingsError(f"AGL_CLICKHOUSE_URL starts with chdb:/// or clickhouse://, as in chdb:///PATH or {EXAMPLE}")
    return _open_server(ServerAddress.parse(url), retention_days)


def _open_chdb(directory: Path, retention_days: int | None) -> TraceStore:
    from agl_otel.traces.chdb import ChdbEngine  # half a gigabyte of library, not needed with a server

    engine = ChdbEngine(directory)
    try:
        create_schema(engine, where=str(directory))
        if retention_days is not None:
            apply_retention(engine, retention_days)
    except BaseException:
        engine.close()
        raise
    unmap_unused("_chdb")
    return engine


def _open_server(address: ServerAddress, retention_days: int | None) -> TraceStore:
    from agl_otel.traces.clickhouse_server import ServerEngine, settings_error

    cluster = Cluster(address.cluster, replicated=address.replicated) if address.cluster else None
    server = ServerEngine(address)

    def bring_up() -> None:
        create_schema(server, where=f"the server {address}", cluster=cluster)
        if retention_days is not None:
            apply_retention(server, retention_days, cluster)

    engine = AwaitedEngine(server, bring_up)
    try:
        engine.prepare()
    except UnavailableError as error:
        _logger.warning("%s; what arrives is kept in the log until it does", error)
    except ClickHouseError as error:
        if fault := settings_error(error, address):
            engine.close()
            raise fault from None
        _logger.warning("the schema at %s cannot be brought up yet: %s", address, error)
    except BaseException:
        engine.close()
        raise
    return engine


class AwaitedEngine:
    """An engine whose schema is created before its first use, as soon as that is possible."""

    def __init__(self, engine: TraceStore, bring_up: Callable[[], None]) -> None:
        self.cluster = engine.cluster
        self.embedded = engine.embedded
        self._engine = engine
        self._bring_up = bring_up
        self._ready = False
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Create the schema once. After UnavailableError, ClickHouseError or ConflictError the next use tries again."""
        if self._ready:
            return
        with self._lock:
            if not self._ready:
                self._bring_up()
                self._ready = True

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing."""
        self.prepare()
        self._engine.command(sql, params)

    def delete(self, table: str, condition: str, params: Mapping[str, object]) -> None:
        """Delete matching rows."""
        self.prepare()
        self._engine.delete(table, condition, params)

    def insert(
        self, table: str, columns: Sequence[str], rows: Iterable[bytes], *, format_name: str = "JSONEachRow", token: str = ""
    ) -> None:
        """Insert the pieces of `rows`."""
        self.prepare()
        self._engine.insert(table, columns, rows, format_name=format_name, token=token)

    def select(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        """Return the rows of one of the program's own queries."""
        self.prepare()
        return self._engine.select(sql, params)

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run SQL that the guard has accepted."""
        self.prepare()
        return self._engine.read(sql, format_name, params)

    def check_disk(self) -> list[str]:
        """Return what is wrong with its disk; nothing before the first use."""
        return self._engine.check_disk() if self._ready else []

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
