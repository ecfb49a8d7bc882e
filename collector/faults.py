"""Named places where a test can raise or end the process. Nothing hooks them outside of tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

POINTS: Final = ("written", "logged", "batch-noted", "inserted", "stored-noted")
"""Between the socket and ClickHouse; "written" is a group of the log that is written, not yet fsynced."""
ROTATION_POINTS: Final = ("segment-opened", "segment-released")
"""Of the log's segments: another is begun (the first one at the start), an old one is deleted."""
LATE_POINTS: Final = ("late-numbered", "late-copied", "adopt-started", "adopt-copied")
"""Of the late pass and of adoption, in the order in which they are reached."""
hooks: dict[str, Callable[[], None]] = {}


def reach(point: str) -> None:
    """Run the hook of `point`, if a test has set one."""
    if hook := hooks.get(point):
        hook()
