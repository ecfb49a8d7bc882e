"""Plot the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agl_otel.types import TrainingStep

_PANELS: Final = (
    ("reward", ("reward_mean", "best_score")),
    ("refused", ("refused",)),
    ("tokens", ("tokens", "editor_tokens")),
)
"""Panels from top to bottom: (title, metrics); an algorithm may have only some of the metrics."""


def draw(steps: Sequence[TrainingStep], path: Path, *, title: str) -> Path:
    """Write a PNG of reward, refused samples and tokens by step, atomically; return the path."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7, 7), layout="constrained")
    numbers = [step.step for step in steps]
    for axes, (name, metrics) in zip(figure.subplots(len(_PANELS), sharex=True), _PANELS, strict=True):
        for metric in metrics:
            values = [step.refused if metric == "refused" else step.metrics.get(metric) for step in steps]
            if any(value is not None for value in values):
                axes.plot(numbers, [float("nan") if value is None else value for value in values], marker=".", label=metric)
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
