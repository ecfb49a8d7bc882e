"""Read-only SQL over ClickHouse's HTTP protocol, for all readers of traces: our own, curl, clickhouse-connect, Grafana.

`guard` decides which queries may run; the engine's read connections limit what they may cost. Queries run in a small thread pool, and those
of our own readers in a separate one. Reads from a ClickHouse server also go through this endpoint: one address is then enough, and the
server's password stays in the collector.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from agl_otel.collector import guard, guard_tables
from agl_otel.errors import DataError, QueryError, UnavailableError, http_status
from agl_otel.net.auth import SQL, BrowserAccess, is_token_itself, shown_to_sql
from agl_otel.net.bodies import Bodies, body_of
from agl_otel.net.http_server import STALLED_SECONDS, browser_access, end_stalled, is_healthy, readable
from agl_otel.net.in_flight import InFlight
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.http import OWN_HEADER
from agl_otel.traces.opened import TraceStore

PING_SECONDS: Final = 1.0  # less than the timeout of our callers
SLOW_SECONDS: Final = 2.0  # after which, and as often, it is checked whether the server of a running query still answers
PINGS: Final = 2  # unanswered pings in a row that mean down: a busy server may miss one
READ_THREADS: Final = 4  # of each lane
MAX_BODY_BYTES: Final = 16 << 20  # parameters may hold long lists of ids
IN_FLIGHT_BYTES: Final = 256 << 20  # limit on all bodies together
SLICE_BYTES: Final = 256 << 10
HELD_BYTES: Final = 1 << 30  # limit on buffered response bytes; further queries wait, so that slow clients cannot exhaust memory
ROOM_SECONDS: Final = 2 * STALLED_SECONDS  # a query's longest wait for buffer space
MAX_MESSAGE: Final = 4000  # limit on an error message, in characters
DEFAULT_FORMAT: Final = "TabSeparated"
_RESERVED: Final = frozenset(
    {"query", "database", "default_format", "user", "password", "query_id", "session_id", "session_timeout", "session_check", "compress",
     "decompress", "enable_http_compression", "client_protocol_version", "quota_key", "role", "buffer_size", "wait_end_of_query"}
)  # fmt: skip
PASSED_TEXTS: Final = 500  # limit on cached query texts: dashboards and readers repeat the text and change the parameters
PASSED_CHARS: Final = 16 << 10
_Passed = tuple[str, dict[str, str], str]  # the result of guard.inner
_QUERY_ID: Final = re.compile(r"[!-~]{1,200}")  # it is copied to a response header
_HINT: Final = re.compile(r"(?<!\s)\s*+Maybe you meant (?!:|(?:otel|system)\.)[^?]*+\?\.?", re.I)  # names a table of another database
_NOT_FOUND: Final = frozenset({46, 47, 60, 81})  # unknown function, identifier, table, database


class _Lane:
    """Threads for one group of queries, and the size of its unsent responses."""

    def __init__(self, name: str) -> None:
        self.threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix=name)
        self.held = 0
        self.taken = asyncio.Condition()


class SqlEndpoint:
    """Answers queries from `engine`. `shared`: the server may have other databases, which are then inaccessible.

    `ping`: health check URL of the server; empty for the embedded one.
    """

    def __init__(
        self,
        engine: TraceStore,
        *,
        token: str = "",
        shared: bool = False,
        ping: str = "",
        held_bytes: int = HELD_BYTES,
        stalled_seconds: float = STALLED_SECONDS,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        self._engine = engine
        self._shared = shared
        self._server_ping = ping
        self._token = token
        self._held_bytes = held_bytes
        self._stalled_seconds = stalled_seconds
        self._in_flight_bytes = in_flight_bytes
        self._own, self._others = _Lane("own-sql"), _Lane("sql")
        self._table_functions: frozenset[str] = frozenset()
        self._passed: dict[str, _Passed] = {}
        self.counts: Counter[str] = Counter()

    def app(self, names: Collection[str] | None = None) -> web.Application:
        """Build the HTTP application: GET and POST on /, GET /ping; `names`: see `auth.BrowserAccess`."""
        bodies = Bodies(InFlight(self._in_flight_bytes), MAX_BODY_BYTES)
        app = web.Application(middlewares=[browser_access(BrowserAccess(names)), readable, bodies.held])
        app.router.add_get("/ping", self._ping)
        app.router.add_route("*", "/", self._query)
        end_stalled(app, self._stalled_seconds)
        return app

    def close(self) -> None:
        """Wait for the running queries, and end the threads."""
        for lane in (self._own, self._others):
            lane.threads.shutdown(wait=True, cancel_futures=True)

    async def _ping(self, _: web.Request) -> web.Response:
        if self._server_ping and not await is_healthy(self._server_ping, seconds=PING_SECONDS):
            return web.Response(status=503, text="ClickHouse does not answer\n")
        return web.Response(text="Ok.\n")

    async def _query(self, request: web.Request) -> web.StreamResponse:
        if (why := SQL.refusal_of_all(self._token, shown_to_sql(request.headers, request.query))) is not None:
            return _error(401, 516, why, "AUTHENTICATION_FAILED")
        lane = self._own if self._is_own(request) else self._others
        values = dict(request.query)
        sql = values.get("query", "")
        if request.method == "POST":
            try:
                body = await body_of(request)
            except UnavailableError as error:
                return _error(503, 210, str(error), "NETWORK_ERROR")
            except DataError as error:
                return _error(http_status(error), 27, str(error), "CANNOT_PARSE_INPUT_ASSERTION_FAILED")
            if request.content_type == "multipart/form-data":
                try:
                    values |= await _form(request, body)
                except (ValueError, AssertionError, RuntimeError) as error:  # what aiohttp raises for a malformed form
                    return _error(400, 27, f"the form cannot be read: {error}", "CANNOT_PARSE_INPUT_ASSERTION_FAILED")
                sql = values.get("query", "")
            else:
                sql = "\n".join(part for part in (sql, body.decode(errors="replace")) if part)
        elif not sql:
            return web.Response(text="Ok.\n")
        query_id = values.get("query_id") or str(uuid.uuid4())
        if not _QUERY_ID.fullmatch(query_id):
            return _error(400, 36, "query_id may have 200 characters, printable ones of ASCII without spaces", "BAD_ARGUMENTS")
        params = {name.removeprefix("param_"): value for name, value in values.items() if name.startswith("param_")}
        settings = guard.filter_settings({name: value for name, value in values.items() if name not in _RESERVED})
        default = request.headers.get("X-ClickHouse-Format") or values.get("default_format") or DEFAULT_FORMAT
        started = time.perf_counter_ns()
        try:
            await self._room(lane)

            def answer() -> tuple[bytes, str]:
                if request.transport is None:
                    raise UnavailableError("the client went away before its query began")
                return self.run(sql, params, settings, default)

            data, used = await self._while_server_answers(asyncio.get_running_loop().run_in_executor(lane.threads, answer))
        except QueryError as error:
            self.counts["refused"] += 1
            return _error(403, 497, str(error), "ACCESS_DENIED")
        except UnavailableError as error:
            self.counts["failed"] += 1
            return _error(503, 210, str(error), "NETWORK_ERROR")
        except ClickHouseError as error:
            self.counts["failed"] += 1
            return _error(
                404 if error.code in _NOT_FOUND else 400 if error.code in {62, 36} else 500, error.code, public_text(str(error)), ""
            )
        self.counts["queries"] += 1
        headers = _response_headers(query_id, used, time.perf_counter_ns() - started)
        if len(data) <= SLICE_BYTES or request.method == "HEAD":
            return web.Response(body=data, headers=headers)
        return await self._send(request, data, headers, lane)

    async def _while_server_answers(self, query: asyncio.Future[tuple[bytes, str]]) -> tuple[bytes, str]:
        """Await a query, however slow. Raises UnavailableError if meanwhile a ClickHouse server misses PINGS pings in a row."""
        missed = 0
        while self._server_ping and not (await asyncio.wait({query}, timeout=SLOW_SECONDS))[0]:
            missed = 0 if await is_healthy(self._server_ping, seconds=PING_SECONDS) else missed + 1
            if missed == PINGS:
                query.cancel()  # one that runs ends with its own timeout
                raise UnavailableError("ClickHouse does not answer")
        return await query

    async def _send(self, request: web.Request, data: bytes, headers: Mapping[str, str], lane: _Lane) -> web.StreamResponse:
        """Send a large response in slices, as the client reads it; sent whole it would be in memory twice."""
        response = web.StreamResponse(headers=headers)
        response.content_length = len(data)
        lane.held += len(data)
        try:
            await response.prepare(request)
            for start in range(0, len(data), SLICE_BYTES):
                await response.write(memoryview(data)[start : start + SLICE_BYTES])
            await response.write_eof()
        finally:
            lane.held -= len(data)
            async with lane.taken:
                lane.taken.notify_all()
        return response

    async def _room(self, lane: _Lane) -> None:
        """Wait until another response may be buffered. Raises UnavailableError after ROOM_SECONDS."""
        if lane.held <= self._held_bytes:
            return
        try:
            async with asyncio.timeout(ROOM_SECONDS), lane.taken:
                await lane.taken.wait_for(lambda: lane.held <= self._held_bytes)
        except TimeoutError:
            raise UnavailableError(f"answers of {lane.held >> 20} MiB wait for slow clients: ask again later") from None

    def run(self, sql: str, params: Mapping[str, str], settings: Mapping[str, str], default_format: str) -> tuple[bytes, str]:
        """Run a query in this thread; return (bytes, format). Raises QueryError if the guard refuses it, otherwise ClickHouseError."""
        statement = guard.split(sql)
        if statement.kind == "fixed":
            used = guard.check_format(statement.format_name or default_format)
            if self._shared:
                guard_tables.check_fixed(statement.text)
            return self._engine.read(statement.text, used), used
        text, own, format_name = self._passed.get(statement.text) or self._pass(statement.text, params)
        used = guard.check_format(format_name or statement.format_name or default_format)
        if self._shared:
            guard_tables.check_query_tree(self._shown(guard_tables.TREE + text, params))
        return self._engine.read(guard.wrap(text, statement.prefix, {**settings, **own}), used, params), used

    def _pass(self, given: str, params: Mapping[str, str]) -> _Passed:
        """Run steps 2 and 3 of the guard. Queries that pass are cached: the check takes longer than many queries."""
        canonical = self._shown("SELECT formatQuery({q:String})", {"q": guard.parameter_text(given)})
        passed = text, _, _ = guard.inner(canonical)
        guard.check_tree(self._shown(f"EXPLAIN AST {text}", params), self._functions())
        if len(given) <= PASSED_CHARS and guard.is_settled(text):
            if len(self._passed) >= PASSED_TEXTS:
                self._passed = {}  # a client that sends a new text each time only loses the cache
            self._passed[given] = passed
        return passed

    def _shown(self, sql: str, params: Mapping[str, str]) -> str:
        return self._engine.read(sql, "TSVRaw", params).decode(errors="replace")  # values may be any bytes

    def _functions(self) -> frozenset[str]:
        if not self._table_functions:
            names = self._engine.read("SELECT lower(name) FROM system.table_functions", "TSVRaw").decode()
            self._table_functions = frozenset(names.split())
        return self._table_functions

    def _is_own(self, request: web.Request) -> bool:
        """Return whether the query is from our own reader: it has the reader's header and, if the stack has a token, the token."""
        shown = not self._token or is_token_itself(request.headers.get("Authorization", ""), self._token)
        return OWN_HEADER in request.headers and shown


