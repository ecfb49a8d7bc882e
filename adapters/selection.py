"""Rejection sampling: which attempts are good enough to learn from, by their rewards alone. Pure.

What is chosen among is whole attempts, not rows: an attempt whose calls made three trajectories counts once. Of equal rewards those that
were enqueued first win, so the same rollouts give the same choice.
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
"""Why a row is left out, in the order in which attempts are sifted."""


def check_selection(top_fraction: float | None, best_of_group: int | None) -> None:
    """Raises UsageError that names the option which says nothing sensible."""
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
    """{attempt that is not chosen: key of SELECTION_REFUSALS}.

    First the threshold, then the best of each task, then the top fraction of what is left, at least one.

    Args:
        rewards: of the attempts to choose among, in the order in which they were enqueued.
        tasks: {rollout id: which task it is} (task_key).
        min_reward: attempts with less are out.
        top_fraction: the share to keep, rounded up.
        best_of_group: so many attempts of each task are kept.

    Raises UsageError where an option says nothing sensible.
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
        count = math.ceil(round(top_fraction * len(left), 9))  # 0.1 of 30 are 3, whatever a float makes of it
        out.update(dict.fromkeys(_falling(left, rewards)[count:], "not_in_top"))
    return out


def _falling(keys: Sequence[AttemptKey], rewards: Mapping[AttemptKey, float]) -> list[AttemptKey]:
    return sorted(keys, key=lambda key: -rewards[key])


def task_key(rollout: Rollout) -> str:
    """Which task a rollout is of: its whole input, the same for equal ones. Rollouts of one task are a group."""
    return json.dumps(rollout.input, ensure_ascii=False, sort_keys=True, default=str)
