"""The evidence of a cycle of `agl-otel improve`, read from stored attempts: what they say of new weights, and the rewards of a canary."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.gates import LEAST_RATED, Rated, Rules, divergence, paired_gain, refusals, trusted_lags
from agl_otel.adapters.logged import logged_of, weighable
from agl_otel.adapters.offpolicy import Estimate, Logged, estimate, joined
from agl_otel.adapters.sampling import token_temperatures
from agl_otel.algorithms.report import final_rewards
from agl_otel.store import Store
from agl_otel.types.columns import Traces
from agl_otel.types.scores import counted

if TYPE_CHECKING:
    from agl_otel.algorithms.grpo.policy import Policy

PAGE: Final = 500
HELD_BACK: Final = 4
"""One in so many attempts is not trained on: on the others a back-test would call what was learnt by heart better."""
ALARM_LEVEL: Final = 0.8
"""Of the interval by which trusted rewards raise an alarm: a halt is cheap, and trusted rewards are few."""


@dataclass(frozen=True)
class Evidence:
    """What the attempts of a cycle say of new weights; of new prompts they say nothing."""

    bounds: tuple[float, float]
    """Between which the rewards that are trained on lie, but for one in fifty."""
    backtest: Estimate | None = None
    """By the rewards that are trained on, of attempts that were not; None where fewer than two count."""
    trusted: Estimate | None = None
    """By the trusted ones, likewise; None where fewer than gates.LEAST_RATED count."""
    drift: float | None = None
    """gates.divergence; None: there are no log-probs of what was made."""
    rated: Rated = field(default_factory=lambda: Rated(np.empty(0), np.empty(0)))
    """The attempts with both rewards."""
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """{why it does not count for the back-test: attempts}."""

    def as_json(self) -> dict[str, Any]:
        """Return it for a file."""
        estimates = {"backtest": self.backtest, "trusted": self.trusted}
        return {
            **{name: None if found is None else {**asdict(found), "verdict": found.verdict} for name, found in estimates.items()},
            "drift": self.drift,
            "rated": [values.tolist() for values in self.rated],
            "bounds": list(self.bounds),
            "left_out": self.left_out,
        }


async def evidence(
    store: Store,
    rollout_ids: Sequence[str],
    model: Path,
    *,
    backtested: Collection[str],
    unseen: Collection[str],
    sources: Collection[str] | None,
    trusted_sources: Collection[str],
    agent_match: str | None,
    device: str,
) -> Evidence:
    """Weigh stored attempts under the weights in a model's folder.

    Args:
        store: a connected store.
        rollout_ids: the cycle's attempts.
        model: the new weights.
        backtested: those of them that count for the back-test.
        unseen: those that the weights were not trained on; they count for the trusted estimate.
        sources: of the rewards that are trained on; None: all.
        trusted_sources: of those that are not.
        agent_match: the agents that are trained.
        device: where the weights are evaluated.
    """
    from agl_otel.algorithms.grpo.policy import load_policy

    policy = await asyncio.to_thread(load_policy, str(model), device=device)
    trained, trusted = (_Weighed(policy, agent_match) for _ in range(2))
    pairs: list[tuple[float, float]] = []
    for start in range(0, len(rollout_ids), PAGE):
        traces = await store.traces(rollout_ids[start : start + PAGE], deadline_seconds=0)
        own = traces.trusting(sources)
        await asyncio.to_thread(trained.add, own, backtested)
        if trusted_sources:
            others = traces.trusting(trusted_sources)
            await asyncio.to_thread(trusted.add, others, unseen)
            both, known = final_rewards(own), final_rewards(others)
            pairs += [(both[name], value) for name, value in known.items() if name in both]
    return Evidence(
        backtest=trained.estimated(2, 0.95),
        trusted=trusted.estimated(LEAST_RATED, ALARM_LEVEL),
        drift=trained.drift,
        rated=Rated(*np.array(pairs, np.float64).reshape(-1, 2).T),
        bounds=bounds_of(trained.rewards),
        left_out=dict(trained.left_out),
    )


def judged_update(
    rules: Rules, *, before: Sequence[float | None], after: Sequence[float | None], found: Evidence, first: Rated | None
) -> dict[str, Any]:
    """Return what gate.json holds: the reasons against what a cycle made (`why`, of gates.REFUSALS), and all that they rest on.

    Args:
        rules: what is asked for.
        before: the rewards of what was promoted, by held-out task.
        after: those of what was made.
        found: what the cycle's attempts say.
        first: the attempts with both rewards of the first cycle that had enough of them; None: this is the first.
    """
    scores = counted(before), counted(after)
    usual = bounds_of([*scores[0], *scores[1]])  # else one outlier would hide what became of all other tasks
    gain = paired_gain(*(np.clip(each, *usual).tolist() for each in scores))
    lags = trusted_lags(first or found.rated, found.rated)
    why = refusals(rules, held_out=gain, backtest=found.backtest, trusted=found.trusted, lags=lags, drift=found.drift)
    held_out = {"before": float(np.mean(scores[0])), "after": float(np.mean(scores[1])), "gain_low": gain.low, "gain_high": gain.high}
    return {"why": list(why), "held_out": held_out, **found.as_json()}


def held_back(rollout_ids: Iterable[str], trusted: Collection[str]) -> list[str]:
    """Return the attempts that are not trained on: those that is_backtested names, and those that have a `trusted` reward.

    Training makes a reply that users liked by chance more probable: were it right as well, its trusted reward would flatter the weights.
    Where more than half of the attempts have one, every second of those is held back: else nothing would be trained on.
    """
    ids = list(rollout_ids)
    watched = [each for each in ids if each in trusted]
    if 2 * len(watched) > len(ids):
        watched = [each for each in watched if _drawn(each, 2)]
    kept = set(watched)
    return [each for each in ids if each in kept or is_backtested(each)]


def is_backtested(rollout_id: str) -> bool:
    """Return whether an attempt counts for the back-test: one in HELD_BACK, by a hash, for reviewers need not choose at random."""
    return _drawn(rollout_id, HELD_BACK)


def _drawn(rollout_id: str, one_in: int) -> bool:
    return hashlib.sha256(rollout_id.encode()).digest()[0] % one_in == 0


class _Weighed:
    """Attempts weighed under new weights, by rewards of one kind."""

    def __init__(self, policy: Policy, agent_match: str | None) -> None:
        self._policy, self._agent_match = policy, agent_match
        self._pages: list[Logged] = []
        self._new: list[NDArray[Any]] = []
        self._old: list[NDArray[Any]] = []
        self.rewards: list[float] = []
        self.left_out = Counter[str]()

    def add(self, traces: Traces, counted: Collection[str]) -> None:
        """Add a page of attempts; those of the rollouts `counted` count for the estimate."""
        from agl_otel.algorithms.backtest import logprobs_under

        found = weighable(traces, agent_match=self._agent_match)
        batch = found.batch
        self.left_out.update(found.left_out)
        if not len(batch):
            return
        new = logprobs_under(self._policy, batch, token_temperatures(traces.calls, batch.rows, default=1.0))
        self._new.append(new)
        self._old.append(batch.logprobs.values[batch.response_mask.values == 1])
        self.rewards += batch.reward.tolist()
        logged = logged_of(traces, batch, new, by_step=False, reward_name=None)
        attempts = dict.fromkeys(zip(batch.rollout_id, batch.attempt_id, strict=True))
        self._pages.append(logged.picked(np.flatnonzero([rollout_id in counted for rollout_id, _ in attempts])))

    def estimated(self, least: int, level: float) -> Estimate | None:
        """Return the estimate at this level; None where fewer than `least` attempts count."""
        logged = joined(self._pages)
        return estimate(logged, level=level) if len(logged.task) >= least else None

    @property
    def drift(self) -> float | None:
        """gates.divergence of all attempts; None where none of their replies counts."""
        return divergence(*(np.concatenate([np.empty(0), *each]) for each in (self._new, self._old)))


def bounds_of(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest of rewards without one percent at each end, but at least without one.

    Where those are equal, they say nothing of the range: then 0 and 1 are in it, so that a canary's other rewards count.
    """
    if not rewards:
        return 0.0, 1.0
    low, high = float(np.quantile(rewards, 0.01, method="higher")), float(np.quantile(rewards, 0.99, method="lower"))
    return (low, high) if low < high else (min(high, 0.0), max(low, 1.0))


