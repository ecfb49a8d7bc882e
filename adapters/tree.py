"""The spans of one attempt as a tree, and the agents and rewards of the model calls in it. Pure.

Names and rules are those of Agent Lightning 0.3's TraceTree. There is no recursion, since traces may be very deep.
"""

from __future__ import annotations

import importlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from agl_otel.errors import UsageError
from agl_otel.spans.agents import agent_name
from agl_otel.spans.calls import JoinedCall, Joiner, repeated
from agl_otel.spans.conversations import read_call
from agl_otel.spans.rewards import emitted_reward, evaluations_by_call, last_of
from agl_otel.types import Span
from agl_otel.types.patterns import checked_pattern, matches_agent
from agl_otel.types.scores import is_usable
from agl_otel_hook import conventions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

VIRTUAL_ROOT = "virtual-root"
CALLER = "gen_ai.agent.name"
"""The attribute with the agent of a model call. Every other mark of an agent applies to the spans below it."""
OLD_CALL_MATCH = r"openai\.chat\.completion"
"""0.3's default pattern of model calls: today's instrumentations name their spans otherwise (openai.chat), so it means any call."""
EVERY_AGENT = "*"
"""The agent of a call without a named agent around it, if none was requested."""


class RewardMatchPolicy(StrEnum):
    """The rule by which a reward is matched to a model call."""

    FIRST_OCCURRENCE = "first_occurrence"
    """The last call that ended before the reward and has none yet."""
    FIRST_SIBLING = "first_sibling"
    """The same, but only among the reward's siblings."""


@dataclass(eq=False)
class TraceTree:
    """One span and those below it."""

    id: str
    span: Span
    children: list[TraceTree] = field(default_factory=list["TraceTree"])

    @classmethod
    def from_spans(cls, spans: Sequence[Span | ReadableSpan]) -> TraceTree:
        """Build the tree of some spans. Missing parents, and a root above several trees, are made up.

        Raises UsageError (also a ValueError) without spans, or if they form a cycle.
        """
        if not spans:
            raise UsageError("there are no spans: a trace tree needs one at least")
        stored = [_as_span(span, place) for place, span in enumerate(spans, 1)]
        nodes = {span.span_id: cls(span.span_id, span) for span in sorted(stored, key=lambda span: span.start_time or 0.0)}
        missing: dict[str, list[TraceTree]] = {}
        roots: list[TraceTree] = []
        for node in nodes.values():
            parent = node.span.parent_id
            if not parent:
                roots.append(node)
            elif parent in nodes:
                nodes[parent].children.append(node)
            else:
                missing.setdefault(parent, []).append(node)
        roots += [cls(parent, _around(parent, children), children) for parent, children in missing.items()]
        if not roots:
            raise UsageError(f"the {len(nodes)} spans form a circle: each has a parent among them, so the trace has no root")
        roots.sort(key=lambda node: node.start_time)
        return roots[0] if len(roots) == 1 else cls(VIRTUAL_ROOT, _around(VIRTUAL_ROOT, roots), roots)

    @property
    def start_time(self) -> float:
        """Unix seconds; 0 if the span has no start."""
        return self.span.start_time or 0.0

    @property
    def end_time(self) -> float:
        """Unix seconds; the start if the span has no end."""
        return self.span.end_time or self.start_time

    @property
    def agent_name(self) -> str | None:
        """The agent that the span names, or None."""
        return agent_name(self.span)

    def traverse(self) -> list[TraceTree]:
        """Return this node and all below it, depth first."""
        return list(self._walk())

    def _walk(self) -> Iterator[TraceTree]:
        stack: list[TraceTree] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def repair_hierarchy(self) -> None:
        """Move misplaced children under the shortest span that encloses them in time; only at the topmost level with several children.

        Instrumentations that lose the context put calls beside their agent. A child is only moved below a span that began before it.
        """
        top = self
        while len(top.children) == 1:
            top = top.children[0]
        known = sorted(((max(child._place(), node._place()), node) for child in top.children for node in child._walk()), key=lambda n: n[0])
        around = _Around()
        moved: set[int] = set()
        grown: dict[int, TraceTree] = {}
        added = 0
        for child in sorted(top.children, key=TraceTree._place):
            place = child._place()
            while known[added][0] < place:
                around.add(known[added][1])
                added += 1
            if (target := around.shortest(child.end_time)) is not None:
                target.children.append(child)
                moved.add(id(child))
                grown[id(target)] = target
        top.children[:] = [child for child in top.children if id(child) not in moved]
        for target in grown.values():
            target.children.sort(key=lambda node: node.start_time)

    def _place(self) -> tuple[float, float]:
        """Return the key that sorts a span after all that enclose it in time."""
        return self.start_time, -self.end_time

    def is_reward_span(self) -> bool:
        """Whether the span holds a reward or is the operation that computed one."""
        operation = (
            self.span.name == conventions.SPAN_OPERATION and self.span.attributes.get(conventions.OPERATION_NAME) == conventions.SPAN_REWARD
        )
        return operation or emitted_reward(self.span) is not None

    def find_llm_calls(
        self, *, llm_call_match: str | None = None, agent_match: str | None = None, exclude_llm_call_in_reward: bool = True
    ) -> list[JoinedCall]:
        """Return the model calls, each once, depth first; of a call that an SDK repeated, the last try.

        Args:
            llm_call_match: a regular expression for the names of spans to treat as calls; None, or 0.3's default: calls in any dialect.
            agent_match: a regular expression that the nearest named agent around a call must match; None takes every call.
            exclude_llm_call_in_reward: leave out a judge's calls, those below a span that holds or computes a reward.
        """
        for name, pattern in (("llm_call_match", llm_call_match), ("agent_match", agent_match)):
            checked_pattern(pattern or "", f"{name} {pattern!r}")
        if llm_call_match == OLD_CALL_MATCH:
            llm_call_match = None
        joiner = Joiner()
        unused = repeated(node.span for node in self.traverse())
        selected = EVERY_AGENT if agent_match is None else None
        stack: list[tuple[TraceTree, str | None, JoinedCall | None]] = [(self, selected, None)]
        while stack:
            node, agent, outer = stack.pop()
            if exclude_llm_call_in_reward and node.is_reward_span():
                continue
            if caller := node.span.attributes.get(CALLER):
                agent = _selected(str(caller), agent_match)
            if agent is not None and (llm_call_match is None or re.search(llm_call_match, node.span.name)):
                call = read_call(node.span, anyway=llm_call_match is not None)
                if call is not None and (node.span.trace_id, node.span.span_id) not in unused:
                    outer = joiner.add(call, agent, node, outer)
            if (name := node.agent_name) is not None:
                agent = _selected(name, agent_match)
            stack.extend((child, agent, outer) for child in reversed(node.children))
        return joiner.calls

    def match_rewards(self, policy: RewardMatchPolicy | str, calls: Sequence[JoinedCall]) -> dict[str, float]:
        """Return {span id of a call: its reward} for calls with a reward: the last evaluation of it, else the emitted one by `policy`."""
        own = {call.node.id: call.node for call in calls}
        groups = [self.traverse()] if policy == RewardMatchPolicy.FIRST_OCCURRENCE else [node.children for node in self._walk()]
        rewards: dict[str, float] = {}
        for group in groups:
            begun: list[tuple[float, int, str]] = []
            """A heap of (end, place, id) of calls."""
            ended: list[tuple[int, str]] = []
            """A heap of (-place, id) of calls that have ended and have no reward."""
            for place, node in enumerate(sorted(group, key=lambda node: node.start_time)):
                if node.id in own:
                    heappush(begun, (node.end_time, place, node.id))
                elif (value := emitted_reward(node.span)) is not None:
                    while begun and begun[0][0] <= node.start_time:
                        _, before, name = heappop(begun)
                        heappush(ended, (-before, name))
                    if ended:
                        rewards[heappop(ended)[1]] = value
        evaluated = evaluations_by_call(node.span for node in self._walk())
        for call in calls:
            names = {name for each in call.calls for name in (each.response_id, getattr(each.span, "span_id", ""))}
            if last := last_of(evaluated[name] for name in names if name in evaluated):
                rewards.pop(call.node.id, None)
                if is_usable(last.value):
                    rewards[call.node.id] = last.value
        return rewards

    def visualize(self, filename: str, interested_span_match: str | None = None) -> None:
        """Draw the tree to `filename`.png. Raises UsageError if graphviz is not installed."""
        try:
            graphviz: Any = importlib.import_module("graphviz")
        except ImportError:
            raise UsageError("drawing a trace needs graphviz: pip install graphviz, and the program dot of your system") from None
        graph = graphviz.Digraph()
        for node in self._walk():
            highlighted = interested_span_match is not None and re.search(interested_span_match, node.span.name)
            graph.node(node.id, f"{node.span.name}\n{node.end_time - node.start_time:.3f} s", style="filled" if highlighted else "")
            for child in node.children:
                graph.edge(node.id, child.id)
        graph.render(filename, format="png", cleanup=True)


