"""Repair of large trees takes about linear time and equals its definition."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.adapters import RewardMatchPolicy, TraceTree
from tests.unit.adapters.spans import call, reward, span

MANY = 1000
SPANS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8), st.integers(-1, 8)), min_size=1, max_size=9)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the time of a span was read."""
    found: Counter[str] = Counter()

    def counted(name: str) -> property:
        real = TraceTree.__dict__[name]

        def get(self: TraceTree) -> float:
            found[name] += 1
            return real.fget(self)

        return property(get)

    for name in ("start_time", "end_time"):
        monkeypatch.setattr(TraceTree, name, counted(name))
    return found


def test_repair_of_many_misplaced_spans_takes_linear_time(reads: Counter[str]) -> None:
    lost = [span(f"lost {number}", 2 + number, 3 + number, "root") for number in range(MANY)]
    tree = TraceTree.from_spans([span("root", 0, 9 * MANY), span("agent", 1, 8 * MANY, "root"), *lost])
    tree.repair_hierarchy()
    [agent] = tree.children
    assert len(agent.children) == MANY
    assert reads.total() < 30 * MANY


def test_rewards_of_long_running_calls_are_matched_in_linear_time(reads: Counter[str]) -> None:
    calls = [call(f"call {number}", number, 9 * MANY, "root") for number in range(MANY)]
    given = [reward(f"reward {number}", MANY + number, 1.0, "root") for number in range(MANY)]
    tree = TraceTree.from_spans([span("root", 0, 9 * MANY), *calls, *given])
    found = tree.find_llm_calls()
    reads.clear()
    assert (len(found), tree.match_rewards(RewardMatchPolicy.FIRST_OCCURRENCE, found)) == (MANY, {})
    assert reads.total() < 30 * MANY


@given(SPANS)
def test_a_span_is_moved_under_the_shortest_enclosing_span(drawn: list[tuple[int, int, int]]) -> None:
    spans = [span("root", 0, 99)]
    for number, (start, length, parent) in enumerate(drawn):
        spans.append(span(f"{number}", start, start + length, f"{parent}" if 0 <= parent < number else "root"))
    tree = TraceTree.from_spans(spans)
    top = tree
    while len(top.children) == 1:
        top = top.children[0]
    before = {child.id: {node.id for node in child.traverse()} for child in top.children}
    nodes = {node.id: node for node in tree.traverse()}
    place = {name: (node.start_time, -node.end_time) for name, node in nodes.items()}
    tree.repair_hierarchy()
    assert sorted(node.id for node in tree.traverse()) == sorted(nodes), "none is lost, and none comes twice"
    parents = {child.id: node for node in tree.traverse() for child in node.children}
    for name in before:
        child = nodes[name]
        fit = [
            nodes[each].end_time - nodes[each].start_time
            for first, below in before.items()
            for each in below
            if max(place[first], place[each]) < place[name] and nodes[each].end_time >= child.end_time
        ]
        parent = parents[name]
        assert (parent is top) == (not fit)
        assert parent is top or parent.end_time - parent.start_time == min(fit)
