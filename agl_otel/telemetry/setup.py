"""Telemetry of runner workers and proxies: the same processor, ledger and seals as in an agent, set up by a call."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.dependencies import get_dependency_conflicts
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Tracer
from opentelemetry.util._importlib_metadata import entry_points

from agl_otel.errors import SettingsError, UnavailableError
from agl_otel.telemetry.otlp import OtlpExporter
from agl_otel_hook import conventions, forks, waiting
from agl_otel_hook.context import Key, format_traceparent
from agl_otel_hook.export import ExportProcessor
from agl_otel_hook.hook import Hook, count_dropped, ensure_propagators, finish_at_exit
from agl_otel_hook.ids import draw_from_system
from agl_otel_hook.ledger import Count, Ledger
from agl_otel_hook.processor import AttemptProcessor, keep, marker_of
from agl_otel_hook.rewards import LastRewards
from agl_otel_hook.seal import TRACER_NAME, Sealer
from agl_otel_hook.unwrapping import remove_wrappers
from agl_otel_hook.whole import WholeSpans

ACK_SECONDS: Final = 30.0
"""How long the start of an attempt waits for the collector."""
_ALSO: Final = {"httpx": ("httpx", "httpx2")}
"""Instrumentations that belong together: newer OpenAI clients use httpx2, and both must propagate baggage."""
INSTRUMENTATIONS: Final = (
    *("openai", "anthropic", "mistralai", "google_generativeai", "litellm", "langchain", "openai_agents", "crewai", "llama-index"),
    *("httpx", "httpx2", "requests", "aiohttp-client", "threading"),
)
"""Instrumentations for plain scripts, if installed with their library: model calls, frameworks, and propagation of baggage to the proxy."""
_GROUP: Final = "opentelemetry_instrumentor"
_log = logging.getLogger(__name__)
_UNLIMITED: Final = SpanLimits(
    max_attributes=SpanLimits.UNSET,
    max_events=SpanLimits.UNSET,
    max_links=SpanLimits.UNSET,
    max_span_attributes=SpanLimits.UNSET,
    max_event_attributes=SpanLimits.UNSET,
    max_link_attributes=SpanLimits.UNSET,
    max_attribute_length=SpanLimits.UNSET,
    max_span_attribute_length=SpanLimits.UNSET,
)


class Telemetry:
    """Tracing of one process. Build it with `start`. All methods are thread-safe; only those that say so wait."""

    def __init__(
        self,
        *,
        otlp_endpoint: str = "",
        otlp_http: str = "",
        token: str = "",
        service_name: str,
        exporter: Callable[[], SpanExporter] | None = None,
        provider: TracerProvider | None = None,
        hook: Hook | None = None,
    ) -> None:
        os.environ.pop("OTEL_SDK_DISABLED", None)  # meant for the user's own telemetry: a proxy must record
        self._hook = hook
        """Already marks and counts the spans of `provider`; its ledger is shared, since a second one would change the marker."""
        self._ledger = hook.ledger if hook is not None else Ledger()
        self._provider = provider or TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False, span_limits=_UNLIMITED
        )
        draw_from_system(self._provider)
        self._processor = AttemptProcessor(self._ledger, on_idle=lambda key: self._sealer.idle(key))
        make = exporter or (lambda: OtlpExporter(otlp_endpoint, token, otlp_http))
        self._export = ExportProcessor(
            make(),
            rebuild=make,
            takes=self._ledger.takes,
            on_dropped=lambda spans: count_dropped(self._ledger, spans),
        )
        self._sealer = Sealer(self._ledger, self._provider, self._flush)
        self._rewards = LastRewards()
        if hook is None:
            self._provider.add_span_processor(self._processor)
        self._provider.add_span_processor(self._rewards)
        self._provider.add_span_processor(self._export)
        self._shut = threading.Lock()
        self._ends_in_order = False
        """Whether os._exit seals and flushes; set in forks, which multiprocessing or their own code may end that way."""
        forks.register(self._after_fork)

    @classmethod
    def start(
        cls, *, otlp_endpoint: str, otlp_http: str = "", token: str = "", service_name: str, instrument: Sequence[str] = ()
    ) -> Telemetry:
        """Set up the global tracer provider, exporting to `otlp_endpoint` (host:port, gRPC), or in forks to `otlp_http` if given.

        `instrument` names instrumentations to switch on ("openai", "httpx", …); those whose library is not installed are skipped. Raises
        SettingsError if an instrumentation itself is not installed.
        """
        telemetry = cls(otlp_endpoint=otlp_endpoint, otlp_http=otlp_http, token=token, service_name=service_name)
        telemetry.install(instrument)
        return telemetry

    def install(self, instrument: Sequence[str] = ()) -> None:
        """Set the global tracer provider and switch on instrumentations, as `start` does. Call it once."""
        if trace.get_tracer_provider() is not self._provider:
            trace.set_tracer_provider(self._provider)
        ensure_propagators()
        self.switch_on(instrument)
        atexit.register(self.shutdown)

    def switch_on(self, instrument: Sequence[str]) -> None:
        """Switch on instrumentations, as `start` does."""
        for name in dict.fromkeys(each for asked in instrument for each in _ALSO.get(asked, (asked,))):
            _Switch(name).on()

    @property
    def marker(self) -> str:
        """The marker that this process gives to attempts it has not seen yet."""
        return self._ledger.marker

    @property
    def resource(self) -> Resource:
        """The OpenTelemetry resource of this process's spans."""
        return self._provider.resource

    @property
    def ledger(self) -> Ledger:
        """The counts of spans by attempt."""
        return self._ledger

    def on_settled(self, settled: Callable[[Sequence[ReadableSpan]], None]) -> None:
        """Call `settled`, in another thread, with spans that were exported or dropped."""
        self._export.on_settled = settled

    def tracer(self, name: str) -> Tracer:
        """Return a tracer of this process's provider."""
        return self._provider.get_tracer(name)

    def whole_spans(self, scope: str) -> WholeSpans:
        """Return a recorder for spans that are created at their end; see whole.py."""
        return WholeSpans(
            scope, self._provider.resource, self._ledger, export=self._export.on_end, on_idle=lambda key: self._sealer.idle(key)
        )

    def take(self, key: Key, spans: Iterable[ReadableSpan]) -> None:
        """Count and export ended spans that something else has recorded, as spans of an attempt; what is counted already is left out.

        May wait, as ending a span may, while the exporter is full.
        """
        known: set[int] = set()
        for span in spans:
            context = span.get_span_context()
            if context is None or context.span_id in known or marker_of(span) is not None:
                continue
            known.add(context.span_id)
            marker = self._ledger.started(key, context.span_id, (context.trace_id, (span.parent or context).span_id)).marker
            ids = {conventions.ROLLOUT_ID: key[0], conventions.ATTEMPT_ID: key[1], conventions.PROCESS: marker}
            now = time.time_ns()
            taken = ReadableSpan(
                span.name, context, span.parent, span.resource, {**(span.attributes or {}), **ids}, span.events, span.links, span.kind,
                status=span.status, start_time=span.start_time or now, end_time=span.end_time or span.start_time or now,
                instrumentation_scope=span.instrumentation_scope,
            )  # fmt: skip
            self._rewards.on_end(taken)
            self._export.on_end(taken)
            if self._ledger.ended(key, context.span_id, marker=marker):
                self._sealer.idle(key)

    def attempt_span(self, rollout_id: str, attempt_id: str) -> str:
        """Export the attempt's root span and wait for the ack; return its traceparent. Raises UnavailableError."""
        return self.attempt_spans([(rollout_id, attempt_id)])[0]

    def attempt_spans(self, keys: Sequence[Key], *, hooked: bool = False) -> list[str]:
        """Do so for many attempts in one export; `hooked`: their agents run under the hook. Concurrent calls share exports."""
        traceparents: list[str] = []
        now = time.time_ns()
        tracer = self.tracer(TRACER_NAME)
        for rollout_id, attempt_id in keys:
            ids = {
                conventions.ROLLOUT_ID: rollout_id,
                conventions.ATTEMPT_ID: attempt_id,
                **({conventions.ATTEMPT_HOOKED: True} if hooked else {}),
            }
            span = tracer.start_span(conventions.SPAN_ATTEMPT, Context(), attributes=ids, start_time=now)
            keep(span, ids)
            span.end(now)
            traceparents.append(format_traceparent(span.get_span_context()))
        if not self._flush(ACK_SECONDS):
            raise UnavailableError(
                f"the collector did not take the attempt span of {_some(keys)} within {ACK_SECONDS:.0f} s: is it running?"
            )
        return traceparents

    def seal(self, keys: Sequence[Key], *, timeout_seconds: float = 10.0) -> dict[Key, dict[str, int]]:
        """Seal these attempts and flush once; return {key: {marker: spans ended}}, {} for attempts without spans of this process.

        Raises UnavailableError if the flush fails, so that some spans may not be stored.
        """
        return {key: {count.marker: count.spans} for key, count in self.seal_counts(keys, timeout_seconds=timeout_seconds).items()} | {
            key: {} for key in keys if self._ledger.count(key) is None
        }

    def seal_counts(self, keys: Sequence[Key], *, timeout_seconds: float = 10.0, closing: bool = False) -> dict[Key, Count]:
        """Seal as `seal` does, and return also what was dropped; attempts without spans of this process are left out.

        `closing`: this process does nothing more for them.
        """
        counts, acked = self._sealer.seal(keys, timeout_seconds=timeout_seconds, closing=closing)
        if not acked:
            raise UnavailableError(f"the collector did not take the spans of {_some(keys)} within {timeout_seconds:.0f} s: is it running?")
        return counts

    def keep_records(self, root: str | Path) -> None:
        """Keep the counts of attempts with a folder below `root` (a runner's) in files there, which outlive a kill of this process."""
        self._ledger.keep(str(root))

    def end_attempts(self, keys: Sequence[Key]) -> None:
        """Mark the agents of these attempts as ended: spans still open in this process will not be exported."""
        for key in keys:
            self._ledger.end_attempt(key)

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """Drop an attempt's counts; if it appears again, it gets a new marker."""
        self._ledger.forget((rollout_id, attempt_id))
        self._rewards.forget((rollout_id, attempt_id))

    def reward(self, key: Key) -> float | None:
        """Return the last primary reward that this process has emitted for an attempt."""
        return self._rewards.get(key)

    def shutdown(self, timeout_seconds: float = 10.0) -> None:
        """Seal all attempts, flush, close. A second call does nothing."""
        if not self._shut.acquire(blocking=False):
            return
        self._sealer.seal_all(timeout_seconds)
        self._ledger.close()
        self._export.shutdown(0.0)

    def _flush(self, timeout_seconds: float) -> bool:
        return self._export.force_flush(int(timeout_seconds * 1000))

    def _after_fork(self) -> None:
        if self._hook is None:  # the hook resets its own parts
            self._processor.after_fork()
            self._shut = threading.Lock()
            if not self._ends_in_order:
                finish_at_exit(self.shutdown)
                self._ends_in_order = True
        self._sealer.after_fork()


