from __future__ import annotations

import time
from collections.abc import Sequence

from agl_otel.algorithms.grpo.groups import RewardWait
from agl_otel.algorithms.verl.held import Held
from agl_otel.types import Rollout, RolloutStatus

GROUPS = [["a", "b"], ["c", "d"]]


def ended(rollout_id: str, status: RolloutStatus = "succeeded") -> Rollout:
    return Rollout(rollout_id=rollout_id, input={}, start_time=1.0, end_time=time.time(), status=status)


async def taken(held: Held, *rollouts: Rollout, no_more: bool = False, is_late: bool = False) -> list[str]:
    return [each.rollout_id for each in await held.take(rollouts, no_more=no_more, is_late=is_late)]


async def test_a_group_is_held_until_all_of_it_have_ended_or_none_will() -> None:
    held = Held(GROUPS, None)
    assert await taken(held, ended("a"), ended("c")) == []
    assert await taken(held, ended("d")) == ["c", "d"]
    assert not held.is_waiting
    assert await taken(held, no_more=True) == ["a"]
    assert held.groups == []


async def test_a_group_is_held_while_one_of_it_waits_for_a_reward() -> None:
    rewarded = {"a"}

    async def known(rollout_ids: Sequence[str]) -> set[str]:
        return rewarded & set(rollout_ids)

    held = Held(GROUPS, RewardWait(3600.0, known))
    assert await taken(held, ended("a"), ended("b", "failed"), ended("c"), ended("d")) == ["a", "b"], "what failed gets no reward"
    assert held.is_waiting
    rewarded.add("c")
    assert await taken(held, no_more=True) == []
    assert await taken(held, no_more=True, is_late=True) == ["c", "d"]
