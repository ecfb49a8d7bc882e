"""A service's own metrics as plain numbers: what is counted and how long things took, told as Prometheus' text when somebody asks.

For services that must start quickly and whose calls are many: OpenTelemetry's SDK takes half a second to import and some microseconds
for each number. Names are OpenTelemetry's (dots), of Agent Lightning 0.3 where it had them; Prometheus writes underscores.
Used in one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal

from agl_otel.telemetry.exposition import Durations, Family, Sample, text_of

BOUNDS_SECONDS: Final = (*(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)), 100.0, 200.0, 300.0)
"""Of the buckets: 1 µs to 300 s, as in 0.3."""


class Meters:
    """What a service tells. Make each instrument once; label values must come from a small set, never from what callers send."""

    def __init__(self) -> None:
        self._told: list[Callable[[], Family]] = []

    def counter(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """A counter; call what is given with the labels' values for each thing that happens."""
        counts: Counter[tuple[str, ...]] = Counter()
        self.gauge(name, about, lambda: ((dict(zip(labels, key, strict=True)), count) for key, count in counts.items()), kind="counter")

        def count(*values: str) -> None:
            counts[values] += 1

        return count

    def durations(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """A histogram of seconds; call what is given with the seconds, then the labels' values."""
        found: dict[tuple[str, ...], Durations] = {}
        self._told.append(
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
        """What `read` says at the moment when somebody asks."""
        self._told.append(lambda: Family(name, kind, about, list(read())))

    def families(self) -> list[Family]:
        """All of it, as of now."""
        return [tell() for tell in self._told]

    def text(self) -> str:
        """All of it in Prometheus' text format."""
        return text_of(self.families())
