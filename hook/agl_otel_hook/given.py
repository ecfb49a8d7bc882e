"""Keys that requests bring to a service which many attempts share: what it exports of an attempt goes out with that attempt's key.

So a service needs no key of its own, and can write into the attempts that were given to it and into no others. A key goes to the address
that the service's own environment names for telemetry, and nowhere else: it is never in baggage, which travels on, and nothing here writes
into requests that the service makes. Where the environment has headers for that address, these are used and no key is.
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
"""How long after its last use the key of an attempt without an open span is kept: spans may come after the answer."""
MAX_EXPORTERS: Final = 128  # connections that are kept open


class GivenKeys(TextMapPropagator):
    """Reads the key out of a request's headers where the instrumentation of a web framework reads its context."""

    def __init__(self, ledger: Ledger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._keys: dict[Key, tuple[str, float]] = {}
        """With the time of its latest use; the earliest first."""
        self._after_fork()
        forks.register(self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def extract(self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter) -> Context:
        """Keep the key, where there is one, and leave the context as it is."""
        self._read(carrier, getter)
        return context if context is not None else otel_context.get_current()

    def inject(self, carrier: CarrierT, context: Context | None = None, setter: Setter[CarrierT] = default_setter) -> None:
        """Write nothing."""

    @property
    def fields(self) -> set[str]:
        """No header is written."""
        return set()

    def of(self, key: Key | None) -> str:
        """The key that was given for an attempt; empty where none was."""
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
                first, _ = self._keys.pop(key, (given[0], now))  # an attempt has one key: who calls later with another text changes nothing
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
    """An OTLP exporter of spans or log records that sends each with the key that `key_of` gives; without one as `own` does.

    `own` is configured by the environment. Used by one thread at a time.
    """

    def __init__(self, own: Any, key_of: Callable[[Any], str]) -> None:
        self._own = own
        self._key_of = key_of
        self._keyed: dict[str, Any] = {}
        self._abandoned: list[dict[str, Any]] = []
        forks.register(self._after_fork)

    def _after_fork(self) -> None:
        self._abandoned.append(self._keyed)  # closing them would speak on the parent's connections
        self._keyed = {}

    def export(self, spans: Sequence[Any]) -> Any:
        """One request for each key; a failure where one of them failed."""
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
        """Nothing is held here."""
        return True


def headers_of_its_own() -> bool:
    """Whether the environment has headers for telemetry: a key of the service's own, or what another receiver asks for."""
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}HEADERS") for signal in ("", "TRACES_", "LOGS_"))
