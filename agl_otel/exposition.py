"""Metrics as Prometheus reads them: https://prometheus.io/docs/instrumenting/exposition_formats. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

Sample = tuple[Mapping[str, str], float]
"""(labels, value)."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def metric_lines(name: str, kind: str, about: str, samples: Iterable[Sample]) -> list[str]:
    """One metric: what it is, then a line for each sample."""
    return [*head_lines(name, kind, about), *(sample_line(name, labels, value) for labels, value in samples)]


def head_lines(name: str, kind: str, about: str) -> list[str]:
    """What a metric is."""
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    """One sample."""
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
