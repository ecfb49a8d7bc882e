"""Convert traces to verl's samples, within verl's length limits. Pure; numpy only.

A rollout may have several samples, because calls that do not continue each other are separate samples. All have the rollout's reward, and
verl computes one advantage for them. A rollout without samples is counted and not trained on. Samples with images are refused as `images`,
because the traces lack the inputs that verl's vision models need besides token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from agl_otel.adapters.lengths import limit_lengths, readable
from agl_otel.adapters.own_sampling import sampled_otherwise
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.report import bias_figures
from agl_otel.algorithms.utils import count_failures, summarise
from agl_otel.types import VerdictKind
from agl_otel.types.columns import AttemptKey, Traces

NO_VERSION: Final = -1
"""The version of samples without one, because verl's metrics need a number. It is no valid version, so such samples count as stale."""


@dataclass(frozen=True)
class Rules:
    """Selects what becomes a sample; the names are those of `to_trajectories`, `limit_lengths` and `readable`."""

    take: Collection[VerdictKind] = ("complete", "unproven")
    fill_reward: float | None = None
    agent_match: str | None = None
    reward_name: str | None = None
    by_call: bool = False
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    vocabulary: int | None = None
    """Number of the model's token ids; None: unknown, not checked."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Sampling parameters of training; calls with others are counted."""


@dataclass(frozen=True)
class Sample:
    """One of a rollout's samples. `response_ids`, `response_mask` and `logprobs` have the same length."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 for tokens that the model sampled, else 0."""
    logprobs: list[float]
    """Captured log-probs, natural; 0.0 where the mask is 0."""
    reward: float
    calls: int
    """Number of merged model calls."""
    model_version: str
    """Version of the weights that sampled it, as recorded by the proxy."""
    images: list[str]

    @property
    def version(self) -> int:
        """Number of updates of the weights that sampled it; NO_VERSION where `model_version` is missing or not a number."""
        return int(self.model_version) if self.model_version.isdecimal() else NO_VERSION


