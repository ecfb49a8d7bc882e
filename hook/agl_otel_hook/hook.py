"""The hook in an agent's process, which `opentelemetry-instrument python agent.py` loads through our entry points.

If a distribution has configured the SDK, its provider gets our processor. If none has (this package does not need one) and
OTEL_TRACES_EXPORTER names exporters, the hook configures the SDK from the same OTEL_* variables with the SDK's own configurator.
All of the agent's threads and tasks start in the attempt's context. At the end of the process (return, exception, sys.exit, os._exit,
os.exec*, SIGTERM) everything is sealed and flushed. Errors of the hook never reach the agent.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.instrumentation.propagators import ResponsePropagator, get_global_response_propagator, set_global_response_propagator
from opentelemetry.instrumentation.propagators import default_setter as response_setter
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import CarrierT, Getter, Setter, TextMapPropagator, default_getter, default_setter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agl_otel_hook import autoload, conventions, declared, exporters, forks, joining, mcp_servers, otlp, versions
from agl_otel_hook.context import AttemptContext, Key, begin_in, carried_context, from_environment, key_of, with_ids
from agl_otel_hook.export import ExportProcessor
from agl_otel_hook.guard import never_raises, note_failure, while_running
from agl_otel_hook.ids import draw_from_system
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.pressure import BackPressure
from agl_otel_hook.processor import UNCOUNTED, AttemptProcessor, Shared, key_of_attributes, marker_of
from agl_otel_hook.records import Records, find_root
from agl_otel_hook.request_keys import KeyedExporter, RequestKeys, has_own_headers
from agl_otel_hook.seal import Sealer
from agl_otel_hook.sigterm import Termination

FINISH_SECONDS: Final = 10.0
"""Timeout of each seal and flush at the end of the process; os._exit and os.exec* wait no longer than this in all."""
END_SECONDS: Final = 2 * FINISH_SECONDS
"""How long the end of the process tries to reach a collector that is away, with all seals and flushes."""
SETTLE_SECONDS: Final = 1.0
"""How long the end of the process waits for spans that other threads are ending, to seal them as well."""
MAX_ATTRIBUTES: Final = "4096"
"""Limit on a span's attributes. The SDK's 128 would drop the oldest messages of long conversations."""
_ATTRIBUTE_LIMIT: Final = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"


class Hook:
    """State of the hook; one for each process."""

    def __init__(self, attempt: AttemptContext | None) -> None:
        self._termination = Termination(functools.partial(self.close, process_continues=True))
        """Continues: spans that the interrupted code still ends are exported, or missing."""
        self.ledger = Ledger(own_records, on_new=self._termination.watch, on_unrecorded=self._announce)
        self._attempt = attempt
        self._providers: list[TracerProvider] = []
        self._exports: list[ExportProcessor] = []
        self._exports_elsewhere = False
        """Whether exporters take spans that do not ask the ledger first."""
        self._sealer: Sealer | None = None
        self.stored_elsewhere: Callable[[ReadableSpan], bool] = lambda span: False
        """Whether another exporter of this process sends the span to the stack (compat/tracer/process.py): our drops do not count then."""
        self.given = RequestKeys(self.ledger) if attempt is None and not has_own_headers() else None
        """Keys of attempts that requests bring; None where the environment names the attempt or has headers for telemetry."""
        self.processor = AttemptProcessor(self.ledger, fallback=attempt.key if attempt else None, on_idle=self._idle)

    def adopt(self, provider: TracerProvider) -> None:
        """Mark and count the spans of `provider`; a second call with the same one does nothing."""
        if self.has(provider):
            return
        self.configured(provider)
        self._exports_elsewhere = True
        for processor in versions.ending(self.processor):
            provider.add_span_processor(processor)
        provider.add_span_processor(self.processor)  # after exporters: a kill before the count leaves a span in flight; see finish()
        provider.add_span_processor(BackPressure(provider.force_flush))

    def has(self, provider: object) -> bool:
        """Return whether the spans of `provider` are marked and counted."""
        return any(known is provider for known in self._providers)

    def configured(self, provider: TracerProvider) -> None:
        """Register `provider`, which has our processor already, and send seals through it."""
        draw_from_system(provider)
        self._providers.append(provider)
        self._sealer = Sealer(
            self.ledger, provider, lambda seconds: provider.force_flush(int(seconds * 1000)), repeats=self._attempt is None
        )

    @never_raises
    def share(self, provider: object) -> None:
        """Add our exporters and span counting to `provider`, which the agent tried to set as the global one.

        Its own exporters stay. A span that reaches the stack through both is read once.
        """
        if not isinstance(provider, TracerProvider) or self.has(provider) or not self._exports:
            return
        draw_from_system(provider)
        self._providers.append(provider)
        for processor in (*versions.ending(self.processor), *map(Shared, self._exports), self.processor):
            provider.add_span_processor(processor)

    def configure_sdk(self) -> None:
        """Configure the SDK from OTEL_CONFIG_FILE or the other OTEL_* variables, as a distribution would, but with our export processor."""
        if declared.is_set() and declared.set_up(int(MAX_ATTRIBUTES)):
            self.adopt_declared()
            return
        from opentelemetry.instrumentation.version import __version__
        from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # pyright: ignore[reportPrivateUsage]  # what distributions subclass

        os.environ.setdefault(_ATTRIBUTE_LIMIT, MAX_ATTRIBUTES)
        with declared.hidden(), exporters.in_environment(exporters.NONE):
            _OTelSDKConfigurator().configure(auto_instrumentation_version=__version__)
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider), "the SDK's configurator sets the SDK's provider"
        self._add_exporters(provider)

    def adopt_declared(self) -> None:
        """Adopt the provider that OTEL_CONFIG_FILE has set up, and add exporters to the stack to those of the file."""
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider) or self.has(provider):
            return
        provider.sampler = ALWAYS_ON  # spans that are not sampled are neither exported nor counted
        self._add_exporters(provider, only_otlp=True)

    def _add_exporters(self, provider: TracerProvider, *, only_otlp: bool = False) -> None:
        """Add the exporters that the environment names to `provider` and to the global logger provider, and our processor."""
        exports = map(self._export_processor, exporters.configured("traces", only_otlp=only_otlp))
        for processor in (*versions.ending(self.processor), *exports, self.processor):
            provider.add_span_processor(processor)
        if made := exporters.configured("logs", only_otlp=only_otlp):
            from agl_otel_hook import logs

            logs.add_processors(map(self._log_processor, made))
        self.configured(provider)

    def install_at_end(self) -> None:
        """Close at every foreseeable end of the process (atexit, os._exit, os.exec*, SIGTERM), and reset forked children."""
        atexit.register(self._termination.complete)  # after the one below: exit handlers run in reverse order
        atexit.register(self.close)
        forks.register(self._after_fork)
        finish_at_exit(self.close)
        os.execv, os.execve = self._ends_with(os.execv), self._ends_with(os.execve)  # all of os.exec* call these two
        self._termination.install()

    @never_raises
    def finish(self) -> None:
        """Seal and flush. A span that ends meanwhile is either exported and counted by a seal, or neither."""
        if self._sealer is None:
            return
        started = time.monotonic()
        while True:
            while self.processor.ending() and time.monotonic() - started < SETTLE_SECONDS:
                time.sleep(0.001)
            if not self._sealer.seal_all(started + FINISH_SECONDS - time.monotonic()):
                note_failure("the last flush", "not every span was exported")
                return
            settled = not self.processor.ending() and not self.ledger.unsealed()
            if settled or time.monotonic() - started > SETTLE_SECONDS:
                return

    @never_raises
    def close(self, *, process_continues: bool = False) -> None:
        """Finish, and record that this process ends: spans that are still open are abandoned.

        Sends a closing seal for each attempt without a record, and for each that has open spans and has ended others since its last seal.
        Spans that threads begin after it are not counted, unless `process_continues`.
        """
        otlp.end_within(END_SECONDS)
        self._end_exports(True)
        try:
            self._close(process_continues)
        finally:
            if process_continues:
                otlp.end_within(math.inf)
                self._end_exports(False)

    def _end_exports(self, ending: bool) -> None:
        for export in self._exports:
            export.is_ending = ending

    def _close(self, process_continues: bool) -> None:
        self.finish()
        self.ledger.close(self.processor.ending())
        if self._sealer is None:
            return
        counts, acked = {}, True
        if unproven := self.ledger.unproven():
            counts, acked = self._sealer.seal(unproven, timeout_seconds=FINISH_SECONDS, closing=True)
        if not (process_continues or self._exports_elsewhere):
            self.ledger.close_for_good()
            started = time.monotonic()
            while self.ledger.exporting() and time.monotonic() - started < SETTLE_SECONDS:
                time.sleep(0.001)
        meanwhile = {key for key, count in counts.items() if self.ledger.count(key) != count}  # spans that ended then were exported
        if acked and (meanwhile := [*meanwhile.union(self.ledger.unsealed())]):
            self._sealer.seal(meanwhile, timeout_seconds=FINISH_SECONDS, closing=True)

    def _ends_with(self, execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """Wrap a function of os.exec*: close before it, reopen if it fails."""

        @functools.wraps(execute)
        def close_and_execute(*args: Any) -> NoReturn:
            finish_in_thread(functools.partial(self.close, process_continues=True))
            try:
                execute(*args)
            finally:
                self.ledger.reopen()

        return close_and_execute

    def _idle(self, key: Key) -> None:
        if self._sealer is not None:
            self._sealer.idle(key)

    def _announce(self, key: Key) -> None:
        if self._sealer is not None:
            self._sealer.announce(key)

    @never_raises
    def _after_fork(self) -> None:
        self._termination.after_fork()
        self.processor.after_fork()
        if self._sealer is not None:
            self._sealer.after_fork()

    def _export_processor(self, span_exporter: SpanExporter) -> ExportProcessor:
        counts, make = _is_otlp(span_exporter), type(span_exporter)
        settings = {name: value for name, value in os.environ.items() if name.startswith("OTEL_EXPORTER_")}
        given = self.given if counts else None

        def key_of_span(span: ReadableSpan) -> str:
            return given.of(key_of_attributes(span)) if given is not None else ""

        def keyed(exporter: SpanExporter) -> SpanExporter:
            return KeyedExporter(exporter, key_of_span) if given is not None else exporter

        def rebuild() -> SpanExporter:
            with exporters.in_environment(settings):
                return keyed(make())

        export = ExportProcessor(
            keyed(span_exporter),
            rebuild=rebuild,
            takes=self.ledger.takes,
            on_dropped=self._dropped if counts else None,
            apart=key_of_span if given is not None else None,
        )
        if counts:
            self._exports.append(export)
        return export

    def _log_processor(self, exporter: Any) -> Any:
        from agl_otel_hook.logs import AttemptLogs, Logs

        given = self.given
        return AttemptLogs(exporter, given) if given is not None and _is_otlp(exporter) else Logs(exporter)

    def _dropped(self, spans: Sequence[ReadableSpan]) -> None:
        count_dropped(self.ledger, [span for span in spans if not self.stored_elsewhere(span)])


@while_running
def finish_in_thread(close: Callable[[], None]) -> None:
    """Run `close` in another thread and wait FINISH_SECONDS at most: a lock that this thread holds must not block the exit."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        close()
        done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return  # the interpreter shuts down: the atexit handler has run
    done.acquire(timeout=FINISH_SECONDS)


