"""Metrics as Prometheus reads them: https://prometheus.io/docs/instrumenting/exposition_formats. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Sample = tuple[Mapping[str, str], float]
"""(labels, value)."""


def metric_lines(name: str, kind: str, about: str, samples: Iterable[Sample]) -> list[str]:
    """One metric: what it is, then a line for each sample."""
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *(f"{name}{_labels(labels)} {value}" for labels, value in samples)]


def _labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
