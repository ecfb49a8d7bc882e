"""Convert traces to verl's samples, within verl's length limits. Pure; does not import torch.

A rollout may have several samples, because calls that do not continue each other are separate samples. All have the rollout's reward, and
verl computes one advantage for them; with credit by calls the samples carry the advantages of their tokens (credit.py). A rollout without
samples is counted and not trained on. Samples with images are refused as `images`, because the traces lack the inputs that verl's vision
models need besides token ids. verl's trainer divides the logits of all tokens by one temperature, so calls that were sampled at another
one, or otherwise than the run says, are refused as `sampling_differs`: their tokens are context of later calls only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np

from agl_otel.adapters.credit import credit, group_advantages
from agl_otel.adapters.lengths import limit_lengths, pick, readable
from agl_otel.adapters.sampling import Assumed
from agl_otel.adapters.token_columns import spread
from agl_otel.adapters.trajectories import TrajectoryBatch, latest_attempts, to_trajectories
from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.report import step_score, without_samples
from agl_otel.algorithms.utils import failures_in
from agl_otel.types import TAKEN_VERDICTS, Rollout, VerdictKind
from agl_otel.types.columns import AttemptKey, Ragged, Traces
from agl_otel.types.scores import Score

NO_VERSION: Final = -1
"""The version of samples without one, because verl's metrics need a number. It is no valid version, so such samples count as stale."""


@dataclass(frozen=True)
class Rules:
    """Selects what becomes a sample; the names are those of `to_trajectories`, `limit_lengths` and `readable`."""

    take: Collection[VerdictKind] = TAKEN_VERDICTS
    fill_reward: float | None = None
    agent_match: str | None = None
    reward_name: str | None = None
    by_call: bool = False
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    vocabulary: int | None = None
    """Number of the model's token ids; None: unknown, not checked."""
    temperature: float = 1.0
    """Of training; calls that were sampled at another one, or not from the whole softmax, are refused."""
    advantages: Advantages = field(default_factory=Advantages)
    """VERL's options of credit."""
    scale_advantages: bool = True
    """verl's `algorithm.norm_adv_by_std_in_grpo`."""


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
    advantages: list[float] | None = None
    """With credit by calls: of each token of the response; 0.0 where the mask is 0."""

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
    spans: int = 0
    """Spans read."""
    sampled_calls: int = 0
    """Calls that are part of a sample, without validation."""
    several_choices: int = 0
    """Sampled calls that are one of several choices of the same request (n > 1)."""
    cut: int = 0
    """Samples that length limits shortened."""
    replies_cut: int = 0
    """Replies read that ended at their token limit."""
    alarms: int = 0
    reward_total: float = 0.0
    """Sum of the rewards of the rollouts that have one and succeeded: with `rollouts`, the score (types/scores.py)."""
    without_reward: int = 0
    """Rollouts without a reward, or that did not succeed."""
    cpu_seconds: float = 0.0
    """CPU time of the conversion to samples."""
    refused: Counter[str] = field(default_factory=Counter[str])
    differing: Counter[str] = field(default_factory=Counter[str])
    """{field: calls refused as `sampling_differs` that have another value of it, or an unknown one}."""
    breaks: Counter[str] = field(default_factory=Counter[str])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])
    """{reason why rollouts did not succeed: count}."""
    attempts: list[AttemptKey] = field(default_factory=list[AttemptKey])
    """Attempts with a sample."""
    errors: Counter[str] = field(default_factory=Counter[str])
    """Why reads failed because of the user's function of credit."""
    credited: int = 0
    """Samples with advantages of their own."""
    learning: Counter[str] = field(default_factory=Counter[str])
    """{group: those of its samples with an advantage other than 0}, with credit by calls."""
    states: Counter[str] = field(default_factory=Counter[str])
    """With credit by states: the calls that are not in the first state of their group (`later`), and those of them that were compared with
    another one in the same state (`matched`)."""
    rewards: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """{group: the reward of each of its rollouts with a sample}; a group of which none has one is there, too."""

    def add(self, other: Counts) -> None:
        """Add the other's counts."""
        for each in fields(self):
            held, more = getattr(self, each.name), getattr(other, each.name)
            if isinstance(held, Counter):
                held.update(more)
            elif isinstance(held, dict):
                for group, rewards in cast("dict[str, list[float]]", more).items():
                    self.rewards.setdefault(group, []).extend(rewards)
            else:
                setattr(self, each.name, held + more)

    @property
    def score(self) -> Score:
        """The score of the rollouts; a missing reward counts as 0."""
        return Score(self.reward_total, self.rollouts, self.without_reward)

    @property
    def groups_gone(self) -> int:
        """Groups of which no rollout has a sample."""
        return sum(not rewards for rewards in self.rewards.values())

    @property
    def zero_variance_groups(self) -> int:
        """Groups whose rollouts with a sample have equal rewards; with credit by calls, those whose advantages are all 0."""
        if self.credited:
            return sum(bool(rewards) and not self.learning[group] for group, rewards in self.rewards.items())
        return sum(len(set(rewards)) == 1 for rewards in self.rewards.values())

    @property
    def without_effect(self) -> str | None:
        """Why verl's advantages are all 0; None where some are not, or where there are no samples."""
        if self.credited:
            return None if self.learning.total() else "the returns are equal wherever they are compared"
        found = {reward for rewards in self.rewards.values() for reward in rewards}
        return f"the rewards are all {found.pop()}" if len(found) == 1 else None


def group_of(rollout: Rollout) -> str:
    """Return the name of a rollout's group: its step and its task; rollouts that name none are groups of their own."""
    metadata = rollout.metadata or {}
    return f"{metadata.get('step')}-{metadata['group']}" if "group" in metadata else rollout.rollout_id


