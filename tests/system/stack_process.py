"""Our commands as real processes, which end with this process however it ends, and checks of the machine after them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pytest

from agl_otel.cli import main
from agl_otel.service.processes import die_with_parent
from tests.command import run_command

START_SECONDS = 300.0
DEMO = Path("examples/first_light")
DEMO_SIZES = (("job.toml", "prompts_per_step = 16"), ("job.toml", "group_size = 8"), ("tasks.py", "VAL_TASKS = 128"))
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OTEL_", "OPENAI_"))}


class Command:
    """`agl-otel …` as a process; `with` ends it. `within` is put before the command line, and must exec it."""

    def __init__(
        self, *arguments: str, log: Path, cwd: Path | None = None, env: dict[str, str] | None = None, within: Sequence[str] = ()
    ) -> None:
        self.log = log
        self._out: IO[bytes] = log.open("wb")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.process = subprocess.Popen(
            [*within, *die_with_parent([sys.executable, "-m", "agl_otel", *arguments])],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env={**ENVIRONMENT, "PATH": path, **(env or {})},
            start_new_session=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(300)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._out.close()

    @property
    def output(self) -> str:
        """Output so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Wait for its end; return its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.output[-2000:]}") from None


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None, seconds: float = 900.0) -> subprocess.CompletedProcess[str]:
    """Run `agl-otel …` to its end."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return run_command(arguments, {**ENVIRONMENT, "PATH": path, **(env or {})}, cwd=cwd, seconds=seconds)


def run_here(
    capsys: pytest.CaptureFixture[str], *arguments: str, cwd: Path, beside: Callable[[threading.Event], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Like `run`, in this process, which has imported torch already: importing it and transformers takes eight seconds of CPU.

    `beside` runs in a thread meanwhile, with an event that is set when the command has ended; if it fails, the command is interrupted.
    """
    failed: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        try:
            if beside is not None:
                beside(over)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with contextlib.chdir(cwd), pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(arguments, ended.value.code, captured.out, captured.err)


def small_demo(folder: Path, *, prompts: int = 4, members: int = 4, val: int = 4) -> Path:
    """Copy `agl-otel demo`'s example to `folder`, where it finds it, with a smaller job: `prompts` × `members` rollouts a step.

    `val`: number of scored tasks.
    """
    place = folder / DEMO
    shutil.copytree(Path(__file__).parents[2] / DEMO, place, ignore=shutil.ignore_patterns("__pycache__"))
    for (name, was), size in zip(DEMO_SIZES, (prompts, members, val), strict=True):
        text = (place / name).read_text()
        assert text.count(was) == 1, f"{name} has no {was!r}"
        (place / name).write_text(text.replace(was, f"{was.split()[0]} = {size}"))
    return folder


def until(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        os.sched_yield()
        signal.sigtimedwait([], 0.05)


def alive(pids: Sequence[int]) -> list[int]:
    """Return which of these processes are running (zombies have ended)."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def naming(folder: Path) -> list[int]:
    """Find processes whose command line or environment names `folder`: those left by a command on that data directory."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text:
            found.append(int(entry.name))
    return alive(found)


def listening(pids: Sequence[int]) -> list[str]:
    """Return the addresses on which these processes listen, one for each socket."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found: list[str] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                words = bytes.fromhex(local.rpartition(":")[0])
                packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, packed).removeprefix("::ffff:"))  # IPv4, in the form that gRPC binds
    return found