async def _form(request: web.Request, body: bytes) -> dict[str, str]:
    content = StreamReader(BaseProtocol(asyncio.get_running_loop()), len(body))
    content.feed_data(body)
    content.feed_eof()
    values: dict[str, str] = {}
    async for part in MultipartReader(request.headers, content):
        if isinstance(part, BodyPartReader) and part.name:
            values[part.name] = (await part.read()).decode(errors="replace")
    return values


def public_text(message: str) -> str:
    """Return ClickHouse's error message for clients: without names of other databases, and shortened if it quotes a long query."""
    text = re.sub(r"^Code: \d+\. (DB::Exception: )?", "", message)
    end = text.rfind("?") + 2
    text = _HINT.sub("", text[:end]) + text[end:]  # the pattern cannot match beyond the last "?"; searching there would take quadratic time
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} …"


def _response_headers(query_id: str, used: str, elapsed_nano: int) -> dict[str, str]:
    return {
        "X-ClickHouse-Query-Id": query_id,
        "X-ClickHouse-Format": used,
        "X-ClickHouse-Timezone": "UTC",
        "X-ClickHouse-Summary": f'{{"read_rows":"0","read_bytes":"0","elapsed_ns":"{elapsed_nano}"}}',
        "X-Content-Type-Options": "nosniff",  # rows contain text written by agents
        "Content-Type": guard.CONTENT_TYPES.get(used, "text/plain; charset=UTF-8"),
    }


def _error(status: int, code: int, message: str, name: str) -> web.Response:
    tail = f" ({name})" if name else ""
    return web.Response(
        status=status, text=f"Code: {code}. DB::Exception: {message}{tail}\n", headers={"X-ClickHouse-Exception-Code": str(code)}
    )
