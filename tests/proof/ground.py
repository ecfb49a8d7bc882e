"""The real processes of a campaign: queue, collector, proxy, runners, a service; and what kills them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Final, TypeVar

import aiohttp

from agl_otel.errors import AglError
from agl_otel.store import Store
from agl_otel.types import LLM
from tests.contract.collector.stack import Stack, new_stack
from tests.proof.judge import Kill
from tests.proof.model import Witness
from tests.proof.plans import KILL, Fault, Start

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
AGENT: Final = str(HERE / "agent.py")
FOREIGN: Final = ("OTEL_", "OPENAI_", "ANTHROPIC_", "AGL_", "VIRTUAL_ENV", "PYTHON", "BAGGAGE", "TRACEPARENT")
PLACES: Final[Mapping[Start, int]] = {
    "anew": 4,
    "warm": 4,
    "function": 100,
    "http": 8,
    "configured": 2,
    "lone-function": 1,
    "lone-http": 1,
    "container": 4,
    "elsewhere": 4,
}
PATIENCE_SECONDS: Final = 120.0
STRIKES: Final[int | None] = None  # of a fault in a round; None: as many as fall into it
START_SECONDS: Final = 0.9  # within which an agent is killed that starts
SERVICE_PAUSE_SECONDS: Final = (1.0, 6.0)  # between two kills of services
RUNNER_PAUSE_SECONDS: Final = (3.0, 9.0)
AWAY_SECONDS: Final = 14.0  # longer than an agent's end waits for the collector
FREEZE_SECONDS: Final = (0.2, 3.0)
CONFIGURATION: Final = """
file_format: "1.0"
tracer_provider:
  processors: []
