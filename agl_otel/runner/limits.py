"""Limits of one attempt on resident memory of its process group and on output. (Time limits are in running.py.)

Memory is polled: an address-space limit would break runtimes that reserve far more than they use (Node, CUDA), and control groups need
privileges that a runner may lack. A fast leak may therefore exceed the limit for POLL_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from agl_otel.errors import AgentError, UsageError
from agl_otel.runner.groups import Leader

POLL_SECONDS: Final = 0.25
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_ENDLESS: Final = 1 << 63  # bytes
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class CountedStream(Protocol):
    """A stream that counts its bytes."""

    total_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one attempt; None: unlimited."""

    memory_bytes: int | None = None
    """Resident memory of its process group; pages shared by several processes count once."""
    output_bytes: int | None = None
    """Of stdout and stderr together."""

    async def enforce(self, process: Leader, streams: Sequence[CountedStream]) -> int:
        """Wait for the process and return its exit status. Raises AgentError when a limit is exceeded; the caller ends the group."""
        if self.memory_bytes is None and self.output_bytes is None:
            return await process.wait()
        ending = asyncio.ensure_future(process.wait())
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=POLL_SECONDS)
                if violation := await asyncio.to_thread(self._violation, process.pid, sum(stream.total_bytes for stream in streams)):
                    raise AgentError(violation)
            return ending.result()
        finally:
            ending.cancel()

    def _violation(self, group: int, output_bytes: int) -> str | None:
        if self.output_bytes is not None and output_bytes > self.output_bytes:
            return f"the agent printed {output_bytes} bytes: its limit is {self.output_bytes}"
        if self.memory_bytes is not None:
            used = group_memory(group, self.memory_bytes)
            if used > self.memory_bytes:
                return f"the agent used {used >> 20} MiB of memory: its limit is {self.memory_bytes >> 20} MiB"
        return None


def parse_size(text: str) -> int:
    """Parse "512M", "2GiB" or "1000" into bytes. Raises UsageError."""
    found = _SIZE.fullmatch(text.strip())
    size = float(found[1]) * _UNITS[found[2].lower()] if found is not None else 0.0
    if not 1 <= size < _ENDLESS:
        raise UsageError(f"{text[:40]!r} is not a size: write for example 512M or 2GiB")
    return int(size)


def group_memory(group: int, threshold: int) -> int:
    """Measure the resident bytes of a process group: the sum of RSS, or above `threshold` the costlier sum of PSS (shared pages once)."""
    members = list(_members(group))
    total = sum(_resident(pid) for pid in members)
    return total if total <= threshold else sum(_proportional(pid) for pid in members)


def _members(group: int) -> Iterable[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if stat.read_text(errors="replace").rpartition(")")[2].split()[2] == str(group):
                yield int(stat.parent.name)


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return _resident(pid)