def _some(keys: Sequence[Key]) -> str:
    names = ", ".join(f"{rollout_id}/{attempt_id}" for rollout_id, attempt_id in keys[:3])
    return names if len(keys) <= 3 else f"{names} and {len(keys) - 3} more"


class _Switch:
    """One instrumentation of this process."""

    def __init__(self, name: str) -> None:
        """Find the instrumentation. Raises SettingsError if it is not installed."""
        found = next(iter(entry_points(group=_GROUP, name=name)), None)
        if found is None:
            raise SettingsError(f"no OpenTelemetry instrumentation {name!r} is installed: install opentelemetry-instrumentation-{name}")
        self._found = found
        self._instrumentor: Any = None

    def on(self, *, quietly: bool = False) -> None:
        """Switch on, now or when the process imports the library (waiting.py), if that is installed. `quietly`: log errors."""
        on_now = self._try_on_now if quietly else self._on_now
        if not waiting.wait(self._found.module, on_now):
            on_now()

    def off(self) -> None:
        """Switch off, also if it still waits for the import."""
        waiting.forget(self._found.module)
        instrumentor, self._instrumentor = self._instrumentor, None
        if instrumentor is not None:
            instrumentor.uninstrument()
            remove_wrappers(instrumentor)

    def _on_now(self) -> None:
        instrumentor = self._found.load()()
        conflict = get_dependency_conflicts(instrumentor.instrumentation_dependencies())
        if conflict is None and not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument()
        self._instrumentor = instrumentor

    def _try_on_now(self) -> None:
        try:
            self._on_now()
        except Exception as error:  # noqa: BLE001 - the boundary: somebody else's instrumentation, of a library that may not be there
            _log.debug("instrumentation %s cannot be switched on: %r", self._found.name, error)


_switched_on: Final[dict[str, _Switch]] = {}
_switching: Final = threading.RLock()  # runners that share a process would each put a wrapper around the same function


def instrument_all() -> None:
    """Switch on all installed INSTRUMENTATIONS that are not on yet. Never raises."""
    installed = {point.name for point in entry_points(group=_GROUP)}
    with _switching:
        for name in [name for name in INSTRUMENTATIONS if name in installed and name not in _switched_on]:
            _switched_on[name] = _Switch(name)
            _switched_on[name].on(quietly=True)


def uninstrument_all() -> None:
    """Undo `instrument_all`."""
    with _switching:
        while _switched_on:
            _switched_on.popitem()[1].off()
