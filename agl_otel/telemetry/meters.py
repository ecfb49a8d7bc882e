"""A service's own metrics: instruments that hold plain numbers, read on request.

exposition.py (prometheus_client, for /metrics) and push.py (OpenTelemetry's exporter) read them; both are imported on use. Counting is
part of every call: it costs a third of prometheus_client's own instruments, and a start needs neither library. Names have dots, as in
OpenTelemetry, and are Agent Lightning 0.3's where it had them; Prometheus shows underscores. For use in one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

BOUNDS_SECONDS: Final = (*(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)), 100.0, 200.0, 300.0)
"""Upper bounds of the buckets: 1 µs to 300 s, as in 0.3."""


Sample = tuple[Mapping[str, str], float]
"""(labels, value)."""


@dataclass
class Durations:
    """A histogram of durations."""

    bounds: Sequence[float]
    """Upper bounds of all buckets but the last, in seconds."""
    buckets: list[int]
    """The count of each bucket, one more than `bounds`."""
    seconds: float = 0.0
    """The sum of the durations."""


@dataclass(frozen=True)
class Family:
    """The current state of one metric."""

    name: str
    """With dots; a counter's name ends with `.total`."""
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    samples: Sequence[Sample] = ()
    durations: Sequence[tuple[Mapping[str, str], Durations]] = ()
    """The values of a histogram, which has no samples."""


class Meters:
    """The instruments of a service. Make each instrument once; label values must come from a small fixed set, never from callers."""

    def __init__(self) -> None:
        self._reads: list[Callable[[], Family]] = []

    def counter(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """Make a counter; call the result with the labels' values for each event."""
        counts: Counter[tuple[str, ...]] = Counter()
        self.gauge(name, about, lambda: ((dict(zip(labels, key, strict=True)), count) for key, count in counts.items()), kind="counter")

        def count(*values: str) -> None:
            counts[values] += 1

        return count

    def durations(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """Make a histogram of seconds; call the result with the seconds, then the labels' values."""
        found: dict[tuple[str, ...], Durations] = {}
        self._reads.append(
            lambda: Family(name, "histogram", about, durations=[(dict(zip(labels, key, strict=True)), each) for key, each in found.items()])
        )

        def observe(seconds: float, *values: str) -> None:
            durations = found.get(values)
            if durations is None:
                durations = found[values] = Durations(BOUNDS_SECONDS, [0] * (len(BOUNDS_SECONDS) + 1))
            durations.seconds += seconds
            durations.buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

        return observe

    def gauge(self, name: str, about: str, read: Callable[[], Iterable[Sample]], *, kind: Literal["counter", "gauge"] = "gauge") -> None:
        """Make a gauge, whose value is `read()` at the time of a request."""
        self._reads.append(lambda: Family(name, kind, about, list(read())))

    def families(self) -> list[Family]:
        """Return the current state of all metrics."""
        return [read() for read in self._reads]

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        from agl_otel.telemetry.exposition import text_of

        return text_of(self.families())