def all_refused(counts: Counts, what: str) -> str | None:
    """Return the error message where none of the rollouts of `what` has a sample, on which verl fails; None otherwise."""
    if counts.sampled or not counts.rollouts:
        return None
    return without_samples(f"{what} has no sample", counts.rollouts, counts.refused, counts.differing, counts.failures)


def to_samples(traces: Traces, rules: Rules) -> tuple[dict[str, list[Sample]], Counts]:
    """Return {rollout id: its samples, in the order of their calls} for all rollouts of `traces`, and the counts.

    The rollouts are of one mode: those of validation have sampling parameters of their own, which are not looked at, and no advantages.
    With credit by calls they are whole groups, and `traces` have their tree. Raises what `credit` raises.
    """
    training = any(rollout.mode != "val" for rollout in traces.rollouts)
    whole = to_trajectories(
        traces,
        take=rules.take,
        fill_reward=rules.fill_reward,
        agent_match=rules.agent_match,
        reward_name=rules.reward_name,
        by_call=rules.by_call,
        sampling=Assumed(rules.temperature) if training else None,
    )
    batch = limit_lengths(whole, max_prompt_tokens=rules.max_prompt_tokens, max_response_tokens=rules.max_response_tokens)
    batch = readable(batch, vocabulary=rules.vocabulary)
    batch = _without_images(batch)
    credited = _credited(traces, whole, batch, rules) if training and rules.advantages.of_calls and len(batch) else None
    found: dict[str, list[Sample]] = {rollout.rollout_id: [] for rollout in traces.rollouts}
    columns: Any = (batch.prompt, batch.response, batch.response_mask, batch.logprobs)
    for row, rollout_id in enumerate(batch.rollout_id):
        prompt, response, mask, logprobs = (column[row].tolist() for column in columns)
        while mask and not mask[-1]:  # a cut response may end in tokens that the model did not sample
            del response[-1], mask[-1], logprobs[-1]
        advantages = _of_tokens(credited.advantages[row], mask) if credited is not None else None
        reward, calls = float(batch.reward[row]), int(batch.calls[row])
        found[rollout_id].append(Sample(prompt, response, mask, logprobs, reward, calls, batch.model_version[row], advantages))
    sampled = [samples for samples in found.values() if samples]
    rows = [row for some in batch.rows for row in some.tolist()] if training else []
    keys = dict.fromkeys(zip(batch.rollout_id, batch.attempt_id, strict=True))
    score = _score(traces, rules.reward_name)
    counts = Counts(
        rollouts=len(found),
        sampled=len(sampled),
        samples=sum(map(len, sampled)),
        calls=traces.calls.count,
        spans=traces.spans,
        sampled_calls=len(rows),
        several_choices=int(traces.calls.several_choices[rows].sum()),
        cut=batch.cut,
        replies_cut=int(traces.calls.truncated.sum()) if traces.calls.truncated is not None else 0,
        alarms=len(traces.alarms),
        reward_total=score.total,
        without_reward=score.missing,
        refused=Counter(batch.refused),
        differing=Counter(batch.differing),
        breaks=Counter(batch.breaks),
        verdicts=Counter(str(verdict.kind) for verdict in traces.verdicts.values()),
        failures=failures_in(traces),
        attempts=[key for key in keys if found[key[0]]],
        credited=len(batch) if credited is not None else 0,
        states=credited.states if credited is not None else Counter(),
    )
    for rollout in traces.rollouts:
        group, samples = group_of(rollout), found[rollout.rollout_id]
        counts.rewards.setdefault(group, []).extend(sample.reward for sample in samples[-1:])
        counts.learning[group] += sum(any(sample.advantages or ()) for sample in samples)
    return found, counts


def _without_images(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Refuse samples with images, and count them."""
    if count := sum(map(bool, batch.images)):
        batch.refused["images"] += count
        return pick(batch, np.flatnonzero([not images for images in batch.images]))
    return batch


class _Credited(NamedTuple):
    advantages: Ragged
    """Of the tokens that the model wrote, uncut: a row for each sample."""
    states: Counter[str]


def _credited(traces: Traces, whole: TrajectoryBatch, batch: TrajectoryBatch, rules: Rules) -> _Credited:
    """Compute the advantages of the samples that are left of `whole` in `batch`, which may be cut."""
    place_of = {int(rows[0]): place for place, rows in enumerate(whole.rows)}
    uncut = pick(whole, np.array([place_of[int(rows[0])] for rows in batch.rows], np.int64))
    groups = {rollout.rollout_id: group_of(rollout) for rollout in traces.rollouts}
    dense = np.unique([groups[rollout_id] for rollout_id in uncut.rollout_id], return_inverse=True)[1]
    rule = rules.advantages.rule(partial(group_advantages, scaled=rules.scale_advantages))
    found = credit(traces, uncut, dense, rule, reward_name=rules.reward_name, agent_match=rules.agent_match)
    states = Counter(later=found.states, matched=found.matched) if rule.states else Counter[str]()
    return _Credited(spread(traces.calls, uncut.rows, found.advantages), states)


def _of_tokens(advantages: Any, mask: list[int]) -> list[float]:
    """Return the advantages of a response's tokens. `advantages`: of those that the model wrote, before a cut."""
    own = iter(advantages.tolist())
    return [next(own) if written else 0.0 for written in mask]


def _score(traces: Traces, reward_name: str | None) -> Score:
    """Compute the score of all rollouts of `traces`, by the primary reward or by a named dimension."""
    if reward_name is None:
        return step_score(traces, [rollout.rollout_id for rollout in traces.rollouts])
    return Score.of(
        reward if rollout.status == "succeeded" else None for rollout, _, _, reward in latest_attempts(traces, (), None, reward_name)
    )
