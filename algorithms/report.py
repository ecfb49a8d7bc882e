"""What a step of an algorithm that trains weights tells: a line of metrics.jsonl, and the figures that raise alarms.

Each algorithm adds what is its own: grpo/report.py, sft/report.py.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from agl_otel.adapters.own_sampling import sampled_otherwise, several_choices_words
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.types.columns import Traces

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """What happened in one step, or round."""

    step: int
    """1, 2, …"""
    weights_version: str
    """The version that sampled this step."""
    next_version: str
    """The version that it made; the same where it taught nothing."""
    reward_mean: float
    """Over the rollouts that could be used, before any shuffling."""
    rollouts: int
    model_calls: int
    """Read, each counted once however many choices it has."""
    spans: int
    verdicts: dict[str, int]
    alarms: int
    """Attempts that are unproven though their agents ran under the hook."""
    refused: dict[str, int]
    """Keys of adapters' ATTEMPT_REFUSALS, CALL_REFUSALS and LENGTH_REFUSALS, and `not_finished`."""
    breaks: dict[str, int]
    """Keys of adapters' BREAKS."""
    trajectories: int
    """Trained on."""
    samples: int = 0
    """Trajectories that could be trained on."""
    rollouts_without_sample: int = 0
    """Of the rollouts: those that gave none of them."""
    cut: int = 0
    """Of the samples: those that length limits shortened."""
    tokens: int
    """Model-written tokens trained on, each counted once."""
    calls_trained: int = 0
    """(call, choice) rows of the trajectories trained on."""
    several_choices: int = 0
    """Of these: those of calls with several choices (n > 1). Which one the agent used is not known, and all have the attempt's reward."""
    own_sampling: int = 0
    """Of the model calls trained on: those that their agent had sampled at a temperature or top_p of its own."""
    off_policy: int
    """Trajectories trained on that other weights than `weights_version` sampled, by what the model server said."""
    loss: float
    rollout_seconds: float
    read_seconds: float
    update_seconds: float
    """With the push of the new weights."""
    rollout_ids: list[str]
    """All of the step, group after group."""
    attempts: list[tuple[str, str]]
    """(rollout id, attempt id) of those trained on."""
    started_at: float
    ended_at: float
    """Unix seconds."""
    digest: str
    """columns.Traces.digest of what was read, groups that were replaced (GRPO's resample_rounds) included."""

    @classmethod
    def of(
        cls,
        step: int,
        versions: tuple[str, str],
        rollout_ids: Sequence[str],
        traces: Traces,
        batch: TrajectoryBatch,
        trained_on: TrajectoryBatch,
        clock: Clock,
        *,
        temperature: float | None,
        **more: Any,
    ) -> Self:
        """The report of a step that trained on `trained_on` of `batch`, which `traces` gave; `versions` sampled it, and came of it.

        `temperature`: what agents were asked to sample at; None where the run asked for nothing. A warning tells of calls that were sampled
        otherwise. `more`: tokens, loss, and the fields of the algorithm's own.
        """
        rows = trained_on.rows.values.astype(np.int64)
        other = int(sampled_otherwise(traces.calls, temperature=temperature)[rows].sum()) if temperature is not None else 0
        if other:
            _log.warning("%s", own_sampling_words(step, other, len(rows)))
        several = int(traces.calls.several_choices[rows].sum())
        if several:
            _log.warning("step %d: %s", step, several_choices_words(several, len(rows)))
        return cls(
            step=step,
            weights_version=versions[0],
            next_version=versions[1],
            reward_mean=mean_reward(batch),
            rollouts=len(rollout_ids),
            model_calls=traces.calls.count,
            spans=traces.spans,
            verdicts=dict(Counter(verdict.kind for verdict in traces.verdicts.values())),
            alarms=len(traces.alarms),
            refused=dict(batch.refused),
            breaks=dict(batch.breaks),
            trajectories=len(trained_on),
            samples=len(batch),
            rollouts_without_sample=len(rollout_ids) - len(set(batch.rollout_id)),
            cut=batch.cut,
            calls_trained=len(rows),
            several_choices=several,
            own_sampling=other,
            off_policy=sum(sampled_by != versions[0] for sampled_by in trained_on.model_version),
            rollout_seconds=clock.seconds["rollout"],
            read_seconds=clock.seconds["read"],
            update_seconds=clock.seconds["update"],
            rollout_ids=list(rollout_ids),
            attempts=list(dict.fromkeys(zip(trained_on.rollout_id, trained_on.attempt_id, strict=True))),
            started_at=clock.started_at,
            ended_at=time.time(),
            digest=traces.digest,
            **more,
        )

    @property
    def figures(self) -> dict[str, float]:
        """What tells of silent bias: `bias_figures`, and the mean reward."""
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
    """What tells of silent bias, by the names that it has whatever trains; beside them `logprob_drift`, where log-probs are computed.

    `refused` counts by reason, so a rollout may be in it several times; `refused_share` is of rollouts that gave no sample. The shares of
    cut and broken-off ones are of all samples, that of stale ones of those `trained` on, `own_sampling` is a share of model calls.
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


def mean_reward(batch: TrajectoryBatch) -> float:
    """Over rollouts, however many trajectories each has; 0 where there is none."""
    rewards = dict(zip(batch.rollout_id, batch.reward.tolist(), strict=True))
    return sum(rewards.values()) / len(rewards) if rewards else 0.0


class Clock:
    """Seconds of each kind of lap."""

    def __init__(self) -> None:
        self.started_at = time.time()
        """Unix seconds."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on this."""
        now = time.perf_counter()
        self.seconds[name], self._last = self.seconds.get(name, 0.0) + now - self._last, now


def own_sampling_words(step: int, other: int, calls: int) -> str:
    """The warning of a step in which so many of the model calls trained on were not sampled as the run asked."""
    return (
        f"step {step}: {other} of {calls} model calls trained on ({100 * other / calls:.0f} %) were sampled at a temperature or top_p of "
        "their agent's own, so their log-probs are not those of the distribution that is trained: take these out of the agent's requests, "
        "or ask for the same in the run's options (`agl-otel traces show` names the calls)"
    )


def singleton_words(step: int, rollout_ids: Sequence[str], groups: int) -> str:
    """The warning of a step in which these rollouts are all that is left of their groups; `groups` are all of the step's."""
    return (
        f"step {step}: {len(rollout_ids)} of {groups} groups have one rollout left, which nothing can be compared with and which teaches "
        f"nothing: {', '.join(rollout_ids)}"
    )
