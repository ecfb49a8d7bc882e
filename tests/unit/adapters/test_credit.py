"""Credit along the span tree: cases of each rule, and equality with plain loops over the definitions in credit.py."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters.credit import (
    AttemptTree,
    Rule,
    TreeCall,
    TreeSpan,
    call_returns,
    credit,
    earners,
    group_advantages,
    state_groups,
    to_go,
)
from agl_otel.adapters.records import Functions, Reading, rows_of, to_transitions
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.errors import AgentError
from agl_otel.types import Span
from agl_otel.types.columns import Reward, SpanColumns, Traces
from agl_otel_hook import conventions
from tests.unit.adapters.conftest import CallRow, TracesBuilder

ROOT = conventions.SPAN_ATTEMPT
NOTE = conventions.SPAN_ANNOTATION


def tree(spans: dict[str, tuple[str, int]], calls: list[str], *rewards: tuple[str, float], agents: str = "", **other: Any) -> AttemptTree:
    """Make a tree of {span: (parent, sequence)}; spans whose names begin with `note` are annotations, `root` is the attempt's."""
    names = {"root": ROOT} | {span: NOTE for span in spans if span.startswith("note")}
    made = {span: TreeSpan(parent, names.get(span, span), sequence) for span, (parent, sequence) in spans.items()}
    agent = agents or "a" * len(calls)
    steps = sorted((spans[call][1], call, agent[place]) for place, call in enumerate(calls))
    return AttemptTree(
        [TreeCall(call, f"resp-{call}", sequence, name, (row,)) for row, (sequence, call, name) in enumerate(steps)],
        [Reward(made[span].sequence if span in made else 0, span, 0, "primary", value, **other) for span, value in rewards],
        made,
    )


FLAT = {"root": ("", 99), "c1": ("root", 1), "note1": ("root", 2), "c2": ("root", 3), "note2": ("root", 4), "c3": ("root", 5)}
STEPS = {
    "root": ("", 99), "s1": ("root", 10), "c1": ("s1", 1), "c2": ("s1", 2), "tool": ("s1", 3), "note1": ("s1", 4),
    "s2": ("root", 20), "c3": ("s2", 11), "note2": ("s2", 12), "c4": ("s2", 13), "note3": ("root", 21),
}  # fmt: skip
PARALLEL = {"root": ("", 99), "a": ("root", 30), "b": ("root", 31), "a1": ("a", 1), "b1": ("b", 2), "a2": ("a", 3), "b2": ("b", 4)}


@pytest.mark.parametrize(
    ("made", "discount", "expected"),
    [
        (tree(FLAT, ["c1", "c2", "c3"], ("note1", 1), ("note2", 10)), 1.0, [11, 10, 0]),
        (tree(FLAT, ["c1", "c2", "c3"], ("note1", 1), ("note2", 10)), 0.5, [6, 10, 0]),
        (tree(FLAT, ["c1", "c2", "c3"], ("note1", 1), ("note2", 10)), 0.0, [1, 10, 0]),
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("s1", 1)), 1.0, [1, 1, 0, 0]),  # on a step's own span
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("s2", 1)), 0.5, [0.125, 0.25, 0.5, 1]),
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("tool", 1)), 1.0, [1, 1, 0, 0]),  # on a tool: the calls of its step before it
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("note2", 1)), 1.0, [1, 1, 1, 0]),  # emitted in a step before its last call
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("c2", 1)), 1.0, [1, 1, 0, 0]),  # of a call
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("gone", 1), time=5, response_id="resp-c3"), 1.0, [1, 1, 1, 0]),
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("gone", 1), time=5), 1.0, [1, 1, 1, 1]),  # an evaluation of a span that is not there
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("note3", 1), ("root", 2)), 1.0, [2, 2, 2, 2]),  # the same place: the last counts
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("s1", 1), ("note1", 3)), 1.0, [3, 3, 0, 0]),
        (tree(STEPS, ["c1", "c2", "c3", "c4"], ("tool", 1), ("note1", 3)), 1.0, [4, 4, 0, 0]),  # another span: both count
        (tree(PARALLEL, ["a1", "b1", "a2", "b2"], ("a", 1)), 1.0, [1, 0, 1, 0]),  # b1 came in between, in another branch
        (tree(PARALLEL, ["a1", "b1", "a2", "b2"], ("b", 1)), 1.0, [1, 1, 0, 1]),  # a1 came before b began
        # the call's span arrived after the reward of its step; after that of its client, which arrived before it
        (
            tree(
                FLAT | {"s": ("root", 8), "c1": ("s", 7), "note1": ("s", 6), "c2": ("s0", 9), "s0": ("root", 1)}, ["c1", "c2"], ("note1", 1)
            ),
            1.0,
            [1, 0],
        ),
        (
            tree(
                {"root": ("", 1), "http": ("root", 2), "c1": ("http", 5), "note1": ("root", 3), "c2": ("root", 6)},
                ["c1", "c2"],
                ("note1", 1),
            ),
            1.0,
            [1, 0],
        ),
        (tree({"c1": ("", 5), "c2": ("", 6), "note1": ("", 1)}, ["c1", "c2"], ("note1", 1)), 1.0, [1, 1]),  # before any call: of all
    ],
)
def test_the_calls_that_receive_a_reward(made: AttemptTree, discount: float, expected: list[float]) -> None:
    assert to_go(made, discount).tolist() == expected


