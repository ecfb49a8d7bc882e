"""Plot the reward curve of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot_rewards(rewards: Sequence[float], path: Path, *, title: str) -> Path:
    """Write a PNG with the mean reward of each step and its running mean over ten steps; return the path."""
    from matplotlib.figure import Figure  # slow to import, and only needed at the end of a run

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="#9ab", linewidth=1, label="step")
    axes.plot(
        steps, [sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))], label="mean of ten"
    )
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)
    return path
