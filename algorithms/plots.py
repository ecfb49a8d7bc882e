"""Plot the figures of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agl_otel.algorithms.validation import VAL_REWARD, is_validation
from agl_otel.types import TrainingStep

_PANELS: Final = (
    ("reward", ("reward_mean", "best_score", VAL_REWARD)),
    ("refused", ("refused",)),
    ("tokens", ("tokens", "editor_tokens")),
)
"""Panels from top to bottom: (title, metrics); an algorithm may have only some of the metrics."""


def curves(steps: Sequence[TrainingStep]) -> dict[str, dict[str, Mapping[int, float]]]:
    """Return {panel: {metric: {step: value}}}, without metrics that no step has."""
    rows = [{**step.metrics, **({} if is_validation(step.metrics) else {"refused": step.refused})} for step in steps]
    found = {
        name: {
            metric: {step.step: row[metric] for step, row in zip(steps, rows, strict=True) if row.get(metric) is not None}
            for metric in metrics
        }
        for name, metrics in _PANELS
    }
    return {name: {metric: values for metric, values in metrics.items() if values} for name, metrics in found.items()}


def draw(steps: Sequence[TrainingStep], path: Path, *, title: str) -> Path:
    """Write a PNG of reward, refused samples and tokens by step, atomically; return the path."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7, 7), layout="constrained")
    panels = curves(steps)
    for axes, (name, metrics) in zip(figure.subplots(len(panels), sharex=True), panels.items(), strict=True):
        for metric, values in metrics.items():
            axes.plot([*values], [*values.values()], marker=".", label=metric)
        axes.set(ylabel=name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.suptitle(title)
    figure.supxlabel("step")
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=110, format="png")
    beside.replace(path)
    return path
