"""What a step of GRPO tells."""

from __future__ import annotations

from dataclasses import dataclass

from agl_otel.algorithms.report import TrainingReport


@dataclass(frozen=True, kw_only=True)
class StepReport(TrainingReport):
    """What happened in one step. `loss` is of the last update."""

    zero_variance_groups: int
    """Groups whose rewards were all equal: they teach nothing."""
    singleton_groups: int = 0
    """Of these: groups of which one rollout is left, which nothing can be compared with."""
    resampled: int
    """Groups that were replaced because they were flat (resample_rounds)."""
    carried: int
    """Groups left running for the next step (groups_in_flight)."""
    oldest: int
    """How many steps ago the oldest group trained on was enqueued."""
    gradient_norm: float
    max_ratio_error: float
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| before the first update; rounding only, if all is right."""
    kl: float | None = None
    """Mean KL term over the tokens trained on, before the last update (objective.kl_terms); None where no KL penalty is switched on."""

    @property
    def figures(self) -> dict[str, float]:
        """Those of every report, the drift of log-probs, groups of one, and the KL term where there is one."""
        kl = {"kl": self.kl} if self.kl is not None else {}
        return {**super().figures, "logprob_drift": self.max_ratio_error, "singleton_groups": self.singleton_groups, **kl}