def test_calls_that_ran_beside_the_first_earner_receive_nothing() -> None:
    made = tree(PARALLEL, ["a1", "b1", "a2", "b2"], ("b", 1))
    times = {"a1": (100, 200), "b1": (140, 250), "a2": (260, 400), "b2": (262, 300)}
    timed = replace(made, calls=[call._replace(time=times[call.span_id]) for call in made.calls])
    assert to_go(timed).tolist() == [0, 1, 0, 1]
    assert to_go(timed, 0.5).tolist() == [0, 0.5, 0, 1], "what did not receive it is no step on its way"
    late = replace(timed, calls=[call._replace(time=(151, 250)) if call.span_id == "b1" else call for call in timed.calls])
    assert to_go(late).tolist() == [1, 1, 0, 1], "for less than half: it was over when that one began, but for clocks"


def test_spans_in_a_circle_and_very_deep_ones_end() -> None:
    circle = tree({"x": ("y", 1), "y": ("x", 2), "c1": ("x", 3)}, ["c1"], ("y", 1))
    assert to_go(circle).tolist() == [1]
    deep = {"s0": ("", 1)} | {f"s{n}": (f"s{n - 1}", n + 1) for n in range(1, 20_000)} | {"c1": ("s19999", 30_000)}
    assert to_go(tree(deep, ["c1"], ("s5", 2.0))).tolist() == [2]


# --- the definitions once more, as plain loops


def climbs(spans: dict[str, TreeSpan], span_id: str) -> list[str]:
    path = [span_id]
    while spans.get(path[-1]) is not None and spans[path[-1]].parent:
        path.append(spans[path[-1]].parent)
    return path


def enumerated(made: AttemptTree, discount: float) -> list[float]:
    spans = dict(made.spans)
    last: dict[tuple[str, tuple[int, ...]], float] = {}
    for reward in made.rewards:
        at = spans[reward.span_id].sequence
        earned: list[int] = []
        for level, above in enumerate(climbs(spans, reward.span_id)):
            below = [place for place, call in enumerate(made.calls) if above in climbs(spans, call.span_id)]
            numbers = [
                min(spans[each].sequence for each in climbs(spans, made.calls[place].span_id) if each in spans and each != "root")
                for place in below
            ]
            earned = [place for place, number in zip(below, numbers, strict=True) if level == 0 or number < at] or below
            if earned:
                break
        if not earned:
            earned = list(range(len(made.calls)))
        about = spans[reward.span_id].parent if spans[reward.span_id].name == NOTE else reward.span_id
        last[about, tuple(earned)] = reward.value
    total = [0.0] * len(made.calls)
    for (_, places), value in last.items():
        receivers = [place for place in range(len(made.calls)) if place in places or place < places[0]]
        for place in receivers:
            total[place] += value * discount ** sum(other > place for other in receivers)
    return total