"""
"""An SDK that is set up by a file, and exports nowhere."""
T = TypeVar("T")


@dataclass
class Ground:
    """Everything that runs."""

    directory: Path
    chance: random.Random
    stack: Stack
    store: Store
    model: Witness
    kills: list[Kill] = field(default_factory=list[Kill])
    """Of agents' processes."""
    services_killed: int = 0
    runners: dict[Start, subprocess.Popen[bytes]] = field(default_factory=dict[Start, "subprocess.Popen[bytes]"])
    python: str = sys.executable
    """The interpreter of agents."""
    services: dict[Start, subprocess.Popen[bytes]] = field(default_factory=dict[Start, "subprocess.Popen[bytes]"])
    listeners: dict[Start, socket.socket] = field(default_factory=dict[Start, socket.socket])
    """Of services: who asks while one is dead is answered by the next one."""
    _restarting: set[str] = field(default_factory=set[str])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def notes(self) -> Path:
        """Where agents write."""
        return self.directory / "notes"

    @property
    def killer(self) -> Path:
        """The socket that takes requests to be killed."""
        return self.directory / "killer"

    # --- runners

    def environment(self) -> dict[str, str]:
        """Of runners and of the service, and so of agents."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        own = {"AGL_STORE": self.stack.queue, "PROOF_NOTES": str(self.notes), "PROOF_KILLER": str(self.killer)}
        if self.python != sys.executable:  # gRPC may not be installed there
            own["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
        return {**kept, **own}

    async def runner(self, start: Start) -> None:
        """Have a runner for this kind of start, and the service that it asks."""
        if start in ("http", "lone-http"):
            self._ensure_service(start)
        if start in self.runners and self.runners[start].poll() is None:
            return
        instrumented = (instrument_of(self.python), self.python)
        options: Mapping[Start, Sequence[str]] = {
            "anew": ("--", self.python, AGENT),
            "configured": ("--", self.python, AGENT),
            "container": ("--image", "here", "--", *instrumented, AGENT),
            "elsewhere": ("--image", "there", "--", *instrumented, AGENT),
            "warm": ("--warm", "--", self.python, AGENT),
            **dict.fromkeys(("function", "lone-function"), ("--function", f"{AGENT}:agent")),
            **{each: ("--hooked", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}/") for each, listener in self.listeners.items()},
        }
        command = (*("--label", f"start={start}", "--concurrency", str(PLACES[start])), *options[start])
        self.runners[start] = self._process([sys.executable, "-m", "agl_otel.runner", *command], f"runner-{start}", self._more(start))

    def _more(self, start: Start) -> dict[str, str]:
        """What the environment of a runner has besides."""
        if start in ("container", "elsewhere"):
            ledgers = Path(tempfile.gettempdir()) / f"agl-otel-{os.getuid()}"
            path = f"{self._engine()}{os.pathsep}{os.environ['PATH']}"
            return {"PATH": path, "PROOF_LEDGERS": str(ledgers), "PROOF_DISK": "none" if start == "elsewhere" else "shared"}
        if start != "configured":
            return {}
        file = self.directory / "opentelemetry.yaml"
        file.write_text(CONFIGURATION)
        return {"OTEL_CONFIG_FILE": str(file)}

    def _engine(self) -> Path:
        """A folder with a program of an engine's name."""
        folder = self.directory / "engine"
        folder.mkdir(exist_ok=True)
        if not (folder / "docker").exists():
            (folder / "docker").symlink_to(HERE / "docker")
        return folder

    def _ensure_service(self, start: Start) -> None:
        if start not in self.listeners:
            self.listeners[start] = socket.create_server(("127.0.0.1", 0), backlog=100)
        listener = self.listeners[start]
        if start not in self.services or self.services[start].poll() is not None:
            otlp = {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": self.stack.http,
            }
            command = [instrument_of(self.python), self.python, str(HERE / "service.py"), str(listener.fileno())]
            self.services[start] = self._process(command, "service", otlp, files=(listener.fileno(),))

    def _process(self, command: Sequence[str], name: str, more: Mapping[str, str], files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env={**self.environment(), **more}, cwd=ROOT, stdout=log, stderr=log, pass_fds=files)

    async def stop_runners(self) -> None:
        """Let all of them finish."""
        for runner in self.runners.values():
            runner.send_signal(signal.SIGTERM)
        for runner in self.runners.values():
            await asyncio.to_thread(runner.wait, PATIENCE_SECONDS)
        self.runners.clear()

    # --- services

    async def healthy(self, service: str) -> bool:
        """Whether it answers."""
        if service == "queue":
            with contextlib.suppress(AglError):
                async with asyncio.timeout(5):
                    await self.store.queue.describe()
                return True
            return False
        port = self.stack.settings.otlp_http_port if service == "collector" else self.stack.settings.proxy_port
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"http://127.0.0.1:{port}/health") as response:
                return response.status == 200
        return False

    async def start(self, service: str) -> None:
        """Start a service and wait until it answers."""
        self.stack.spawn(service)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not await self.healthy(service):
            if self.stack.processes[service].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{service} does not start: {self.stack.log.read_text()[-3000:]}")
            await asyncio.sleep(0.05)

    def restart(self, service: str) -> None:
        """kill -9, and start it again at once."""
        if service not in self._restarting:
            self._restarting.add(service)
            self._spawn(self._restart(service))

    async def _restart(self, service: str) -> None:
        try:
            await self.stack.end(service, signal.SIGKILL)
            self.services_killed += 1
            if service == "collector" and self.chance.random() < 0.2:
                await asyncio.sleep(AWAY_SECONDS)
            await self.start(service)
        finally:
            self._restarting.discard(service)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def proxy_has_answered(self) -> None:
        """Somebody wants the proxy gone, now or a moment later."""
        asyncio.get_running_loop().call_later(self.chance.choice((0.0, 0.002, 0.01, 0.05)), self.restart, "proxy")

    async def settled(self) -> None:
        """Wait until every service answers again."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
        for service in ("queue", "collector", "proxy"):
            await until(lambda service=service: self.healthy(service), f"{service} answers")

    # --- faults

    @asynccontextmanager
    async def faults(self, fault: Fault) -> AsyncGenerator[None]:
        """Kill from the block's first agent to its end; then all is well again."""
        kinds: Mapping[Fault, Sequence[Callable[[], Awaitable[None]]]] = {
            "": (),
            "starts": (self._kill_starts,),
            "proxy": (lambda: self._kill_services(("proxy",)),),
            "collector": (lambda: self._kill_services(("collector",)),),
            "queue": (lambda: self._kill_services(("queue",)),),
            "runners": (self._kill_runners,),
            "service": (self._kill_service,),
            "everything": (lambda: self._kill_services(("proxy", "collector", "queue")), self._kill_runners),
        }
        before = {*self.notes.iterdir()}
        tasks = [asyncio.ensure_future(kill() if fault == "starts" else self._once_agents_work(before, kill)) for kill in kinds[fault]]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
            await self.settled()

    async def _once_agents_work(self, before: Collection[Path], kill: Callable[[], Awaitable[None]]) -> None:
        while {*self.notes.iterdir()} <= {*before}:  # noqa: ASYNC110  # agents are other processes
            await asyncio.sleep(0.05)
        await kill()

    async def _kill_services(self, names: Sequence[str]) -> None:
        for _ in islice(count(), STRIKES):
            await asyncio.sleep(self.chance.uniform(*SERVICE_PAUSE_SECONDS))
            name = self.chance.choice(names)
            if name in self._restarting:
                continue
            if self.chance.random() < 0.25:
                process = self.stack.processes[name]
                process.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(self.chance.uniform(*FREEZE_SECONDS))
                finally:  # also where the round ends meanwhile
                    process.send_signal(signal.SIGCONT)
            else:
                self.restart(name)

    async def _kill_runners(self) -> None:
        for _ in islice(count(), STRIKES):
            await asyncio.sleep(self.chance.uniform(*RUNNER_PAUSE_SECONDS))
            starts: list[Start] = [*self.runners]
            start = self.chance.choice(starts)
            self.runners[start].kill()
            await asyncio.to_thread(self.runners[start].wait)
            self.services_killed += 1
            await self.runner(start)

    async def _kill_service(self) -> None:
        """kill -9 the agents' HTTP service, and start it again at once on its port."""
        for _ in islice(count(), STRIKES):
            await asyncio.sleep(self.chance.uniform(*SERVICE_PAUSE_SECONDS))
            if (service := self.services.get("http")) is not None and (born := started(service.pid)):
                self._kill(service.pid, born, KILL)
                await asyncio.to_thread(service.wait)
                self.services_killed += 1

    async def _kill_starts(self) -> None:
        seen: set[int] = set()
        ours = f"PROOF_KILLER={self.killer}".encode()
        while True:
            for pid in pids() - seen:
                named = environment_of(pid)
                if ours in named and b"AGL_ATTEMPT_ID" in {variable.partition(b"=")[0] for variable in named}:
                    seen.add(pid)
                    self.kill_later(pid, self.chance.uniform(0, START_SECONDS), KILL)
            await asyncio.sleep(0.02)

    def kill_later(self, pid: int, seconds: float, number: int) -> None:
        """Send a signal to a process, if it is still the same then."""
        born = started(pid)
        if born:
            asyncio.get_running_loop().call_later(seconds, self._kill, pid, born, number)

    def _kill(self, pid: int, born: str, number: int) -> None:
        if started(pid) == born:
            with contextlib.suppress(ProcessLookupError):
                self.kills.append(Kill(pid, time.time_ns(), number))
                os.kill(pid, number)

    def take_request(self, mail: socket.socket) -> None:
        """A process wants to be killed."""
        pid, seconds, number = json.loads(mail.recv(1 << 12))
        self.kill_later(pid, seconds, number)


