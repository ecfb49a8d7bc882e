"""Computes what each model call earned from the rewards along the span tree, and its advantage. Pure: columns in, columns out.

This is the one place that decides which calls a reward belongs to. A reward may be on any span: emitted in a step or a tool, an attribute
or an evaluation of a sub-agent's span, an evaluation of a call or of its response. Calls are in the order of the collector's sequence; the
choices of one call share its place. Calls without a whole reply are no steps, and neither, if some agents alone are trained, are those of
the others: they are part of the environment.

1. The calls that *earn* a reward are: the one that it names (span or response id); else those at or below its span; else those below the
   nearest span above it that has any (without such a span those of the attempt) that came before it, or all of these if none did. A call
   came before a reward if it, or a span around it, has a lower number: the spans of one process are numbered as they ended, but those of
   agent and proxy may overtake each other.
2. The reward is *received* by the calls that earned it and by all calls before the first of these that did not run beside it (for more
   than half of the shorter of both), as calls of a parallel branch do: they cannot have led to it.
3. The return of a call is the sum of the rewards that it receives, each times `discount` to the power of the later calls that receive it,
   too (rewards to go: Sutton et al., "Policy Gradient Methods for Reinforcement Learning with Function Approximation", 1999).
4. Of several rewards in one span with the same earners the last counts, as for the reward of an attempt. Thus a reward that was corrected,
   or both emitted and returned, counts once.

An attempt whose only reward is its own, and came after its last call, has it as the return of each call, as in GRPO, with a discount of 1.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.token_columns import pieces
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.errors import AgentError
from agl_otel.types.columns import AttemptKey, CallColumns, Reward, SpanColumns, Traces
from agl_otel.types.patterns import matches_agent
from agl_otel.types.scores import is_usable
from agl_otel_hook import conventions

STD_EPSILON: Final = 1e-6  # keeps the division finite; a group that differs at all has a std of at least 0.1 with rewards in [0, 1]
_WHOLE: Final = frozenset({"", conventions.LLM_MASKED, conventions.LLM_MISALIGNED})
"""Values of CallColumns.incomplete of calls whose reply the agent got."""
Array = NDArray[Any]


class TreeSpan(NamedTuple):
    """A span of an attempt."""

    parent: str
    name: str
    sequence: int


class TreeCall(NamedTuple):
    """A model call of an attempt, with all of its choices."""

    span_id: str
    response_id: str
    sequence: int
    agent: str
    rows: tuple[int, ...]
    """Of CallColumns: one for each choice."""
    time: tuple[int, int] = (0, 0)
    """Begin and end in Unix nanoseconds; zeros: unknown."""


@dataclass(frozen=True)
class AttemptTree:
    """One attempt, as rules of credit see it."""

    calls: Sequence[TreeCall]
    """In order of the sequence; of the agents that are trained."""
    rewards: Sequence[Reward]
    """The usable ones of the trained dimension, in order: of several in one place the last counts."""
    spans: Mapping[str, TreeSpan] = field(default_factory=dict[str, TreeSpan])
    """By span id; empty if the tree was not read."""

    def below(self, span_id: str) -> list[int]:
        """Return the places in `calls` of those at or below a span, in order."""
        index = self._index
        if span_id not in index.first:
            return list(index.own.get(span_id, ()))
        first, last = (index.first[span_id],), (index.end[span_id],)
        return sorted(place for _, place in index.placed[bisect.bisect_left(index.placed, first) : bisect.bisect_left(index.placed, last)])

    def above(self, span_id: str) -> Iterator[str]:
        """Yield the spans above a span, the nearest first."""
        seen = {span_id}
        while (span := self.spans.get(span_id)) is not None and span.parent and span.parent not in seen:
            span_id = span.parent
            seen.add(span_id)
            yield span_id

    def before(self, place: int) -> NDArray[np.int64]:
        """Return the places of the calls that may have led to one: those before it that did not run beside it.

        Calls run beside each other for more than half of the shorter one: clocks of two proxies differ by less.
        """
        began, ended = self._times[:place].T
        first, last = self._times[place]
        both = np.minimum(ended, last) - np.maximum(began, first)
        shorter = np.minimum(ended - began, last - first)
        return np.flatnonzero((2 * both <= shorter) | (shorter == 0))

    def ended(self, place: int) -> int:
        """Return the lowest number of a call and the spans around it; that of the attempt is given before the agent starts."""
        call = self.calls[place]
        around = (self.spans.get(above) for above in self.above(call.span_id))
        return min([call.sequence, *(span.sequence for span in around if span is not None and span.name != conventions.SPAN_ATTEMPT)])

    @functools.cached_property
    def _times(self) -> NDArray[np.int64]:
        return np.array([call.time for call in self.calls], np.int64)

    @functools.cached_property
    def _index(self) -> _Index:
        first, end = _numbered(self.spans)
        own: dict[str, list[int]] = {}
        for place, call in enumerate(self.calls):
            own.setdefault(call.span_id, []).append(place)
        placed = sorted((first[span_id], place) for span_id, places in own.items() if span_id in first for place in places)
        return _Index(first, end, own, placed)


class _Index(NamedTuple):
    """The spans numbered so that those below one have the numbers from its own to its end."""

    first: dict[str, int]
    end: dict[str, int]
    own: dict[str, list[int]]
    """{span of calls: their places}."""
    placed: list[tuple[int, int]]
    """(number of a call's span, its place), sorted."""


def _numbered(spans: Mapping[str, TreeSpan]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first and the end number of each span. Spans in a circle begin anywhere."""
    children: dict[str, list[str]] = {}
    for span_id, span in spans.items():
        children.setdefault(span.parent if span.parent in spans else "", []).append(span_id)
    order: dict[str, int] = {}
    end: dict[str, int] = {}
    for root in [*children.get("", ()), *spans]:
        stack = [(root, False)]
        while stack:
            span_id, is_done = stack.pop()
            if is_done:
                end[span_id] = len(order)
            elif span_id not in order:
                order[span_id] = len(order)
                stack.append((span_id, True))
                stack += [(child, False) for child in children.get(span_id, ())]
    return order, end


def attempt_trees(
    traces: Traces, keys: Sequence[AttemptKey], reward_name: str | None = None, *, agent_match: str | None = None
) -> dict[AttemptKey, AttemptTree]:
    """Return the trees of these attempts; without `traces.tree` their spans are unknown, and rewards are those of flat attempts.

    `reward_name`: the dimension that is the reward; None is the primary one. `agent_match`: a regular expression for the agents whose calls
    are taken; None: all.
    """
    wanted = set(keys)
    calls = _calls_of(traces.calls, wanted, agent_match)
    spans = _spans_of(traces.tree, wanted)
    return {
        key: AttemptTree(
            calls.get(key, []),
            [each for each in traces.rewards.get(key, ()) if each.is_of(reward_name) and is_usable(each.value)],
            spans.get(key, {}),
        )
        for key in dict.fromkeys(keys)
    }


def _calls_of(calls: CallColumns, wanted: set[AttemptKey], agent_match: str | None) -> dict[AttemptKey, list[TreeCall]]:
    agents = {name for name in set(calls.agent) if matches_agent(agent_match, name)}
    rows: dict[tuple[AttemptKey, str, int], list[int]] = {}
    for row, key in enumerate(zip(calls.rollout_id, calls.attempt_id, strict=True)):
        if key in wanted and calls.incomplete[row] in _WHOLE and calls.agent[row] in agents:
            rows.setdefault((key, calls.process[row], int(calls.call[row])), []).append(row)
    found: dict[AttemptKey, list[TreeCall]] = {}
    responses = calls.response_id or [""] * len(calls)
    for (key, _, _), own in rows.items():
        first = min(own, key=lambda row: int(calls.sequence[row]))
        time = (0, 0) if calls.began is None or calls.ended is None else (int(calls.began[first]), int(calls.ended[first]))
        call = TreeCall(calls.span_id[first], responses[first], int(calls.sequence[first]), calls.agent[first], tuple(own), time)
        found.setdefault(key, []).append(call)
    return {key: sorted(own, key=lambda call: (call.sequence, call.rows)) for key, own in found.items()}


def _spans_of(tree: SpanColumns | None, wanted: set[AttemptKey]) -> dict[AttemptKey, dict[str, TreeSpan]]:
    found: dict[AttemptKey, dict[str, TreeSpan]] = {}
    if tree is None:
        return found
    made = map(TreeSpan, tree.parent_span_id, tree.name, tree.sequence.tolist())
    for rollout_id, attempt_id, span_id, span in zip(tree.rollout_id, tree.attempt_id, tree.span_id, made, strict=True):
        if (rollout_id, attempt_id) in wanted:
            found.setdefault((rollout_id, attempt_id), {}).setdefault(span_id, span)
    return found


# --- returns: rules 1 to 4


def earners(tree: AttemptTree, reward: Reward) -> list[int]:
    """Return the places of the calls that earn a reward, in order (rule 1); empty only of an attempt without calls."""
    if reward.response_id and (named := [place for place, call in enumerate(tree.calls) if call.response_id == reward.response_id]):
        return named
    if own := tree.below(reward.span_id):
        return own
    span = tree.spans.get(reward.span_id)
    at = span.sequence if span is not None else reward.sequence if reward.time is None else math.inf

    around = (found for above in tree.above(reward.span_id) if (found := tree.below(above)))
    own = next(around, [*range(len(tree.calls))])
    return [place for place in own if tree.ended(place) < at] or own


def to_go(tree: AttemptTree, discount: float = 1.0) -> NDArray[np.float64]:
    """Return the return of each call of an attempt (rules 2 to 4): float64 [calls]."""
    found = np.zeros(len(tree.calls))
    for own, value in _counted(tree):
        receivers = np.array([*tree.before(own[0]), *own])
        found[receivers] += value * discount ** np.arange(len(receivers) - 1, -1, -1.0)
    return found


def earned(tree: AttemptTree) -> NDArray[np.float64]:
    """Return what was earned by the time that each call had ended, and not before: float64 [calls]. A reward is at its last earner."""
    found = np.zeros(len(tree.calls))
    for own, value in _counted(tree):
        found[own[-1]] += value
    return found


def _counted(tree: AttemptTree) -> list[tuple[tuple[int, ...], float]]:
    """Return the rewards that count (rule 4): (places of its earners, value) of each; none of an attempt without calls."""
    counted: dict[tuple[str, tuple[int, ...]], Reward] = {}
    for reward in tree.rewards:
        place = _subject(tree, reward), tuple(earners(tree, reward))
        counted.pop(place, None)
        counted[place] = reward
    return [(own, reward.value) for (_, own), reward in counted.items() if own]


def _subject(tree: AttemptTree, reward: Reward) -> str:
    """Return the span that a reward is about: that in which it was emitted, or its own; empty for the whole attempt."""
    span = tree.spans.get(reward.span_id)
    about = span.parent if span is not None and span.name == conventions.SPAN_ANNOTATION else reward.span_id
    known = tree.spans.get(about)
    return about if known is not None and known.name != conventions.SPAN_ATTEMPT else ""


Function = Callable[[AttemptTree], Sequence[float]]
"""A user's rule: returns the return of each of `AttemptTree.calls`."""
Compare = Callable[[Array, NDArray[np.int64]], Array]
"""Returns the advantage of each value, float [n], in its group, int64 [n], 0 … g - 1; in the dtype of the values."""


def group_advantages(values: Array, groups: NDArray[np.int64], *, epsilon: float = STD_EPSILON, scaled: bool = True) -> Array:
    """Compute each value's advantage in its group: (value - mean) / (std + epsilon), with the unbiased std (n - 1).

    Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, §4.1.2). Without `scaled` it is value - mean: Dr. GRPO
    (arXiv:2503.20783, §3.2), where groups of nearly equal rewards are not amplified. `values`: float [n]; `groups`: int64 [n], 0 … g - 1,
    in any order. Returns [n] in the dtype of the values. The advantages of a group with equal values, or with one member, are exactly 0.
    """
    kind = values.dtype.type
    count = np.bincount(groups).astype(kind)

    def summed(terms: Array) -> Array:
        total = np.zeros(len(count), kind)
        np.add.at(total, groups, terms)
        return total

    centred = values - (summed(values) / np.maximum(count, kind(1)))[groups]
    std = np.sqrt(summed(np.square(centred)) / np.maximum(count - kind(1), kind(1)))
    lowest, highest = np.full(len(count), np.inf, kind), np.full(len(count), -np.inf, kind)
    np.minimum.at(lowest, groups, values)
    np.maximum.at(highest, groups, values)
    relative = centred / (std[groups] + kind(epsilon)) if scaled else centred
    return np.where((highest > lowest)[groups], relative, kind(0))


@dataclass(frozen=True)
class Rule:
    """How the returns of calls are computed and compared."""

    returns: Literal["final", "to_go"] | Function = "to_go"
    """`final`: each call has the reward of its attempt, as if all had earned it."""
    discount: float = 1.0
    """Not of a function."""
    states: bool = False
    """Compare attempts as a whole, and calls with those of the same state (`by_state`); else calls with those at the same place."""
    state_weight: float = 1.0
    """Of the advantages by state (omega in GiGPO, eq. 8)."""
    by_agent: bool = False
    """Compare each agent's calls with those of the same agent only: advantages of each agent have their own mean and std, as in Dr. MAS
    (arXiv:2602.08847)."""
    compare: Compare = group_advantages


@dataclass(frozen=True)
class Credit:
    """The result of `credit`."""

    returns: NDArray[np.float64]
    """Of each entry of TrajectoryBatch.rows.values."""
    advantages: Array
    """Likewise, in the dtype asked for."""
    states: int = 0
    """Number of these calls that are not in the first state of their group."""
    matched: int = 0
    """Of these: compared with another call in the same state."""


def call_returns(
    traces: Traces,
    batch: TrajectoryBatch,
    discount: float,
    reward_name: str | None = None,
    *,
    returns: Literal["final", "to_go"] = "to_go",
    agent_match: str | None = None,
    permuted: Callable[[list[float]], list[float]] | None = None,
) -> NDArray[np.float64]:
    """Return the return of each entry of TrajectoryBatch.rows.values, without any comparison; arguments as those of Rule and `credit`."""
    alone = np.unique(batch.rollout_id, return_inverse=True)[1]
    rule = Rule(returns, discount)
    return credit(traces, batch, alone, rule, reward_name=reward_name, agent_match=agent_match, permuted=permuted).returns


def credit(
    traces: Traces,
    batch: TrajectoryBatch,
    groups: NDArray[np.int64],
    rule: Rule,
    *,
    reward_name: str | None = None,
    agent_match: str | None = None,
    permuted: Callable[[list[float]], list[float]] | None = None,
    dtype: Any = np.float32,
) -> Credit:
    """Compute the return and the advantage of each call that is trained on.

    Args:
        traces: the traces that `batch` was made from, with their tree.
        batch: trajectories, uncut. An attempt without any reward has that of the batch (`fill_reward`).
        groups: the group of each trajectory; those of one rollout have the same.
        rule: how returns are computed and compared.
        reward_name: the dimension that is the reward; None is the primary one.
        agent_match: that of the batch.
        permuted: permutes the values of all rewards of the batch, for a control experiment.
        dtype: returns are rounded to it before they are compared.

    Raises AgentError where the user's function fails, or returns anything but a finite number for each call.
    """
    keys = list(zip(batch.rollout_id, batch.attempt_id, strict=True))
    trees = attempt_trees(traces, keys, reward_name, agent_match=agent_match)
    of_batch = dict(zip(keys, batch.reward.tolist(), strict=True))
    whole = rule.returns == "final"
    trees = {key: _with_reward(tree, of_batch[key]) if whole or not tree.rewards else tree for key, tree in trees.items()}
    if permuted is not None:
        trees = _permuted(trees, permuted)
    place_of = {row: (key, place) for key, tree in trees.items() for place, call in enumerate(tree.calls) for row in call.rows}
    places = [place_of[row] for row in np.asarray(batch.rows.values).tolist()]
    found = {key: _returns(tree, rule, key) for key, tree in trees.items()}
    returns = np.array([found[key][place] for key, place in places], np.float64)
    group_of = dict(zip(keys, groups.tolist(), strict=True))
    if not rule.states:
        return Credit(returns, _by_place(trees, found, places, group_of, rule, dtype))
    totals = {key: np.array([sum((value for _, value in _counted(tree)), 0.0)]) for key, tree in trees.items()}
    advantages = _by_place(trees, totals, places, group_of, rule, dtype)
    states = state_groups(traces.calls, batch, groups)
    later = ~np.isin(states, states[[place == 0 for _, place in places]])
    again = later & (np.bincount(states[later], minlength=len(states))[states] > 1)
    dense = np.unique(states[again], return_inverse=True)[1]
    advantages[again] += dtype(rule.state_weight) * rule.compare(returns[again].astype(dtype), dense)
    return Credit(returns, advantages, int(later.sum()), int(again.sum()))


def _with_reward(tree: AttemptTree, value: float) -> AttemptTree:
    return replace(tree, rewards=[Reward(0, "", 0, "primary", value)])


def _permuted(trees: Mapping[AttemptKey, AttemptTree], permuted: Callable[[list[float]], list[float]]) -> dict[AttemptKey, AttemptTree]:
    values = iter(list(permuted([reward.value for tree in trees.values() for reward in tree.rewards])))
    return {key: replace(tree, rewards=[replace(reward, value=next(values)) for reward in tree.rewards]) for key, tree in trees.items()}


def _returns(tree: AttemptTree, rule: Rule, key: AttemptKey) -> NDArray[np.float64]:
    if isinstance(rule.returns, str):
        return to_go(tree, rule.discount)
    name = getattr(rule.returns, "__qualname__", repr(rule.returns))
    try:
        found = np.asarray(list(rule.returns(tree)), np.float64)
    except Exception as error:  # user code: any error becomes a message that names it
        raise AgentError(f"{name} failed on attempt {key[1]} of rollout {key[0]}: {type(error).__name__}: {error}") from error
    if found.shape != (len(tree.calls),) or not np.isfinite(found).all():
        raise AgentError(
            f"{name} returned {found.tolist()} for attempt {key[1]} of rollout {key[0]}: return a finite number for each of its "
            f"{len(tree.calls)} calls"
        )
    return found


# --- comparison


def _by_place(
    trees: Mapping[AttemptKey, AttemptTree],
    values: Mapping[AttemptKey, NDArray[np.float64]],
    places: Sequence[tuple[AttemptKey, int]],
    group_of: Mapping[AttemptKey, int],
    rule: Rule,
    dtype: Any,
) -> Array:
    """Compare the value of each call with those of the group's other attempts at the same place, of a shorter attempt at its last one.

    The mean over attempts at a step is the baseline that depends on time (Greensmith, Bartlett & Baxter, "Variance Reduction Techniques
    for Gradient Estimates in Reinforcement Learning", 2004). It is GRPO's where the calls of an attempt have equal values. `values` has
    one for each call of an attempt, or one for all. With `rule.by_agent` places are counted among the calls of one agent.
    """
    series: dict[tuple[int, str], dict[AttemptKey, list[int]]] = {}
    nth: dict[tuple[AttemptKey, int], int] = {}
    for key, tree in trees.items():
        for place, call in enumerate(tree.calls):
            own = series.setdefault((group_of[key], call.agent if rule.by_agent else ""), {}).setdefault(key, [])
            nth[key, place] = len(own)
            own.append(place)
    flat: list[float] = []
    sets: list[int] = []
    index: dict[tuple[AttemptKey, str, int], int] = {}
    count = 0
    for (_, agent), attempts in series.items():
        for step in range(max(map(len, attempts.values()))):
            for key, own in attempts.items():
                index[key, agent, step] = len(flat)
                of_attempt = values[key]
                flat.append(float(of_attempt[min(own[min(step, len(own) - 1)], len(of_attempt) - 1)]))
                sets.append(count)
            count += 1
    found = rule.compare(np.array(flat, dtype), np.array(sets, np.int64))
    agents = [trees[key].calls[place].agent if rule.by_agent else "" for key, place in places]
    return found[[index[key, agent, nth[key, place]] for (key, place), agent in zip(places, agents, strict=True)]]


def state_groups(calls: CallColumns, batch: TrajectoryBatch, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the states of the batch's calls, 0, 1, …: int64, one for each entry of TrajectoryBatch.rows.values.

    Two calls are in the same state if their rollouts are of one group, the same version of the weights sampled them, and their prompts
    have the same token ids: the anchor states of GiGPO (arXiv:2505.10978, §4.2). Ids are compared, not only their hashes.
    """
    seen: dict[tuple[int, str, int, int], list[tuple[int, Array]]] = {}
    found: list[int] = []
    count = 0
    for place in range(len(batch)):
        mask: Any = batch.response_mask[place]
        tokens = np.concatenate([batch.prompt[place], batch.response[place]])
        asked = len(batch.prompt[place])
        for piece in pieces(calls, np.asarray(batch.rows[place]).tolist(), mask):
            prompt = tokens[: asked + piece.start]
            alike = seen.setdefault((int(groups[place]), calls.model_version[piece.row], len(prompt), hash(prompt.tobytes())), [])
            state = next((number for number, other in alike if np.array_equal(other, prompt)), None)
            if state is None:
                state = count
                count += 1
                alike.append((state, prompt))
            found.append(state)
    return np.array(found, np.int64)