def random_tree(chance: random.Random) -> AttemptTree:
    sequence = iter(chance.sample(range(1, 200), 40))
    spans = {"root": ("", next(sequence))}
    inner = ["root"]
    for number in range(chance.randint(0, 6)):
        inner.append(f"s{number}")
        spans[inner[-1]] = (chance.choice(inner[:-1]), next(sequence))
    calls = [f"c{number}" for number in range(chance.randint(1, 7))]
    notes = [f"note{number}" for number in range(chance.randint(1, 6))]
    spans |= {each: (chance.choice(inner), next(sequence)) for each in [*calls, *notes]}
    rewarded = chance.sample([*notes, *inner[1:], *calls], chance.randint(1, len(notes)))
    agents = "".join(chance.choice("ab") for _ in calls)
    return tree(spans, calls, *((each, chance.uniform(-1, 1)) for each in rewarded), agents=agents)


def test_returns_equal_enumeration() -> None:
    chance = random.Random(25)
    for _ in range(500):
        made, discount = random_tree(chance), chance.choice([1.0, 0.9, 0.5, 0.0])
        assert to_go(made, discount) == pytest.approx(enumerated(made, discount), abs=1e-9)


def columns_of(trees: dict[str, AttemptTree], prompts: dict[str, list[list[int]]], versions: dict[str, str]) -> Traces:
    """Make the traces of which `attempt_trees` makes these trees; rollouts are in the order of their ids."""
    rows = [
        CallRow(rollout=rollout, call=place + 1, prompt=prompts[rollout][place], agent=call.agent, version=versions[rollout])
        for rollout, made in trees.items()
        for place, call in enumerate(made.calls)
    ]
    traces = TracesBuilder(rewards={(rollout, "at-1"): list(made.rewards) for rollout, made in trees.items()}).build(*rows)
    calls = [call for made in trees.values() for call in made.calls]
    held = replace(
        traces.calls,
        span_id=[call.span_id for call in calls],
        response_id=[call.response_id for call in calls],
        sequence=np.array([call.sequence for call in calls], np.uint64),
    )
    spans = [(rollout, span_id, span) for rollout, made in trees.items() for span_id, span in made.spans.items()]
    columns = SpanColumns(
        rollout_id=[rollout for rollout, _, _ in spans],
        attempt_id=["at-1"] * len(spans),
        span_id=[span_id for _, span_id, _ in spans],
        parent_span_id=[span.parent for _, _, span in spans],
        name=[span.name for _, _, span in spans],
        sequence=np.array([span.sequence for _, _, span in spans], np.uint64),
    )
    return replace(traces, calls=held, tree=columns)


def advantage(value: float, others: list[float], scaled: bool) -> float:
    if len(set(others)) < 2:
        return 0.0
    spread = statistics.stdev(others) + 1e-6 if scaled else 1.0
    return (value - statistics.fmean(others)) / spread


