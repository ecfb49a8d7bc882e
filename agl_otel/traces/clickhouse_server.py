"""A ClickHouse server behind the same interface as the embedded one.

Statements and the program's own queries use the native protocol; inserts and users' queries use HTTP, which takes and returns formatted
bytes as chdb does. Connections open on the first call, and a server that is down raises UnavailableError, so that a collector can start,
accept and log before its server is up.
"""

from __future__ import annotations

import http.client
import logging
import re
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast
from urllib.parse import urlencode

from clickhouse_driver import Client
from clickhouse_driver import errors as driver_errors

from agl_otel.errors import AglError, SettingsError, UnavailableError
from agl_otel.traces import detached_parts
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.cluster import LOCAL, on_cluster, stored_as
from agl_otel.traces.engine import DATABASE, INSERT_SETTINGS, READ_SETTINGS, ClickHouseError, insert_into

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 90.0  # over HTTP: an insert, or a read with its limit of 60 s
STATEMENT_SECONDS: Final = 300.0  # over the native protocol, where progress messages extend a long statement
IDLE_SECONDS: Final = 2.0  # an HTTP connection idle for longer is reopened: servers close idle ones after 3 to 30 seconds
AUTHENTICATION_FAILED: Final = 516
NOT_ALLOWED: Final = frozenset({497, 164})  # access denied, read-only
ABORTED: Final = 236  # "The server is shutting down"

# Settings of every session, regardless of the user's profile.
SESSION: Final[dict[str, str | int]] = {
    **INSERT_SETTINGS,
    "distributed_foreground_insert": 1,
}
READ_LIMITS: Final = {**READ_SETTINGS, "readonly": 2}
# A subquery on one distributed table within a query on another runs once, for all nodes.
CLUSTER_READS: Final = {"distributed_product_mode": "global"}
CLUSTER_SESSION: Final[dict[str, str | int]] = {
    **CLUSTER_READS,
    "distributed_ddl_output_mode": "none_only_active",  # a node that is down catches up later
    "distributed_ddl_task_timeout": 60,
}
_OURS: Final = re.compile(rf"\bFROM {DATABASE}\.(otel_\w+)")
_CODE_HEADER: Final = "X-ClickHouse-Exception-Code"
# End of an answer whose query failed after its first rows: https://clickhouse.com/docs/interfaces/http#http_response_codes_caveats
_EXCEPTION: Final = re.compile(rb"\r\n__exception__\r\n\w+\r\n(.+)\n\d+ \w+\r\n__exception__\r\n\Z", re.DOTALL)
_TAIL_BYTES: Final = 64 << 10
logging.getLogger("clickhouse_driver.connection").setLevel(logging.CRITICAL)  # it logs a traceback for what it also raises


