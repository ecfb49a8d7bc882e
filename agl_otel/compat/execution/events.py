"""Events that say "time to stop" across threads or processes."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Protocol, runtime_checkable


@runtime_checkable
class ExecutionEvent(Protocol):
    """Set once it is time to stop."""

    def set(self) -> None:
        """Now."""
        ...

    def clear(self) -> None:
        """Not any more."""
        ...

    def is_set(self) -> bool:
        """Whether it is time."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is time, or `timeout` seconds are over; whether it is."""
        ...


class ThreadingEvent:
    """Between threads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Now."""
        self._event.set()

    def clear(self) -> None:
        """Not any more."""
        self._event.clear()

    def is_set(self) -> bool:
        """Whether it is time."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is time, or `timeout` seconds are over; whether it is."""
        return self._event.wait(timeout)


class MultiprocessingEvent(ThreadingEvent):
    """Between processes of one `multiprocessing` context."""

    def __init__(self) -> None:
        super().__init__()
        self._event = multiprocessing.Event()  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]  # the same four methods
