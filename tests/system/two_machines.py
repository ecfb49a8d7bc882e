"""Two connected machines, simulated for scripts by two network namespaces in their own user namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

HOLD = ("sleep", "infinity")
START_SECONDS = 300.0


@dataclass(frozen=True)
class Machine:
    """A network namespace, held by a process."""

    pid: int
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command that runs there."""
        return ("nsenter", "--target", str(self.pid), "--user", "--net", "--preserve-credentials", "--")

    @property
    def namespace(self) -> str:
        """What its processes see as /proc/self/ns/net."""
        return str(Path(f"/proc/{self.pid}/ns/net").readlink())

    def run(self, *command: str) -> None:
        """Run a command there to its end."""
        subprocess.run([*self.enter, *command], check=True, capture_output=True, timeout=START_SECONDS)


@contextmanager
def two_machines() -> Generator[tuple[Machine, Machine]]:
    """Create 10.77.0.1 and 10.77.0.2. Skips the test if the system does not permit namespaces."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"two machines need {program} (util-linux, iproute2)")
    made = subprocess.run(["unshare", "-Urn", "ip", "link", "add", "wire-a", "type", "veth"], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"two machines need user and network namespaces (or root): {made.stderr.decode().strip()}")
    with ExitStack() as stack:
        first = Machine(stack.enter_context(_held(["unshare", "-Urn", *HOLD])), "10.77.0.1")
        second = Machine(stack.enter_context(_held([*first.enter, "unshare", "-n", *HOLD])), "10.77.0.2")
        first.run("ip", "link", "add", "wire-a", "type", "veth", "peer", "name", "wire-b", "netns", str(second.pid))
        for machine, wire in ((first, "wire-a"), (second, "wire-b")):
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", wire)
            for device in ("lo", wire):
                machine.run("ip", "link", "set", device, "up")
        yield first, second


@contextmanager
def _held(command: Sequence[str]) -> Generator[int]:
    """Start a process that becomes HOLD in the namespaces that `command` creates, and yield its id; they end with it."""
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_SECONDS
        while _name(process.pid) != HOLD[0]:
            assert process.poll() is None and time.monotonic() < deadline, f"{command} holds no namespace"
            os.sched_yield()
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
