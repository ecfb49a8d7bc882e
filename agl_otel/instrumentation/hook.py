"""The hook in an agent's process: what `opentelemetry-instrument python agent.py` loads through our entry points.

Where a distribution has configured the SDK, its provider gets our processor; where none is installed (this package does not
need one) and OTEL_TRACES_EXPORTER asks for exporters, the SDK is configured from the same OTEL_* variables with its own
configurator. The agent's main thread starts in the attempt's context. At the end of the process (return, exception, sys.exit,
os._exit, SIGTERM) everything is sealed and flushed. No error of ours reaches the agent.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Literal, NoReturn

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agl_otel.instrumentation import autoload
from agl_otel.instrumentation.context import AttemptContext, carried_context, from_environment, with_ids
from agl_otel.instrumentation.export import ExportProcessor
from agl_otel.instrumentation.guard import never_raises, note_failure
from agl_otel.instrumentation.ledger import Ledger
from agl_otel.instrumentation.pressure import BackPressure
from agl_otel.instrumentation.processor import UNCOUNTED, AttemptProcessor, key_of_attributes, marker_of
from agl_otel.instrumentation.seal import Sealer

FINISH_SECONDS: Final = 10.0
"""The longest that sealing and flushing may delay the end of the process."""
SETTLE_SECONDS: Final = 1.0
"""How long spans that other threads end meanwhile are still sealed."""
PAUSE_SECONDS: Final = (0.2, 5.0)
"""Between two looks whether the process has ended by its SIGTERM: the first, and the longest; doubled each time."""
MAX_ATTRIBUTES: Final = "4096"
"""The SDK's 128 would drop the oldest attributes of a span, which are the ids, in long conversations."""
_ATTRIBUTE_LIMIT: Final = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"


class Hook:
    """Everything that the hook keeps; one for each process."""

    def __init__(self, attempt: AttemptContext | None) -> None:
        self.ledger = Ledger()
        self._attempt = attempt
        self._providers: list[TracerProvider] = []
        self._sealer: Sealer | None = None
        self._previous_sigterm: Any = signal.SIG_DFL
        self._ending: Literal["", "finishing", "finished"] = ""
        """How far the end is that a SIGTERM has begun."""
        self.stored_elsewhere: Callable[[ReadableSpan], bool] = lambda span: False
        """Whether another exporter of this process brings a span to its stack (tracer/process.py): ours may then drop it."""
        self.processor = AttemptProcessor(self.ledger, fallback=attempt.key if attempt else None, on_idle=self._idle)

    def adopt(self, provider: TracerProvider) -> None:
        """Have `provider` mark and count its spans; a second call with the same one does nothing."""
        if self.has(provider):
            return
        self.configured(provider)
        provider.add_span_processor(self.processor)
        provider.add_span_processor(BackPressure(provider.force_flush))

    def has(self, provider: object) -> bool:
        """Whether it marks and counts the spans of `provider`."""
        return any(known is provider for known in self._providers)

    def configured(self, provider: TracerProvider) -> None:
        """`provider` has our processor; seal through it."""
        self._providers.append(provider)
        self._sealer = Sealer(self.ledger, provider, lambda seconds: provider.force_flush(int(seconds * 1000)))

    def configure_sdk(self) -> None:
        """Configure the SDK from OTEL_* variables, as a distribution would, with exporters that lose nothing."""
        from opentelemetry.instrumentation.version import __version__
        from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # pyright: ignore[reportPrivateUsage]  # what distributions subclass

        os.environ.setdefault(_ATTRIBUTE_LIMIT, MAX_ATTRIBUTES)
        _OTelSDKConfigurator().configure(auto_instrumentation_version=__version__, export_span_processor=self._export_processor)
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider), "the SDK's configurator sets the SDK's provider"
        provider.add_span_processor(self.processor)
        self.configured(provider)

    def install_at_end(self) -> None:
        """Finish at every end that a process can see coming, and start over in forked children."""
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._after_fork)
        exit_now = os._exit  # pyright: ignore[reportPrivateUsage]  # a public function of os, despite its name

        def finish_and_exit(status: int) -> NoReturn:
            self._finish_aside()
            exit_now(status)

        os._exit = finish_and_exit  # what multiprocessing's children and pre-forking servers end with
        previous = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and previous is not signal.SIG_IGN and previous is not None:
            self._previous_sigterm = previous
            signal.signal(signal.SIGTERM, self._on_sigterm)
            keep_sigterm_for_forked_children()

    @never_raises
    def finish(self) -> None:
        """Seal and flush. A span that ends meanwhile arrives with a seal that counts it, or does not arrive and is not counted."""
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

    def _finish_aside(self) -> None:
        """Finish in another thread, so that a lock that this one holds cannot keep the process from ending."""
        done = _thread.allocate_lock()
        done.acquire()

        def run() -> None:
            self.finish()
            done.release()

        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:
            return  # the interpreter is ending: atexit has finished already
        done.acquire(timeout=FINISH_SECONDS)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._ending == "finishing":  # the kernel sends one for each thread of a parent that was killed (die_with_parent)
            return
        if not self._ending:  # return at once: the interrupted code may hold any lock
            self._ending = "finishing"

            def end() -> None:
                self.finish()
                self._ending, pause = "finished", PAUSE_SECONDS[0]
                while self._ending == "finished":  # one that comes while the main thread is about to sleep does not wake it
                    os.kill(os.getpid(), number)
                    time.sleep(pause)
                    pause = min(2 * pause, PAUSE_SECONDS[1])

            _thread.start_new_thread(end, ())
            return
        self._ending = ""
        signal.signal(number, self._previous_sigterm)
        if callable(self._previous_sigterm):
            self._previous_sigterm(number, frame)
            if signal.getsignal(number) is self._previous_sigterm:
                signal.signal(number, self._on_sigterm)
        else:
            os.kill(os.getpid(), number)

    def _idle(self, key: tuple[str, str]) -> None:
        if self._sealer is not None:
            self._sealer.idle(key)

    @never_raises
    def _after_fork(self) -> None:
        self._ending = ""
        self.ledger.after_fork()
        self.processor.after_fork()
        if self._sealer is not None:
            self._sealer.after_fork()

    def _export_processor(self, span_exporter: SpanExporter, *_: object, **__: object) -> ExportProcessor:
        counts = "otlp" in type(span_exporter).__module__
        return ExportProcessor(
            span_exporter,
            rebuild=type(span_exporter),
            takes=lambda span: is_own(self.ledger, span),
            on_dropped=self._dropped if counts else None,
        )

    def _dropped(self, spans: Sequence[ReadableSpan]) -> None:
        count_dropped(self.ledger, [span for span in spans if not self.stored_elsewhere(span)])


