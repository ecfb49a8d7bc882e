"""0.3's tracers over this process's OpenTelemetry SDK. They share one implementation and differ in the instrumentations they enable.

A trace context with ids stores its spans under that attempt: the root span is exported and acknowledged first, the seal last. In a runner,
which does both for its attempts, a trace context only records.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from agl_otel.compat.tracer.langchain import agent_names_handler
from agl_otel.compat.tracer.process import Recording, Route, process_telemetry
from agl_otel.compat.tracer.tracer import Tracer
from agl_otel.errors import UnavailableError
from agl_otel.types import Attributes, SpanCoreFields, TraceStatus
from agl_otel.types import StatusCode as StatusName
from agl_otel_hook import attempt_scope
from agl_otel_hook.attributes import flatten_attributes, sanitize_attributes
from agl_otel_hook.context import key_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agl_otel.store import Store

TRACER: Final = "agl_otel.tracer"
_log = logging.getLogger(__name__)


class OtelTracer(Tracer):
    """Records this process's OpenTelemetry spans and enables the installed instrumentations."""

    hooked = True
    opens_root = False
    """Whether each trace gets a root span named after the rollout."""

    def __init__(self) -> None:
        super().__init__()
        self._latest = Recording()
        self._here: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("agl_otel_recording", default=None)

    def init_worker(self, worker_id: int, store: Store | None = None, *args: Any, **kwargs: Any) -> None:
        """Set up the process once, in the worker, because threads and connections do not survive a fork."""
        super().init_worker(worker_id, store, *args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        process_telemetry().instrument()

    @contextlib.asynccontextmanager
    async def trace_context(  # pyright: ignore[reportIncompatibleMethodOverride]  # decorated, it has the base's type
        self,
        name: str | None = None,
        *,
        store: Store | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[trace.Tracer]:
        """Record spans within the context, and with ids store them under that attempt. Yields an OpenTelemetry tracer.

        Raises ValueError for one id without the other, or ids without a store.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context takes a rollout id and an attempt id, or neither")
        store = store or self._store
        self._set_up()
        self._latest = recording = Recording()
        self._here.set(recording)  # threads and tasks share a tracer; each has its own latest trace
        async with contextlib.AsyncExitStack() as entered:
            await entered.enter_async_context(self._as_active())
            if rollout_id is not None and attempt_id is not None and key_of(None) != (rollout_id, attempt_id):
                if store is None:
                    raise ValueError("trace_context with ids needs a store: give store=, or use the tracer in a runner")
                await entered.enter_async_context(_stored(store, rollout_id, attempt_id))
            token = otel_context.attach(recording.context())
            entered.callback(otel_context.detach, token)
            tracer = trace.get_tracer(TRACER)
            if self.opens_root:
                entered.enter_context(tracer.start_as_current_span(name or rollout_id or "session"))
            yield tracer

    def get_last_trace(self) -> list[ReadableSpan]:
        """Return the spans that ended in the latest trace context so far."""
        return list((self._here.get() or self._latest).spans)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span of zero duration."""
        at = timestamp or time.time()
        clean = dict(sanitize_attributes(flatten_attributes(attributes or {})))
        span = trace.get_tracer(TRACER).start_span(name, attributes=clean, start_time=_nano(at))
        status = status or TraceStatus()
        if status.status_code != "UNSET":
            span.set_status(Status(StatusCode[status.status_code], status.description if status.status_code == "ERROR" else None))
        span.end(_nano(at))
        return SpanCoreFields(name=name, attributes=clean, start_time=at, end_time=at, status=status)

    @contextlib.contextmanager
    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None, start_time: float | None = None, end_time: float | None = None
    ) -> Generator[Recorded]:
        """Open a span for the context; an exception in it is recorded and raised."""
        clean = dict(sanitize_attributes(flatten_attributes(attributes or {})))
        span = trace.get_tracer(TRACER).start_span(name, attributes=clean, start_time=_nano(start_time or time.time()))
        recorded = Recorded(span, SpanCoreFields(name=name, attributes=clean, start_time=start_time or time.time()))
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                yield recorded
        except BaseException as error:
            recorded.record_exception(error)
            raise
        else:
            if recorded.get_recorded_span().status.status_code == "UNSET":
                recorded.record_status("OK")
        finally:
            recorded.get_recorded_span().end_time = end_time or time.time()
            span.end(_nano(end_time) if end_time else None)

    def get_langchain_handler(self) -> Any:
        """Make a callback handler that records agent names of LangChain and LangGraph runs. Raises SettingsError without LangChain."""
        return agent_names_handler()


class AgentOpsTracer(OtelTracer):
    """0.3's default tracer: a root span named after the rollout; OpenTelemetry's instrumentations record model calls and frameworks.

    AgentOps itself is neither needed nor started. `agentops_managed` and `daemon` have no effect.

    Args:
        instrument_managed: False enables no instrumentations; the user does.
    """

    opens_root = True

    def __init__(self, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        super().__init__()
        self.agentops_managed = agentops_managed
        self.instrument_managed = instrument_managed

    def _set_up(self) -> None:
        if self.instrument_managed:
            super()._set_up()
        else:
            process_telemetry()


class WeaveTracer(OtelTracer):
    """0.3's tracer for Weights & Biases Weave, with the same instrumentations as OtelTracer.

    Calls of `@weave.op` functions are not OpenTelemetry spans and are not recorded: use `@agl.operation` for those. To configure Weave,
    call `weave.init`; the arguments have no effect.
    """

    def __init__(self, project_name: str | None = None, *, weave_user_settings: Any = None, instrument_managed: bool = True) -> None:
        super().__init__()
        self.project_name = project_name
        _log.warning(
            "WeaveTracer records OpenTelemetry spans; calls of @weave.op functions are not among them: "
            "put @agl.operation beside @weave.op, or send Weave's traces as OTLP to the collector"
        )


class Recorded:
    """A SpanRecordingContext over an open span."""

    def __init__(self, span: trace.Span, fields: SpanCoreFields) -> None:
        self._span = span
        self._fields = fields

    def record_exception(self, exception: BaseException) -> None:
        """Record an exception and the status ERROR."""
        self._span.record_exception(exception)
        self.record_status("ERROR", str(exception))

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        clean = sanitize_attributes(flatten_attributes(attributes))
        self._span.set_attributes(clean)
        self._fields.attributes.update(clean)

    def record_status(self, status_code: StatusName, description: str | None = None) -> None:
        """Set the status."""
        self._span.set_status(Status(StatusCode[status_code], description if status_code == "ERROR" else None))
        self._fields.status = TraceStatus(status_code=status_code, description=description)

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the fields recorded so far."""
        return self._fields


@contextlib.asynccontextmanager
async def _stored(store: Store, rollout_id: str, attempt_id: str) -> AsyncGenerator[None]:
    """Send spans within the context to the store's collector under the attempt; seal and flush at the end."""
    description = (await store.open()).description
    if description.collector_grpc is None:
        raise UnavailableError("the stack has no collector: start it with `agl-otel up`")
    telemetry, key = process_telemetry(), (rollout_id, attempt_id)
    telemetry.routes.add([key], Route(description.collector_grpc, store.token, description.collector_http or ""))
    [traceparent] = await asyncio.to_thread(telemetry.attempt_spans, [key])
    try:
        with attempt_scope(*key, traceparent=traceparent):
            yield
    finally:
        await asyncio.to_thread(lambda: telemetry.seal_counts([key], closing=True))
        telemetry.forget(*key)


def _nano(seconds: float) -> int:
    return int(seconds * 1e9)