class ServerEngine:
    """One server, or a cluster through one of its nodes. Safe to use from several threads."""

    embedded = False

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self.cluster = address.cluster
        self._reads = READ_LIMITS | (CLUSTER_READS if address.cluster else {})
        self._session = SESSION | (CLUSTER_SESSION if address.cluster else {})
        if address.insert_quorum:
            self._session["insert_quorum"] = address.insert_quorum
        self._client = Client(
            address.host,
            port=address.port,
            user=address.user,
            password=address.password,
            secure=address.secure,
            connect_timeout=CONNECT_SECONDS,
            send_receive_timeout=STATEMENT_SECONDS,
            settings={**self._session, "server_side_params": True, "output_format_json_quote_64bit_integers": 0},
        )
        self._lock = threading.Lock()
        self._http = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing."""
        self._native(sql, params)

    def select(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        """Return the rows of a query of the program; on a cluster after replicas have synced, since recovery asks what is stored."""
        table = _OURS.search(sql)
        if self.cluster and self.address.replicated and table:
            self._native(f"SYSTEM SYNC REPLICA{on_cluster(self.cluster)} {DATABASE}.{table[1]}{LOCAL} LIGHTWEIGHT", None)
        return [list(row) for row in self._native(sql, params)]

    def check_disk(self) -> list[str]:
        """Describe the damaged parts that the server detached."""
        return detached_parts.of_server(self)

    def delete(self, table: str, condition: str, params: Mapping[str, object]) -> None:
        """Delete matching rows on every node. Deleted rows are invisible to queries when this returns."""
        where = f"{DATABASE}.{stored_as(table, self.cluster)}{on_cluster(self.cluster)}"
        self.command(f"DELETE FROM {where} WHERE {condition}", params)

    def insert(
        self, table: str, columns: Sequence[str], rows: Iterable[bytes], *, format_name: str = "JSONEachRow", token: str = ""
    ) -> None:
        """Insert the pieces of `rows`; on disk when this returns (the tables' fsync settings)."""
        sql = f"{insert_into(table, columns)} FORMAT {format_name}"
        self._post({"query": sql, **self._session, "insert_deduplication_token": token}, b"".join(rows))

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run SQL that the guard has accepted, limited and read-only; `params` are already in ClickHouse's text form."""
        names = {f"param_{name}": value for name, value in (params or {}).items()}
        return self._post({"database": DATABASE, "default_format": format_name, **self._reads}, sql.encode(), names)

    def close(self) -> None:
        """Close the connections; the threads that use them must have ended."""
        with self._lock:
            self._client.disconnect()
            for connection in self._open:
                connection.close()
            self._open.clear()

    def _native(self, sql: str, params: Mapping[str, object] | None) -> list[Sequence[object]]:
        values = {name: int(value) if isinstance(value, bool) else value for name, value in (params or {}).items()}
        with self._lock:
            try:
                return cast(list[Sequence[object]], self._client.execute(sql, values or None))
            except driver_errors.ServerException as error:
                raise self._refused(f"Code: {error.code}. {error.message}") from None
            except (driver_errors.Error, OSError, EOFError) as error:
                self._client.disconnect()
                raise self._unavailable(self.address.port, error) from None

    def _post(self, query: Mapping[str, object], body: bytes, form: Mapping[str, str] | None = None) -> bytes:
        headers = {"X-ClickHouse-User": self.address.user, "X-ClickHouse-Key": self.address.password}
        if form:
            headers["Content-Type"], body = _multipart(form, body)
        try:
            connection = self._connection()
            connection.request("POST", f"/?{urlencode(query)}", body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if isinstance(error, http.client.IncompleteRead) and (match := _EXCEPTION.search(error.partial[-_TAIL_BYTES:])):
                raise self._refused(match[1].decode(errors="replace")) from None
            raise self._unavailable(self.address.http_port, error) from None
        self._http.used_at = time.monotonic()
        if response.status != 200 or response.headers.get(_CODE_HEADER):
            raise self._refused(answer.decode(errors="replace"))
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._http, "connection", None)
        if connection is not None and time.monotonic() - self._http.used_at < IDLE_SECONDS:
            return connection
        self._drop()
        host, port = self.address.host, self.address.http_port
        if self.address.secure:
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(ANSWER_SECONDS)
        self._http.connection = connection
        with self._lock:
            self._open.append(connection)
        return connection

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._http, "connection", None)
        if connection is not None:
            connection.close()
            self._http.connection = None
            with self._lock:
                self._open.remove(connection)

    def _refused(self, message: str) -> ClickHouseError | UnavailableError:
        """Return the error for what the server answered: one that ends (it aborts, or is stopped) is away, as if it did not answer."""
        error = ClickHouseError(_short(message))
        return UnavailableError(f"ClickHouse at {self.address} is ending: {_first_line(message)}") if error.code == ABORTED else error

    def _unavailable(self, port: int, error: BaseException) -> UnavailableError:
        reason = str(error) or type(error).__name__
        return UnavailableError(f"ClickHouse at {self.address} does not answer on port {port}: {_first_line(reason)}")


def settings_error(error: AglError, address: ServerAddress) -> SettingsError | None:
    """Return an error that names the setting to correct if `error` means that a retry at the start is useless; else None."""
    code = error.code if isinstance(error, ClickHouseError) else 0
    if code == AUTHENTICATION_FAILED:
        return SettingsError(f"ClickHouse at {address} refuses the user or the password: check both in AGL_CLICKHOUSE_URL")
    if code in NOT_ALLOWED:
        return SettingsError(
            f"ClickHouse at {address} does not let the user {address.user!r} do what is needed: {error}. "
            f"Grant it: GRANT ALL ON {DATABASE}.* TO {address.user}; GRANT SELECT ON system.* TO {address.user}"
        )
    return None


def _multipart(form: Mapping[str, str], query: bytes) -> tuple[str, bytes]:
    """Return (content type, body) of a form, for parameters too long for a URL."""
    boundary = "agl-otel-7f1c9b0e4d2a"
    parts = [(name, value.encode()) for name, value in form.items()] + [("query", query)]
    if any(boundary.encode() in value for _, value in parts):
        raise ClickHouseError("Code: 36. DB::Exception: a parameter holds the form's own boundary")
    lines = [f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n" for name, value in parts]
    return f"multipart/form-data; boundary={boundary}", b"".join([*lines, f"--{boundary}--\r\n".encode()])


def _short(message: str) -> str:
    return message.split("Stack trace:")[0].strip()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else text
