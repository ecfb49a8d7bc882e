"""Spans as a tree: who called whom, which agent, which model call. Pure; for triplets and for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agl_otel import semconv
from agl_otel.errors import UsageError
from agl_otel.types import Span

VIRTUAL_ROOT: Final = "virtual-root"
_RESPONSE_IDS: Final = ("gen_ai.response.id", f"{semconv.OPERATION_OUTPUT}.id")


@dataclass(eq=False)
class TraceTree:
    """One span and what hangs below it."""

    span: Span
    children: list[TraceTree] = field(default_factory=list["TraceTree"])

    @property
    def start(self) -> float:
        """Unix seconds; 0 where it is not known."""
        return self.span.start_time or 0.0

    @property
    def end(self) -> float:
        """Unix seconds; its start where it is not known."""
        return self.span.end_time or self.start

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> TraceTree:
        """The tree of all spans; several roots, or parents that are not among them, get a virtual one. Raises UsageError without a root."""
        if not spans:
            raise UsageError("there are no spans to make a tree of: has the agent run, and was it instrumented?")
        nodes = {span.span_id: cls(span) for span in spans}
        roots: list[TraceTree] = []
        missing: dict[str, list[TraceTree]] = {}
        for node in nodes.values():
            parent = node.span.parent_id
            if not parent:
                roots.append(node)
            elif parent in nodes:
                nodes[parent].children.append(node)
            else:
                missing.setdefault(parent, []).append(node)
        for parent, children in missing.items():
            roots.append(_virtual(children, span_id=parent))
        for node in nodes.values():
            node.children.sort(key=lambda child: child.start)
        if not roots:
            raise UsageError("the spans have no root: their parents go in a circle")
        return roots[0] if len(roots) == 1 else _virtual(sorted(roots, key=lambda root: root.start))

    def walk(self) -> Iterator[TraceTree]:
        """This node and all below it, depth first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def repair_hierarchy(self) -> None:
        """Move children of the top to where they belong by time: some instrumentations hang everything under the root."""
        top = self
        while len(top.children) == 1:
            top = top.children[0]
        for child in list(top.children):
            if len(top.children) == 1:
                return
            inside = {id(node) for node in child.walk()}
            slack = {id(node): child.start - node.start + node.end - child.end for node in self.walk()}
            hosts = [
                node
                for node in self.walk()
                if id(node) not in inside
                and node not in (self, top)
                and node.start <= child.start
                and child.end <= node.end
                and slack[id(node)] > 0
            ]
            if hosts:
                host = min(hosts, key=lambda node: slack[id(node)])
                top.children.remove(child)
                host.children.append(child)
                host.children.sort(key=lambda node: node.start)

    def agent_name(self) -> str | None:
        """The agent that this span stands for; None where it stands for none."""
        attributes = self.span.attributes
        for key, when in _AGENT_NAMES:
            if key in attributes and when(self.span.name, attributes):
                return str(attributes[key])
        return None

    def llm_calls(self, match: str, agent_match: str | None, skip: frozenset[str] = frozenset()) -> list[tuple[TraceTree, str]]:
        """Model calls, depth first, each with its agent's name ("*" where all agents are asked for), each response once.

        `skip` holds span ids below which nothing is looked for (rewards).
        """
        found: list[tuple[TraceTree, str]] = []
        seen: set[str] = set()
        everything = "*" if agent_match is None else None

        def look(node: TraceTree, agent: str | None, inside: bool) -> None:
            if node.span.span_id in skip:
                return
            is_call = re.search(match, node.span.name) is not None
            if is_call and agent is not None:
                response = next((str(node.span.attributes[key]) for key in _RESPONSE_IDS if node.span.attributes.get(key)), None)
                if response not in seen and not (response is None and inside):
                    found.append((node, agent))
                    if response is not None:
                        seen.add(response)
            name = node.agent_name()
            if name is not None and agent_match is not None:
                agent = name if re.search(agent_match, name) else None
            for child in node.children:
                look(child, agent, inside or is_call)

        look(self, everything, False)
        return found


def _always(name: str, attributes: Mapping[str, Any]) -> bool:
    return True


_AGENT_NAMES: Final = (  # the first that holds
    ("agent.name", _always),
    ("gen_ai.agent.name", lambda name, attributes: attributes.get("gen_ai.operation.name") == "invoke_agent"),
    ("operation.name", lambda name, attributes: attributes.get("agentops.span.kind") == "agent"),
    ("recipient_agent_type", _always),
    ("langchain.chain.type", _always),
    ("executor.id", _always),
    (f"{semconv.OPERATION_INPUT}.name", lambda name, attributes: attributes.get("type") == "agent"),
    ("lc_name", lambda name, attributes: name.startswith("langchain.Chain.")),
)


def _virtual(children: list[TraceTree], *, span_id: str | None = None) -> TraceTree:
    span = Span.from_attributes(
        attributes={},
        name=VIRTUAL_ROOT,
        span_id=span_id,
        trace_id=children[0].span.trace_id,
        start_time=min(child.start for child in children),
        end_time=max(child.end for child in children),
    )
    return TraceTree(span, children)
