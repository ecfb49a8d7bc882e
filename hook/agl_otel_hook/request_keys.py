"""Keys that requests bring to a service shared by many attempts: spans and log records of an attempt are exported with its key.

So the service needs no key of its own and can write to the attempts of its requests only. A key is sent to the telemetry address in the
service's own environment and nowhere else: it is not in baggage, which propagates further, and nothing here adds it to outgoing requests.
If the environment has headers for that address, they are used instead of any key.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import CarrierT, Getter, Setter, TextMapPropagator, default_getter, default_setter
from opentelemetry.sdk.trace.export import SpanExporter

from agl_otel_hook import conventions, forks
from agl_otel_hook.context import Key
from agl_otel_hook.conventions import named_by
from agl_otel_hook.guard import never_raises
from agl_otel_hook.ledger import Ledger

MAX_KEYS: Final = 100_000  # some 40 MB
KEPT_SECONDS: Final = 3600.0
"""How long after its last use the key of an attempt without open spans is kept: spans may follow the response."""
MAX_EXPORTERS: Final = 128  # open connections, one for each key


class RequestKeys(TextMapPropagator):
    """Propagator that reads keys from request headers; instrumentations of web frameworks call it."""

    def __init__(self, ledger: Ledger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._keys: dict[Key, tuple[str, float]] = {}
        """{attempt: (key, time of its latest use)}, least recently used first."""
        self._after_fork()
        forks.register(self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def extract(self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter) -> Context:
        """Store the key, if the carrier has one. Return the context unchanged."""
        self._read(carrier, getter)
        return context if context is not None else otel_context.get_current()

    def inject(self, carrier: CarrierT, context: Context | None = None, setter: Setter[CarrierT] = default_setter) -> None:
        """Inject nothing."""

    @property
    def fields(self) -> set[str]:
        """Empty: no header is written."""
        return set()

    def of(self, key: Key | None) -> str:
        """Return the key that a request has brought for an attempt; empty if none has."""
        if key not in self._keys:
            return ""
        with self._lock:
            text, _ = self._keys.pop(key, ("", 0.0))
            if text:
                self._keys[key] = text, self._clock()
        return text

    @never_raises
    def _read(self, carrier: CarrierT, getter: Getter[CarrierT]) -> None:
        given = getter.get(carrier, conventions.HEADER_OTLP_KEY)
        key = named_by(given[0]) if given else None
        if given and key is not None:
            now = self._clock()
            with self._lock:
                first, _ = self._keys.pop(key, (given[0], now))  # the first key of an attempt stays: a later caller cannot replace it
                self._keys[key] = first, now
                self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        while (oldest := next(iter(self._keys.items())))[1][1] + KEPT_SECONDS < now:
            key, (text, _) = oldest
            del self._keys[key]
            if self._ledger.is_open(key):
                self._keys[key] = text, now


class KeyedExporter(SpanExporter):
    """OTLP exporter of spans or log records that sends each with the key that `key_of` returns, or by `own` where that is empty.

    `own` is configured by the environment. Not thread-safe.
    """

    def __init__(self, own: Any, key_of: Callable[[Any], str]) -> None:
        self._own = own
        self._key_of = key_of
        self._keyed: dict[str, Any] = {}
        self._abandoned: list[dict[str, Any]] = []
        forks.register(self._after_fork)

    def _after_fork(self) -> None:
        self._abandoned.append(self._keyed)  # never closed: that would write to the parent's connections
        self._keyed = {}

    def export(self, spans: Sequence[Any]) -> Any:
        """Send one request for each key. Return a failure if any of them failed."""
        parts: dict[str, list[Any]] = {}
        for each in spans:
            parts.setdefault(self._key_of(each), []).append(each)
        return max([self._exporter(key).export(part) for key, part in parts.items()], key=lambda result: result.value)

    def _exporter(self, key: str) -> Any:
        if not key:
            return self._own
        exporter = self._keyed.pop(key, None) or type(self._own)(headers={"authorization": f"Bearer {key}"})
        self._keyed[key] = exporter
        if len(self._keyed) > MAX_EXPORTERS:
            self._keyed.pop(next(iter(self._keyed))).shutdown()
        return exporter

    def shutdown(self) -> None:
        """Close every connection."""
        for exporter in (self._own, *self._keyed.values()):
            exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: nothing is buffered here."""
        return True


def has_own_headers() -> bool:
    """Return whether the environment has headers for telemetry: a key of the service's own, or headers for another receiver."""
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}HEADERS") for signal in ("", "TRACES_", "LOGS_"))