def finish_at_exit(close: Callable[[], None]) -> None:
    """Call `close` before os._exit, by which multiprocessing's children and pre-forking servers exit."""
    exit_now = os._exit  # pyright: ignore[reportPrivateUsage]  # a public function of os, despite its name

    def finish_and_exit(status: int) -> NoReturn:
        finish_in_thread(close)
        exit_now(status)

    os._exit = finish_and_exit


def _is_otlp(exporter: object) -> bool:
    return "otlp" in type(exporter).__module__


def count_dropped(ledger: Ledger, spans: Sequence[ReadableSpan]) -> None:
    """Count in the ledger those of the dropped spans that an attempt counts."""
    for span in spans:
        key, marker = key_of_attributes(span), marker_of(span)
        if key is not None and marker is not None and span.name not in UNCOUNTED:
            ledger.dropped(key, marker)


class MarkedBaggage(TextMapPropagator):
    """Propagator that adds this process's marker to outgoing W3C baggage: the callee then knows of this process, even if it dies.

    Runs after the other propagators and writes the header anew, with the whole baggage of the context. Extracts nothing.
    """

    def __init__(self, ledger: Ledger, fallback: Key | None) -> None:
        self._ledger = ledger
        self._fallback = fallback
        self._baggage = W3CBaggagePropagator()

    def extract(self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter) -> Context:
        """Leave the context as it is."""
        return context if context is not None else otel_context.get_current()

    def inject(self, carrier: CarrierT, context: Context | None = None, setter: Setter[CarrierT] = default_setter) -> None:
        """Write the header if the context belongs to an attempt that has spans in this process."""
        key = key_of(context, self._fallback)
        count = self._ledger.count(key) if key is not None else None
        if key is not None and count is not None:
            marked = baggage.set_baggage(conventions.PROCESS, count.marker, with_ids(key, context))
            self._baggage.inject(carrier, marked, setter)

    @property
    def fields(self) -> set[str]:
        """The header that is written."""
        return self._baggage.fields