@pytest.mark.parametrize("by_agent", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_advantages_equal_enumeration(states: bool, by_agent: bool) -> None:
    chance = random.Random(26)
    matched = 0
    for _ in range(60):
        names = [f"r{number}" for number in range(chance.randint(1, 6))]
        group = {name: chance.randint(0, 1) for name in names}
        trees = {name: random_tree(chance) for name in names}
        prompts = {
            name: [[1], *([9, chance.randint(1, 3)] for _ in made.calls)][: len(made.calls)] for name, made in trees.items()
        }  # no prompt goes on from an earlier one
        versions = {name: chance.choice("12") for name in names}
        rule = Rule("to_go", chance.choice([1.0, 0.5]), states, chance.choice([1.0, 0.3]), by_agent)
        scaled = chance.choice([True, False])
        rule = replace(rule, compare=partial(group_advantages, scaled=scaled))
        traces = columns_of(trees, prompts, versions)
        batch = to_trajectories(traces)
        groups = np.array([group[rollout] for rollout in batch.rollout_id])
        found = credit(traces, batch, groups, rule, dtype=np.float64)
        row_of = list(zip(traces.calls.rollout_id, (traces.calls.call - 1).tolist(), strict=True))
        returns = {name: enumerated(made, rule.discount) for name, made in trees.items()}
        totals = {name: [enumerated(made, 1.0)[0]] * len(made.calls) for name, made in trees.items()}
        for row, value, got in zip(batch.rows.values.tolist(), found.returns.tolist(), found.advantages.tolist(), strict=True):
            name, place = row_of[row]
            agent = trees[name].calls[place].agent
            assert value == pytest.approx(returns[name][place], abs=1e-9)

            series = {o: [at for at, call in enumerate(trees[o].calls) if not by_agent or call.agent == agent] for o in names}
            step = series[name].index(place)
            values = totals if states else returns
            others = [values[o][own[min(step, len(own) - 1)]] for o, own in series.items() if group[o] == group[name] and own]
            expected = advantage(values[name][place], others, scaled)
            state = (group[name], versions[name], prompts[name][place])
            if states and prompts[name][place] != [1]:
                alike = [returns[o][at] for o in names for at, prompt in enumerate(prompts[o]) if (group[o], versions[o], prompt) == state]
                matched += len(alike) > 1
                expected += rule.state_weight * advantage(returns[name][place], alike, scaled)
            assert got == pytest.approx(expected, abs=1e-9)
    assert matched > 100 or not states


def test_the_share_of_matched_states_counts_all_but_the_first_ones() -> None:
    rows = [CallRow(rollout=name, call=call, prompt=prompt) for name, call, prompt in [
        ("a", 1, [1]), ("a", 2, [5]), ("a", 3, [6]), ("b", 1, [1]), ("b", 2, [5]), ("b", 3, [1]), ("c", 1, [1]), ("c", 2, [5]),
    ]]  # fmt: skip
    traces = TracesBuilder().build(*(replace(row, version="2") if row.rollout == "c" else row for row in rows))
    batch = to_transitions(traces)
    same = np.zeros(len(batch), np.int64)
    found = credit(traces, batch, same, Rule(states=True))
    assert (found.states, found.matched) == (4, 2), "c was sampled by other weights, and b came back to the first state"
    assert state_groups(traces.calls, batch, same).tolist() == [0, 1, 2, 0, 1, 0, 3, 4]


def test_prompts_of_merged_calls_are_whole() -> None:
    """The second call continues the first in both attempts, after the same reply of the model in one pair only."""
    rows = [
        CallRow(rollout="a", call=1, prompt=[1], response=[2]), CallRow(rollout="a", call=2, prompt=[1, 2, 3], response=[4]),
        CallRow(rollout="b", call=1, prompt=[1], response=[2]), CallRow(rollout="b", call=2, prompt=[1, 2, 3], response=[5]),
        CallRow(rollout="c", call=1, prompt=[1], response=[7]), CallRow(rollout="c", call=2, prompt=[1, 7, 3], response=[4]),
    ]  # fmt: skip
    traces = TracesBuilder().build(*rows)
    batch = to_trajectories(traces)
    assert len(batch) == 3
    assert state_groups(traces.calls, batch, np.zeros(3, np.int64)).tolist() == [0, 1, 0, 1, 0, 2]


def test_an_attempt_without_a_reward_has_the_filled_one() -> None:
    traces = TracesBuilder(rewards={("a", "at-1"): [], ("b", "at-1"): [Reward(9, "r", 0, "primary", 1.0)]}).build(
        CallRow(rollout="a"), CallRow(rollout="b")
    )
    batch = to_trajectories(traces, fill_reward=-2.0)
    assert credit(traces, batch, np.zeros(2, np.int64), Rule()).returns.tolist() == [-2.0, 1.0]


def test_calls_of_agents_that_are_not_trained_are_no_steps() -> None:
    """They neither receive nor discount a reward, and calls are compared by their place among those of the trained agents."""

    def played(rollout: str, agents: list[str]) -> list[CallRow]:
        return [CallRow(rollout, call=number, prompt=[number], agent=agent) for number, agent in enumerate(agents, 1)]

    traces = TracesBuilder().build(*played("a", ["plan", "solve", "plan"]), *played("b", ["plan", "solve", "solve", "plan"]))
    span, sequence = traces.calls.span_id, traces.calls.sequence.tolist()
    traces.rewards["a", "at-1"] = [Reward(sequence[1], span[1], 0, "primary", 2.0), Reward(99, "r", 0, "primary", 1.0)]
    traces.rewards["b", "at-1"] = [Reward(99, "r", 0, "primary", 3.0)]
    batch = to_trajectories(traces, agent_match="plan")
    assert batch.refused == {"other_agent": 3}
    found = credit(traces, batch, np.zeros(len(batch), np.int64), Rule("to_go", 0.5), agent_match="plan")
    assert found.returns.tolist() == [2.0 + 0.5, 1.0, 1.5, 3.0], "what another agent's call earned is of the plans before it"
    assert found.advantages.tolist() == [pytest.approx(own, abs=1e-5) for own in (0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5)]
    assert call_returns(traces, batch, 0.5, agent_match="plan").tolist() == found.returns.tolist()
    assert credit(traces, batch, np.zeros(len(batch), np.int64), Rule("to_go", 0.5)).returns.tolist() == [1.25, 1.0, 0.375, 3.0]


def test_rewards_that_are_not_usable_are_none() -> None:
    rewards = [Reward(2, "x", 0, "primary", math.nan), Reward(9, "r", 0, "primary", 1.0)]
    traces = TracesBuilder(rewards={("ro-1", "at-1"): rewards}).build(CallRow())
    assert credit(traces, to_trajectories(traces), np.zeros(1, np.int64), Rule()).returns.tolist() == [1.0]


def test_a_users_function_gives_the_returns() -> None:
    def backwards(attempt: AttemptTree) -> list[float]:
        return [len(attempt.calls) - place + attempt.rewards[0].value for place in range(len(attempt.calls))]

    traces = TracesBuilder().build(CallRow(call=1), CallRow(call=2, prompt=[9]))
    batch = to_transitions(traces)
    assert credit(traces, batch, np.zeros(2, np.int64), Rule(returns=backwards)).returns.tolist() == [3, 2]


@pytest.mark.parametrize("wrong", [lambda _: [1.0], lambda _: [1.0, math.nan], lambda _: None, lambda attempt: attempt.calls])
def test_a_users_function_that_fails_is_named(wrong: Any) -> None:
    traces = TracesBuilder().build(CallRow(call=1), CallRow(call=2, prompt=[9]))
    with pytest.raises(AgentError, match=r"lambda.* attempt at-1 of rollout ro-1"):
        credit(traces, to_transitions(traces), np.zeros(2, np.int64), Rule(returns=wrong))


def test_a_reward_is_earned_by_the_calls_that_its_evaluation_names() -> None:
    made = tree(STEPS, ["c1", "c2", "c3", "c4"])
    assert earners(made, Reward(0, "s2", 0, "judge", 1.0, 5, "resp-c1")) == [0]


def test_group_advantages_keep_the_dtype_and_are_0_without_a_difference() -> None:
    for kind in (np.float32, np.float64):
        found = group_advantages(np.array([1, 1, 3, 4, 4], kind), np.array([0, 0, 2, 1, 1]))
        assert found.dtype == kind and not found.any()


def test_the_reward_of_a_users_function_is_of_the_whole_attempt() -> None:
    spans = {"root": ("", 99), "a": ("root", 30), "b": ("root", 31), "a1": ("a", 1), "b1": ("b", 2), "a2": ("a", 3), "b2": ("b", 4)}
    made = tree(spans, ["a1", "b1", "a2", "b2"])
    traces = columns_of({"ro-1": made}, {"ro-1": [[1], [2], [3], [4]]}, {"ro-1": "1"})
    own = [
        Span.model_construct(rollout_id="ro-1", attempt_id="at-1", span_id=each, sequence_id=number) for each, (_, number) in spans.items()
    ]
    reading = Reading(form="transitions", returns=True, reward_function="mine.py:rate")
    rows = rows_of(reading, traces, own, Functions(reward=lambda _: 1.0)).rows
    assert [row["returns"] for row in rows] == [[1.0]] * 4, "although the last span is a sub-agent's"
