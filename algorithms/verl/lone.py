"""Groups of which one rollout is left, because its others were refused. There is nothing to compare it with. Knows no verl.

verl's group-relative estimators take its bare reward for its advantage, so such a row would be pushed up, or down, by whatever it got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WITHOUT_GROUPS: Final = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""verl's estimators (algorithm.adv_estimator) that compare a rollout with something else than its group."""


def compares_groups(estimator: str, rollouts: int) -> bool:
    """Whether `estimator` judges the `rollouts` of a task against each other."""
    return estimator not in WITHOUT_GROUPS and rollouts > 1


def lone_keys(keys: Sequence[str]) -> list[str]:
    """The rows, by their keys `{task's uid}_{session}_{number of the sample}`, of tasks that have one session left."""
    sessions: dict[str, set[str]] = {}
    for key in keys:
        uid, session, _ = key.rsplit("_", 2)
        sessions.setdefault(uid, set()).add(session)
    return [key for key in keys if len(sessions[key.rsplit("_", 2)[0]]) == 1]


def groups_of(keys: Sequence[str]) -> int:
    """Of how many tasks these rows are."""
    return len({key.rsplit("_", 2)[0] for key in keys})
