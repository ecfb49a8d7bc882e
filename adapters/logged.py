"""Brings stored attempts into the columns from which offpolicy.py estimates. Pure.

An attempt counts only if the distribution of each of its replies is known: one call without log-probs, or that was cut off, greedy or
sampled by a rule that leaves tokens out, and no weight of the attempt is right. What does not count is named and counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.credit import attempt_trees, earned
from agl_otel.adapters.lengths import pick
from agl_otel.adapters.offpolicy import Logged
from agl_otel.adapters.sampling import TOLERANCE, Assumed
from agl_otel.adapters.selection import task_key
from agl_otel.adapters.trajectories import ATTEMPT_REFUSALS, TrajectoryBatch, to_trajectories
from agl_otel.types.columns import Ragged, Traces
from agl_otel.types.patterns import matches_agent

UNKNOWN_CALL: Final = "unknown_call"
SEVERAL_CHOICES: Final = "several_choices"
OTHER_TEMPERATURE: Final = "other_temperature"
LEFT_OUT: Final = {
    **ATTEMPT_REFUSALS,
    UNKNOWN_CALL: "the distribution of one of its replies is not known in full",
    SEVERAL_CHOICES: "a call asked for several replies: which one the agent used is not known",
    OTHER_TEMPERATURE: "a reply was not sampled at temperature 1, at which servers give the log-probs of a prompt: score it by --policy",
}
"""Reasons for which an attempt does not count; the first that applies is counted."""


class Weighable(NamedTuple):
    """The attempts that count."""

    batch: TrajectoryBatch
    """Theirs alone, uncut. `refused` and `differing` are still of all attempts."""
    left_out: Counter[str]
    """{key of LEFT_OUT: attempts}."""


def weighable(traces: Traces, *, agent_match: str | None = None, reward_name: str | None = None, at_one: bool = False) -> Weighable:
    """Return the attempts all of whose calls can be weighed.

    Args:
        traces: the result of `Store.traces`.
        agent_match: the agents whose model is another one under the new policy, by a regular expression; None: all. What others say is
            part of what happens to them.
        reward_name: the dimension that is the score; None is the primary one.
        at_one: whether only replies sampled at temperature 1 can be scored.
    """
    batch = to_trajectories(traces, agent_match=agent_match, reward_name=reward_name, sampling=Assumed(1.0, temperatures="any"))
    left_out = Counter({why: count for why, count in batch.refused.items() if why in ATTEMPT_REFUSALS and why != "no_calls"})
    calls = traces.calls
    needed = Counter[tuple[str, str]]()
    several = set[tuple[str, str]]()
    for rollout_id, attempt_id, agent, choice in zip(calls.rollout_id, calls.attempt_id, calls.agent, calls.choice.tolist(), strict=True):
        if matches_agent(agent_match, agent):
            needed[rollout_id, attempt_id] += 1
            several |= {(rollout_id, attempt_id)} if choice else set()
    known, hot = Counter[tuple[str, str]](), set[tuple[str, str]]()
    for place, key in enumerate(zip(batch.rollout_id, batch.attempt_id, strict=True)):
        known[key] += int(batch.calls[place])
        rows: Any = batch.rows[place]
        if at_one and not np.allclose(calls.temperature[rows], 1.0, rtol=0, atol=TOLERANCE):
            hot.add(key)
    counted = set[tuple[str, str]]()
    for key in batch.taken:
        if not needed[key]:
            left_out["no_calls"] += 1
        elif key in several:
            left_out[SEVERAL_CHOICES] += 1
        elif known[key] < needed[key]:
            left_out[UNKNOWN_CALL] += 1
        elif key in hot:
            left_out[OTHER_TEMPERATURE] += 1
        else:
            counted.add(key)
    kept = [place for place, key in enumerate(zip(batch.rollout_id, batch.attempt_id, strict=True)) if key in counted]
    return Weighable(pick(batch, np.array(kept, np.int64)), left_out)


def logged_of(traces: Traces, batch: TrajectoryBatch, new: NDArray[np.floating[Any]], *, by_step: bool, reward_name: str | None) -> Logged:
    """Return the columns of the attempts of a batch (`weighable`), in the order of their first trajectory.

    Args:
        traces: those of which the batch was made; with their tree if `by_step`.
        new: log-probs under the new policy of the tokens that the model wrote, of one trajectory after the other.
        by_step: the score of an attempt is the sum of its rewards, each from its place on; else its last reward.
        reward_name: as for `weighable`.
    """
    rows: Any = batch.rows.values
    written: Any = batch.logprobs.values[batch.response_mask.values == 1]
    starts = np.concatenate([[0], np.cumsum(traces.calls.response.lengths[rows])[:-1]]).astype(np.int64)
    ratios = np.add.reduceat(new.astype(np.float64) - written.astype(np.float64), starts) if len(rows) else np.zeros(0)
    keys = list(zip(batch.rollout_id, batch.attempt_id, strict=True))
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    attempt = np.repeat([number[key] for key in keys], batch.rows.lengths).astype(np.int64)
    order = np.lexsort((traces.calls.sequence[rows], attempt))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(attempt, minlength=len(number)))])
    rewards = np.zeros(len(rows))
    if by_step:
        place_of = {int(row): place for place, row in enumerate(rows[order].tolist())}
        for key, tree in attempt_trees(traces, list(number), reward_name).items():
            first = int(offsets[number[key]])
            at = first
            for call, value in zip(tree.calls, earned(tree).tolist(), strict=True):
                at = place_of.get(call.rows[0], at)  # a call of another agent: what it earned is known after the one before
                rewards[at] += value
    else:
        of_attempt = dict(zip(keys, batch.reward.tolist(), strict=True))
        rewards[offsets[1:] - 1] = [of_attempt[key] for key in number]
    tasks = {rollout.rollout_id: task_key(rollout) for rollout in traces.rollouts}
    task = np.unique([tasks[rollout_id] for rollout_id, _ in number], return_inverse=True)[1] if number else np.zeros(0, np.int64)
    return Logged(Ragged(ratios[order], offsets), Ragged(rewards, offsets), task)
