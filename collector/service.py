"""The collector as a service: opens the engine and the log, recovers, listens, registers with the queue, and drains on shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web
from opentelemetry.sdk.metrics.export import MetricsData

from agl_otel import __version__
from agl_otel.adapters.otlp_masking import load_masker
from agl_otel.collector.commit import GroupCommit
from agl_otel.collector.copying import Copying
from agl_otel.collector.core import COMPILED, core
from agl_otel.collector.deletion import Deletion
from agl_otel.collector.disk import DiskBudget, Level
from agl_otel.collector.expiry import Expiry
from agl_otel.collector.forward import Forwarder, make_target
from agl_otel.collector.grpc_port import grpc_server
from agl_otel.collector.heartbeat import Heartbeats
from agl_otel.collector.http_port import Handler, HttpPort
from agl_otel.collector.intake import Intake
from agl_otel.collector.journal import RecoveryState, describe, recovery_state
from agl_otel.collector.maintenance import Maintenance
from agl_otel.collector.readings import Parts, watch
from agl_otel.collector.receive import Receiver
from agl_otel.collector.refusals import Refusals
from agl_otel.collector.resends import ResendJournal
from agl_otel.collector.sqlhttp import SqlEndpoint
from agl_otel.collector.store_batch import BatchStore
from agl_otel.collector.store_watch import StoreWatch
from agl_otel.collector.telemetry import Telemetry
from agl_otel.collector.wal import SEGMENT_BYTES, Log, claim
from agl_otel.collector.write import Writer
from agl_otel.errors import InUseError, SettingsError, UnavailableError
from agl_otel.net.auth import own_names
from agl_otel.net.grpc_server import GrpcPort
from agl_otel.net.http_server import is_healthy, listen, make_runner, require_certificate
from agl_otel.net.in_flight import InFlight
from agl_otel.net.tls import Tls
from agl_otel.queue.client import QueueClient
from agl_otel.queue.registration import Registration
from agl_otel.settings import Settings
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.opened import CHDB_SCHEME, open_store

DRAIN_SECONDS: Final = 10.0
FAREWELL_SECONDS: Final = 2.0
CLICKHOUSE_PROBE_SECONDS: Final = 2.0
SLOWER_CORE: Final = "requests are read by the core in plain Python, for twice the CPU"
_logger = logging.getLogger(__name__)


class Collector:
    """One collector on one data directory. Call `start`, then `stop`; `addresses` has the addresses of its ports."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._token = settings.token.get_secret_value()
        self._started_at = time.time()
        self._tasks: list[asyncio.Task[None]] = []
        self._runners: list[web.AppRunner] = []
        self._forwarder: Forwarder | None = None
        self._maintenance: Maintenance | None = None
        self._registration: Registration | None = None
        self._grpc: GrpcPort | None = None
        self._closers = contextlib.AsyncExitStack()
        self._pushing = contextlib.AsyncExitStack()
        self._writer_task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.addresses: dict[str, str] = {}
        self._away = ""

    async def start(self) -> None:
        """Start the collector; all ports answer on return. Raises InUseError, SettingsError or ConflictError; nothing is left open then."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings = self._settings
        self._tls = Tls.load(settings)
        self._forwarder = _forwarder(settings)
        self._masker = load_masker(settings.mask)
        self._engine = await asyncio.to_thread(open_store, settings.clickhouse_db, retention_days=settings.retention_days)
        self._closers.callback(self._engine.close)
        left = self._open_log()
        resends = ResendJournal(settings.wal_dir)
        self._closers.callback(resends.close)
        self._queue = QueueClient(settings.queue_address, token=self._token)
        self._closers.push_async_callback(self._queue.close)
        self._commit = GroupCommit(self._log)
        self._closers.push_async_callback(self._commit.close)
        self._open_store()
        self._telemetry = Telemetry()
        self._closers.callback(self._telemetry.close)
        self._writer = Writer(
            self._store,
            self._commit,
            self._queue,
            left,
            self._log.read,
            resends,
            on_stored=self._telemetry.batch_stored,
            away=lambda: self._away,
        )
        self._heartbeats = Heartbeats(self._queue)
        refusals = Refusals()
        self._open_intake(left, resends, refusals)
        server = ServerAddress.parse(settings.clickhouse_db) if not settings.clickhouse_db.startswith(CHDB_SCHEME) else None
        self._begin_tasks(server)
        self._open_sql(server)
        self._maintenance = Maintenance(self._engine, self._queue, adopt_after=settings.adopts_after)
        parts = Parts(
            self._intake,
            self._writer,
            self._commit,
            self._store,
            self._heartbeats,
            self._disk,
            self._in_flight,
            self._forwarder,
            self._masker,
            self._store_watch,
            refusals,
            self._core,
            self._maintenance,
        )
        watch(self._telemetry, parts)
        receiver = Receiver(self._intake, self._writer, self._token, settings.metrics, settings.max_message_bytes, refusals)
        await self._listen(receiver)
        if settings.metrics_otlp:
            from agl_otel.telemetry.push import pushing  # its exporter is rarely wanted, and takes memory and time to import

            await self._pushing.enter_async_context(pushing(self._own_metrics, settings))

    def _open_log(self) -> RecoveryState:
        """Open the write-ahead log; return what an earlier process has left in it."""
        settings = self._settings
        self._closers.callback(claim(settings.wal_dir).close)
        self._log = Log(settings.wal_dir, segment_bytes=min(SEGMENT_BYTES, settings.wal_budget_bytes // 8), describe=describe)
        self._closers.callback(self._log.close)
        self._closers.callback(self._clear_log)
        left = recovery_state(self._log.replay())
        if not left.in_doubt and not left.unwritten:
            self._log.clear()
        return left

    def _open_store(self) -> None:
        """Create what inserts batches into ClickHouse, with the core that makes their rows."""
        self._store_watch = StoreWatch(self._engine)
        self._core = core(self._settings.core)
        if self._core.name == "python":
            missing = "" if self._settings.core == "python" else ": the compiled core is not installed (docs/install.md)"
            _logger.info("%s%s", SLOWER_CORE, missing)
        self._store = BatchStore(self._engine, self._settings.data_dir.absolute() / "refused", self._core)

    def _open_intake(self, left: RecoveryState, resends: ResendJournal, refusals: Refusals) -> None:
        """Create the intake, within the limits of the settings."""
        settings = self._settings
        self._disk = DiskBudget(
            settings.wal_dir,
            budget_bytes=settings.wal_budget_bytes,
            reserve_bytes=settings.disk_reserve_bytes,
            refusal=lambda: self._commit.trouble,
        )
        self._in_flight = InFlight(settings.max_in_flight_bytes)
        self._intake = Intake(
            self._commit,
            self._writer,
            self._heartbeats,
            left,
            resends.known,
            disk=self._disk,
            in_flight=self._in_flight,
            max_span_attributes=settings.max_span_attributes,
            max_expanded_bytes=settings.max_expanded_bytes,
            unidentified=settings.unidentified,
            forward=self._forwarder.offer if self._forwarder is not None else None,
            masker=self._masker,
            used_core=self._core,
            refusals=refusals,
        )
        resends.known.clear()  # the intake has copied them, into less memory

    def _open_sql(self, server: ServerAddress | None) -> None:
        """Create the endpoint for SQL; `server`: that of the store; None if it is embedded."""
        ping = server.ping if server is not None else ""
        budget = self._settings.max_in_flight_bytes
        self._sql = SqlEndpoint(self._engine, token=self._token, shared=server is not None, ping=ping, in_flight_bytes=budget)
        self._closers.callback(self._sql.close)

    def _begin_tasks(self, server: ServerAddress | None) -> None:
        """Start the tasks that run beside the ports until `stop`."""
        self._writer_task = asyncio.create_task(self._writer.run(), name="writer")
        self._writer_task.add_done_callback(self._writer_ended)
        self._tasks.append(asyncio.create_task(self._heartbeats.run(), name="heartbeats"))
        if self._forwarder is not None:
            self._closers.push_async_callback(self._forwarder.close)
            self._tasks.append(asyncio.create_task(self._forwarder.run(), name="forwarder"))
        self._tasks.append(asyncio.create_task(self._store_watch.run(), name="store-watch"))
        if days := self._settings.retention_days:
            self._tasks.append(asyncio.create_task(Expiry(self._writer, days).run(), name="expiry"))
        if server is not None:
            self._tasks.append(asyncio.create_task(self._probe_clickhouse(server), name="probe"))

    async def _own_metrics(self) -> MetricsData:
        return self._telemetry.data()

    async def _listen(self, receiver: Receiver) -> None:
        settings, tls = self._settings, self._tls
        self._grpc = GrpcPort(lambda: grpc_server(receiver, settings.max_message_bytes), "AGL_OTLP_GRPC_PORT")
        grpc_port = await self._grpc.start(settings.host, settings.otlp_grpc_port, tls)
        client_certificate = tls is not None and tls.client_authority is not None
        pages = {"/status": lambda: web.json_response(self.status()), "/metrics": self._metrics_page}
        copying = Copying(self._engine)
        self._closers.callback(copying.close)
        self._deletion = Deletion(self._engine)
        actions: dict[str, Handler] = {"/delete": self._deletion.handle, "/purge": self._post_purge, "/copy": copying.handle}
        if self._maintenance:
            actions["/maintain"] = self._maintenance.handle
        names = own_names(settings)
        port = HttpPort(
            receiver,
            self._in_flight,
            self.health,
            pages,
            actions,
            client_certificate=client_certificate,
            names=names,
            grpc_at=f"{settings.announced_host}:{grpc_port}",
        )
        self._otlp_app = port.app()
        http_port = await self._serve(self._otlp_app, settings.otlp_http_port, "AGL_OTLP_HTTP_PORT", tls)
        sql_app = self._sql.app(names)
        if client_certificate:
            sql_app.middlewares.append(require_certificate({"/ping"}))
        sql_port = await self._serve(sql_app, settings.clickhouse_port, "AGL_CLICKHOUSE_PORT", tls)
        scheme = "https" if tls else "http"
        self.addresses = {
            "collector_grpc": f"{'https://' if tls else ''}{settings.announced_host}:{grpc_port}",
            "collector_http": f"{scheme}://{settings.announced_host}:{http_port}",
            "clickhouse": f"{scheme}://{settings.announced_host}:{sql_port}",
        }
        self._registration = Registration(self._queue, "collector", self.addresses["collector_http"], self.addresses)
        self._registration.start()

    async def _post_purge(self, _: web.Request) -> web.Response:
        """POST /purge: return when no file of the log or of the embedded ClickHouse contains data deleted before the call."""
        try:
            await self._writer.purge()
        except OSError as error:
            raise UnavailableError(f"the write-ahead log keeps what is stored: {error.strerror or error}; ask again") from None
        if self._settings.clickhouse_db.startswith(CHDB_SCHEME):
            await self._deletion.purge()
        return web.json_response({})

    async def failed(self) -> None:
        """Never return; raise the error that ended the writer. Acked data would no longer become visible then: the process must restart."""
        await self._failure

    async def _probe_clickhouse(self, server: ServerAddress) -> None:
        """Check whether the server answers even while nothing is written; create or update its schema as soon as it does."""
        while True:
            if not await is_healthy(server.ping):  # without this check a server that hangs would block a query for minutes
                self._away = f"ClickHouse at {server} does not answer at {server.ping}"
            else:
                try:
                    await asyncio.to_thread(self._engine.select, "SELECT 1")
                    self._away = ""
                except (UnavailableError, ClickHouseError) as error:
                    self._away = str(error)
            await asyncio.sleep(CLICKHOUSE_PROBE_SECONDS)

    def _writer_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _state(self) -> dict[str, str]:
        """Return status, and the reason if it is degraded: it still accepts spans then, unless its disk is full."""
        level, message = self._look_at_disk()
        first = (message if level == "full" else "") or self._writer.trouble or self._away
        trouble = "; ".join([*([first] if first else []), *(each for each in self._store_watch.problems if each not in first)])
        return {"status": "degraded", "reason": trouble} if trouble else {"status": "ok"}

    def health(self) -> dict[str, Any]:
        """Return the body of GET /health."""
        return {
            **self._state(),
            "service": "collector",
            "core": self._core.name,
            "uptime_seconds": round(time.time() - self._started_at, 3),
            "backlog_rows": self._writer.backlog,
            "log_bytes": self._commit.bytes_held,
            "log_torn_bytes": self._log.torn_bytes,
            "log_damaged_bytes": self._log.damaged_bytes,
            "batches": self._writer.batches,
            **self._intake.counts,
            **{f"store_{name}": count for name, count in self._store.counts.items()},
            **{f"sql_{name}": count for name, count in self._sql.counts.items()},
            **{f"late_{name}": count for name, count in (self._maintenance.counts() if self._maintenance else {}).items()},
        }

    def status(self) -> dict[str, Any]:
        """Return the body of GET /status: as /health the state, all metrics, the state of the disk and of the store's, the dead letters."""
        level, message = self._look_at_disk()
        return {
            **self._state(),
            "service": "collector",
            "version": __version__,
            "core": self._core.name,
            "core_installed": COMPILED,
            "uptime_seconds": round(time.time() - self._started_at, 3),
            "disk": {"level": level, "message": message},
            "store_problems": self._store_watch.problems,
            "kept_aside": self._store.dead_letters()._asdict(),
            "metrics": self._telemetry.snapshot(),
        }

    def _look_at_disk(self) -> tuple[Level, str]:
        return self._disk.current_level(0 if self._writer.idle else self._commit.bytes_held)

    def _metrics_page(self) -> web.Response:
        body, content_type = self._telemetry.prometheus()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def stop(self) -> None:
        """Stop listening, write what is acked (up to a deadline; the rest stays in the log), and close everything."""
        if self._grpc is not None:
            await self._grpc.stop(5.0)
        if self._maintenance is not None:
            await self._maintenance.close()
        if self._runners:
            await self._runners[0].cleanup()
        if self._writer_task is not None:
            self._writer.close()
            await asyncio.wait({self._writer_task}, timeout=DRAIN_SECONDS)
            with contextlib.suppress(TimeoutError):  # the queue may have stopped already
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await self._farewell()
            if self._forwarder is not None:
                await self._forwarder.drain(FAREWELL_SECONDS)
            self._tasks.append(self._writer_task)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for runner in self._runners[1:]:
            await runner.cleanup()
        await self._pushing.aclose()
        await self._closers.aclose()

    async def _farewell(self) -> None:
        await self._heartbeats.flush(everything=True)
        if self._registration is not None:
            await self._registration.end()

    def _clear_log(self) -> None:
        """Clear the log after a clean stop with nothing left to write, so that the next start has nothing to replay."""
        if self._writer_task is not None and self._writer.idle:
            self._log.clear()

    async def _serve(self, app: web.Application, port: int, setting: str, tls: Tls | None = None) -> int:
        runner = make_runner(
            app,
            max_line_size=1 << 20,
            max_field_size=1 << 16,
            handle_signals=False,
        )
        await runner.setup()
        self._runners.append(runner)
        try:
            return await listen(runner, self._settings.host, port, tls.context if tls else None)
        except OSError as error:
            raise InUseError.of_port(self._settings.host, port, error, setting) from None


def _forwarder(settings: Settings) -> Forwarder | None:
    endpoint = settings.forward_otlp
    if not endpoint:
        return None
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    if parts.hostname in (settings.host, "localhost", "127.0.0.1") and parts.port in (settings.otlp_grpc_port, settings.otlp_http_port):
        raise SettingsError(f"AGL_FORWARD_OTLP {endpoint!r} is this collector itself: name another endpoint, or none")
    target = make_target(endpoint, settings.forward_headers.get_secret_value())
    return Forwarder(target, endpoint)