@dataclass
class Counts:
    """Counts over rollouts; `add` sums them."""

    rollouts: int = 0
    sampled: int = 0
    """Rollouts with a sample."""
    samples: int = 0
    calls: int = 0
    """Model calls read."""
    sampled_calls: int = 0
    """Calls that are part of a sample, without validation."""
    several_choices: int = 0
    """Sampled calls that are one of several choices of the same request (n > 1)."""
    own_sampling: int = 0
    """Sampled calls whose temperature or top_p was set by the agent."""
    cut: int = 0
    alarms: int = 0
    reward_sum: float = 0.0
    """Over the rollouts with a sample."""
    reward_least: float | None = None
    reward_most: float | None = None
    cpu_seconds: float = 0.0
    """CPU time of the conversion to samples."""
    refused: Counter[str] = field(default_factory=Counter[str])
    breaks: Counter[str] = field(default_factory=Counter[str])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])
    """{reason why rollouts did not succeed: count}."""
    attempts: list[AttemptKey] = field(default_factory=list[AttemptKey])
    """Attempts with a sample."""

    def add(self, other: Counts) -> None:
        """Add the other's counts."""
        for name in (
            "rollouts",
            "sampled",
            "samples",
            "calls",
            "sampled_calls",
            "several_choices",
            "own_sampling",
            "cut",
            "alarms",
            "reward_sum",
            "cpu_seconds",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("refused", "breaks", "verdicts", "failures"):
            getattr(self, name).update(getattr(other, name))
        self.attempts += other.attempts
        for name, choose in (("reward_least", min), ("reward_most", max)):
            known = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            setattr(self, name, choose(known, default=None))

    @property
    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a step, under `agl/`."""
        flat: dict[str, float] = {
            "agl/rollouts": self.rollouts,
            "agl/rollouts_without_sample": self.rollouts - self.sampled,
            "agl/samples": self.samples,
            "agl/model_calls": self.calls,
            "agl/cut": self.cut,
            "agl/alarms": self.alarms,
            "agl/adapter_cpu_seconds": self.cpu_seconds,
        }
        if self.sampled:
            flat["agl/reward_mean"] = self.reward_sum / self.sampled
            flat |= {"agl/reward_least": self.reward_least or 0.0, "agl/reward_most": self.reward_most or 0.0}
        for group in ("refused", "breaks", "verdicts"):
            flat |= {f"agl/{group}/{reason}": count for reason, count in getattr(self, group).items()}
        return flat


def all_refused(counts: Counts, what: str) -> str | None:
    """Return the error message where none of the rollouts of `what` has a sample, on which verl fails; None otherwise."""
    if counts.sampled or not counts.rollouts:
        return None
    failed = f" What failed: {summarise(counts.failures)}." if counts.failures else ""
    return (
        f"none of the {counts.rollouts} rollouts of {what} can be used: refused {dict(counts.refused)}.{failed} The reasons are explained "
        "in agl_otel.adapters: trajectories (ATTEMPT_REFUSALS, CALL_REFUSALS), lengths (LENGTH_REFUSALS)"
    )


def to_samples(traces: Traces, rules: Rules) -> tuple[dict[str, list[Sample]], Counts]:
    """Return {rollout id: its samples, in the order of their calls} for all rollouts of `traces`, and the counts."""
    batch = to_trajectories(
        traces,
        take=rules.take,
        fill_reward=rules.fill_reward,
        agent_match=rules.agent_match,
        reward_name=rules.reward_name,
        by_call=rules.by_call,
    )
    batch = limit_lengths(batch, max_prompt_tokens=rules.max_prompt_tokens, max_response_tokens=rules.max_response_tokens)
    batch = readable(batch, vocabulary=rules.vocabulary)
    found: dict[str, list[Sample]] = {rollout.rollout_id: [] for rollout in traces.rollouts}
    columns: Any = (batch.prompt, batch.response, batch.response_mask, batch.logprobs)
    for row, rollout_id in enumerate(batch.rollout_id):
        prompt, response, mask, logprobs = (column[row].tolist() for column in columns)
        while mask and not mask[-1]:  # a cut response may end in tokens that the model did not sample
            del response[-1], mask[-1], logprobs[-1]
        if batch.images[row]:
            batch.refused["images"] += 1
            continue
        reward, calls = float(batch.reward[row]), int(batch.calls[row])
        found[rollout_id].append(Sample(prompt, response, mask, logprobs, reward, calls, batch.model_version[row], batch.images[row]))
    sampled = [samples for samples in found.values() if samples]
    rewards = [samples[-1].reward for samples in sampled]
    validation = {rollout.rollout_id for rollout in traces.rollouts if rollout.mode == "val"}
    rows = [row for place, some in enumerate(batch.rows) if batch.rollout_id[place] not in validation for row in some.tolist()]
    keys = dict.fromkeys(zip(batch.rollout_id, batch.attempt_id, strict=True))
    counts = Counts(
        rollouts=len(found),
        sampled=len(sampled),
        samples=sum(map(len, sampled)),
        calls=traces.calls.count,
        sampled_calls=len(rows),
        several_choices=int(traces.calls.several_choices[rows].sum()),
        own_sampling=int(sampled_otherwise(traces.calls, temperature=rules.temperature, top_p=rules.top_p)[rows].sum()),
        cut=batch.cut,
        alarms=len(traces.alarms),
        reward_sum=sum(rewards),
        reward_least=min(rewards, default=None),
        reward_most=max(rewards, default=None),
        refused=Counter(batch.refused),
        breaks=Counter(batch.breaks),
        verdicts=Counter(str(verdict.kind) for verdict in traces.verdicts.values()),
        failures=count_failures(traces.rollouts),
        attempts=[key for key in keys if found[key[0]]],
    )
    return found, counts


def figures_of(counts: Counts, *, trained: int, stale: int) -> dict[str, float]:
    """Compute a step's bias figures from its counts, under the names that are common to all trainers."""
    found = bias_figures(
        rollouts=counts.rollouts,
        without_sample=counts.rollouts - counts.sampled,
        samples=counts.samples,
        trained=trained,
        refused=sum(counts.refused.values()),
        cut=counts.cut,
        breaks=sum(counts.breaks.values()),
        stale=stale,
        alarms=counts.alarms,
        own_sampling=counts.own_sampling / max(1, counts.sampled_calls),
    )
    found["trajectories"] = trained
    return found | ({"reward_mean": counts.reward_sum / counts.sampled} if counts.sampled else {})
