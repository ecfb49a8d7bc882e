"""A service's own metrics: instruments of plain numbers, and what they hold when somebody asks.

They are read by exposition.py (prometheus_client, for /metrics) and push.py (OpenTelemetry's exporter), both imported where they are asked
for. Counting is on the way of every call: here it costs a third of what prometheus_client's own instruments do, and neither library is
needed to start. Names are OpenTelemetry's (dots), of Agent Lightning 0.3 where it had them; Prometheus has underscores.
Used in one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

BOUNDS_SECONDS: Final = (*(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)), 100.0, 200.0, 300.0)
"""Of the buckets: 1 µs to 300 s, as in 0.3."""


Sample = tuple[Mapping[str, str], float]
"""(labels, value)."""


@dataclass
class Durations:
    """How long things took."""

    bounds: Sequence[float]
    """Upper bounds of the buckets but the last, in seconds."""
    buckets: list[int]
    """How many fell into each, one more than bounds."""
    seconds: float = 0.0
    """The sum."""


@dataclass(frozen=True)
class Family:
    """One metric of a service, as of now."""

    name: str
    """With dots; that of a counter ends with `.total`."""
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    samples: Sequence[Sample] = ()
    durations: Sequence[tuple[Mapping[str, str], Durations]] = ()
    """Of a histogram, instead of samples."""


class Meters:
    """The instruments of a service. Make each instrument once; label values must come from a small set, never from what callers send."""

    def __init__(self) -> None:
        self._reads: list[Callable[[], Family]] = []

    def counter(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """A counter; call the result with the labels' values for each thing that happens."""
        counts: Counter[tuple[str, ...]] = Counter()
        self.gauge(name, about, lambda: ((dict(zip(labels, key, strict=True)), count) for key, count in counts.items()), kind="counter")

        def count(*values: str) -> None:
            counts[values] += 1

        return count

    def durations(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """A histogram of seconds; call the result with the seconds, then the labels' values."""
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
        """What `read` gives at the moment when somebody asks."""
        self._reads.append(lambda: Family(name, kind, about, list(read())))

    def families(self) -> list[Family]:
        """All of it, as of now."""
        return [read() for read in self._reads]

    def text(self) -> str:
        """All of it in Prometheus' text format."""
        from agl_otel.telemetry.exposition import text_of

        return text_of(self.families())
