"""The supervisor behind `agl-otel up`: starts the services as child processes, waits until each is healthy, restarts crashed ones, and
stops them in reverse order (the queue last).

A service that does not become healthy at the start ends the stack. A service that ends later is restarted indefinitely, after pauses that
double, while the others go on; the supervisor logs it and reports it to the queue (types.Describe.down).

Embedded and distributed stacks run the same services over the same protocols, so this module depends only on how a service is started,
how its health is checked, and where it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from agl_otel.errors import AglError, SettingsError, UnavailableError
from agl_otel.net.tls import Tls, Trust, connector
from agl_otel.queue.client import DOWN, QueueClient
from agl_otel.service.forkserver import ForkServer
from agl_otel.service.lock import FileLock, holder
from agl_otel.service.ports import check_free
from agl_otel.service.private import exposure_problem, open_file
from agl_otel.service.processes import HEALTH_POLL_SECONDS, Process, began, how_ended, is_alive
from agl_otel.service.retry import Backoff
from agl_otel.settings import Settings
from agl_otel.stack.services import REGISTERED, TOGETHER, Service, services_of

if TYPE_CHECKING:
    import aiohttp

LOG = logging.getLogger(__name__)
STACK_FILE: Final = "stack.json"
LOCK_FILE: Final = "stack.lock"
LAYOUT_VERSION: Final = 1
"""Version of the data directory's layout; a higher one was written by a newer release."""
START_TIMEOUT_SECONDS: Final = 60.0
STOP_GRACE_SECONDS: Final = 30.0  # includes the time for the collector to flush its log
ORPHAN_SECONDS: Final = 30.0  # within which the services of a killed stack end; a collector that lost its queue first takes 11 s
STEADY_SECONDS: Final = 60.0  # a service that ends after running this long is restarted at once
LONGEST_PAUSE_SECONDS: Final = 60.0
RESTART: Final = Backoff(1.0, LONGEST_PAUSE_SECONDS, jitter=0.0)
FOLDER_SECONDS: Final = 1.0  # between two checks that the data directory is there
REPORT_SECONDS: Final = 1.0  # bounds how long an unresponsive queue delays a restart


@dataclass
class _Running:
    service: Service
    process: Process
    failures: int = 0
    """How often in a row it ended within STEADY_SECONDS of its start."""