class ProcessHeader(ResponsePropagator):
    """Propagator that adds this process's marker and span counts to HTTP responses, for a runner on another machine."""

    def __init__(self, ledger: Ledger, before: ResponsePropagator | None) -> None:
        self._ledger = ledger
        self._before = before

    def inject(self, carrier: Any, context: Context | None = None, setter: Any = response_setter) -> None:
        """Write the header if the server's span belongs to an attempt."""
        if self._before is not None:
            self._before.inject(carrier, context, setter)
        span = trace.get_current_span(context)
        key = key_of_attributes(span) if isinstance(span, ReadableSpan) else None
        count = self._ledger.count(key) if key is not None else None
        if key is not None and count is not None:
            setter.set(carrier, conventions.HEADER_PROCESS, f"{count.marker};{count.spans + count.open};{count.spans}")


_known_root: str | Path | None = None
"""The root of ledgers that this process or an ancestor by fork has found: the environment may have been cleared since."""


def own_records() -> Records | None:
    """Return the Records of this process; None where no root of ledgers is known."""
    global _known_root
    root: str | Path | None = os.environ.get(conventions.ENV_LEDGER)
    if not root and (attempt := from_environment(os.environ)) is not None and attempt.attempt_id:
        root = find_root(*attempt.key)
    _known_root = root or _known_root
    return Records(str(_known_root)) if _known_root else None


