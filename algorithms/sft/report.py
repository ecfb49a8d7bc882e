"""The report of an SFT round."""

from __future__ import annotations

from dataclasses import dataclass

from agl_otel.algorithms.report import TrainingReport


@dataclass(frozen=True, kw_only=True)
class RoundReport(TrainingReport):
    """Results of one round. `refused` includes attempts that were not selected (SELECTION_REFUSALS, `flat_rewards`)."""

    kept_reward_mean: float
    """Over the attempts trained on, before any shuffling; 0 where there were none."""
    kept: int
    """Attempts trained on."""
    corrected: int = 0
    """Corrections trained on."""
    loss_before: float
    """Of the first batch before any update, as `loss` is over the last epoch: nats a token."""
    logprob_drift: float | None = None
    """Of the first batch before any update, as GRPO's max_ratio_error; None where other weights sampled it, or nothing was trained."""

    not_finite: int = 0
    """Batches whose loss or gradient was not finite; they changed no weight."""

    @property
    def figures(self) -> dict[str, float]:
        """The figures of TrainingReport, batches that were not finite, corrections, and the drift of log-probs where it is known."""
        return (
            super().figures
            | {"not_finite": self.not_finite}
            | ({"corrected": self.corrected} if self.corrected else {})
            | ({"logprob_drift": self.logprob_drift} if self.logprob_drift is not None else {})
        )
