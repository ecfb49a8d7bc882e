"""The evidence of a cycle of `agl-otel improve`, read from stored attempts: what they say of new weights, and the rewards of a canary."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.gates import LEAST_RATED, Rated, drift
from agl_otel.adapters.lengths import pick
from agl_otel.adapters.logged import logged_of, weighable
from agl_otel.adapters.offpolicy import Estimate, Logged, estimate, joined
from agl_otel.adapters.sampling import token_temperatures
from agl_otel.algorithms.report import final_rewards
from agl_otel.store import Store
from agl_otel.types.columns import Traces

PAGE: Final = 500
ALARM_LEVEL: Final = 0.8
"""Of the interval by which trusted rewards raise an alarm: a halt is cheap, and trusted rewards are few."""


@dataclass(frozen=True)
class Evidence:
    """What the attempts of a cycle say of new weights."""

    backtest: Estimate | None
    """By the rewards that are trained on, of attempts that were not; None where fewer than two count."""
    trusted: Estimate | None
    """By the trusted ones, of all attempts; None where fewer than gates.LEAST_RATED count."""
    drift: float
    """gates.drift."""
    rated: Rated
    """The attempts with both rewards."""
    bounds: tuple[float, float]
    """Between which the rewards that are trained on lie, but for one in fifty."""
    left_out: dict[str, int]
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
        unseen: those of them that the weights were not trained on.
        sources: of the rewards that are trained on; None: all.
        trusted_sources: of those that are not.
        agent_match: the agents that are trained.
        device: where the weights are evaluated.
    """
    from agl_otel.algorithms.grpo.policy import load_policy

    policy = await asyncio.to_thread(load_policy, str(model), device=device)
    pages: list[list[Logged]] = [[], []]
    changes: list[NDArray[Any]] = []
    pairs: list[tuple[float, float]] = []
    left_out: dict[str, int] = {}
    rewards: list[float] = []

    def weigh(traces: Traces, kind: int) -> None:
        from agl_otel.algorithms.backtest import logprobs_under

        found = weighable(traces, agent_match=agent_match)
        if not kind:
            left_out.update({why: left_out.get(why, 0) + count for why, count in found.left_out.items()})
        if not len(found.batch):
            return
        new = logprobs_under(policy, found.batch, token_temperatures(traces.calls, found.batch.rows, default=1.0))
        if kind:
            pages[1].append(logged_of(traces, found.batch, new, by_step=False, reward_name=None))
            return
        rewards.extend(found.batch.reward.tolist())
        changes.append(np.stack([new, found.batch.logprobs.values[found.batch.response_mask.values == 1]]))
        if len(rows := np.flatnonzero([rollout_id in unseen for rollout_id in found.batch.rollout_id])):
            of_rows = np.isin(np.repeat(np.arange(len(found.batch)), [int((row == 1).sum()) for row in found.batch.response_mask]), rows)
            pages[0].append(logged_of(traces, pick(found.batch, rows), new[of_rows], by_step=False, reward_name=None))

    for start in range(0, len(rollout_ids), PAGE):
        traces = await store.traces(rollout_ids[start : start + PAGE], deadline_seconds=0)
        trained = traces.trusting(sources)
        await asyncio.to_thread(weigh, trained, 0)
        if trusted_sources:
            trusted = traces.trusting(trusted_sources)
            await asyncio.to_thread(weigh, trusted, 1)
            both, known = final_rewards(trained), final_rewards(trusted)
            pairs += [(both[name], value) for name, value in known.items() if name in both]
    new, old = np.concatenate(changes, 1) if changes else np.zeros((2, 0))
    return Evidence(
        backtest=_estimated(pages[0], 2, 0.95),
        trusted=_estimated(pages[1], LEAST_RATED, ALARM_LEVEL),
        drift=drift(new, old),
        rated=Rated(*np.array(pairs, np.float64).reshape(-1, 2).T),
        bounds=_bounds(rewards),
        left_out=left_out,
    )


def _bounds(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the first and the last but one percent of rewards; the least and the greatest where these are equal."""
    if not rewards:
        return 0.0, 1.0
    low, high = (float(bound) for bound in np.quantile(rewards, [0.01, 0.99]))
    return (low, high) if low < high else (min(rewards), max(rewards))


def _estimated(pages: Sequence[Logged], least: int, level: float) -> Estimate | None:
    logged = joined(pages)
    return estimate(logged, level=level) if len(logged.task) >= least else None


@dataclass(frozen=True)
class Arms:
    """The conversations that a canary and the promoted weights answered in a step of the canary."""

    begun: int
    """Those that the canary answered, rated or not, without those that it has answered since an earlier step."""
    canary: NDArray[np.float64]
    """Rewards of the conversations that began in this step and that it alone answered."""
    promoted: NDArray[np.float64]
    """Likewise, of the promoted weights."""
    mixed: int
    """Conversations that both answered in part: their rewards count for none."""


async def arms_since(store: Store, canary: str, since: float, sources: Collection[str] | None, *, step: float) -> Arms:
    """Read what both arms have earned since a step began.

    Args:
        store: a connected store.
        canary: the canary's resource name.
        since: when the canary began (Unix seconds). What the promoted weights had begun after it and a greater share took over is mixed.
        sources: of the rewards that count.
        step: when its step began (Unix seconds). Conversations of earlier steps have no rewards in it.
    """
    found = await store.arms(since)
    of = {each.conversation: each.rollout_id for each in found if each.arms == [canary] and each.began >= step}
    others = [each.rollout_id for each in found if canary not in each.arms and each.rollout_id and each.began >= step]
    mixed = sum(canary in each.arms and len(each.arms) > 1 and each.latest >= step for each in found)
    both = [[name for name in of.values() if name], others]
    rewards: list[NDArray[np.float64]] = []
    for ids in both:
        known = sorted(await store.rewarded(ids, sources)) if ids else []
        values: list[float] = []
        for start in range(0, len(known), PAGE):
            traces = await store.traces(known[start : start + PAGE], deadline_seconds=0)
            values += final_rewards(traces.trusting(sources)).values()
        rewards.append(np.array(values, np.float64))
    return Arms(len(of) + mixed, canary=rewards[0], promoted=rewards[1], mixed=mixed)