_hook: Hook | None = None


@never_raises
def pre_instrument() -> None:
    """Defer instrumentations until their libraries are imported, and install the hook, once."""
    global _hook
    autoload.begin()
    if _hook is not None:
        return
    attempt = from_environment(os.environ)
    _hook = Hook(attempt)
    if attempt is not None:
        _hook.ledger.loaded(attempt.key)
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        _hook.adopt_declared() if declared.is_set() else _hook.adopt(provider)
    elif isinstance(provider, trace.ProxyTracerProvider) and os.environ.get("OTEL_TRACES_EXPORTER", "none").strip() not in ("", "none"):
        _hook.configure_sdk()
    _hook.install_at_end()
    ensure_propagators()
    ours: list[TextMapPropagator] = [MarkedBaggage(_hook.ledger, attempt.key if attempt else None)]
    propagate.set_global_textmap(
        CompositePropagator([propagate.get_global_textmap(), *ours, *([_hook.given] if _hook.given is not None else [])])
    )
    share_agent_providers(_hook)
    set_global_response_propagator(ProcessHeader(_hook.ledger, get_global_response_propagator()))
    if attempt is not None:
        begin_in(with_ids(attempt.key, carried_context(os.environ)))
        joining.begin(os.environ)
        mcp_servers.begin()


@never_raises
def post_instrument() -> None:
    """End the deferral, now that every instrumentation is loaded or deferred; adopt a provider that one of them has set."""
    autoload.end()
    provider = trace.get_tracer_provider()
    if _hook is not None and isinstance(provider, TracerProvider):
        _hook.adopt(provider)


def share_agent_providers(hook: Hook) -> None:
    """Call `share` with each provider that the agent sets as the global one: OpenTelemetry keeps ours, but the agent still uses its own."""
    set_tracer_provider = trace.set_tracer_provider

    @functools.wraps(set_tracer_provider)
    def set_and_share(tracer_provider: trace.TracerProvider) -> None:
        set_tracer_provider(tracer_provider)
        hook.share(tracer_provider)

    trace.set_tracer_provider = set_and_share


def hook_of(provider: object) -> Hook | None:
    """Return the hook that marks and counts the spans of `provider`, or None."""
    return _hook if _hook is not None and _hook.has(provider) else None


def ensure_propagators() -> None:
    """Add the propagators of trace context and baggage where OTEL_PROPAGATORS leaves them out."""
    active = propagate.get_global_textmap()
    missing = [p for p in (TraceContextTextMapPropagator(), W3CBaggagePropagator()) if not p.fields <= active.fields]
    if missing:
        propagate.set_global_textmap(CompositePropagator([active, *missing]))
