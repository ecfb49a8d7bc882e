"""Metrics of a service, and how Prometheus reads them: https://prometheus.io/docs/instrumenting/exposition_formats. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

Sample = tuple[Mapping[str, str], float]
"""(labels, value)."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


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
    """One metric of a service, as of now. Names are OpenTelemetry's (dots); Prometheus writes underscores."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    samples: Sequence[Sample] = ()
    durations: Sequence[tuple[Mapping[str, str], Durations]] = ()
    """Of a histogram, instead of samples."""

    def lines(self) -> list[str]:
        """What it is, then a line for each sample."""
        name = self.name.replace(".", "_")
        lines = [f"# HELP {name} {self.about}", f"# TYPE {name} {self.kind}"]
        lines += [_line(name, labels, value) for labels, value in self.samples]
        for labels, found in self.durations:
            reached = list(accumulate(found.buckets))
            for bound, count in zip((*map(str, found.bounds), "+Inf"), reached, strict=True):
                lines.append(_line(f"{name}_bucket", {**labels, "le": bound}, count))
            lines += [_line(f"{name}_sum", labels, found.seconds), _line(f"{name}_count", labels, reached[-1])]
        return lines


def text_of(families: Iterable[Family]) -> str:
    """A page of them."""
    return "".join(f"{line}\n" for family in families for line in family.lines())


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    return f"{name}{_labels(labels)} {value}"


def merged(pages: Mapping[str, str], label: str) -> str:
    """One page of several services of a kind: {the service: its page}, told apart by `label`; each metric is described once."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # {name: (what it is, samples)}
    for service, page in pages.items():
        own = _labels({label: service})[1:-1]
        family: tuple[list[str], list[str]] = families.setdefault("", ([], []))
        for line in page.splitlines():
            if line.startswith("# "):
                heads, _ = family = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in heads:
                    heads.append(line)
            elif line:
                family[1].append(_with_label(line, own))
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))


def _with_label(line: str, own: str) -> str:
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{own},{rest}"
    name, _, rest = line.partition(" ")
    return f"{name}{{{own}}} {rest}"


def _labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
