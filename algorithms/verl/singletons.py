"""Groups of which one rollout is left, because its others were refused. There is nothing to compare it with. Knows no verl.

verl's group-relative estimators take its bare reward for its advantage, so such a row would be pushed up, or down, by whatever it got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WITHOUT_GROUPS: Final = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""verl's estimators (algorithm.adv_estimator) that compare a rollout with something else than its group."""
OF_GROUPS: Final = frozenset(
    {
        *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gpg", "opo", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline"),
        *("optimal_token_baseline", "tir_optimal_token_baseline"),
    }
)
"""verl's others."""


def needs_more_rollouts(estimator: str, rollouts: int) -> str | None:
    """Why `rollouts` of a task are too few for one of verl's estimators; None where they are not, and for estimators of the user's own."""
    if estimator not in OF_GROUPS or rollouts > 1:
        return None
    return (
        f"actor_rollout_ref.rollout.n is {rollouts}, and algorithm.adv_estimator = {estimator!r} compares the rollouts of a task with each "
        "other: it would take the bare reward of a single one for its advantage. Set n to at least 2, or adv_estimator to one of "
        f"{', '.join(sorted(WITHOUT_GROUPS))}"
    )


def compares_groups(estimator: str, rollouts: int) -> bool:
    """Whether `estimator` judges the `rollouts` of a task against each other."""
    return estimator not in WITHOUT_GROUPS and rollouts > 1


def singleton_keys(keys: Sequence[str]) -> list[str]:
    """The rows, by their keys `{task's uid}_{session}_{number of the sample}`, of tasks that have one session left."""
    sessions: dict[str, set[str]] = {}
    for key in keys:
        uid, session, _ = key.rsplit("_", 2)
        sessions.setdefault(uid, set()).add(session)
    return [key for key in keys if len(sessions[key.rsplit("_", 2)[0]]) == 1]


def groups_of(keys: Sequence[str]) -> int:
    """Of how many tasks these rows are."""
    return len({key.rsplit("_", 2)[0] for key in keys})
