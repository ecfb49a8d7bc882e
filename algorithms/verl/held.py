"""Rollouts of verl's sessions that have ended and are not read yet. Does not import verl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agl_otel.algorithms.grpo.groups import Group, RewardWait
from agl_otel.types import AttemptedRollout, Rollout


class Held:
    """Holds rollouts back until none of their group runs, or waits for a reward."""

    def __init__(self, groups: Iterable[Sequence[str]], wait: RewardWait | None) -> None:
        self.groups = [Group(number, 0, rollout_ids) for number, rollout_ids in enumerate(groups)]
        """Those that were not taken."""
        self._group_of = {rollout_id: group for group in self.groups for rollout_id in group.rollout_ids}
        self._wait = wait

    @property
    def is_waiting(self) -> bool:
        """Whether a rollout that has ended waits for a reward."""
        return any(group.unrewarded for group in self.groups)

    async def take(self, ended: Iterable[Rollout | AttemptedRollout], *, no_more: bool, is_late: bool) -> list[Rollout | AttemptedRollout]:
        """Add rollouts that have ended, and return those of the groups that need not be held any more.

        `no_more`: no other rollout will end. `is_late`: rewards are not waited for any more.
        """
        for rollout in ended:
            self._group_of[rollout.rollout_id].unrewarded[rollout.rollout_id] = rollout
        waiting = {rollout.rollout_id: rollout for group in self.groups for rollout in group.unrewarded.values()}
        over = waiting.keys() if self._wait is None or is_late else await self._wait.over(list(waiting.values()))
        for group in self.groups:
            group.finish(over & group.unrewarded.keys())
        taken = [group for group in self.groups if group.whole or (no_more and not group.unrewarded)]
        self.groups = [group for group in self.groups if group not in taken]
        return [group.finished[name] for group in taken for name in group.rollout_ids if name in group.finished]
