"""Rejection sampling: selects attempts to learn from by their rewards. Pure.

Whole attempts are selected, not rows: an attempt whose calls made three trajectories counts once. Among equal rewards those enqueued first
win, so the same rollouts give the same selection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from agl_otel.errors import UsageError
from agl_otel.types import Rollout
from agl_otel.types.columns import AttemptKey

SELECTION_REFUSALS: Final = {
    "low_reward": "its reward is less than min_reward",
    "not_best_of_group": "other attempts at the same task have higher rewards (best_of_group)",
    "not_in_top": "its reward is not in the top fraction (top_fraction)",
}
"""Reasons for leaving out a row, in the order of the steps."""


def check_selection(top_fraction: float | None, best_of_group: int | None) -> None:
    """Raise UsageError, which names the option, for an invalid value."""
    if top_fraction is not None and not 0 < top_fraction <= 1:
        raise UsageError(f"top_fraction is {top_fraction}: it is a share, more than 0 and at most 1")
    if best_of_group is not None and best_of_group < 1:
        raise UsageError(f"best_of_group is {best_of_group}: it must be at least 1")


def left_out(
    rewards: Mapping[AttemptKey, float],
    tasks: Mapping[str, str],
    *,
    min_reward: float | None = None,
    top_fraction: float | None = None,
    best_of_group: int | None = None,
) -> dict[AttemptKey, str]:
    """Return {attempt that is not selected: key of SELECTION_REFUSALS}.

    The threshold applies first, then the best of each task, then the top fraction of the rest (at least one).

    Args:
        rewards: the attempts' rewards, in the order of their enqueue.
        tasks: {rollout id: key of its task} (task_key).
        min_reward: attempts with less are left out.
        top_fraction: the share to keep, rounded up.
        best_of_group: how many attempts of each task to keep.

    Raises UsageError for an invalid option.
    """
    check_selection(top_fraction, best_of_group)
    out: dict[AttemptKey, str] = {}
    if min_reward is not None:
        out.update({key: "low_reward" for key, reward in rewards.items() if not reward >= min_reward})
    if best_of_group is not None:
        groups: dict[str, list[AttemptKey]] = {}
        for key in rewards:
            if key not in out:
                groups.setdefault(tasks[key[0]], []).append(key)
        for group in groups.values():
            out.update(dict.fromkeys(_falling(group, rewards)[best_of_group:], "not_best_of_group"))
    if top_fraction is not None:
        left = [key for key in rewards if key not in out]
        count = max(1, math.ceil(round(top_fraction * len(left), 9)))  # 0.1 of 30 must be 3 despite rounding of floats
        out.update(dict.fromkeys(_falling(left, rewards)[count:], "not_in_top"))
    return out


def _falling(keys: Sequence[AttemptKey], rewards: Mapping[AttemptKey, float]) -> list[AttemptKey]:
    return sorted(keys, key=lambda key: -rewards[key])


def task_key(rollout: Rollout) -> str:
    """Return the key of a rollout's task, made of its whole input. Rollouts of one task form a group."""
    return json.dumps(rollout.input, ensure_ascii=False, sort_keys=True, default=str)
