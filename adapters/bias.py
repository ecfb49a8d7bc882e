"""Counts what is left out of training, to reveal silent bias: a reason that affects some tasks or rewards more than others.

Pure: columns in, counters out, which can be added over any number of reads. Everything is counted as `to_trajectories` decides.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, Final, cast

import numpy as np

from agl_otel.adapters.trajectories import CALL_REFUSALS, TrajectoryBatch, latest_attempts, to_trajectories
from agl_otel.types import TAKEN_VERDICTS, Rollout, VerdictKind
from agl_otel.types.columns import Traces

TAKEN: Final = "taken"
NO_REWARD: Final = "none"
TASK_LENGTH: Final = 60
TASK_KEYS: Final = ("task", "task_id", "id", "name")
"""Fields of a rollout's metadata or input that name its task; the first one present counts."""


@dataclass
class Bias:
    """Counts over the latest attempts of rollouts that have ended."""

    attempts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(mode, TAKEN or a key of ATTEMPT_REFUSALS)."""
    rewards: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(range of the reward, TAKEN or a key of ATTEMPT_REFUSALS)."""
    tasks: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(task, TAKEN or a key of ATTEMPT_REFUSALS)."""
    verdicts: Counter[str] = field(default_factory=Counter[str])
    alarms: int = 0
    """Attempts that are unproven although their agents ran under the hook."""
    calls: Counter[str] = field(default_factory=Counter[str])
    """(call, choice) of taken attempts, by TAKEN or a key of CALL_REFUSALS."""
    trajectories: int = 0
    split_reasons: Counter[str] = field(default_factory=Counter[str])
    """Trajectories that were split off from an earlier one, by key of split_reasons.SPLIT_REASONS."""
    endings: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Taken attempts by (range of the reward, `truncated` if a reply ended at its length limit, else `whole`)."""
    versions: Counter[str] = field(default_factory=Counter[str])
    """Attempts by `same` or `mixed`: whether one version of the weights answered all of their calls."""

    def add(self, other: Bias) -> None:
        """Add the counts of `other`."""
        for each in fields(self):
            own, more = getattr(self, each.name), getattr(other, each.name)
            if isinstance(own, Counter):
                own.update(more)  # in place: tasks may be many
            else:
                setattr(self, each.name, own + more)

    def shares(self) -> dict[str, Any]:
        """Return {by: {group: {reason: refused share of the group's attempts}}} for tasks and rewards, without groups that lost none."""
        return {"task": _shares(self.tasks), "reward": _shares(self.rewards)}


def bias_of(traces: Traces, *, take: Collection[str] = TAKEN_VERDICTS, **options: Any) -> Bias:
    """Count one read; `take` and `options` are those of `to_trajectories`."""
    verdicts = cast("Collection[VerdictKind]", take)  # an unknown verdict takes nothing
    found = bias_of_attempts(traces, take=verdicts, fill_reward=options.get("fill_reward"), reward_name=options.get("reward_name"))
    batch = to_trajectories(traces, take=verdicts, **options)
    found.calls.update({why: count for why, count in batch.refused.items() if why in CALL_REFUSALS} | {TAKEN: int(batch.calls.sum())})
    found.trajectories = len(batch)
    found.split_reasons = batch.breaks
    found.endings = _endings(traces, batch)
    versions: dict[tuple[str, str], set[str]] = {}
    for rollout_id, attempt_id, version in zip(traces.calls.rollout_id, traces.calls.attempt_id, traces.calls.model_version, strict=True):
        versions.setdefault((rollout_id, attempt_id), set()).add(version)
    found.versions.update("same" if len(seen) == 1 else "mixed" for seen in versions.values())
    return found


def bias_of_attempts(
    traces: Traces, *, take: Collection[VerdictKind], fill_reward: float | None = None, reward_name: str | None = None
) -> Bias:
    """Count attempts and verdicts as `bias_of` does, without making samples."""
    found = Bias()
    for rollout, key, reason, reward in latest_attempts(traces, take, fill_reward, reward_name):
        outcome = reason or TAKEN
        found.attempts[rollout.mode or "", outcome] += 1
        found.rewards[reward_range(reward), outcome] += 1
        found.tasks[task_of(rollout), outcome] += 1
        if key is not None and (verdict := traces.verdicts.get(key)) is not None:
            found.verdicts[verdict.kind] += 1
            found.alarms += verdict.alarm
    return found


def _endings(traces: Traces, batch: TrajectoryBatch) -> Counter[tuple[str, str]]:
    calls = traces.calls
    rows = np.flatnonzero(calls.truncated).tolist() if calls.truncated is not None else []
    truncated = {(calls.rollout_id[row], calls.attempt_id[row]) for row in rows}
    rewards = dict(zip(zip(batch.rollout_id, batch.attempt_id, strict=True), batch.reward.tolist(), strict=True))
    return Counter((reward_range(reward), "truncated" if key in truncated else "whole") for key, reward in rewards.items())


def reward_range(reward: float | None) -> str:
    """Return the range of a reward, one of a few for comparison."""
    if reward is None or not math.isfinite(reward):
        return NO_REWARD
    return "below 0" if reward < 0 else "0" if reward == 0 else "0 to 1" if reward < 1 else "1 and more"


def task_of(rollout: Rollout) -> str:
    """Return a short name of the task: the value of one of TASK_KEYS, else the beginning of the input."""
    for holder in (rollout.metadata, rollout.input):
        if isinstance(holder, dict):
            named = next((holder[key] for key in TASK_KEYS if isinstance(holder.get(key), (str, int))), None)
            if named is not None:
                return str(named)[:TASK_LENGTH]
    text = rollout.input if isinstance(rollout.input, str) else json.dumps(rollout.input, ensure_ascii=False, sort_keys=True, default=str)
    return text[:TASK_LENGTH]


def _shares(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, float]]:
    totals: Counter[str] = Counter()
    for (group, _), count in counts.items():
        totals[group] += count
    found: dict[str, dict[str, float]] = {}
    for (group, outcome), count in counts.items():
        if outcome != TAKEN:
            found.setdefault(group, {})[outcome] = round(count / totals[group], 4)
    return found