class _Around:
    """Finds the shortest of some spans that ends no earlier than a given one; all of them began before it."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._shortest: list[tuple[float, TraceTree]] = []
        """(duration, node) of the shortest span that ends at each of `_ends` or later; durations rise along with the ends."""

    def add(self, node: TraceTree) -> None:
        """Add a span; drop those that it makes irrelevant."""
        end, duration = node.end_time, node.end_time - node.start_time
        place = bisect_left(self._ends, end)
        if place < len(self._ends) and self._shortest[place][0] <= duration:
            return
        first = place
        while first and self._shortest[first - 1][0] >= duration:
            first -= 1
        last = place + (place < len(self._ends) and self._ends[place] == end)
        self._ends[first:last] = [end]
        self._shortest[first:last] = [(duration, node)]

    def shortest(self, end: float) -> TraceTree | None:
        """Return the shortest span that ends at `end` or later."""
        place = bisect_left(self._ends, end)
        return self._shortest[place][1] if place < len(self._ends) else None


def _selected(name: str, agent_match: str | None) -> str | None:
    return name if matches_agent(agent_match, name) else None


def _as_span(span: Span | ReadableSpan, place: int) -> Span:
    return span if isinstance(span, Span) else Span.from_opentelemetry(span, "", "", place)


def _around(span_id: str, children: Sequence[TraceTree]) -> Span:
    """Make up a span that covers its children in time, in the trace of the first one."""
    first = children[0].span
    return Span.from_attributes(
        attributes={},
        rollout_id=first.rollout_id,
        attempt_id=first.attempt_id,
        trace_id=first.trace_id,
        span_id=span_id,
        start_time=min(child.start_time for child in children),
        end_time=max(child.end_time for child in children),
    )
