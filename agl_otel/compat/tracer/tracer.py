"""What a tracer is to runners and users: a context in which spans are recorded, and the spans of the last one.

Exactly one tracer is active at a time in a context: entering `trace_context` makes it so.
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
    """The tracer whose trace context we are in; None outside."""
    return _active.get()


def set_active_tracer(tracer: Tracer) -> None:
    """Make `tracer` the active one. Raises ValueError where another one is."""
    if (active := _active.get()) is not None and active is not tracer:
        raise ValueError(f"{type(active).__name__} is active already: leave its trace context, or call clear_active_tracer() first")
    _active.set(tracer)


def clear_active_tracer() -> None:
    """No tracer is active from now on."""
    _active.set(None)


class Tracer(ParallelWorkerBase):
    """Base of all tracers. A subclass gives `trace_context` and `get_last_trace`; the rest follows from them."""

    hooked = False
    """Whether the spans of its traces are counted by this process (agl_otel_hook), so that uncounted ones are an alarm."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Store | None = None

    def init_worker(self, worker_id: int, store: Store | None = None, *args: Any, **kwargs: Any) -> None:
        """Set up one worker; `store` is where the spans of its attempts go."""
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
        """A context in which spans are recorded; with ids they belong to that attempt and are stored."""
        raise NotImplementedError(f"{type(self).__name__} gives no trace_context")

    def get_last_trace(self) -> Sequence[ReadableSpan] | Sequence[Span]:
        """The spans that ended in the latest trace context so far."""
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
        """Record a span without length. Times are Unix seconds; None: now."""
        raise NotImplementedError(f"{type(self).__name__} gives no create_span")

    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None, start_time: float | None = None, end_time: float | None = None
    ) -> AbstractContextManager[SpanRecordingContext]:
        """A span for the block; what is recorded goes onto it. Times are Unix seconds; None: when the block begins and ends."""
        raise NotImplementedError(f"{type(self).__name__} gives no operation_context")

    def get_langchain_handler(self) -> Any:
        """A callback handler that names agents in LangChain and LangGraph runs; None where the tracer needs none."""
        return None

    @contextlib.contextmanager
    def lifespan(self, store: Store | None = None) -> Generator[Tracer]:
        """Set the tracer up for one worker in this process, and take it down again."""
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
