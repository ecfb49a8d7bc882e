"""Reports of training steps: lines of metrics.jsonl, and the figures that alarms are computed from.

grpo/report.py and sft/report.py add the fields of their algorithms.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters import remedies
from agl_otel.adapters.losses import lost
from agl_otel.adapters.records import REASONS
from agl_otel.adapters.sampling import Assumed, several_choices_warning, unlike
from agl_otel.adapters.trajectories import TrajectoryBatch, final_reward
from agl_otel.algorithms.utils import failures_in, summarise
from agl_otel.types import AttemptedRollout
from agl_otel.types.columns import Traces
from agl_otel.types.scores import Score

_log: Final = logging.getLogger(__name__)
MANY_WITHOUT_SAMPLE: Final = 0.2
"""Share of a step's rollouts without a sample above which a warning is logged: what is trained on is then a selection by survival."""

NOT_FINITE_STEPS: Final = 3
"""A run of GRPO or verl ends after so many steps in a row whose loss or gradient is not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Results of one step of GRPO or one round of SFT."""

    step: int
    """1, 2, …"""
    weights_version: str
    """The version that sampled this step."""
    next_version: str
    """The version that it produced; the same where the weights were not updated."""
    reward_mean: float
    """The score (types/scores.py) of the step's rollouts, before any shuffling: those without a reward count as 0."""
    without_reward: int = 0
    """Of these rollouts: those without a reward, or that did not succeed."""
    rollouts: int
    model_calls: int
    """Model calls read, each counted once whatever its number of choices."""
    spans: int
    verdicts: dict[str, int]
    alarms: int
    """Attempts with the verdict unproven although their agents ran under the hook."""
    refused: dict[str, int]
    """Keys of adapters' ATTEMPT_REFUSALS, CALL_REFUSALS and LENGTH_REFUSALS, and `not_finished`."""
    breaks: dict[str, int]
    """Keys of adapters' SPLIT_REASONS."""
    trajectories: int
    """Trained on."""
    samples: int = 0
    """Trajectories that could be trained on."""
    rollouts_without_sample: int = 0
    """Rollouts without any such trajectory."""
    groups_gone: int = 0
    """Groups without any such trajectory."""
    cut: int = 0
    """Samples that length limits shortened."""
    replies_cut: int = 0
    """Replies read that ended at their token limit (finish reason `length`)."""
    tokens: int
    """Model-written tokens trained on, each counted once."""
    calls_trained: int = 0
    """(call, choice) rows of the trajectories trained on."""
    several_choices: int = 0
    """Of these rows: from calls with several choices (n > 1). The choice that the agent used is unknown: all get the attempt's reward."""
    own_sampling: int = 0
    """Model calls trained on that were sampled otherwise than the run's parameters say (adapters.sampling.unlike)."""
    differing: dict[str, int] = field(default_factory=dict[str, int])
    """{field: calls refused as `sampling_differs` that have another value of it than the run, or an unknown one}."""
    off_policy: int
    """Trajectories trained on that, by the model server's header, other weights than `weights_version` sampled."""
    loss: float
    rollout_seconds: float
    read_seconds: float
    update_seconds: float
    """Including the push of the new weights."""
    rollout_ids: list[str]
    """All rollouts of the step, group by group."""
    attempts: list[tuple[str, str]]
    """(rollout id, attempt id) of the attempts trained on."""
    started_at: float
    ended_at: float
    """Unix seconds."""
    digest: str
    """columns.Traces.digest of the traces read, including replaced groups (GRPO's resample_rounds)."""

    @classmethod
    def of(
        cls,
        step: int,
        versions: tuple[str, str],
        groups: Sequence[Sequence[str]],
        traces: Traces,
        batch: TrajectoryBatch,
        trained_on: TrajectoryBatch,
        clock: Clock,
        *,
        temperature: float | None,
        earlier: Sequence[TrainingReport],
        asked: bool = True,
        **more: Any,
    ) -> Self:
        """Build the report of a step.

        Args:
            step: number of the step.
            versions: of the weights, before and after.
            groups: ids of all rollouts of the step, in groups.
            traces: what was read.
            batch: the trajectories from `traces`.
            trained_on: the part of `batch` that was trained on.
            clock: with laps "rollout", "read" and "update".
            temperature: that agents were asked to use; None: not set. Calls with another one are logged as a warning.
            earlier: the reports of the run's earlier steps, which may have told what such calls are.
            asked: whether the step enqueued its rollouts; of others, those without a reward are left out of `reward_mean`.
            **more: tokens, loss, and the algorithm's own fields.
        """
        rollout_ids = [rollout_id for group in groups for rollout_id in group]
        score = step_score(traces, rollout_ids, asked=asked)
        rows = trained_on.rows.values.astype(np.int64)
        other, several = _count_unusual(traces, rows, step, temperature, earlier)
        if refused := batch.refused["sampling_differs"]:
            _log.warning("%s", differing_warning(step, refused, traces.calls.count, batch.differing))
        report = cls(
            step=step,
            weights_version=versions[0],
            next_version=versions[1],
            rollout_ids=rollout_ids,
            rollouts=len(rollout_ids),
            reward_mean=score.mean,
            without_reward=score.missing,
            calls_trained=len(rows),
            several_choices=several,
            own_sampling=other,
            differing=dict(batch.differing),
            **_fields_of_traces(traces),
            **_fields_of_samples(batch, groups),
            **_fields_of_training(trained_on, versions[0]),
            **_fields_of_time(clock),
            **more,
        )
        if report.rollouts_without_sample > MANY_WITHOUT_SAMPLE * report.rollouts:
            failures = failures_in(traces)
            _log.warning("%s", without_sample_warning(step, report.rollouts, report.rollouts_without_sample, report.losses, failures))
        return report

    @property
    def row(self) -> dict[str, Any]:
        """The step as a line of metrics.jsonl: all fields, and `figures`."""
        return {**self.figures, **asdict(self)}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Read what `row` has returned."""
        return cls(**{each.name: row[each.name] for each in fields(cls) if each.name in row})

    @property
    def seconds(self) -> float:
        """Seconds of work on the step."""
        return self.rollout_seconds + self.read_seconds + self.update_seconds

    @property
    def losses(self) -> str:
        """What the step lost, in words; empty where it lost nothing."""
        return lost(vars(self), self.refused)

    @property
    def figures(self) -> dict[str, float]:
        """`bias_figures`, the step and the mean reward."""
        return {
            "step": self.step,
            "reward_mean": self.reward_mean,
            **bias_figures(
                rollouts=self.rollouts,
                without_sample=self.rollouts_without_sample,
                samples=self.samples,
                trained=self.trajectories,
                refused=sum(self.refused.values()),
                cut=self.cut,
                breaks=sum(self.breaks.values()),
                stale=self.off_policy,
                alarms=self.alarms,
                own_sampling=self.own_sampling / max(1, self.calls_trained),
            ),
        }


def bias_figures(
    *,
    rollouts: int,
    without_sample: int,
    samples: int,
    trained: int,
    refused: float,
    cut: int,
    breaks: float,
    stale: int,
    alarms: int,
    own_sampling: float,
) -> dict[str, float]:
    """Build the indicators of silent bias, under the same names for all trainers. Trainers that compute log-probs add `logprob_drift`.

    `refused` counts reasons, so a rollout may count several times; `refused_share` is the share of rollouts without a sample. The shares
    of cut samples and of splits refer to all samples, that of stale ones to those `trained` on; `own_sampling` is a share of model calls.
    """
    return {
        "refused": refused,
        "refused_share": without_sample / max(1, rollouts),
        "cut_share": cut / max(1, samples),
        "break_share": breaks / max(1, samples),
        "stale_share": stale / max(1, trained),
        "own_sampling_share": own_sampling,
        "alarms": alarms,
    }


def step_score(traces: Traces, rollout_ids: Collection[str], *, asked: bool = True) -> Score:
    """Compute the score of these rollouts; not `asked`: of those that have a reward."""
    succeeded = {rollout.rollout_id for rollout in traces.rollouts if rollout.status == "succeeded"}
    rewards = {rollout_id: value for rollout_id, value in final_rewards(traces).items() if rollout_id in succeeded}
    found = [rewards.get(rollout_id) for rollout_id in rollout_ids]
    return Score.of(found if asked else [value for value in found if value is not None])


def without_samples(what: str, rollouts: int, refused: Counter[str], differing: Counter[str], failures: Counter[str]) -> str:
    """Return the error where none of the `rollouts` gave a sample: `what` is so, what was refused with the remedies, and what failed.

    `differing`: see TrajectoryBatch; `failures`: of failures_in.
    """
    lines = [f"{what}: of {rollouts} rollouts, refused {_counts(refused) or 'none'}"]
    for reason in sorted(refused.keys() & REASONS):
        by = f", by {_counts(differing)}" if reason == "sampling_differs" and differing else ""
        lines.append(f"{reason}: {REASONS[reason]}{by}. Remedy: {remedies.of(reason, differing)}")
    return "\n".join([*lines, *([f"what failed: {summarise(failures)}"] if failures else [])])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def without_sample_warning(step: int, rollouts: int, without: int, losses: str, failures: Counter[str]) -> str:
    """Return the warning for a step in which many of the `rollouts` gave no sample.

    `losses`: what the step lost, in words; `failures`: of failures_in.
    """
    return (
        f"step {step}: {100 * without / rollouts:.0f} % of the rollouts gave no sample, so that only survivors are trained on ({losses}): "
        "`agl-otel doctor` and the pages of these rollouts say why" + (f"; what failed: {summarise(failures)}" if failures else "")
    )


def mean_reward(batch: TrajectoryBatch) -> float:
    """Average the reward over rollouts, each counted once; 0 where there are none."""
    rewards = dict(zip(batch.rollout_id, batch.reward.tolist(), strict=True))
    return sum(rewards.values()) / len(rewards) if rewards else 0.0


def final_rewards(traces: Traces) -> dict[str, float]:
    """Return {rollout id: the primary reward of its latest attempt}, the one that is trained on; those that do not count are logged."""
    found: dict[str, float] = {}
    for rollout in traces.rollouts:
        if isinstance(rollout, AttemptedRollout):
            rewards = traces.rewards.get((rollout.rollout_id, rollout.attempt.attempt_id), ())
            if (value := final_reward(rewards)) is not None:
                found[rollout.rollout_id] = value
            elif given := [reward.value for reward in rewards if reward.is_of(None)]:
                _log.warning("the reward of rollout %s is %s: it counts as none", rollout.rollout_id, given[-1])
    return found


def not_finite(**values: float) -> str:
    """Name the first of these values that is not a finite number, as "the loss is nan"; empty where all are."""
    return next((f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)), "")


class Clock:
    """Sums up the seconds spent on each kind of work."""

    def __init__(self) -> None:
        self.started_at = time.time()
        """Unix seconds."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Attribute the time since the last lap to `name`."""
        now = time.perf_counter()
        self.seconds[name], self._last = self.seconds.get(name, 0.0) + now - self._last, now


