"""Refused requests: their number by reason and transport, and a line in the log. Also that line for items refused alone.

Any client can cause as many as it likes, so each reason logs one line a minute at most, of bounded length.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal

from agl_otel.errors import AglError, CrowdedError, DataError, EncodingError, SwitchedOffError, TooLargeError, UnavailableError, UsageError
from agl_otel.text import printable

Reason = Literal[
    "unauthorized",
    "forbidden",
    "unknown_path",
    "other_protocol",
    "content_type",
    "encoding",
    "too_large",
    "malformed",
    "crowded",
    "unavailable",
    "switched_off",
]
Transport = Literal["http", "grpc"]
QUIET_SECONDS: Final = 60.0
MAX_CHARACTERS: Final = 300
_REASONS: Final[tuple[tuple[type[AglError], Reason], ...]] = (  # the most specific first
    (TooLargeError, "too_large"),
    (EncodingError, "encoding"),
    (CrowdedError, "crowded"),
    (DataError, "malformed"),
    (UsageError, "malformed"),
    (UnavailableError, "unavailable"),
    (SwitchedOffError, "switched_off"),
)
_MAGIC: Final = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_logger = logging.getLogger(__name__)


def hint(body: bytes, *, as_json: bool = False) -> str:
    """Return what to add to the refusal of a body that is no OTLP: the header that it lacks, by its first bytes; mostly empty.

    `as_json`: it came as JSON.
    """
    for name, start in _MAGIC.items():
        if body.startswith(start):
            return f"; it begins like {name}: send Content-Encoding: {name}"
    looks_like_json = not as_json and body[:16].lstrip().startswith(b"{")
    return "; it begins like JSON: send Content-Type: application/json" if looks_like_json else ""


def reason_of(error: AglError) -> Reason | None:
    """Return the reason that a refusal with this error counts for; None: it is not counted."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)


class Refusals:
    """Counts and logs the refused requests of a collector. It is not thread-safe: both transports call it on the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[tuple[Reason, Transport]] = Counter()
        self._clock = clock
        self._unlogged: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def add(self, transport: Transport, reason: Reason, message: str) -> None:
        """Count a request, and log it with those since the last line of its reason; `message` is the client's answer."""
        self.counts[reason, transport] += 1
        if count := self._due(reason, 1):
            _logger.warning("refused %d request%s (%s), the last over %s: %s", count, _s(count), reason, transport, _shown(message))

    def add_items(self, signal: str, rejected: int, message: str) -> None:
        """Log items of an accepted request that were refused, with those since the last line of their signal; the intake counts them."""
        if count := self._due(signal, rejected):
            _logger.warning("refused %d item%s of %s in accepted requests, the last: %s", count, _s(count), signal, _shown(message))

    def _due(self, key: str, more: int) -> int:
        """Return how many a line about `key` is to report now; 0: none is due."""
        self._unlogged[key] += more
        now = self._clock()
        if now < self._quiet_until.get(key, now):
            return 0
        self._quiet_until[key] = now + QUIET_SECONDS
        return self._unlogged.pop(key)

    def add_error(self, transport: Transport, error: AglError) -> None:
        """Count a request that is refused with this error."""
        if (reason := reason_of(error)) is not None:
            self.add(transport, reason, str(error))


def _shown(message: str) -> str:
    return printable(message[:MAX_CHARACTERS].strip())


def _s(count: int) -> str:
    return "" if count == 1 else "s"
