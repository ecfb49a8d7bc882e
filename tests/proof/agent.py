"""An agent that plays a plan and writes what it does to files of its own: what the store is held against (tests/proof).

The plan is the task: a list of steps, each `[name, arguments …]` (STEPS). Every process appends to one file of its own below
$PROOF_NOTES/<attempt>, one line a write, before and after each action; so what is in it survives any end of the process. Beside it the
kernel's signals are noted as they arrive, one byte each. Nothing here knows of agl-otel.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry import trace

Step = Sequence[Any]
NOT_WATCHED: Final = frozenset({"agentlightning.seal", "agentlightning.attempt"})
TRYING_SECONDS: Final = 40.0  # a model call: somebody may have killed the proxy
PAUSE_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 20.0
JOBS: Final = 3  # for the two workers of a pool
JOBS_SECONDS: Final = 8.0  # a pool waits for ever for the job of a worker that was killed
_tracer: Final = trace.get_tracer("proof")


class Notes:
    """Where this process writes what it does, for one attempt."""

    def __init__(self, attempt_id: str) -> None:
        self.attempt_id = attempt_id
        self._pid = 0
        self._file = self._signals = -1

    def __call__(self, kind: str, *values: object) -> None:
        """One line: what, when (Unix nanoseconds), and what there is to say."""
        if self._pid != os.getpid():
            self._open()
        os.write(self._file, (json.dumps([kind, time.time_ns(), *values]) + "\n").encode())

    def files(self) -> set[int]:
        """What it has open."""
        return {self._file, self._signals}

    def _open(self) -> None:
        self._pid = os.getpid()
        folder = os.path.join(os.environ["PROOF_NOTES"], self.attempt_id)  # noqa: PTH118 - pathlib would be loaded for this alone
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - as above
        name = os.path.join(folder, f"{self._pid}-{time.time_ns()}")  # noqa: PTH118 - as above
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if threading.current_thread() is threading.main_thread() and os.environ.get("AGL_ATTEMPT_ID") == self.attempt_id:
            self._signals = os.open(f"{name}.signals", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
            signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        self("born", self._pid, os.getppid(), bool(sys.flags.ignore_environment))


class Witness:
    """A span processor that notes every span of this process, also those that libraries make."""

    def __init__(self, note: Notes) -> None:
        self._note = note

    def on_start(self, span: Any, parent_context: object = None) -> None:
        if span.name in NOT_WATCHED:
            self._note("drew", f"{span.get_span_context().span_id:016x}")  # an id that another span must not have
        else:
            self._note("begun", f"{span.get_span_context().span_id:016x}")

    def on_end(self, span: Any) -> None:
        if span.name not in NOT_WATCHED:
            self._note("ended", f"{span.get_span_context().span_id:016x}")

    def _on_ending(self, span: object) -> None:
        return

    def shutdown(self) -> None:
        return

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


class Player:
    """Plays steps in one process; its children play theirs."""

    def __init__(self, note: Notes, address: str = "", headers: Mapping[str, str] | None = None) -> None:
        self.note = note
        self.address = address or os.environ.get("OPENAI_BASE_URL", "")
        self.headers = dict(headers or {})
        self.answers: Callable[[], object] = lambda: None
        """Of a service: answer whoever asked."""
        self._kept: list[Any] = []
        self._waits: list[Callable[[], object]] = []

    def play(self, steps: Sequence[Step]) -> None:
        """All of them, one after the other."""
        for name, *arguments in steps:
            STEPS[name](self, *arguments)

    def to_the_end(self, steps: Sequence[Step]) -> None:
        """The same as the whole of a process's work: what it waits for is waited for, and that it closes is noted."""
        how = "return"
        try:
            self.play(steps)
            for wait in self._waits:
                wait()
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self.note("closing", how)

    # --- spans

    def span(self, steps: Sequence[Step]) -> None:
        """Play within a span."""
        with self._noted() as span, trace.use_span(span):
            self.play(steps)

    @contextlib.contextmanager
    def _noted(self) -> Generator[Any]:
        span = self._begin()
        span_id = f"{span.get_span_context().span_id:016x}"
        try:
            yield span
        finally:
            self.note("ending", span_id)
            span.end()
            if span.get_span_context().is_valid:
                self.note("ended", span_id)

    def _begin(self) -> Any:
        self.note("beginning")
        span = _tracer.start_span("work")
        self.note("begun", f"{span.get_span_context().span_id:016x}" if span.get_span_context().is_valid else "")
        return span

    def spans(self, count: int) -> None:
        """So many, one after the other."""
        for _ in range(count):
            with self._noted():
                pass

    def wide(self, count: int) -> None:
        """A span with so many attributes."""
        with self._noted() as span:
            for number in range(count):
                span.set_attribute(f"number {number}", "some text")

    def leak(self) -> None:
        """A span that nobody ever ends."""
        self._kept.append(self._begin())

    def generator(self) -> None:
        """An async generator with a span in it, which nobody reads to its end."""

        async def numbers() -> AsyncGenerator[int]:
            with self._noted():
                for number in range(3):
                    yield number

        async def read() -> None:
            unfinished = numbers()
            self._kept.append(unfinished)
            async for _ in unfinished:
                return

        loop = asyncio.new_event_loop()
        self._kept.append(loop)
        loop.run_until_complete(read())

    def flush(self) -> None:
        """Have the SDK export what it has."""
        provider: Any = trace.get_tracer_provider()
        if hasattr(provider, "force_flush"):
            self.note("flushing")
            provider.force_flush()
            self.note("flushed")

    # --- model calls

    def call(self, mode: str = "plain", asks: str = "") -> None:
        """Ask the model: plain, stream, cut (a stream that is not read to its end), client (an HTTP client that is instrumented)."""
        number = os.urandom(6).hex()
        deadline = time.monotonic() + TRYING_SECONDS
        while time.monotonic() < deadline:
            self.note("calling", number)
            try:
                reply = self._ask(mode, f"{self.note.attempt_id} {number} {asks}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.note("failed", number, repr(error)[:200])
                time.sleep(PAUSE_SECONDS)
                continue
            self.note("called", number, reply)
            return
        raise ConnectionError("the model does not answer")

    def _ask(self, mode: str, said: str) -> str:
        if mode == "client":
            return self._client(said)
        return self._plain(said, stream=mode != "plain", whole=mode != "cut")

    def _plain(self, said: str, *, stream: bool = False, whole: bool = True) -> str:
        url = urlsplit(self.address)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=ANSWER_SECONDS)
        with contextlib.closing(connection):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": said}], "stream": stream})
            headers = {"content-type": "application/json", "authorization": "Bearer none", **self.headers}
            connection.request("POST", f"{url.path}/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"HTTP {response.status}: {response.read(300)!r}")
            if not stream:
                return json.loads(response.read())["id"]
            first = response.readline()
            while whole and response.read(1 << 16):
                pass
            return json.loads(first.removeprefix(b"data: "))["id"]

    def _client(self, said: str) -> str:
        import httpx2

        try:
            headers = {"authorization": "Bearer none", **self.headers}
            body = {"model": "m", "messages": [{"role": "user", "content": said}]}
            answer = httpx2.post(f"{self.address}/chat/completions", json=body, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
            return answer.raise_for_status().json()["id"]
        except httpx2.HTTPError as error:
            raise OSError(str(error)) from error

    # --- other processes and threads

    def child(self, how: str, steps: Sequence[Step], wait: bool = True) -> None:
        """A child process that plays steps: fork, c-fork, python, unhooked; process, pool, executor of a start method (pool-spawn)."""
        self.note("starting", how)
        kind, _, method = how.partition("-")
        if how in FORKS:
            waiting = self._fork(steps, FORKS[how])
        elif how in ("python", "unhooked"):
            waiting = self._python(steps, *(["-E"] if how == "unhooked" else []))
        elif kind == "process":
            waiting = self._multiprocessing(method, steps)
        else:
            waiting = self._pool(method, steps) if kind == "pool" else self._executor(method, steps)
        if wait:
            waiting()
        else:
            self._waits.append(waiting)

    def _fork(self, steps: Sequence[Step], fork: Callable[[], int]) -> Callable[[], object]:
        pid = fork()
        if pid == 0:
            _become_child(self, steps)
        self.note("started", pid)
        return lambda: os.waitpid(pid, 0)

    def _python(self, steps: Sequence[Step], *options: str) -> Callable[[], object]:
        process = subprocess.Popen([sys.executable, *options, __file__, json.dumps(steps)])
        self.note("started", process.pid)
        return process.wait

    def _multiprocessing(self, how: str, steps: Sequence[Step]) -> Callable[[], object]:
        process: Any = multiprocessing.get_context(how).Process(target=play_in_child, args=(self.note.attempt_id, steps))  # pyright: ignore[reportAttributeAccessIssue]  # each kind has one
        process.start()
        self.note("started", process.pid)
        return process.join

    def _pool(self, how: str, steps: Sequence[Step]) -> Callable[[], object]:
        with multiprocessing.get_context(how).Pool(2) as pool, contextlib.suppress(Exception):
            pool.map_async(play_in_pool, [(self.note.attempt_id, steps)] * JOBS).get(JOBS_SECONDS)
        return lambda: None

    def _executor(self, how: str, steps: Sequence[Step]) -> Callable[[], object]:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(how)) as pool, contextlib.suppress(Exception):
            for job in [pool.submit(play_in_pool, (self.note.attempt_id, steps)) for _ in range(JOBS)]:
                job.result(JOBS_SECONDS)
        return lambda: None

    def limited(self, limits: Mapping[str, str], steps: Sequence[Step]) -> None:
        """A child with limits on what its spans hold."""
        self.note("starting", "limited")
        process = subprocess.Popen([sys.executable, __file__, json.dumps(steps)], env={**os.environ, **limits})
        self.note("started", process.pid)
        process.wait()

    def orphan(self, steps: Sequence[Step]) -> None:
        """A forked child that this process never waits for."""
        self.note("starting", "orphan")
        self._fork(steps, os.fork)

    def daemon(self, steps: Sequence[Step]) -> None:
        """A process of a session of its own that nobody waits for."""
        self.note("starting", "daemon")
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork() == 0:
                for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
                    os.dup2(os.open(os.devnull, mode), number)
                _become_child(self, steps)
            os._exit(0)
        os.waitpid(pid, 0)

    def thread(self, steps: Sequence[Step]) -> None:
        """A thread that plays steps; the process waits for it at its end."""
        thread = threading.Thread(target=self.play, args=(steps,))
        thread.start()
        self._waits.append(thread.join)

    def answer(self) -> None:
        """Answer now, and go on."""
        self.answers()

    # --- ends

    def kill(self, number: int) -> None:
        """A signal to this process, now."""
        self.note("killing", number)
        os.kill(os.getpid(), number)

    def close_files(self) -> None:
        """Close every file and connection, as daemons do; the notes stay open, which are ours."""
        kept = self.note.files()
        for number in range(3, 1 << 10):
            if number not in kept:
                with contextlib.suppress(OSError):
                    os.close(number)

    def leave(self, how: str) -> None:
        """Go where the ledger's folder is not at its path (`chroot`), or where another folder is (`mount`)."""
        self.note("leaving", how)
        if how == "chroot":
            os.chroot(os.environ["PROOF_NOTES"])
            return
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private = 0x20000, 1 << 18 | 1 << 14
        mounts = ((b"/", None, private), (os.environ["AGL_LEDGER"].encode(), b"tmpfs", 0))
        if libc.unshare(new_namespace) or any(libc.mount(b"none", path, kind, flags, None) for path, kind, flags in mounts):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def ignore(self, number: int) -> None:
        """From now on this process does not heed a signal."""
        self.note("ignoring", number)
        signal.signal(number, signal.SIG_IGN)

    def killed_within(self, seconds: float, number: int) -> None:
        """Have somebody else send this process a signal, at a moment of theirs."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mail:
            mail.sendto(json.dumps([os.getpid(), seconds, number]).encode(), os.environ["PROOF_KILLER"])

    def exec(self, program: str, steps: Sequence[Step]) -> None:
        """Become another program: `python` plays steps, `true` ends, `missing` is not there."""
        self.note("closing", "exec")
        if program == "python":
            os.execv(sys.executable, [sys.executable, __file__, json.dumps(steps)])
        with contextlib.suppress(FileNotFoundError):
            os.execv({"true": "/bin/true", "missing": "/nowhere/at/all"}[program], [program])
        self.note("reopening")
        self.play(steps)

    def exit_now(self, status: int) -> None:
        """os._exit."""
        self.note("closing", "_exit")
        os._exit(status)

    def fail(self) -> None:
        """An exception that nobody expects."""
        raise RuntimeError("the plan wants this")

    def sleep(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)


def _fork_in_c() -> int:
    """A fork that passes Python's own by: nobody who registered for forks hears of it."""
    return ctypes.PyDLL(None).fork()


FORKS: Final[Mapping[str, Callable[[], int]]] = {"fork": lambda: os.fork(), "c-fork": _fork_in_c}
STEPS: Final[Mapping[str, Callable[..., None]]] = {
    name: getattr(Player, name)
    for name in (
        *("span", "spans", "wide", "leak", "generator", "flush", "call", "child", "limited", "orphan", "daemon", "thread", "answer"),
        *("kill", "close_files", "leave", "ignore", "killed_within", "exec", "exit_now", "fail", "sleep"),
    )
}


def _become_child(parent: Player, steps: Sequence[Step]) -> None:
    status = 1
    try:
        Player(parent.note, parent.address, parent.headers).to_the_end(steps)
        status = 0
    finally:
        os._exit(status)


def play_in_child(attempt_id: str, steps: Sequence[Step]) -> None:
    """The main function of a child of multiprocessing's."""
    Player(watched(attempt_id).note).to_the_end(steps)


def play_in_pool(job: tuple[str, Sequence[Step]]) -> None:
    """A job of a pool's worker, which may get more of them."""
    Player(watched(job[0]).note).play(job[1])


def agent(task: Any, rollout: Any, llm: Any) -> float:
    """An agent that is a function: ids in the address of the model, or, where the task says so, in baggage alone."""
    address = os.environ["OPENAI_BASE_URL"] if task.get("baggage") else llm.endpoint
    Player(Notes(rollout.attempt.attempt_id), address).to_the_end(task["plan"])
    return 1.0


_players: Final[dict[str, Player]] = {}


def watched(attempt_id: str) -> Player:
    """The player of this process, whose spans are witnessed."""
    if attempt_id not in _players:
        player = _players[attempt_id] = Player(Notes(attempt_id))
        provider: Any = trace.get_tracer_provider()
        if hasattr(provider, "add_span_processor"):
            provider.add_span_processor(Witness(player.note))
    return _players[attempt_id]


def main() -> None:
    if len(sys.argv) > 1:
        steps = json.loads(sys.argv[1])
    elif "AGL_TASK_FILE" in os.environ:
        with open(os.environ["AGL_TASK_FILE"]) as file:  # noqa: PTH123 - without pathlib, too
            steps = json.load(file)["plan"]
    else:
        steps = json.loads(os.environ["AGL_TASK"])["plan"]
    watched(os.environ["AGL_ATTEMPT_ID"]).to_the_end(steps)


if __name__ == "__main__":
    main()
