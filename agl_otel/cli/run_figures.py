"""Figures of `agl-otel runs`, computed from the data of runs. Pure: no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from agl_otel.adapters.cycles import Cycle, cycles_of
from agl_otel.adapters.losses import CUT, LOSSES, lost, recorded_losses, refused_in
from agl_otel.algorithms.run_folder import OTHER_CODE, other_code
from agl_otel.algorithms.run_result import RunResult
from agl_otel.algorithms.validation import ScoredWeights, Validation, best_of
from agl_otel.errors import UsageError
from agl_otel.traces.figures import Curve, CurvePoint
from agl_otel.types import Run, TrainingRun, TrainingStage, TrainingStep
from agl_otel.types.scores import Score

REWARDS: Final = ("reward", "val_reward")
"""Metrics of every run with rewards, by step.

The score of the ended rollouts, as everywhere (types/scores.py): a missing reward counts as 0. val_reward is that of mode val, by the step
whose weights were validated (0: before the training), reward that of all other modes, without `test` where there are others.
"""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDEST: Final = 60  # characters of a sparkline


@dataclass(frozen=True)
class RunReport:
    """The data of one run from the queue, the trace store and its folder."""

    run_id: str
    run: Run | None
    steps: Sequence[TrainingStep]
    curve: Curve
    verdicts: Mapping[str, int]
    """{verdict: count} of the rollouts that ended last."""
    alarms: int
    configuration: Mapping[str, Any] | None
    """Options by name, those of a nested table as `outer.inner`; None if the run's folder was not given."""
    validations: Sequence[Validation] = ()
    """Those in the run's folder."""
    result: RunResult | None = None
    """What the run made; None if it has nothing yet, or its folder was not given."""
    training: TrainingRun | None = None
    """None if the trace store does not know the run."""
    forced: Sequence[Mapping[str, Any]] = ()
    """That of run.json (run_folder.py), if the run's folder was given."""
    stages: Sequence[TrainingStage] = ()
    """Those of its steps, as far as they are."""

    @property
    def algorithm(self) -> str:
        """Its name; empty if it is unknown."""
        return self.training.algorithm if self.training else ""

    @property
    def outcome(self) -> str:
        """TrainingRun.outcome; empty if it is unknown."""
        return self.training.outcome if self.training else ""

    @property
    def cycles(self) -> list[Cycle]:
        """Those of a run of `improve`."""
        return cycles_of(self.steps, self.stages)

    @property
    def start_time(self) -> float:
        """Unix seconds at which its first rollout or step started; of a run that ended before either, at which it began."""
        started = [*([self.run.start_time] if self.run else []), *(step.start_time for step in self.steps)]
        return min(started, default=self.training.start_time if self.training else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds from `start_time` to the last end of a rollout or step."""
        ends = [*([self.run.end_time] if self.run and self.run.end_time else []), *(step.end_time for step in self.steps)]
        return max(0.0, max(ends, default=self.start_time) - self.start_time)

    def series(self) -> dict[str, dict[int, float]]:
        """Return {metric: {step: value}} of the steps that were made: REWARDS, tokens, and the metrics that the algorithm recorded."""
        found: dict[str, dict[int, float]] = {name: {} for name in REWARDS}
        made = [point for point in self.curve.points if point.made]
        modes = {point.mode for point in made} - {"val"}
        rewarded = modes - {"test"} or modes
        for name, of_modes in zip(REWARDS, (rewarded, {"val"}), strict=True):
            of_step: dict[int, list[CurvePoint]] = {}
            for point in made:
                if point.mode in of_modes and (point.ended if point.mode == "val" else point.rewarded):
                    of_step.setdefault(point.step, []).append(point)
            for step, points in of_step.items():
                found[name][step] = Score.joined(point.score for point in points).mean
        for point in made:
            tokens = found.setdefault("tokens", {})
            tokens[point.step] = tokens.get(point.step, 0) + point.prompt_tokens + point.response_tokens
        for step in self.steps:
            for name, value in step.metrics.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    found.setdefault(name, {})[step.step] = value
        return {name: values for name, values in found.items() if values}

    def best_validation(self) -> ScoredWeights | None:
        """Return the best validation after a step, the earliest of equal ones; None where there is none.

        Its weights are known if the run's folder was given.
        """
        if (best := best_of(self.validations)) is not None:
            return best.scored_weights
        scores = self.series().get("val_reward", {}) if self.curve.by == "step" else {}
        step = max((step for step in scores if step > 0), key=lambda step: (scores[step], -step), default=None)
        return None if step is None else ScoredWeights(step, scores[step], None)

    def best_described(self) -> str | None:
        """Return the best validation in words, with the score before the training where it is not above that; None if there is none."""
        if (best := self.best_validation()) is None:
            return None
        recorded = {each.step: each.score for each in self.validations} or self.series().get("val_reward", {})
        return best.described(recorded.get(0))

    def lost(self) -> str:
        """Return what all steps lost, in words."""
        refused: Counter[str] = Counter()
        for step in self.steps:
            refused.update(refused_in(step.metrics))
        counts = {name: sum(step.metrics.get(name) or 0 for step in self.steps) for name in ("rollouts", *LOSSES)}
        return lost(counts, refused)

    def losses(self) -> dict[int, str]:
        """Return {step: what it lost, in words} of the steps that lost something."""
        found = {step.step: recorded_losses(step.metrics) for step in self.steps}
        return {step: words for step, words in found.items() if words}

    def other_code(self) -> dict[int, str]:
        """Return {number of steps done before: the code since then} where the run was resumed with other code than it was begun with.

        An algorithm of one's own may have recorded no steps: then it is that of the run's folder.
        """
        named = [step.metrics.get(OTHER_CODE, "") for step in self.steps]
        if not any(named):
            return {each["step"]: other_code(self.forced, each["step"] + 1) for each in self.forced}
        return {done: name for done, (before, name) in enumerate(pairwise(["", *named])) if name != before}

    def totals(self) -> dict[str, Any]:
        """Return sums over the run, and the last and best step's mean reward."""
        validation = [point for point in self.curve.points if point.mode == "val"]
        rewards = self.series().get("reward") or self.series().get("reward_mean") or {}
        return {
            "prompt_tokens": sum(point.prompt_tokens for point in self.curve.points),
            "response_tokens": sum(point.response_tokens for point in self.curve.points),
            "spans": sum(point.spans for point in self.curve.points),
            "errors": sum(point.errors for point in self.curve.points),
            "validated": sum(point.ended for point in validation),
            "validated_without_reward": sum(point.ended - point.rewarded for point in validation),
            **{name: int(sum(self.series().get(name, {}).values())) for name in (*LOSSES, CUT)},
            "last_reward": round(rewards[max(rewards)], 6) if rewards else None,
            "best_reward": round(max(rewards.values()), 6) if rewards else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "run_id": self.run_id,
            "rollouts": self.run.model_dump() if self.run else None,
            "verdicts": {**self.verdicts},
            "alarms": self.alarms,
            "outcome": self.outcome,
            "totals": self.totals(),
            "by": self.curve.by,
            "metrics": self.series(),
            "best_validation": asdict(best) if (best := self.best_validation()) is not None else None,
            "result": self.result.as_json() if self.result is not None else None,
            "losses": self.losses(),
            "other_code": self.other_code(),
            "cycles": [cycle.model_dump() for cycle in self.cycles],
            "versions": {step.step: step.version_after for step in self.steps},
            "start_time": self.start_time,
            "seconds": self.seconds,
            "configuration": None if self.configuration is None else {**self.configuration},
        }


def chosen_metrics(reports: Sequence[RunReport], requested: Sequence[str]) -> list[str]:
    """Return the metrics to show: the requested ones, else rewards of rollouts, else the steps' own mean rewards.

    Raises UsageError for a metric that no run has.
    """
    known = {name for report in reports for name in report.series()}
    for name in requested:
        if name not in known:
            raise UsageError(f"no run has a metric {name!r}: there are {', '.join(sorted(known)) or 'none'}")
    return [*dict.fromkeys(requested)] or [name for name in (*REWARDS, "reward_mean") if name in known][:2]


def differences(reports: Sequence[RunReport]) -> dict[str, list[Any]]:
    """Return {option: its value in each run} for options that differ between runs of known configuration; None for an absent option."""
    configured = [report.configuration for report in reports if report.configuration is not None]
    names = sorted({name for each in configured for name in each})
    return {
        name: [None if report.configuration is None else report.configuration.get(name) for report in reports]
        for name in names
        if any(each.get(name) != configured[0].get(name) for each in configured)
    }


def cost_of(report: RunReport, price: tuple[float, float] | None) -> float | None:
    """Compute the cost of the tokens recorded by the proxy, at prices per million (prompt, response) tokens; None without prices."""
    if price is None:
        return None
    totals = report.totals()
    return (totals["prompt_tokens"] * price[0] + totals["response_tokens"] * price[1]) / 1e6


def thinned(steps: Sequence[int], points: int, *, keep: Collection[int] = ()) -> list[int]:
    """Return `points` of the steps, evenly spaced, including the first and the last, and those to `keep` besides; all if these are few."""
    if len(steps) <= points:
        return [*steps]
    spaced = {steps[round(place * (len(steps) - 1) / (points - 1))] for place in range(points)}
    return [step for step in steps if step in spaced or step in keep]


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve as one line of text."""
    shown = [values[place] for place in thinned(range(len(values)), _WIDEST)]
    low, high = min(shown), max(shown)
    return "".join(_BLOCKS[int((value - low) / (high - low) * (len(_BLOCKS) - 1)) if high > low else 0] for value in shown)
