"""The report of a GRPO step.

A new field needs a default, because a resumed run reads the reports of its earlier steps. A metric of the update passes Update
(learner.py), `_report` (algorithm.py) and this class, whose fields metrics.jsonl and the metric sinks have; the stack's metrics, which are
for alarms, have `figures`. verl's steps have the same names (algorithms/verl/figures.py), or are listed in its test as without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agl_otel.algorithms.report import TrainingReport


@dataclass(frozen=True, kw_only=True)
class StepReport(TrainingReport):
    """Results of one step. `loss` is that of the last update."""

    zero_variance_groups: int
    """Groups whose rewards were all equal; their advantages are 0."""
    singleton_groups: int = 0
    """Of these: groups with one usable rollout."""
    resampled: int
    """Zero-variance groups that were replaced (resample_rounds)."""
    carried: int
    """Groups left running for the next step (groups_in_flight)."""
    oldest: int
    """Age of the oldest group trained on, in steps since it was enqueued."""
    gradient_norm: float
    max_ratio_error: float
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| before the first update; rounding errors only, if all is right."""
    worst_ratio_error: float = 0.0
    """The mean of the worst hundredth of these errors, over the tokens that the current weights sampled (Updates.ratio_error_limit)."""
    not_finite: str = ""
    """What was not a finite number, so that the weights were not updated further; empty where all was finite."""
    kl: float | None = None
    """Mean KL term over the tokens trained on, before the last update (objective.kl_terms); None without a KL penalty."""
    learning_rate: float | None = None
    """Of the step's optimizer steps; None where none was made."""

    @property
    def figures(self) -> dict[str, float]:
        """The figures of TrainingReport, the drift of log-probs, singleton groups, and the KL term where there is one."""
        kl = {"kl": self.kl} if self.kl is not None else {}
        drift = {"logprob_drift": self.max_ratio_error, "worst_ratio_error": self.worst_ratio_error}
        return {**super().figures, **drift, "singleton_groups": self.singleton_groups, "not_finite": float(bool(self.not_finite)), **kl}