def keep_sigterm_for_forked_children() -> None:
    """Have a SIGTERM wait until fork has returned: Python forgets those that arrive while a child is being made.

    What is registered with os.register_at_fork would be too early to handle it: others that are registered have not run yet, so a lock may
    be one of the parent's, and what a handler raises there is lost.
    """

    def patiently(fork: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fork)
        def wrapper(*args: Any) -> Any:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                return fork(*args)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        return wrapper

    os.fork, os.forkpty = patiently(os.fork), patiently(os.forkpty)


def is_own(ledger: Ledger, span: ReadableSpan) -> bool:
    """Whether the span began in this process, and not before the fork that made it."""
    marker = marker_of(span)
    return marker is None or not ledger.is_foreign(marker)


def count_dropped(ledger: Ledger, spans: Sequence[ReadableSpan]) -> None:
    """Tell the ledger about counted spans that were given up."""
    for span in spans:
        key, marker = key_of_attributes(span), marker_of(span)
        if key is not None and marker is not None and span.name not in UNCOUNTED:
            ledger.dropped(key, marker)


_hook: Hook | None = None


@never_raises
def pre_instrument() -> None:
    """Have instrumentations wait for their libraries, and install the hook, once."""
    global _hook
    autoload.begin()
    if _hook is not None:
        return
    attempt = from_environment(os.environ)
    _hook = Hook(attempt)
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        _hook.adopt(provider)
    elif isinstance(provider, trace.ProxyTracerProvider) and os.environ.get("OTEL_TRACES_EXPORTER", "none").strip() not in ("", "none"):
        _hook.configure_sdk()
    _hook.install_at_end()
    ensure_propagators()
    if attempt is not None:
        otel_context.attach(with_ids(attempt.key, carried_context(os.environ)))


@never_raises
def post_instrument() -> None:
    """Every instrumentation is loaded, or waits. Adopt the provider of one that brought its own."""
    autoload.end()
    provider = trace.get_tracer_provider()
    if _hook is not None and isinstance(provider, TracerProvider):
        _hook.adopt(provider)


def hook_of(provider: object) -> Hook | None:
    """The hook that marks and counts the spans of `provider`; None where there is none."""
    return _hook if _hook is not None and _hook.has(provider) else None


def ensure_propagators() -> None:
    """Make sure that trace context and baggage travel, whatever else OTEL_PROPAGATORS asks for."""
    active = propagate.get_global_textmap()
    missing = [p for p in (TraceContextTextMapPropagator(), W3CBaggagePropagator()) if not p.fields <= active.fields]
    if missing:
        propagate.set_global_textmap(CompositePropagator([active, *missing]))
