"""What a training step tells: a line of metrics.jsonl, and the figures that raise alarms."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What happened in one step."""

    step: int
    """1, 2, …"""
    weights_version: str
    """The version that sampled this step."""
    next_version: str
    """The version that it made; the same where it taught nothing."""
    reward_mean: float
    """Over the rollouts trained on, before any shuffling."""
    rollouts: int
    model_calls: int
    """(call, choice) rows read."""
    spans: int
    verdicts: dict[str, int]
    alarms: int
    """Attempts that are unproven though their agents ran under the hook."""
    refused: dict[str, int]
    """Keys of adapters' ATTEMPT_REFUSALS and CALL_REFUSALS, and `not_finished`."""
    breaks: dict[str, int]
    """Keys of adapters' BREAKS."""
    trajectories: int
    tokens: int
    """Model-written tokens trained on."""
    off_policy: int
    """Trajectories that other weights than `weights_version` sampled, by what the model server said."""
    flat_groups: int
    """Groups whose rewards were all equal: they teach nothing."""
    resampled: int
    """Groups that were replaced because they were flat (resample_rounds)."""
    carried: int
    """Groups left running for the next step (groups_under_way)."""
    oldest: int
    """How many steps ago the oldest group trained on was enqueued."""
    loss: float
    gradient_norm: float
    max_ratio_error: float
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| before the first update; rounding only, if all is right."""
    rollout_seconds: float
    read_seconds: float
    update_seconds: float
    """With the push of the new weights."""
    rollout_ids: list[str]
    """All that were enqueued for the step, group after group."""
    attempts: list[tuple[str, str]]
    """(rollout id, attempt id) of those trained on."""
    started_at: float
    ended_at: float
    """Unix seconds."""
    digest: str
    """columns.Traces.digest of what was read."""

    @property
    def figures(self) -> dict[str, float]:
        """What tells of silent bias: drift of log-probs, and shares of stale, refused and broken-off trajectories."""
        made = max(1, self.trajectories)
        return {
            "step": self.step,
            "reward_mean": self.reward_mean,
            "logprob_drift": self.max_ratio_error,
            "stale_share": self.off_policy / made,
            "break_share": sum(self.breaks.values()) / made,
            "refused": sum(self.refused.values()),
            "alarms": self.alarms,
        }


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
