"""Matches rewards to calls, for agents that reward single steps. Pure.

An evaluation belongs to the call of its span, or of the response that it names; of several the last counts, also over other rewards. For
other rewards the rule is Agent Lightning 0.3's for a proxy's calls: each goes to the latest earlier call, by the collector's sequence, that
has none yet. Clocks are not used, since those of agents and proxies differ.
"""

from __future__ import annotations

import bisect
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.types.columns import AttemptKey, Traces
from agl_otel.types.scores import is_usable


def call_rewards(traces: Traces, batch: TrajectoryBatch, reward_name: str | None = None) -> NDArray[np.float32]:
    """Return each transition's own reward, float32 [transitions]; NaN if it has none or one that is not usable (types/scores.py).

    Args:
        traces: the traces that `batch` was made from.
        batch: the result of `to_transitions`, one row per call.
        reward_name: the dimension that is the reward; None is the primary one.
    """
    places: dict[AttemptKey, list[tuple[int, int]]] = {}
    rows: Any = batch.rows.values  # one per transition
    spans, responses = traces.calls.span_id, traces.calls.response_id or [""] * len(traces.calls)
    called: dict[tuple[AttemptKey, str], list[int]] = {}
    sequences: list[int] = traces.calls.sequence[rows].tolist()
    for place, (rollout_id, attempt_id, sequence) in enumerate(zip(batch.rollout_id, batch.attempt_id, sequences, strict=True)):
        key = (rollout_id, attempt_id)
        places.setdefault(key, []).append((sequence, place))
        for name in {spans[rows[place]], responses[rows[place]]} - {""}:
            called.setdefault((key, name), []).append(place)
    found = np.full(len(batch), math.nan, np.float32)
    for key, free in places.items():
        free.sort()
        for reward in traces.rewards.get(key, ()):
            if reward.time is not None:
                continue
            before = bisect.bisect_left(free, (reward.sequence, -1))
            if before and reward.is_of(reward_name):
                found[free.pop(before - 1)[1]] = reward.value if is_usable(reward.value) else math.nan
        for reward in traces.rewards.get(key, ()):
            if reward.time is not None and reward.is_of(reward_name):
                evaluated = called.get((key, reward.span_id)) or called.get((key, reward.response_id)) or []
                found[evaluated] = reward.value if is_usable(reward.value) else math.nan
    return found