def _fields_of_traces(traces: Traces) -> dict[str, Any]:
    """Return the fields of a report that count what was read."""
    return {
        "model_calls": traces.calls.count,
        "spans": traces.spans,
        "verdicts": dict(Counter(verdict.kind for verdict in traces.verdicts.values())),
        "alarms": len(traces.alarms),
        "replies_cut": int(traces.calls.truncated.sum()) if traces.calls.truncated is not None else 0,
        "digest": traces.digest,
    }


def _fields_of_samples(batch: TrajectoryBatch, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the fields of a report that count what could be trained on, and what was refused."""
    sampled = set(batch.rollout_id)
    return {
        "refused": dict(batch.refused),
        "breaks": dict(batch.breaks),
        "samples": len(batch),
        "rollouts_without_sample": sum(len(group) for group in groups) - len(sampled),
        "groups_gone": sum(sampled.isdisjoint(group) for group in groups),
        "cut": batch.cut,
    }


def _fields_of_training(trained_on: TrajectoryBatch, version: str) -> dict[str, Any]:
    """Return the fields of a report that count what was trained on; `version`: the weights that should have sampled it."""
    return {
        "trajectories": len(trained_on),
        "off_policy": sum(sampled_by != version for sampled_by in trained_on.model_version),
        "attempts": list(dict.fromkeys(zip(trained_on.rollout_id, trained_on.attempt_id, strict=True))),
    }


def _fields_of_time(clock: Clock) -> dict[str, Any]:
    """Return the fields of a report that say when the step ran, and on what it spent its seconds."""
    return {
        **{f"{lap}_seconds": clock.seconds[lap] for lap in ("rollout", "read", "update")},
        "started_at": clock.started_at,
        "ended_at": time.time(),
    }


def _count_unusual(
    traces: Traces, rows: NDArray[np.int64], step: int, temperature: float | None, earlier: Sequence[TrainingReport]
) -> tuple[int, int]:
    """Count the trained calls that were sampled at another temperature, and those with several choices; log a warning of each.

    It is said in full in the first such step of the run, of which `earlier` are the reports.
    """
    other = int(unlike(traces.calls, Assumed(temperature, agent_alone=True)).differs[rows].sum()) if temperature is not None else 0
    if other:
        _log.warning("%s", own_sampling_warning(step, other, len(rows), told=any(report.own_sampling for report in earlier)))
    several = int(traces.calls.several_choices[rows].sum())
    if several:
        _log.warning("%s", choices_warning(step, several, len(rows), told=any(report.several_choices for report in earlier)))
    return other, several


def choices_warning(step: int, several: int, calls: int, *, told: bool = False) -> str:
    """Return `several_choices_warning` for a step; `told`: see own_sampling_warning."""
    return f"step {step}: {several_choices_warning(several, calls, told=told)}" + (
        "" if told else ". Later steps say only how many they are"
    )


def own_sampling_warning(step: int, other: int, calls: int, *, told: bool = False) -> str:
    """Return the warning for a step in which `other` of the `calls` trained on were sampled with other parameters than the run's.

    `told`: an earlier step of the run had such calls, so that the count alone is said.
    """
    counted = f"step {step}: {other} of {calls} model calls read for training ({100 * other / calls:.0f} %) were sampled with settings "
    if told:
        return f"{counted}of the agent's own"
    return (
        f"{counted}of the agent's own: another temperature than the run's, or a constraint (a grammar, a forced tool call, top_p, …). GRPO "
        "scores each call at its own temperature, and refuses constrained ones; SFT takes all. Leave them out of the agent's requests; "
        "`agl-otel traces show` names the calls. Later steps say only how many they are"
    )


def differing_warning(step: int, refused: int, calls: int, differing: Mapping[str, int]) -> str:
    """Return the warning for a step in which so many of the `calls` read were refused as `sampling_differs`, because of these fields."""
    return (
        f"step {step}: {refused} of {calls} model calls are not trained on, because they were sampled from another distribution than the "
        f"policy's (refused as sampling_differs: {_counts(differing)}). Remedy: {remedies.of('sampling_differs', differing)}"
    )


def singleton_warning(step: int, rollout_ids: Sequence[str], groups: int) -> str:
    """Return the warning for a step of `groups` groups in which these rollouts are the only usable ones of their groups."""
    return (
        f"step {step}: {len(rollout_ids)} of {groups} groups have one rollout left, which cannot be compared with others and is not "
        f"trained on: {', '.join(rollout_ids)}"
    )
