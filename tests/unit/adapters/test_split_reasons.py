"""Random conversation trees of simulated agents: the cause of each break is known, so the reason must match it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.adapters.merge import merge
from agl_otel.adapters.split_reasons import SPLIT_REASONS, Call, left_out

DRIFT = 50  # added to the tokens of a reply that is tokenised again


@dataclass
class Node:
    """One call of a simulated agent: messages are (role, content), tokens follow from them by a template."""

    messages: list[tuple[str, tuple[int, ...]]]
    reply: tuple[int, ...]
    agent: str
    drifted: frozenset[int] = frozenset()
    """Places of messages that are in other tokens than when they were sampled."""
    expected: str = ""
    call: Call = field(init=False)

    def made(self, number: int, *, messages_known: bool) -> Call:
        tokens: list[int] = []
        for place, (role, content) in enumerate(self.messages):
            shift = DRIFT if place in self.drifted else 0
            tokens += [{"system": 1, "user": 2, "assistant": 3, "tool": 4}[role], *(token + shift for token in content), 5]
        self.call = Call(
            row=number,
            call=number,
            prompt=np.array([*tokens, 3], np.int32),
            response=np.array([*self.reply, 5], np.int32),
            agent=self.agent,
            asked=tuple(f"{role}:{content}" for role, content in self.messages) if messages_known else (),
            answer=f"assistant:{self.reply}" if messages_known else "",
        )
        return self.call

    @property
    def history(self) -> list[tuple[str, tuple[int, ...]]]:
        return [*self.messages, ("assistant", self.reply)]


@st.composite
def conversations(draw: st.DrawFn) -> list[Node]:
    """Several agents at once: turns, tool calls, empty turns, retries, branches, edits, drift, overflow. All content is distinct."""
    fresh = iter(range(10, 10_000))

    def content() -> tuple[int, ...]:
        return tuple(1000 + next(fresh) for _ in range(draw(st.integers(1, 3))))

    def begin(agent: str, expected: str) -> Node:
        opening = [("system", (7, 7)), ("user", content())]
        return Node(opening, content(), agent, expected=expected)

    made = [begin("", "")]
    tips = [made[0]]
    for _ in range(draw(st.integers(0, 8))):
        tip = draw(st.sampled_from(tips))
        what = draw(st.sampled_from(["turn", "turn", "tool", "empty", "retry", "branch", "edit", "drift", "overflow", "agent", "named"]))
        role = "tool" if what == "tool" else "user"
        after = [*tip.history, (role, content())]
        if what in ("agent", "named"):
            node = begin("helper" if what == "named" else tip.agent, "sub_agent")
        elif what == "retry":
            node = Node(tip.messages, content(), tip.agent, tip.drifted, "branch")
        elif what == "branch":
            node = Node([*tip.history, ("user", content())], content(), tip.agent, tip.drifted, "branch")
            if not any(other.messages[: len(tip.history)] == tip.history for other in made):
                node.expected = ""
        elif what == "edit":  # of what was asked, or of the reply, never of the last message alone: that is a branch
            place = draw(st.integers(2, len(tip.history) - 1)) if len(tip.history) > 2 else 1
            edited = [(r, content()) if p == place else (r, c) for p, (r, c) in enumerate(after)]
            node = Node(edited, content(), tip.agent, tip.drifted, "history_edited")
        elif what == "drift":
            node = Node(after, content(), tip.agent, tip.drifted | {len(tip.messages)}, "template_drift")
        elif what == "overflow" and len(tip.messages) >= 4:
            cut = draw(st.integers(2, len(tip.messages) - 1))
            shift = cut - 1
            node = Node([after[0], *after[cut:]], content(), tip.agent, frozenset(p - shift for p in tip.drifted if p >= cut), "truncated")
        else:
            if what == "empty":
                after = [*tip.history, ("user", ())]
            node = Node(after, content(), tip.agent, tip.drifted, "")
        made.append(node)
        if node.expected != "branch":
            tips = [other for other in tips if other is not tip] if node.expected not in ("sub_agent",) else tips
            tips.append(node)
    return made


@given(conversations(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_reason_matches_the_agents_action(nodes: list[Node], messages_known: bool) -> None:
    calls = [node.made(number, messages_known=messages_known) for number, node in enumerate(nodes, 1)]
    merged = merge(calls)
    reasons = {m.calls[0].row: m.reason for m in merged}
    assert sorted(call.row for m in merged for call in m.calls) == [call.row for call in calls]
    assert reasons[1] == ""
    named: set[str] = {nodes[0].agent}
    for node in nodes[1:]:
        got = reasons.get(node.call.row, "")
        first_of_agent, allowed = node.agent not in named, {node.expected}
        named.add(node.agent)
        if first_of_agent:
            allowed = {"sub_agent"}
        if not messages_known and node.expected in ("history_edited", "template_drift", "truncated", "sub_agent"):
            allowed |= {"response_changed", "prompt_changed", "branch"}  # tokens alone do not tell them apart
        assert got in allowed, (got, allowed)
        assert got == "" or got in SPLIT_REASONS


SHORT = st.lists(st.integers(1, 2), max_size=6)


@given(SHORT, SHORT)
@settings(max_examples=500, deadline=None)
def test_left_out_equals_its_definition(sequence: list[int], history: list[int]) -> None:
    def definition(numbers: Sequence[int], before: Sequence[int]) -> bool:
        """Whether they are equal without some run of `before` that begins where the two first differ."""
        starts = [place for place in range(min(len(numbers), len(before))) if numbers[place] != before[place]][:1]
        shorter = [[*before[:start], *before[end:]] for start in starts for end in range(start + 1, len(before))]
        return any(list(numbers[: len(each)]) == each for each in shorter)

    assert left_out(sequence, history) == definition(sequence, history)
