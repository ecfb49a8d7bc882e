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
    matched_states: float | None = None
    """Share of the calls trained on, those in the first state of their group left out, that were compared with a call in the same state;
    None without `credit = "states"`. Prompts with times or ids in them never match."""
    learning_rate: float | None = None
    """Of the step's optimizer steps; None where none was made."""

    @property
    def figures(self) -> dict[str, float]:
        """The figures of TrainingReport, the drift of log-probs, singleton groups; KL term and matched states where there are some."""
        matched = {"matched_states": self.matched_states} if self.matched_states is not None else {}
        kl = {"kl": self.kl} if self.kl is not None else {}
        drift = {"logprob_drift": self.max_ratio_error, "worst_ratio_error": self.worst_ratio_error}
        counts = {"singleton_groups": self.singleton_groups, "not_finite": float(bool(self.not_finite))}
        return {**super().figures, **drift, **counts, **kl, **matched}
