"""Failpoints: named places where a test can raise or end the process. Outside of tests no hook is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

POINTS: Final = ("written", "logged", "batch-noted", "inserted", "stored-noted")
"""Between the socket and ClickHouse; at "written" a group of the log is written but not fsynced."""
ROTATION_POINTS: Final = ("segment-opened", "segment-released")
"""Of the log's segments: one is created (the first at the start), an old one is deleted."""
LATE_POINTS: Final = ("late-numbered", "late-copied", "adopt-started", "adopt-copied")
"""Of the late pass and of adoption, in the order in which they are reached."""
hooks: dict[str, Callable[[], None]] = {}


def failpoint(point: str) -> None:
    """Run the hook of `point`, if a test has set one."""
    if hook := hooks.get(point):
        hook()
