"""The cycles of `agl-otel improve`, read back from the training steps that record them, and one under way from its stages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agl_otel.adapters.gates import ALARMS, REFUSALS
from agl_otel.traces.steps import span_id_of, trace_id_of
from agl_otel.types import Model, TrainingStage, TrainingStep

IMPROVE: Final = "improve"
"""The algorithm of a run whose steps are cycles."""
CANARY_STEP: Final = "canary "
"""Prefix of the name of a stage that is a step of a canary: `canary 1`."""
WAITS: Final = "waits"
"""The figure of a stage that is under way: what it waits for, for people. One that has ended has none."""
SILENT_SECONDS: Final = 180.0
"""A run that is under way and has told nothing for so long may have been killed; it tells each minute at least."""
_NEXT: Final = {"window": "update", "update": "gate", "gate": "canary", "canary": "verdict"}


class Reason(Model):
    """Why what a cycle made was not promoted."""

    key: str
    """Of gates.REFUSALS."""
    text: str
    alarm: bool
    """Whether it speaks of a reward that is exploited."""


class Cycle(Model):
    """One cycle: from the attempts that it learnt from to its verdict. What it did not come to is None, or empty."""

    cycle: int
    verdict: str
    """promoted, rolled_back (after a canary), or refused (by the gate); empty while it is under way."""
    stage: str = ""
    """The stage that is under way; empty where it has its verdict."""
    waits: str = ""
    """What that stage waits for, for people."""
    stage_began: float | None = None
    """When that stage began, or the step of the canary, in Unix seconds."""
    reasons: list[Reason]
    start_time: float
    end_time: float
    """Unix seconds; while it is under way, of what was told last."""
    resources_id: str
    """The set by which the product's users are served."""
    version_before: str
    version_after: str
    attempts: int
    """Of its window, as far as they had stored spans; their ids are in TrainingStep.attempts. While it is under way: of its window."""
    unlinked: int
    """Further ones, that had none."""
    selection: str
    """The window as a selection, NAME@VERSION."""
    training_run: str
    """The run that trained on it, or that searched for prompts by it."""
    samples: int
    trace_id: str
    span_id: str
    """Of the cycle's span; its stages are below it."""
    held_out_before: float | None
    held_out_after: float | None
    """Mean rewards on the held-out tasks."""
    held_out_gain_low: float | None
    held_out_gain_high: float | None
    """95 % interval of the gain."""
    drift: float | None
    """gates.divergence; None where it is not known, as of prompts."""
    backtest_gain: float | None
    backtest_verdict: str
    trusted_gain: float | None
    trusted_verdict: str
    """Of the back-test by trusted rewards."""
    canary_share: float | None
    """Of the conversations."""
    canary_begun: int | None
    canary_rated: int | None
    """Conversations that it answered, and those of them with a reward."""
    canary_mean: float | None
    canary_promoted_mean: float | None
    """Mean rewards of the canary, and of the promoted weights at the same time."""
    canary_promoted_rated: int | None
    """Conversations of the promoted weights with a reward at the same time."""


_SAME: Final = ("start_time", "end_time", "resources_id", "version_before", "version_after", "unlinked", "samples")
_NUMBERS: Final = [name for name, field in Cycle.model_fields.items() if field.annotation == float | None and name != "stage_began"]
_COUNTS: Final = [name for name, field in Cycle.model_fields.items() if field.annotation == int | None]
_TEXTS: Final = ("verdict", WAITS, "selection", "training_run", "backtest_verdict", "trusted_verdict")


def cycles_of(steps: Iterable[TrainingStep], stages: Iterable[TrainingStage] = ()) -> list[Cycle]:
    """Return the cycles of a run, the last one by its `stages` if it is under way; none if it is no run of `improve`."""
    found = [_cycle_of(step) for step in steps if step.algorithm == IMPROVE]
    ended = found[-1].cycle if found else 0
    begun = [stage for stage in stages if stage.algorithm == IMPROVE and stage.step == ended + 1]
    return [*found, _under_way(begun)] if begun else found


def _under_way(stages: Sequence[TrainingStage]) -> Cycle:
    """Return the cycle of these stages; those of an earlier try of it, whose folder was removed, count for nothing."""
    begun = max((stage.start_time for stage in stages if stage.name == "window"), default=stages[0].start_time)
    own = [stage for stage in stages if stage.start_time >= begun]
    first, last = own[0], own[-1]
    metrics: dict[str, Any] = {}
    for stage in own:
        if stage.name.startswith(CANARY_STEP):  # of each step its own
            metrics = {name: value for name, value in metrics.items() if not name.startswith("canary_")}
        metrics |= stage.metrics
    metrics[WAITS] = last.metrics.get(WAITS, "")
    serving = str(metrics.get("version") or "")
    step = TrainingStep(
        run_id=last.run_id,
        algorithm=last.algorithm,
        step=last.step,
        resources_id=last.resources_id,
        version_before=serving,
        version_after=str(metrics.get("canary_version") or serving),
        start_time=first.start_time,
        end_time=last.end_time,
        metrics=metrics,
    )
    name = "canary" if last.name.startswith(CANARY_STEP) else last.name
    under_way = WAITS in last.metrics or name != last.name
    found = {
        "stage": name if under_way else "verdict" if metrics.get("why") else _NEXT.get(name, name),
        "stage_began": last.start_time if under_way else last.end_time,
        "attempts": int(_number(metrics.get("attempts")) or 0),
    }
    return _cycle_of(step).model_copy(update=found)


def _cycle_of(step: TrainingStep) -> Cycle:
    found = {name: step.metrics.get(name) for name in (*_TEXTS, *_NUMBERS, *_COUNTS)}
    numbers = {name: _number(found[name]) for name in (*_NUMBERS, *_COUNTS)}
    return Cycle.model_validate(
        {
            **{name: str(found[name] or "") for name in _TEXTS},
            **numbers,
            **{name: None if (value := numbers[name]) is None else int(value) for name in _COUNTS},
            **{name: getattr(step, name) for name in _SAME},
            "cycle": step.step,
            "reasons": [_reason_of(key) for key in str(step.metrics.get("why") or "").split(", ") if key],
            "attempts": len(step.attempts),
            "trace_id": trace_id_of(step.run_id),
            "span_id": span_id_of(step.run_id, step.step),
        }
    )


def _reason_of(key: str) -> Reason:
    return Reason(key=key, text=REFUSALS.get(key, key), alarm=key in ALARMS)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