class Stack:
    """The services of one data directory. Use `async with Stack(settings) as stack`.

    Args:
        settings: ports of 0 are replaced by free ones, which are kept across restarts.
        only: names of the services to run; all by default.

    Raises (on start):
        SettingsError: the data directory cannot be written, or was written by a newer release.
        InUseError: the data directory or a port is in use.
        UnavailableError: a service does not become healthy.
    """

    def __init__(self, settings: Settings, *, only: Sequence[str] = ()) -> None:
        self.settings = settings.with_ports()
        self._trust = Trust.of(settings)
        self._token = settings.token.get_secret_value()
        self.services = services_of(settings, only)
        self.failed: asyncio.Future[None]
        """Fails when the supervision itself fails (services that end are restarted); from the start on."""
        self._running: dict[str, _Running] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._lock: FileLock | None = None
        self._told = False
        """Whether stack.json is of this stack: during a start it may be that of a killed one, whose services still run."""
        self._http: aiohttp.ClientSession | None = None
        environment = self._settings_of_services().environment()
        self._forks = ForkServer(self._modules(self.services), environment=environment, log=self.data_dir / "logs" / "forks.log")

    @property
    def data_dir(self) -> Path:
        """The data directory, absolute."""
        return self.settings.data_dir.absolute()

    @property
    def address(self) -> str:
        """The queue's address, the only one that a client needs."""
        return self._at("queue_port")

    @property
    def claimed(self) -> bool:
        """Whether it holds its data directory."""
        return self._lock is not None

    def _at(self, port: str, scheme: str = "") -> str:
        scheme = "https://" if self.settings.tls_cert else scheme
        return f"{scheme}{reachable_host(self.settings.host)}:{getattr(self.settings, port)}"

    def addresses(self) -> dict[str, str]:
        """Return the address of each port of the services, by the name of its setting without `_port`."""
        return {port.removesuffix("_port"): self._at(port, service.scheme) for service in self.services for port in service.ports}

    async def __aenter__(self) -> Stack:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every service and wait until all are healthy; then write stack.json."""
        await self.start_early()
        await self.start_others()

    async def start_early(self) -> None:
        """Claim the data directory and the ports, and start the services that must run before the others, above all the queue."""
        import aiohttp  # commands import this module, and most start no stack

        self.failed = asyncio.get_running_loop().create_future()
        tls = Tls.load(self.settings)
        if tls is not None:
            tls.check(self._trust, reachable_host(self.settings.host))
        self._lock = claim_data_dir(self.data_dir)
        await self._wait_for_orphans()
        for service in self.services:
            for port in service.ports:
                setting = f"--{port.replace('_', '-')} or AGL_{port.upper()} (0 takes a free one)"
                check_free(self.settings.host, getattr(self.settings, port), setting)
        headers = (
            {"Authorization": f"Bearer {self._token}"} if self._token else {}
        )  # the OpenTelemetry Collector requires it for /health, too
        self._http = aiohttp.ClientSession(headers=headers, connector=connector(self._trust))
        for service in self.services:
            if service.early:
                await self._launch(service)
                self._follow(service)

    async def start_others(self) -> None:
        """Start the services that `start_early` has left out, and wait until all are registered at the queue; then write stack.json."""
        await self._deregister_dead()
        try:
            async with asyncio.TaskGroup() as group:
                for service in self.services:
                    if not service.early and self._host(service) is service:
                        group.create_task(self._launch(service))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first error, for which the others were cancelled
        await self._wait_for_registrations()
        self._write_stack_file()
        for service in self.services:
            if not service.early and service.name in self._running:
                self._follow(service)
        self._watchers.append(asyncio.create_task(self._watch_folder(), name="folder"))

    async def _watch_folder(self) -> None:
        """End the stack if its data directory is deleted or replaced: what its services acknowledge from then on is lost."""
        while self._lock is not None and self._lock.is_at(self.data_dir / LOCK_FILE):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(FOLDER_SECONDS)
        if not self.failed.done():
            words = "was deleted or replaced while its stack ran, which therefore ends: what has been stored since then is lost"
            self.failed.set_exception(UnavailableError(f"data directory {self.data_dir} {words}"))

    def _follow(self, service: Service) -> None:
        watcher = asyncio.create_task(self._watch(self._running[service.name]), name=service.name)
        watcher.add_done_callback(self._supervision_ended)
        self._watchers.append(watcher)

    async def _wait_for_orphans(self) -> None:
        """Wait, at most ORPHAN_SECONDS, until the services of a killed stack on this data directory have ended.

        The kernel sends them SIGTERM (die_with_parent), but until they have ended they hold ports and files. If a port stays taken, the
        check of the ports reports it.
        """
        left = {name: service["pid"] for name, service in read_stack_file(self.data_dir).items() if _runs(service)}
        if left:
            named = ", ".join(f"{name} (process {pid})" for name, pid in left.items())
            LOG.warning("waiting up to %.0f s for services of a stack that was killed: %s", ORPHAN_SECONDS, named)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORPHAN_SECONDS):
                while any(map(is_alive, left.values())):  # noqa: ASYNC110  # they are no children of this process
                    await asyncio.sleep(HEALTH_POLL_SECONDS)

    def _settings_of_services(self) -> Settings:
        return self.settings.model_copy(update={"store": self.address})

    def _host(self, service: Service) -> Service:
        """Return the service whose process this one shares; itself, if it has its own."""
        return next((each for each in self.services if each.name == service.within), service)

    def _beside(self, service: Service) -> list[Service]:
        """Return the services that share the process of this one."""
        return [each for each in self.services if each is not service and self._host(each) is service]

    def _process(self, name: str) -> Process:
        service = next(service for service in self.services if service.name == name)
        return self._running[self._host(service).name].process

    def prefork(self, *, early: bool = False) -> None:
        """Fork the services, or only the early ones, from this process, which saves an import in another; see ForkServer.prefork."""
        hosts = [each for each in self.services if self._host(each) is each and each.start is None and (each.early or not early)]
        self._forks.prefork(len(hosts), self._modules(hosts))

    def _modules(self, services: Sequence[Service]) -> list[str]:
        """Return the modules in the processes of these services."""
        found = {each.module for service in services for each in (service, *self._beside(service)) if each.module}
        return [*sorted(found), *([TOGETHER] if any(map(self._beside, services)) else [])]

    async def _launch(self, service: Service) -> None:
        log = self.data_dir / "logs" / f"{service.name}.log"
        settings = self._settings_of_services()
        running = self._running.setdefault(service.name, _Running(service, Process("", (), log=log)))
        together = [each.module for each in self._beside(service)]
        running.process = service.process(settings, forks=self._forks, log=log, together=together)
        await running.process.start()
        await running.process.ready(self._probe(service), timeout_seconds=START_TIMEOUT_SECONDS)

    async def _deregister_dead(self) -> None:
        """Deregister collectors and proxies that no longer listen.

        Services of a killed stack did not deregister, so the restarted queue would return their addresses for a minute: exporters would
        send to dead ports, and readers would wait for the dead collector.
        """
        from agl_otel.net.http_server import listens

        async with QueueClient(self.address, token=self._token, trust=self._trust) as queue:
            known = await queue.describe()
            remembered = [*(("collector", address) for address in known.collectors), *(("proxy", address) for address in known.proxies)]
            for service, address in remembered:
                if not await listens(address):
                    scheme, _, rest = address.rpartition("://")
                    own = f"{scheme}://{self.settings.host}:{rest.rpartition(':')[2]}"  # a wildcard host is replaced by the dialled one
                    for instance in {address, own}:
                        await queue.announce(service, instance, {}, gone=True)

    async def _wait_for_registrations(self) -> None:
        """Wait until all services are registered with the queue, which clients query: a service may be healthy before it is registered."""
        missing = [name for name in REGISTERED if any(service.name == REGISTERED[name] for service in self.services)]
        try:
            async with (
                asyncio.timeout(START_TIMEOUT_SECONDS),
                QueueClient(self.address, token=self._token, trust=self._trust) as queue,
            ):
                while True:
                    known = await queue.describe()
                    missing = [name for name in missing if not getattr(known, name)]
                    if not missing:
                        return
                    for name in missing:
                        self._process(REGISTERED[name]).check_running()
                    await asyncio.sleep(HEALTH_POLL_SECONDS)
        except TimeoutError:
            silent = [self._process(REGISTERED[name]) for name in missing]
            words = "; ".join(f"{process.name} (its log is {process.log}): {process.log_end()}" for process in silent)
            raise UnavailableError(
                f"not announced to the queue within {START_TIMEOUT_SECONDS:.0f} s, though the service answers: {words}"
            ) from None

    def _probe(self, service: Service) -> Callable[[], Awaitable[bool]]:
        from agl_otel.net.http_server import is_healthy

        async def runs() -> bool:
            return self._running[service.name].process.running

        async def queue_is_healthy() -> bool:
            async with QueueClient(self.address, token=self._token, timeout_seconds=1.0, trust=self._trust) as queue:
                with contextlib.suppress(UnavailableError):
                    await queue.describe()
                    return True
            return False

        async def http_is_healthy() -> bool:
            assert self._http is not None
            return await is_healthy(self._at(service.port, "http://") + "/health", self._http)

        return queue_is_healthy if service.name == "queue" else http_is_healthy if service.port else runs

    async def _watch(self, running: _Running) -> None:
        """Restart the service whenever it ends."""
        clock = asyncio.get_running_loop().time
        up_since = clock()
        while True:
            how = how_ended(await running.process.wait())
            if clock() - up_since >= STEADY_SECONDS:
                running.failures = 0
            while not await self._restart(running, how):
                how = "did not come up again"
            up_since = clock()

    async def _restart(self, running: _Running, how: str) -> bool:
        """Restart it after a pause; return whether it became healthy."""
        name, log = running.service.name, running.process.log
        running.failures += 1
        pause = restart_pause(running.failures)
        often = f" ({running.failures} times in a row)" if running.failures > 1 else ""
        beside = " and ".join(each.name for each in self._beside(running.service))
        with_it = f", and with it {beside}" if beside else ""
        why = f"{how}{often}{with_it}; it is restarted {f'in {pause:.0f} s' if pause else 'now'}, the others keep running. Its log is {log}"
        LOG.warning("%s %s and ends with:\n%s", name, why, running.process.log_end())
        await report_down(self._settings_of_services(), name, why, seconds=pause + START_TIMEOUT_SECONDS + REPORT_SECONDS)
        await asyncio.sleep(pause)
        try:
            await self._launch(running.service)
        except (AglError, OSError) as error:
            LOG.warning("%s", error)
            await running.process.kill()
            return False
        LOG.warning("%s is up again", name)
        if self._told:
            self._write_stack_file()
        await report_down(self._settings_of_services(), name)
        return True

    def _supervision_ended(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    def _write_stack_file(self) -> None:
        content = {
            service.name: {
                "pid": (pid := self._process(service.name).pid),
                "began": began(pid),
                "address": self._at(service.port, service.scheme) if service.port else "",
            }
            for service in self.services
        }
        temporary = self.data_dir / f"{STACK_FILE}.tmp"
        with open_file(temporary, "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        temporary.replace(self.data_dir / STACK_FILE)
        self._told = True

    async def stop(self) -> None:
        """Stop the services in reverse order of their start; each flushes its data. Safe to call twice."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        for service in reversed(self.services):
            if running := self._running.get(service.name):
                await running.process.stop(grace_seconds=STOP_GRACE_SECONDS)
        await self._forks.close()
        self._release()
        if self._http:
            await self._http.close()

    async def kill(self) -> None:
        """Kill every service. Acknowledged data is in their logs and is recovered at the next start."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(running.process.kill() for running in self._running.values()))
        await self._forks.close()
        self._release()

    def _release(self) -> None:
        if self._lock:
            if self._told:
                (self.data_dir / STACK_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            if self.failed.done() and not self.failed.cancelled():
                self.failed.exception()  # marks the exception as retrieved, so that the loop does not warn
            else:
                self.failed.cancel()


def restart_pause(failures: int) -> float:
    """Return the seconds to wait before a restart after so many failures in a row: 0, 1, 2, 4 … LONGEST_PAUSE_SECONDS."""
    return RESTART.seconds(failures - 1)


async def report_down(settings: Settings, name: str, why: str = "", *, seconds: float | None = None) -> None:
    """Report to the queue of these settings that a service is down, for at most so many seconds, or without `why` that it is up again."""
    instance = f"{socket.gethostname()} {settings.data_dir.absolute()} {name}"
    token, trust = settings.token.get_secret_value(), Trust.of(settings)
    with contextlib.suppress(AglError):  # the queue itself is down, as logged
        async with QueueClient(settings.queue_address, token=token, timeout_seconds=REPORT_SECONDS, retry_seconds=0, trust=trust) as queue:
            await queue.announce("supervisor", instance, {f"{DOWN}{name}": why} if why else {}, gone=not why, seconds=seconds)


def reachable_host(host: str) -> str:
    """Return the host by which this machine reaches a service that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def claim_data_dir(path: Path) -> FileLock:
    """Create the data directory and take its lock.

    Raises SettingsError if it cannot be written or was written by a newer release, InUseError if a stack runs on it.
    """

    def taken(pid: str) -> str:
        services = "".join(f", {name} {service['pid']}" for name, service in read_stack_file(path).items()) or ", still starting"
        return f"data directory {path} is in use by a running stack (process {pid}{services}). Stop it, or use --data-dir"

    if path.is_file():
        raise SettingsError(f"data directory {path} is a file: choose a folder with --data-dir or AGL_DATA_DIR")
    lock = FileLock.hold(path / LOCK_FILE, what=f"data directory {path}", taken=taken)
    version_file = path / "VERSION"
    written = version_file.read_text().strip() if version_file.exists() else str(LAYOUT_VERSION)
    if not written.isdigit() or int(written) > LAYOUT_VERSION:
        lock.close()
        raise SettingsError(
            f"data directory {path} has layout version {written}, and this release knows up to {LAYOUT_VERSION}. "
            "Upgrade agl-otel, or choose another with --data-dir"
        )
    try:
        with open_file(version_file, "w") as file:
            file.write(f"{LAYOUT_VERSION}\n")
    except OSError as error:
        lock.close()
        raise SettingsError(f"data directory {path} cannot be written: {error.strerror or error}") from None
    if warning := exposure_problem(path):
        LOG.warning("%s", warning)
    return lock


def read_stack_file(data_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a running stack's stack.json, {service: {pid, began, address}}; empty if none runs.

    A killed stack leaves its file behind: it counts as running only if one of its processes exists.
    """
    try:
        told: dict[str, dict[str, Any]] = json.loads((data_dir / STACK_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return told if any(map(_runs, told.values())) else {}


def _runs(service: dict[str, Any]) -> bool:
    """Whether the process of a service in stack.json runs, and its id has not been given to another one since."""
    return is_alive(service["pid"]) and began(service["pid"]) == service["began"]


def running_address(settings: Settings) -> str:
    """Return the queue's address of the settings' stack, else of the stack running on the data directory; empty if there is none.

    Services whose supervisor was killed are not counted as a stack: they end by themselves, and `claim_data_dir` waits for that.
    """
    if settings.store:
        return settings.store
    supervisor = holder(settings.data_dir / LOCK_FILE)
    running = read_stack_file(settings.data_dir) if not supervisor.isdigit() or is_alive(int(supervisor)) else {}
    return running["queue"]["address"] if running else ""
