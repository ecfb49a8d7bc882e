"""The disk budget: bounds the log while ClickHouse is too slow or down, keeps some disk space free, and warns well before either limit.

`level` is pure; DiskBudget measures, and logs each change once.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from agl_otel.errors import UnavailableError

WARN_SHARE: Final = 0.7
"""Share of the budget above which it warns."""
WARN_RESERVES: Final = 4
"""It warns when the free space is below this multiple of the reserve."""
MEASURE_SECONDS: Final = 1.0  # between two measurements of the free space
Level = Literal["ok", "warning", "full"]
_logger = logging.getLogger(__name__)


def level(held: int, budget: int, free: int, reserve: int, directory: Path) -> tuple[Level, str]:
    """Return the level for the log in `directory` and a message; sizes in bytes."""
    if held >= budget:
        return (
            "full",
            f"the write-ahead log holds {_mib(held)}, all of its budget (AGL_WAL_BUDGET_BYTES), because ClickHouse does not keep up",
        )
    room = f"{_mib(free)} are free on the disk of {directory}"
    remedy = "make room (`agl-otel disk` shows what of a data directory is large)"
    if free < reserve:
        return "full", f"only {room}, less than AGL_DISK_RESERVE_BYTES ({_mib(reserve)}): {remedy}"
    if held >= WARN_SHARE * budget:
        return (
            "warning",
            f"the write-ahead log holds {_mib(held)}, {held / budget:.0%} of its budget (AGL_WAL_BUDGET_BYTES); at 100 % spans are refused",
        )
    if free < WARN_RESERVES * reserve:
        return "warning", f"only {room}; below {_mib(reserve)} (AGL_DISK_RESERVE_BYTES) spans are refused: {remedy}"
    return "ok", ""


class DiskBudget:
    """Watches the log in `directory`.

    Args:
        directory: on the file system whose free space counts.
        budget_bytes: limit on the size of the log.
        reserve_bytes: disk space to keep free.
        free: returns the free bytes of a directory's file system; tests pass their own.
        refusal: returns why the disk refused the last write, or an empty string: the only way to detect a quota.
    """

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int,
        reserve_bytes: int = 0,
        free: Callable[[Path], int] | None = None,
        refusal: Callable[[], str] = str,
    ) -> None:
        self._directory = directory
        self.budget_bytes = budget_bytes
        self._reserve = reserve_bytes
        self._free = free or _free_bytes
        self._refusal = refusal
        self._measured_at = float("-inf")
        self.free_bytes = 0
        """As of the last measurement, which is at most a second old while requests arrive."""
        self.level: Level = "ok"
        self.refused = 0
        """Number of refused requests."""

    def check(self, held: int) -> None:
        """Check before logging; `held` is the size of the log. Raises UnavailableError at level full."""
        found, message = self._measure(held)
        if found == "full":
            self.refused += 1
            raise UnavailableError(message)

    def current_level(self, held: int) -> tuple[Level, str]:
        """Return the current level. It is also full after the disk itself refused a write, until a try (commit.py) succeeds."""
        found, message = self._measure(held)
        refusal = self._refusal()
        return ("full", refusal) if refusal and found != "full" else (found, message)

    def _measure(self, held: int) -> tuple[Level, str]:
        """Measure the level; log a change once."""
        now = time.monotonic()
        if now - self._measured_at >= MEASURE_SECONDS:
            self._measured_at = now
            self.free_bytes = self._free(self._directory)
        found, message = level(held, self.budget_bytes, self.free_bytes, self._reserve, self._directory)
        if found != self.level:
            if found == "ok":
                _logger.info("the disk budget is fine again: the log holds %s", _mib(held))
            else:
                _logger.log(logging.ERROR if found == "full" else logging.WARNING, "%s", message)
            self.level = found
        return found, message


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _mib(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size} bytes"
