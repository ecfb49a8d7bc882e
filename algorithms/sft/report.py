"""What a round of SFT tells: a line of metrics.jsonl, and the figures that raise alarms."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.report import Clock
from agl_otel.algorithms.sft.train import Trained
from agl_otel.columns import Traces


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round."""

    step: int
    """1, 2, …"""
    weights_version: str
    """The version that sampled this round."""
    next_version: str
    """The version that it made; the same where it taught nothing."""
    reward_mean: float
    """Over the attempts to choose from, before any shuffling."""
    kept_reward_mean: float
    """Over those trained on, the same; 0 where there were none."""
    rollouts: int
    kept: int
    """Attempts trained on."""
    model_calls: int
    """(call, choice) rows read."""
    spans: int
    verdicts: dict[str, int]
    alarms: int
    """Attempts that are unproven though their agents ran under the hook."""
    refused: dict[str, int]
    """Keys of adapters' ATTEMPT_REFUSALS, CALL_REFUSALS and SELECTION_REFUSALS, `not_finished`, and `flat_rewards`."""
    breaks: dict[str, int]
    trajectories: int
    """Rows trained on."""
    tokens: int
    """With a loss, in one epoch."""
    off_policy: int
    """Trajectories that other weights than `weights_version` sampled, by what the model server said."""
    loss_before: float
    loss: float
    """Nats a token: of the first batch before any update, and over the last epoch."""
    rollout_seconds: float
    read_seconds: float
    update_seconds: float
    """With the start of the process and the push of the new weights."""
    rollout_ids: list[str]
    attempts: list[tuple[str, str]]
    """(rollout id, attempt id) of those trained on."""
    started_at: float
    ended_at: float
    """Unix seconds."""
    digest: str
    """columns.Traces.digest of what was read."""

    @classmethod
    def of(
        cls,
        step: int,
        versions: tuple[str, str],
        rollout_ids: Sequence[str],
        traces: Traces,
        batch: TrajectoryBatch,
        chosen: TrajectoryBatch,
        trained: Trained | None,
        clock: Clock,
    ) -> RoundReport:
        """The report of a round that chose `chosen` from `batch`; `trained` is None where that taught nothing.

        `versions` sampled it, and came of it.
        """
        return cls(
            step=step,
            weights_version=versions[0],
            next_version=versions[1],
            reward_mean=_mean_of_attempts(batch),
            kept_reward_mean=_mean_of_attempts(chosen),
            rollouts=len(rollout_ids),
            kept=len(set(chosen.rollout_id)),
            model_calls=len(traces.calls),
            spans=traces.spans,
            verdicts=dict(Counter(verdict.kind for verdict in traces.verdicts.values())),
            alarms=len(traces.alarms),
            refused=dict(batch.refused),
            breaks=dict(batch.breaks),
            trajectories=len(chosen),
            tokens=trained.tokens if trained else 0,
            off_policy=sum(sampled_by != versions[0] for sampled_by in batch.model_version),
            loss_before=trained.loss_before if trained else 0.0,
            loss=trained.loss if trained else 0.0,
            rollout_seconds=clock.seconds["rollout"],
            read_seconds=clock.seconds["read"],
            update_seconds=clock.seconds["update"],
            rollout_ids=list(rollout_ids),
            attempts=list(dict.fromkeys(zip(chosen.rollout_id, chosen.attempt_id, strict=True))),
            started_at=clock.started_at,
            ended_at=time.time(),
            digest=traces.digest,
        )

    @property
    def figures(self) -> dict[str, float]:
        """What tells of silent bias, as GRPO's do."""
        made = max(1, self.trajectories)
        return {
            "step": self.step,
            "reward_mean": self.reward_mean,
            "stale_share": self.off_policy / max(1, self.model_calls),
            "break_share": sum(self.breaks.values()) / made,
            "refused": sum(self.refused.values()),
            "alarms": self.alarms,
        }


def _mean_of_attempts(batch: TrajectoryBatch) -> float:
    rewards = dict(zip(batch.rollout_id, batch.reward.tolist(), strict=True))
    return sum(rewards.values()) / len(rewards) if rewards else 0.0
