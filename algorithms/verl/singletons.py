"""Singleton groups: groups with one usable rollout, because the others were refused. Does not import verl.

verl's group-relative estimators use the bare reward of a singleton as its advantage, which would train on it without a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agl_otel.algorithms.verl.credit import ESTIMATOR

WITHOUT_GROUPS: Final = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""verl's estimators (algorithm.adv_estimator) that do not compare the rollouts of a group."""
OF_GROUPS: Final = frozenset(
    {
        *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gpg", "opo", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline"),
        *("optimal_token_baseline", "tir_optimal_token_baseline"),
    }
)
"""verl's estimators that compare the rollouts of a group."""


def needs_more_rollouts(estimator: str, rollouts: int) -> str | None:
    """Return why `rollouts` per task are too few for one of verl's estimators; None where they suffice, and for custom estimators."""
    if estimator not in OF_GROUPS | {ESTIMATOR} or rollouts > 1:
        return None
    return (
        f"actor_rollout_ref.rollout.n is {rollouts}, and algorithm.adv_estimator = {estimator!r} compares the rollouts of a task with each "
        "other: it would take the bare reward of a single one for its advantage. Set n to at least 2, or adv_estimator to one of "
        f"{', '.join(sorted(WITHOUT_GROUPS))}"
    )


def compares_groups(estimator: str, rollouts: int) -> bool:
    """Return whether `estimator` compares the `rollouts` of a task with each other."""
    return estimator not in WITHOUT_GROUPS and rollouts > 1


def singleton_keys(keys: Sequence[str]) -> list[str]:
    """Select the keys, `{task's uid}_{session}_{number of the sample}`, of tasks with one session."""
    sessions: dict[str, set[str]] = {}
    for key in keys:
        uid, session, _ = key.rsplit("_", 2)
        sessions.setdefault(uid, set()).add(session)
    return [key for key in keys if len(sessions[key.rsplit("_", 2)[0]]) == 1]


def groups_of(keys: Sequence[str]) -> int:
    """Count the tasks of these rows."""
    return len({key.rsplit("_", 2)[0] for key in keys})
