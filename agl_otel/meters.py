"""A service's own metrics as plain numbers: what is counted and how long things took, told as Prometheus' text when somebody asks.

For services that must start quickly and whose calls are many: OpenTelemetry's SDK takes half a second to import and some microseconds
for each number. Names are OpenTelemetry's (dots), of Agent Lightning 0.3 where it had them; Prometheus writes underscores.
Used in one thread.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from agl_otel.exposition import Sample, head_lines, metric_lines, sample_line

if TYPE_CHECKING:
    from agl_otel.settings import Settings

BOUNDS_SECONDS: Final = (*(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)), 100.0, 200.0, 300.0)
"""Of the buckets: 1 µs to 300 s, as in 0.3."""


class Meters:
    """What a service tells. Make each instrument once; label values must come from a small set, never from what callers send."""

    def __init__(self) -> None:
        self._told: list[Callable[[], list[str]]] = []

    def counter(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """A counter; call what is given with the labels' values for each thing that happens."""
        counts: Counter[tuple[str, ...]] = Counter()
        self.gauge(name, about, lambda: ((dict(zip(labels, key, strict=True)), count) for key, count in counts.items()), kind="counter")

        def count(*values: str) -> None:
            counts[values] += 1

        return count

    def durations(self, name: str, about: str, *labels: str) -> Callable[..., None]:
        """A histogram of seconds; call what is given with the seconds, then the labels' values."""
        found: dict[tuple[str, ...], _Durations] = {}
        self._told.append(lambda: _histogram(_prometheus(name), about, labels, found))

        def observe(seconds: float, *values: str) -> None:
            durations = found.get(values)
            if durations is None:
                durations = found[values] = _Durations()
            durations.seconds += seconds
            durations.buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

        return observe

    def gauge(self, name: str, about: str, read: Callable[[], Iterable[Sample]], *, kind: str = "gauge") -> None:
        """What `read` says at the moment when somebody asks."""
        self._told.append(lambda: metric_lines(_prometheus(name), kind, about, read()))

    def text(self) -> str:
        """All of it in Prometheus' text format."""
        return "".join(f"{line}\n" for tell in self._told for line in tell())


def served(meters: Meters, settings: Settings, port: int, setting: str) -> contextlib.AbstractAsyncContextManager[None]:
    """As metrics_http.metrics_port; where `port` is 0 on none, and then no HTTP server is imported."""
    if not port:
        return contextlib.nullcontext()
    from agl_otel.metrics_http import metrics_port

    return metrics_port(meters, settings, port, setting)


class _Durations:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_SECONDS) + 1)


def _histogram(name: str, about: str, labels: tuple[str, ...], found: dict[tuple[str, ...], _Durations]) -> list[str]:
    lines = head_lines(name, "histogram", about)
    for values, durations in found.items():
        own = dict(zip(labels, values, strict=True))
        reached = list(accumulate(durations.buckets))
        for bound, count in zip((*map(str, BOUNDS_SECONDS), "+Inf"), reached, strict=True):
            lines.append(sample_line(f"{name}_bucket", own | {"le": bound}, count))
        lines += [sample_line(f"{name}_sum", own, durations.seconds), sample_line(f"{name}_count", own, reached[-1])]
    return lines


def _prometheus(name: str) -> str:
    return name.replace(".", "_")
