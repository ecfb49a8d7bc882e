"""What a step of GRPO tells."""

from __future__ import annotations

from dataclasses import dataclass

from agl_otel.algorithms.report import TrainingReport


@dataclass(frozen=True, kw_only=True)
class StepReport(TrainingReport):
    """What happened in one step. `loss` is of the last update."""

    flat_groups: int
    """Groups whose rewards were all equal: they teach nothing."""
    resampled: int
    """Groups that were replaced because they were flat (resample_rounds)."""
    carried: int
    """Groups left running for the next step (groups_under_way)."""
    oldest: int
    """How many steps ago the oldest group trained on was enqueued."""
    gradient_norm: float
    max_ratio_error: float
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| before the first update; rounding only, if all is right."""

    @property
    def figures(self) -> dict[str, float]:
        """Those of every report, and the drift of log-probs."""
        return {**super().figures, "logprob_drift": self.max_ratio_error}
