"""Base class of tracers: a context in which spans are recorded, and access to the spans of the last one.

At most one tracer is active in a context; entering `trace_context` activates it.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any

from agl_otel.types import ParallelWorkerBase, SpanCoreFields, SpanRecordingContext, TraceStatus

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agl_otel.store import Store
    from agl_otel.types import Span

_active: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("agl_otel_active_tracer", default=None)


def get_active_tracer() -> Tracer | None:
    """Return the tracer of the current trace context; None outside."""
    return _active.get()


def set_active_tracer(tracer: Tracer) -> None:
    """Make `tracer` the active one. Raises ValueError if another one is active."""
    if (active := _active.get()) is not None and active is not tracer:
        raise ValueError(f"{type(active).__name__} is active already: leave its trace context, or call clear_active_tracer() first")
    _active.set(tracer)


def clear_active_tracer() -> None:
    """Deactivate the active tracer."""
    _active.set(None)


class Tracer(ParallelWorkerBase):
    """Base of all tracers. Subclasses implement `trace_context` and `get_last_trace`; the other methods build on them."""

    hooked = False
    """Whether this process counts the spans of its traces (agl_otel_hook), so that uncounted ones raise an alarm."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Store | None = None

    def init_worker(self, worker_id: int, store: Store | None = None, *args: Any, **kwargs: Any) -> None:
        """Set up one worker; `store` receives the spans of its attempts."""
        super().init_worker(worker_id, *args, **kwargs)
        if store is not None:
            self._store = store

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: Store | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        **kwargs: Any,
    ) -> AbstractAsyncContextManager[Any]:
        """Record spans within the context, and with ids store them under that attempt."""
        raise NotImplementedError(f"{type(self).__name__} gives no trace_context")

    def get_last_trace(self) -> Sequence[ReadableSpan] | Sequence[Span]:
        """Return the spans that ended in the latest trace context so far."""
        raise NotImplementedError(f"{type(self).__name__} gives no get_last_trace")

    def trace_run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `func` in a trace context, from code that is not async."""
        import asyncio

        async def run() -> Any:
            async with self.trace_context(name=func.__name__):
                return func(*args, **kwargs)

        return asyncio.run(run())

    async def trace_run_async(self, func: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Call `func` in a trace context."""
        async with self.trace_context(name=func.__name__):
            answer = func(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span of zero duration. Times are Unix seconds; None: now."""
        raise NotImplementedError(f"{type(self).__name__} gives no create_span")

    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None, start_time: float | None = None, end_time: float | None = None
    ) -> AbstractContextManager[SpanRecordingContext]:
        """Open a span for the context and yield its recorder. Times are Unix seconds; None: the context's begin and end."""
        raise NotImplementedError(f"{type(self).__name__} gives no operation_context")

    def get_langchain_handler(self) -> Any:
        """Return a callback handler that records agent names of LangChain and LangGraph runs; None if the tracer needs none."""
        return None

    @contextlib.contextmanager
    def lifespan(self, store: Store | None = None) -> Generator[Tracer]:
        """Set the tracer up for one worker in this process within the context."""
        self.init()
        self.init_worker(0, store)
        try:
            yield self
        finally:
            self.teardown_worker(0)
            self.teardown()

    @contextlib.asynccontextmanager
    async def _as_active(self) -> AsyncGenerator[None]:
        before = _active.get()
        _active.set(self)
        try:
            yield
        finally:
            _active.set(before)
