"""Stop events across threads or processes."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Protocol, runtime_checkable


@runtime_checkable
class ExecutionEvent(Protocol):
    """A stop event, with the interface of threading.Event."""

    def set(self) -> None:
        """Set the event."""
        ...

    def clear(self) -> None:
        """Clear the event."""
        ...

    def is_set(self) -> bool:
        """Return whether the event is set."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event, at most `timeout` seconds; return whether it is set."""
        ...


class ThreadingEvent:
    """A stop event between threads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Set the event."""
        self._event.set()

    def clear(self) -> None:
        """Clear the event."""
        self._event.clear()

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event, at most `timeout` seconds; return whether it is set."""
        return self._event.wait(timeout)


class MultiprocessingEvent(ThreadingEvent):
    """A stop event between processes of one `multiprocessing` context."""

    def __init__(self) -> None:
        super().__init__()
        self._event = multiprocessing.Event()  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]  # it has the same four methods
