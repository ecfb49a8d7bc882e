"""The figures of verl's steps and validations, under the names of GRPO's reports. Pure; does not import verl.

Figures are numbers by name, `refused.no_reward` for a number of one kind: so steps are recorded, and so they reach metric sinks. verl's
loggers get them as `agl/refused/no_reward`, and lines of metrics.jsonl as GRPO writes them: {"refused": {"no_reward": 1}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.adapters.losses import CUT, lost
from agl_otel.algorithms.report import bias_figures, not_finite
from agl_otel.algorithms.run_log import flat
from agl_otel.algorithms.validation import VAL_REWARD
from agl_otel.algorithms.verl.samples import Counts
from agl_otel.types.scores import Score

OURS: Final = "agl/"
"""Prefix of this package's names among verl's metrics."""
KINDS: Final = ("refused", "differing", "breaks", "verdicts")
"""Figures that are counted by kind."""
_OF_VERL: Final = {"loss": "actor/loss", "gradient_norm": "actor/grad_norm", "kl": "actor/kl_loss"}
"""{figure: verl's metric}; `kl` only where verl computes it."""
_RECORDED: Final = ("reward_mean", "logprob_drift", "worst_ratio_error", "singleton_groups", "not_finite", "kl", "matched_states")
_BIAS: Final = ("refused_share", "cut_share", "break_share", "stale_share", "own_sampling_share", "alarms")


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a step trained on, and what verl's update gave."""

    trajectories: int
    tokens: int
    """Model-written tokens trained on."""
    calls_trained: int
    off_policy: int
    """Trajectories that other weights sampled than those that the step began with, or that name none."""
    singleton_groups: int
    metrics: Mapping[str, Any]
    """verl's metrics of the step."""
    rollout_seconds: float
    """Until the samples were there: rollouts, and reading them."""
    update_seconds: float
    """The rest of the step, without the push of the weights."""
    ratios: tuple[float, float] | None = None
    """objective.max_ratio_error and worst_ratio_error; None where verl does not compute log-probs before the update."""


def step_figures(counts: Counts, update: Update) -> dict[str, float]:
    """Compute the figures of a step, under the names of StepReport (grpo/report.py)."""
    drift: dict[str, float] = {}
    if update.ratios is not None:
        greatest, worst = update.ratios
        drift = {"max_ratio_error": greatest, "logprob_drift": greatest, "worst_ratio_error": worst}
    of_verl = {name: float(update.metrics[key]) for name, key in _OF_VERL.items() if key in update.metrics}
    bias = bias_figures(
        rollouts=counts.rollouts,
        without_sample=counts.rollouts - counts.sampled,
        samples=counts.samples,
        trained=update.trajectories,
        refused=sum(counts.refused.values()),
        cut=counts.cut,
        breaks=sum(counts.breaks.values()),
        stale=update.off_policy,
        alarms=counts.alarms,
        own_sampling=0.0,
    )
    return {
        "reward_mean": counts.score.mean,
        "without_reward": counts.without_reward,
        "rollouts": counts.rollouts,
        "model_calls": counts.calls,
        "spans": counts.spans,
        "alarms": counts.alarms,
        "trajectories": update.trajectories,
        "samples": counts.samples,
        "rollouts_without_sample": counts.rollouts - counts.sampled,
        "groups_gone": counts.groups_gone,
        "cut": counts.cut,
        "replies_cut": counts.replies_cut,
        "tokens": update.tokens,
        "calls_trained": update.calls_trained,
        "several_choices": counts.several_choices,
        "own_sampling": 0,  # such calls are refused: verl scores all tokens at one temperature
        "off_policy": update.off_policy,
        "zero_variance_groups": counts.zero_variance_groups,
        "singleton_groups": update.singleton_groups,
        "not_finite": float(bool(not_finite_in(update.metrics))),
        "rollout_seconds": update.rollout_seconds,
        "update_seconds": update.update_seconds,
        "adapter_cpu_seconds": counts.cpu_seconds,
        **({"matched_states": counts.states["matched"] / max(1, counts.states["later"])} if counts.states else {}),
        **of_verl,
        **drift,
        **{name: bias[name] for name in _BIAS},
        **flat({kind: dict(getattr(counts, kind)) for kind in KINDS}),
    }


def stack_figures(figures: Mapping[str, float], step: int) -> dict[str, float]:
    """Select the figures of a step that the stack exports as metrics, as StepReport.figures has them."""
    refused = sum(value for name, value in figures.items() if name.startswith("refused."))
    return {"step": step, "refused": refused, **{name: figures[name] for name in (*_RECORDED, *_BIAS) if name in figures}}


def not_finite_in(metrics: Mapping[str, Any]) -> str:
    """Name what is not a finite number in verl's metrics of a step; verl skips such an update. Empty where all is finite."""
    named = {"loss": "actor/loss", "gradient": "actor/grad_norm"}
    return not_finite(**{name: metrics[key] for name, key in named.items() if key in metrics})


def as_metrics(figures: Mapping[str, float]) -> dict[str, float]:
    """Name figures as verl's loggers get them."""
    return {OURS + name.replace(".", "/"): value for name, value in figures.items()}


def line_of(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Convert verl's metrics of a step, or of a validation, to a line of metrics.jsonl; verl's own keep their names."""
    line: dict[str, Any] = {"step": step}
    if f"{OURS}rollouts" in metrics:
        line |= {kind: {} for kind in KINDS}
    for name, value in metrics.items():
        first, _, kind = name.removeprefix(OURS).partition("/") if name.startswith(OURS) else (name, "", "")
        if kind:
            line.setdefault(first, {})[kind] = value
        else:
            line[first] = value
    return line


def is_step(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is that of a step, not of a validation alone."""
    return "rollouts" in line


def validation_of(line: Mapping[str, Any]) -> Score | None:
    """Return the score of the validation in a line of metrics.jsonl; None where there was none."""
    if VAL_REWARD not in line:
        return None
    asked = int(line["val_rollouts"])
    return Score(line[VAL_REWARD] * asked, asked, int(line["val_without_reward"]))


@dataclass(frozen=True)
class ShownStep:
    """What the console shows of a step (cli/live.py)."""

    step: int
    reward_mean: float
    model_calls: int
    spans: int
    verdicts: Mapping[str, int]
    alarms: int
    seconds: float
    losses: str
    """What the step lost, in words."""
    replies_cut: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> ShownStep:
        """Select it from a step's line of metrics.jsonl."""
        return cls(
            step=line["step"],
            reward_mean=line["reward_mean"],
            model_calls=line["model_calls"],
            spans=line["spans"],
            verdicts=line["verdicts"],
            alarms=line["alarms"],
            seconds=line["rollout_seconds"] + line["update_seconds"],
            losses=lost(line, line["refused"]),
            replies_cut=line[CUT],
        )
