"""The disk budget: the log may grow to a bound while ClickHouse does not keep up, and some disk stays free. A warning comes long before.

`level` is pure; DiskBudget measures, and says it once per change.
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
"""Of the budget, from where on it warns."""
WARN_RESERVES: Final = 4
"""It warns when less than this many times the reserve is free."""
MEASURE_SECONDS: Final = 1.0  # between two looks at the file system
Level = Literal["ok", "warning", "full"]
_logger = logging.getLogger(__name__)


def level(held: int, budget: int, free: int, reserve: int, directory: Path) -> tuple[Level, str]:
    """How bad it is for the log in `directory`, and in words; all in bytes."""
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
        budget_bytes: how large the log may grow.
        reserve_bytes: how much disk stays free.
        free: free bytes of a directory's file system; tests pass their own.
        refusal: says why the disk did not take what was written last, empty where it did: a quota is seen by nothing else.
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
        """As of the last look, at most a second old while requests come."""
        self.level: Level = "ok"
        self.refused = 0
        """Requests that were refused."""

    def check(self, held: int) -> None:
        """Before something is logged; `held` is the size of the log. Raises UnavailableError where nothing more is taken."""
        found, message = self._measure(held)
        if found == "full":
            self.refused += 1
            raise UnavailableError(message)

    def look(self, held: int) -> tuple[Level, str]:
        """The level now: full also where the disk has refused to take what nothing here forbids, until a try (commit.py) succeeds."""
        found, message = self._measure(held)
        refusal = self._refusal()
        return ("full", refusal) if refusal and found != "full" else (found, message)

    def _measure(self, held: int) -> tuple[Level, str]:
        """The level by what was measured; a change is logged once."""
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