@dataclass(frozen=True)
class Arms:
    """The conversations that a canary and the promoted weights answered in a step of the canary."""

    begun: int
    """Those that the canary took in this step, rated or not."""
    canary: NDArray[np.float64]
    """Rewards of the conversations that began in this step and that it alone answered."""
    promoted: NDArray[np.float64]
    """Likewise, of the promoted weights."""
    mixed: int
    """Conversations that both answered in part, or the promoted weights where the canary failed: their rewards count for none."""
    filled: float | None = None
    """When the canary took the last conversation that it may (`[improve] canary_most`), in Unix seconds; None while it may take more.
    Conversations that the promoted weights began after that are not compared."""


async def arms_since(
    store: Store, canary: str, since: float, sources: Collection[str] | None, *, step: float, version: str, most: int
) -> Arms:
    """Read what both arms have earned since a step began.

    Args:
        store: a connected store.
        canary: the canary's resource name.
        since: when the canary began (Unix seconds). What the promoted weights had begun after it and a greater share took over is mixed.
        sources: of the rewards that count.
        step: when its step began (Unix seconds). Conversations of earlier steps have no rewards in it.
        version: of the set, with the step's share.
        most: how many conversations it may take in a step.
    """
    found = await store.arms(since)
    asked = [each for each in found if canary in each.arms]
    alone = [each for each in asked if len(each.arms) == 1 and each.began >= step]
    mixed = sum(len(each.arms) > 1 and each.latest >= step for each in asked)
    taken = sorted(each.arms[canary] for each in asked if each.arms[canary] >= step)
    filled = None
    if len(taken) >= most:
        filled = taken[most - 1]
    elif any(f"{canary}@{version}" in each.full for each in found):  # a span of what it took is late
        filled = taken[-1] if taken else step
    promoted = [each for each in found if canary not in each.arms and step <= each.began <= (filled or math.inf)]
    rewards: list[NDArray[np.float64]] = []
    for conversations in (alone, promoted):
        ids = [each.rollout_id for each in conversations if each.rollout_id]
        known = sorted(await store.rewarded(ids, sources)) if ids else []
        rewards.append(np.array([*(await rewards_of(store, known, sources)).values()], np.float64))
    return Arms(len(taken), canary=rewards[0], promoted=rewards[1], mixed=mixed, filled=filled)


async def rewards_of(store: Store, rollout_ids: Sequence[str], sources: Collection[str] | None) -> dict[str, float]:
    """Return the rewards of these sources (None: of any) by rollout."""
    found: dict[str, float] = {}
    for start in range(0, len(rollout_ids), PAGE):
        traces = await store.traces(rollout_ids[start : start + PAGE], deadline_seconds=0)
        found |= final_rewards(traces.trusting(sources))
    return found
