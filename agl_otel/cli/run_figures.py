"""What `agl-otel runs` works out of what it has read of runs. Pure: no store, no terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.errors import UsageError
from agl_otel.traces.figures import Curve, CurvePoint
from agl_otel.types import Run, TrainingStep

REWARDS: Final = ("reward", "val_reward")
"""Metrics of every run that has rewards: means over the rollouts of a step, apart for mode val."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDEST: Final = 60  # characters of a sparkline


@dataclass(frozen=True)
class Look:
    """One run, as both stores and its folder tell of it."""

    run_id: str
    run: Run | None
    steps: Sequence[TrainingStep]
    curve: Curve
    verdicts: Mapping[str, int]
    """Of the rollouts that ended last."""
    alarms: int
    configuration: Mapping[str, Any] | None
    """Options by name, those of an inner table as `outer.inner`; None where its folder was not given."""

    @property
    def start_time(self) -> float:
        """Unix seconds of its first rollout or step."""
        return min([*([self.run.start_time] if self.run else []), *(step.start_time for step in self.steps)])

    @property
    def seconds(self) -> float:
        """From there to the end of the last that has ended."""
        ends = [*([self.run.end_time] if self.run and self.run.end_time else []), *(step.end_time for step in self.steps)]
        return max(0.0, max(ends, default=self.start_time) - self.start_time)

    def series(self) -> dict[str, dict[int, float]]:
        """{metric: {step: value}}: REWARDS, tokens, and whatever numbers the algorithm told of its steps."""
        found: dict[str, dict[int, float]] = {name: {} for name in REWARDS}
        for name, validates in zip(REWARDS, (False, True), strict=True):
            of_step: dict[int, list[CurvePoint]] = {}
            for point in self.curve.points:
                if (point.mode == "val") == validates and point.rewarded and point.reward_mean is not None:
                    of_step.setdefault(point.step, []).append(point)
            for step, points in of_step.items():
                weights = sum(point.rewarded for point in points)
                found[name][step] = sum((point.reward_mean or 0.0) * point.rewarded for point in points) / weights
        for point in self.curve.points:
            tokens = found.setdefault("tokens", {})
            tokens[point.step] = tokens.get(point.step, 0) + point.prompt_tokens + point.response_tokens
        for step in self.steps:
            for name, value in step.metrics.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    found.setdefault(name, {})[step.step] = value
        return {name: values for name, values in found.items() if values}

    def totals(self) -> dict[str, Any]:
        """Sums over the run, and its last and best mean reward of a step."""
        rewards = self.series().get("reward") or self.series().get("reward_mean") or {}
        return {
            "prompt_tokens": sum(point.prompt_tokens for point in self.curve.points),
            "response_tokens": sum(point.response_tokens for point in self.curve.points),
            "spans": sum(point.spans for point in self.curve.points),
            "errors": sum(point.errors for point in self.curve.points),
            "last_reward": round(rewards[max(rewards)], 6) if rewards else None,
            "best_reward": round(max(rewards.values()), 6) if rewards else None,
        }

    def told(self) -> dict[str, Any]:
        """All of it, as one JSON object."""
        return {
            "run_id": self.run_id,
            "rollouts": self.run.model_dump() if self.run else None,
            "verdicts": {**self.verdicts},
            "alarms": self.alarms,
            "totals": self.totals(),
            "by": self.curve.by,
            "metrics": self.series(),
            "versions": {step.step: step.version_after for step in self.steps},
            "start_time": self.start_time,
            "seconds": self.seconds,
            "configuration": None if self.configuration is None else {**self.configuration},
        }


def chosen_metrics(looks: Sequence[Look], asked: Sequence[str]) -> list[str]:
    """The metrics to show; unless told, the rewards of rollouts, else the mean rewards that steps told.

    Raises UsageError for one that no run has.
    """
    known = {name for look in looks for name in look.series()}
    for name in asked:
        if name not in known:
            raise UsageError(f"no run has a metric {name!r}: there are {', '.join(sorted(known)) or 'none'}")
    return [*dict.fromkeys(asked)] or [name for name in (*REWARDS, "reward_mean") if name in known][:2]


def differences(looks: Sequence[Look]) -> dict[str, list[Any]]:
    """{option: its value in each run} of those that differ between the runs whose configuration is at hand; None where one has it not."""
    at_hand = [look.configuration for look in looks if look.configuration is not None]
    names = sorted({name for each in at_hand for name in each})
    return {
        name: [None if look.configuration is None else look.configuration.get(name) for look in looks]
        for name in names
        if any(each.get(name) != at_hand[0].get(name) for each in at_hand)
    }


def cost_of(look: Look, price: tuple[float, float] | None) -> float | None:
    """What its tokens cost at these prices of a million prompt and response tokens. Tokens are those that our proxy recorded."""
    if price is None:
        return None
    totals = look.totals()
    return (totals["prompt_tokens"] * price[0] + totals["response_tokens"] * price[1]) / 1e6


def thinned(steps: Sequence[int], points: int) -> list[int]:
    """At most so many of them, evenly, the first and the last always."""
    if len(steps) <= points:
        return [*steps]
    return [steps[round(place * (len(steps) - 1) / (points - 1))] for place in range(points)]


def sparkline(values: Sequence[float]) -> str:
    """A curve as one line of text."""
    shown = [values[place] for place in thinned(range(len(values)), _WIDEST)]
    low, high = min(shown), max(shown)
    return "".join(_BLOCKS[int((value - low) / (high - low) * (len(_BLOCKS) - 1)) if high > low else 0] for value in shown)