def instrument_of(python: str) -> str:
    """The command that starts a program with the hook, beside an interpreter."""
    return str(Path(python).with_name("opentelemetry-instrument"))


def pids() -> set[int]:
    """Of all processes."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def environment_of(pid: int) -> list[bytes]:
    """The variables of a process, as they were at its start."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty where there is none."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return rest[18] if state not in "ZX" else ""
    return ""


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition of other processes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        await asyncio.sleep(0.05)


async def asked(ask: Callable[[], Awaitable[T]]) -> T:
    """Its answer; services may be away for a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await ask()
        except AglError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


@asynccontextmanager
async def ground(directory: Path, seed: int, python: str = sys.executable) -> AsyncGenerator[Ground]:
    """A stack on free ports with a model, and the socket of the killer. What was started is ended."""
    (directory / "notes").mkdir(parents=True)
    made = new_stack(directory)
    made.settings = made.settings.model_copy(update={"store": f"127.0.0.1:{made.settings.queue_port}"})
    stack = Stack(made.settings, made.log)
    on: Ground | None = None
    model = Witness(lambda: on.proxy_has_answered() if on is not None else None)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mail, contextlib.closing(stack):
        mail.bind(str(directory / "killer"))
        mail.setblocking(False)
        await model.start()
        await stack.start_queue()
        await stack.start_collector()
        async with await asked(lambda: Store.connect(stack.queue)) as store:
            on = Ground(directory, random.Random(seed), stack, store, model, python=python)
            loop.add_reader(mail, on.take_request, mail)
            try:
                await on.start("proxy")

                async def announced() -> bool:
                    described = await store.queue.describe()
                    return bool(described.proxies and described.clickhouse)

                await until(announced, "collector and proxy are announced")
                await store.publish({"main": LLM(endpoint=model.url, model="m", api_key="sk-secret")})
                yield on
            finally:
                loop.remove_reader(mail)
                for process in [*on.runners.values(), *on.services.values()]:
                    if process.poll() is None:
                        process.kill()
                    await asyncio.to_thread(process.wait)
                for listener in on.listeners.values():
                    listener.close()
                await model.stop()
