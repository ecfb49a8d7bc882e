"""How a trace looks in a terminal: a tree of spans with rewards and token counts.

Whatever an agent wrote is data: control characters are shown, never sent to the terminal, and rich markup is not interpreted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from agl_otel.adapters.history import in_full
from agl_otel.adapters.own_sampling import own_of
from agl_otel.cli.conversation import PROMPT_TOKENS, said, with_prompt_tokens
from agl_otel.spans.tolerant import json_of
from agl_otel.text import printable
from agl_otel.types import Attempt, Rollout, Span, Verdict
from agl_otel_hook import conventions

WIDEST_VALUE: Final = 60  # characters of an attribute value on one line
WIDEST_LINE: Final = 10_000  # characters of a line of a message
HIDDEN_SPANS: Final = frozenset({conventions.SPAN_SEAL})
RESPONSE_ID: Final = "gen_ai.response.id"
DEEPEST_JOIN: Final = 4  # spans of HTTP clients and their transports between an agent's model call and the proxy's
NO_SAMPLING: Final[Mapping[str, Any]] = {}
VERDICT_STYLES: Final = {"complete": "green", "incomplete": "red", "unproven": "yellow", "empty": "dim"}


def plain(value: object, width: int = WIDEST_VALUE) -> str:
    """`value` as one short line without control characters."""
    text = printable(str(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def attempt_tree(
    rollout: Rollout,
    attempt: Attempt,
    spans: Sequence[Span],
    verdict: Verdict | None,
    *,
    messages: bool = False,
    sampling: Mapping[str, Any] = NO_SAMPLING,
) -> RenderableType:
    """One attempt: a line about it, then its spans as a tree ordered by start time; seals are left out.

    `messages` shows all that was said in every model call; `sampling` is what the agent was asked to sample with: what differs is its own.
    """
    head = Text.assemble(
        ("rollout ", "dim"),
        rollout.rollout_id,
        ("  attempt ", "dim"),
        attempt.attempt_id,
        ("  ", ""),
        (attempt.status, _status_style(attempt.status)),
    )
    if verdict:
        head.append("  verdict ", "dim").append(verdict.kind, VERDICT_STYLES[verdict.kind])
        if verdict.alarm:
            head.append("  ALARM", "bold red")
    lines: list[RenderableType] = [head, *(verdict_lines(verdict) if verdict else ())]
    lines.append(Text.assemble(("input ", "dim"), plain(json.dumps(rollout.input, ensure_ascii=False), 120)))
    if attempt.error:
        lines.append(Text(f"error {plain(attempt.error, 200)}", "red"))
    return Group(*lines, *span_trees(spans, messages=messages, sampling=sampling))


def verdict_lines(verdict: Verdict) -> list[Text]:
    """Why a verdict is what it is, whole: what is missing, and what a person should know besides."""
    reasons = [Text(f"  - {printable(reason)}", "yellow") for reason in verdict.reasons]
    return reasons + [Text(f"  note: {printable(note)}", "dim") for note in verdict.notes]


def span_trees(spans: Sequence[Span], *, messages: bool = False, sampling: Mapping[str, Any] = NO_SAMPLING) -> list[Tree]:
    """One tree for each span whose parent is not among `spans`; spans that are their own ancestors stand alone at the end."""
    whole = joined(with_prompt_tokens(in_full(spans) if messages else spans))
    shown = sorted((span for span in whole if span.name not in HIDDEN_SPANS), key=lambda span: (span.start_time or 0, span.sequence_id))
    label = partial(_with_messages if messages else span_label, sampling=sampling)
    children: dict[str, list[Span]] = {}
    ids = {span.span_id for span in shown}
    roots = [span for span in shown if not span.parent_id or span.parent_id not in ids]
    for span in shown:
        if span.parent_id and span.parent_id in ids:
            children.setdefault(span.parent_id, []).append(span)
    trees: list[Tree] = []
    left = {span.span_id: span for span in shown}
    for root in roots:
        tree = Tree(label(root), guide_style="dim")
        stack = [(tree, root)]
        while stack:  # not recursive: an agent's trace may be deeper than Python's stack
            node, span = stack.pop()
            left.pop(span.span_id, None)
            stack.extend((node.add(label(child)), child) for child in children.get(span.span_id, ()))
        trees.append(tree)
    return trees + [Tree(label(span)) for span in left.values()]


def joined(spans: Sequence[Span]) -> list[Span]:
    """The spans with each model call as one: the agent's own span, if there is one, with what the proxy's span adds to it.

    The proxy's span belongs to the model call of the agent that is nearest above it (HTTP client spans lie between), else to the one
    that had the same response. An HTTP span left without children goes too. What one of them lacks is
    taken from the other.
    """
    by_id = {span.span_id: span for span in spans}
    own = {span.span_id for span in spans if span.name != conventions.SPAN_LLM and is_model_call(span)}
    by_response = {str(by_id[i].attributes.get(RESPONSE_ID)): i for i in own if by_id[i].attributes.get(RESPONSE_ID)}
    hosts: dict[str, list[Span]] = {}
    hidden: set[str] = set()
    for span in spans:
        if span.name != conventions.SPAN_LLM:
            continue
        between = _between(span, by_id, own)
        host = between.pop() if between else by_response.get(str(span.attributes.get(RESPONSE_ID)), "")
        if host:
            hosts.setdefault(host, []).append(span)
            hidden |= {span.span_id, *between}
    hidden -= {span.parent_id for span in spans if span.span_id not in hidden and span.parent_id}
    return [_with(span, hosts.get(span.span_id, ())) for span in spans if span.span_id not in hidden]


def is_model_call(span: Span) -> bool:
    """Whether an instrumentation says that this span is a call of a model."""
    return "gen_ai.request.model" in span.attributes or str(span.attributes.get("gen_ai.operation.name")) in ("chat", "text_completion")


def _between(span: Span, by_id: Mapping[str, Span], own: Set[str]) -> list[str]:
    """The ids from the parent of a proxy's span up to the agent's model call, which is the last; none where there is none."""
    trail: list[str] = []
    above = span.parent_id
    while above and above in by_id and len(trail) < DEEPEST_JOIN:
        trail.append(above)
        if above in own:
            return trail
        above = by_id[above].parent_id
    return []


def _with(span: Span, proxied: Sequence[Span]) -> Span:
    if not proxied:
        return span
    last = proxied[-1]  # of several tries the one that the agent used
    tries = {"model call": f"{len(proxied)} tries"} if len({s.attributes.get(conventions.LLM_CALL) for s in proxied}) > 1 else {}
    return span.model_copy(update={"attributes": {**last.attributes, **span.attributes, **tries}})


def span_label(span: Span, sampling: Mapping[str, Any] = NO_SAMPLING) -> Text:
    """The line for one span: name, duration, and what makes it worth looking at."""
    text = Text(plain(span.name), "bold")
    if span.start_time is not None and span.end_time is not None and span.end_time > span.start_time:
        text.append(f"  {1000 * (span.end_time - span.start_time):.1f} ms", "dim")
    for style, part in _highlights(span.attributes, sampling):
        text.append("  ").append(part, style)
    if span.status.status_code == "ERROR":
        text.append(f"  ERROR {plain(span.status.description or '')}", "red")
    return text


def _with_messages(span: Span, sampling: Mapping[str, Any]) -> Text:
    """The line for a span, and below it all that was said in a model call."""
    text = span_label(span, sampling)
    for role, content in said(span.attributes) if is_model_call(span) or span.name == conventions.SPAN_LLM else ():
        for number, line in enumerate(content.splitlines() or [""]):
            text.append(f"\n{'' if number else plain(role):>11} ", "dim").append(plain(line, WIDEST_LINE))
    return text


def _highlights(attributes: Mapping[str, Any], sampling: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    if model := attributes.get("gen_ai.request.model"):
        parts.append(("cyan", plain(model)))
    if conventions.LLM_RESPONSE_TOKEN_IDS in attributes:
        prompt, response = attributes.get(PROMPT_TOKENS, "?"), attributes[conventions.LLM_RESPONSE_TOKEN_IDS]
        parts.append(("magenta", f"{prompt} + {len(response)} tokens, weights {attributes.get(conventions.LLM_MODEL_VERSION, '?')}"))
    if own := own_of(attributes, sampling):
        parts.append(("yellow", "own " + ", ".join(f"{name} {value:g}" for name, value in own.items())))
    for key, arrow in (("gen_ai.input.messages", "←"), ("gen_ai.output.messages", "→")):
        if content := last_content(attributes.get(key)):
            parts.append(("", f"{arrow} {plain(content)!r}"))
    if why := attributes.get(conventions.LLM_INCOMPLETE) or attributes.get(conventions.LLM_DEFECT):
        parts.append(("yellow", plain(why)))
    if tries := attributes.get("model call"):
        parts.append(("yellow", plain(tries)))
    index = 0
    while (value := attributes.get(conventions.reward_value_key(index))) is not None:
        parts.append(("green", f"{plain(attributes.get(conventions.reward_name_key(index), 'reward'))} = {value}"))
        index += 1
    return parts


def last_content(messages: object) -> str:
    """The text of the last message in a `gen_ai.*.messages` JSON value; empty where there is none."""
    if not isinstance(messages, str):
        return ""
    try:
        last = json_of(messages)[-1]
        content = last.get("content")
        if content is None:
            content = " ".join(str(part.get("content", part.get("name", ""))) for part in last.get("parts", []))
    except (ValueError, LookupError, AttributeError, TypeError):
        return ""
    return str(content)


def _status_style(status: str) -> str:
    return {"succeeded": "green", "running": "cyan", "preparing": "cyan"}.get(status, "red")
