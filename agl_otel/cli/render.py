"""Render a trace in a terminal as a tree of spans with rewards and token counts.

Agent output is untrusted: control characters are escaped, and rich markup is not interpreted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from agl_otel.adapters.sampling import sampling_notes
from agl_otel.cli.output import WIDEST_LINE, plain
from agl_otel.cli.verdicts import VERDICT_STYLES, verdict_lines
from agl_otel.spans.calls import Outline, pairs
from agl_otel.spans.conversations import NO_MESSAGES, dialect_of, text_of, written
from agl_otel.spans.dialects.dialect import as_text, first, numbers
from agl_otel.spans.feedback import words_of
from agl_otel.spans.history import Place, SpanKey, expand_spans, lengths_of_prompts, place_of
from agl_otel.spans.operations import OPERATION, is_no_call
from agl_otel.spans.rewards import evaluation_events
from agl_otel.spans.tolerant import json_of, whole_of
from agl_otel.types import Attempt, Rollout, Span, Verdict
from agl_otel.types.bridges import unbridged
from agl_otel.types.feedback import StoredEvaluation
from agl_otel_hook import conventions

SHOWN_CHARACTERS: Final = 16 << 20
"""Limit on the messages in one tree, in characters: each call repeats the conversation before it."""
HIDDEN_SPANS: Final = frozenset({conventions.SPAN_SEAL})
RESPONSE_ID: Final = "gen_ai.response.id"
HTTP_METHODS: Final = frozenset({"GET", "POST", "HTTP"})
"""First words of the names of HTTP clients' spans, by OpenTelemetry's conventions; a model is called by POST."""
CACHED: Final = "gen_ai.usage.cache_read.input_tokens"
PROMPT_TOKENS: Final = "prompt tokens"
"""Display-only attribute of a call: number of tokens of its whole prompt."""
CHOICES: Final = "choices"
"""Display-only attribute of the first choice's span of a call with several choices (n > 1): token counts of all its responses."""
OF_TOOLS: Final = (
    ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result", "", ""),
    ("gen_ai.retrieval.query.text", "gen_ai.retrieval.documents", "", ""),
    ("gen_ai.memory.query.text", "gen_ai.memory.records", OPERATION, "search_memory"),
    ("gen_ai.memory.records", "", "", ""),
    ("ai.toolCall.args", "ai.toolCall.result", "", ""),
    ("tool_arguments", "tool_response", "", ""),
    (conventions.OPERATION_INPUT, conventions.OPERATION_OUTPUT, "", ""),
    ("input.value", "output.value", "openinference.span.kind", "TOOL"),
    ("traceloop.entity.input", "traceloop.entity.output", "traceloop.span.kind", "tool"),
)
"""(arguments, result, attribute, its value): how each dialect names what a tool was given and what it returned, where spans of other kinds
use the same names, only in spans with this attribute."""
WIDEST_FEEDBACK: Final = 1_000  # characters of an evaluation on one line; --json has all of it
NO_SAMPLING: Final[Mapping[str, Any]] = {}


def attempt_tree(
    rollout: Rollout,
    attempt: Attempt,
    spans: Sequence[Span],
    verdict: Verdict | None,
    *,
    messages: bool = False,
    sampling: Mapping[str, Any] = NO_SAMPLING,
    evaluations: Sequence[StoredEvaluation] = (),
) -> RenderableType:
    """Render one attempt: its status and verdict, then its spans as trees ordered by start time, without seals.

    `messages` shows all messages of every model call. `sampling` are the parameters that the resources set; a call's deviations from
    them are marked as the agent's own. Those of the `evaluations` that are of none of the spans are shown above them.
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
    on_spans = {span.span_id for span in spans} | {str(span.attributes.get(RESPONSE_ID, "")) for span in spans}
    lines += feedback_lines(evaluations, attempt.attempt_id, on_spans - {""})
    return Group(*lines, *span_trees(spans, messages=messages, sampling=sampling))


def span_trees(spans: Sequence[Span], *, messages: bool = False, sampling: Mapping[str, Any] = NO_SAMPLING) -> list[Tree]:
    """Build one tree for each span whose parent is not among `spans`; spans in a cycle follow as single nodes."""
    visible = [span for span in (expand_spans(spans) if messages else spans) if span.name not in HIDDEN_SPANS]
    whole = _joined(_with_choices(_with_prompt_tokens(visible)))
    shown = sorted(whole, key=lambda span: (span.start_time or 0, span.sequence_id))
    label = _with_some_messages(sampling) if messages else partial(span_label, sampling=sampling)
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
        while stack:  # iterative: an agent's trace may be deeper than Python's recursion limit
            node, span = stack.pop()
            left.pop(span.span_id, None)
            stack.extend((node.add(label(child)), child) for child in children.get(span.span_id, ()))
        trees.append(tree)
    return trees + [Tree(label(span)) for span in left.values()]


def _with_prompt_tokens(spans: Sequence[Span]) -> list[Span]:
    """Add PROMPT_TOKENS to the spans of calls, unless an earlier call that they extend is missing."""
    lengths = lengths_of_prompts(spans)
    return [_with_length(span, lengths) for span in spans]


def _with_length(span: Span, lengths: Mapping[SpanKey, int]) -> Span:
    own = span.attributes.get(conventions.LLM_PROMPT_TOKEN_IDS)
    length = lengths.get((span.trace_id, span.span_id))
    if own is None or length == 0:
        return span
    return span.model_copy(update={"attributes": {**span.attributes, PROMPT_TOKENS: len(own) if length is None else length}})


def _with_choices(spans: Sequence[Span]) -> list[Span]:
    """Add CHOICES to the first choice of each call with several."""
    lengths: dict[Place, list[int]] = {}
    for span in spans:
        if conventions.LLM_CALL in span.attributes:
            response = numbers(span.attributes.get(conventions.LLM_RESPONSE_TOKEN_IDS))
            lengths.setdefault(place_of(span, conventions.LLM_CALL), []).append(len(response))
    return [_with_lengths(span, lengths.get(place_of(span, conventions.LLM_CALL), ())) for span in spans]


def _with_lengths(span: Span, lengths: Sequence[int]) -> Span:
    if len(lengths) < 2 or span.attributes.get(conventions.LLM_CHOICE) or conventions.LLM_CALL not in span.attributes:
        return span
    return span.model_copy(update={"attributes": {**span.attributes, CHOICES: lengths}})


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Merge the spans of each model call: the agent's span, if there is one, gets the attributes of the proxy's.

    An HTTP client span between them is removed if it has no other children.
    """
    found = pairs(map(_outline, spans))
    proxied = {pair.proxied for pair in found}
    by_key = {_key(span): span for span in spans}
    of_agents: dict[SpanKey, list[Span]] = {}
    for pair in found:
        of_agents.setdefault(pair.agents, []).append(by_key[pair.proxied])
    hidden = proxied | {key for pair in found for key in pair.between}
    hidden -= {(span.trace_id, span.parent_id) for span in spans if _key(span) not in hidden and span.parent_id}
    return [_merged(span, of_agents.get(_key(span), ())) for span in spans if _key(span) not in hidden]


def _key(span: Span) -> SpanKey:
    return span.trace_id, span.span_id


def _outline(span: Span) -> Outline:
    attributes = span.attributes
    return Outline(
        key=_key(span),
        parent=(span.trace_id, span.parent_id or ""),
        attempt_id=span.attempt_id,
        name=span.name,
        response_id=str(attributes.get(RESPONSE_ID, "")),
        model=_model_of(span) or "?" if _is_model_call(span) else "",
        is_http=span.kind == "Client" or span.name.partition(" ")[0] in HTTP_METHODS,
        is_proxied=_is_proxied(span),
        choice=whole_of(attributes.get(conventions.LLM_CHOICE, 0)),
        operation=str(attributes.get(OPERATION, "")),
    )


def _model_of(span: Span) -> str:
    """Return the model that a model call's span names; empty for other spans."""
    dialect = dialect_of(span)
    found = first(span.attributes, dialect.model) if dialect is not None else span.attributes.get("gen_ai.request.model")
    return str(found or "")


def _is_proxied(span: Span) -> bool:
    return span.name == conventions.SPAN_LLM or conventions.LLM_CALL in span.attributes


def _is_model_call(span: Span) -> bool:
    """Return whether the span looks like an instrumentation's model call."""
    named = "gen_ai.request.model" in span.attributes and not is_no_call(str(span.attributes.get(OPERATION, "")), span.name)
    return named or dialect_of(span) is not None


def _merged(span: Span, proxied: Sequence[Span]) -> Span:
    if not proxied:
        return span
    last = proxied[-1]  # of several retries, the one whose response the agent got
    tries = {"model call": f"{len(proxied)} tries"} if len({s.attributes.get(conventions.LLM_CALL) for s in proxied}) > 1 else {}
    events = [event for each in proxied for event in each.events if event.name == conventions.EVALUATION]
    return span.model_copy(update={"attributes": {**last.attributes, **span.attributes, **tries}, "events": [*span.events, *events]})


def span_label(span: Span, sampling: Mapping[str, Any] = NO_SAMPLING) -> Text:
    """Format the line of one span: name, duration, model, tokens, messages, rewards and errors."""
    text = Text(plain(span.name), "bold")
    if (name := span.attributes.get(conventions.OPERATION_NAME)) is not None:
        text.append(" ").append(plain(name), "cyan")
    if span.start_time is not None and span.end_time is not None and span.end_time > span.start_time:
        text.append(f"  {1000 * (span.end_time - span.start_time):.1f} ms", "dim")
    for style, part in _highlights(span, sampling):
        text.append("  ").append(part, style)
    if span.status.status_code == "ERROR":
        text.append(f"  ERROR {plain(span.status.description or '')}", "red")
    return text


def _with_some_messages(sampling: Mapping[str, Any]) -> Callable[[Span], Text]:
    """Return a function like `_with_messages` that stops adding messages after SHOWN_CHARACTERS."""
    left = SHOWN_CHARACTERS

    def label(span: Span) -> Text:
        nonlocal left
        if left <= 0:
            return span_label(span, sampling)
        text = _with_messages(span, sampling)
        left -= len(text)
        if left <= 0:
            text.append(f"\nmessages from here on are left out, after {SHOWN_CHARACTERS >> 20} MiB: --json and ", "yellow")
            text.append("`agl-otel export --as messages` have them all", "yellow")
        return text

    return label


def _with_messages(span: Span, sampling: Mapping[str, Any]) -> Text:
    """Format the line of a span, followed by all messages of a model call."""
    text = span_label(span, sampling)
    prompt, reply, _ = written(span) if _is_model_call(span) or _is_proxied(span) else NO_MESSAGES
    for message in (*prompt, *reply):
        for number, line in enumerate(text_of(message).splitlines() or [""]):
            text.append(f"\n{'' if number else plain(message.get('role') or '?'):>11} ", "dim").append(plain(line, WIDEST_LINE))
    return text


def _highlights(span: Span, sampling: Mapping[str, Any]) -> list[tuple[str, str]]:
    attributes, parts = span.attributes, list[tuple[str, str]]()
    if model := _model_of(span):
        parts.append(("cyan", plain(model)))
    if conventions.LLM_RESPONSE_TOKEN_IDS in attributes:
        responses: Sequence[int] = attributes.get(CHOICES) or [len(attributes[conventions.LLM_RESPONSE_TOKEN_IDS])]
        several = f" in {len(responses)} choices" if len(responses) > 1 else ""
        length, weights = attributes.get(PROMPT_TOKENS, "?"), attributes.get(conventions.LLM_MODEL_VERSION, "?")
        cached = f" ({held} cached)" if isinstance(held := attributes.get(CACHED), int) and held else ""
        parts.append(("magenta", plain(f"{length}{cached} + {sum(responses)} tokens{several}, weights {weights}")))
    if notes := sampling_notes(attributes, sampling):
        parts.append(("yellow", plain("; ".join(notes))))
    if (bridge := attributes.get(conventions.LLM_BRIDGE)) is not None:
        parts += _of_bridge(bridge)
    prompt, reply, _ = written(span)
    for messages, arrow in ((prompt, "←"), (reply, "→")):
        if messages and (content := text_of(messages[-1])):
            parts.append(("", f"{arrow} {plain(_one_line(content))!r}"))
    parts += [("", f"{arrow} {plain(_one_line(text))}") for text, arrow in zip(_of_tool(attributes), "←→", strict=True) if text]
    if why := attributes.get(conventions.LLM_INCOMPLETE) or attributes.get(conventions.LLM_DEFECT):
        parts.append(("yellow", plain(why)))
    if tries := attributes.get("model call"):
        parts.append(("yellow", plain(tries)))
    index = 0
    while (value := attributes.get(conventions.reward_value_key(index))) is not None:
        parts.append(("green", f"{plain(attributes.get(conventions.reward_name_key(index), 'reward'))} = {value}"))
        index += 1
    own = [event for event in evaluation_events(span) if not event.is_of_attempt]
    said = [words_of(event.attributes) for event in sorted(own, key=lambda event: event.time_unix_nano or event.timestamp or 0)]
    return parts + [("green", plain(_one_line(each), WIDEST_FEEDBACK)) for each in said]


def feedback_lines(evaluations: Sequence[StoredEvaluation], attempt_id: str, shown: Set[str] = frozenset()) -> list[Text]:
    """Format the evaluations of an attempt, each with the call or span that it is of, but those of spans and responses that are `shown`."""
    own = [each for each in evaluations if each.attempt_id == attempt_id and not shown & {each.span_id, each.response_id}]
    return [Text(f"  {plain(_one_line(each.words), WIDEST_FEEDBACK)}{_about(each)}", "green") for each in own]


def _about(each: StoredEvaluation) -> str:
    return f"  on call {plain(each.response_id)}" if each.response_id else f"  on span {plain(each.span_id)}" if each.span_id else ""


def _of_bridge(recorded: Any) -> list[tuple[str, str]]:
    """Say whose tokens the call continued, or why none's (docs/bridging.md)."""
    if why := unbridged(str(recorded)):
        return [("yellow", f"not bridged: {why}")]
    with contextlib.suppress(ValueError):  # another program's
        match json_of(str(recorded)):
            case {"call": int(call)}:
                return [("dim", f"continues the tokens of call {call}")]
            case _:
                pass
    return []


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _of_tool(attributes: Mapping[str, Any]) -> tuple[str, str]:
    """Return arguments and result of a tool call or an operation; empty for other spans."""
    for arguments, result, kind, wanted in OF_TOOLS:
        if (arguments in attributes or result in attributes) and (not kind or attributes.get(kind) == wanted):
            return as_text(attributes.get(arguments, "")), as_text(attributes.get(result, ""))
    return "", ""


def _status_style(status: str) -> str:
    return {"succeeded": "green", "running": "cyan", "preparing": "cyan"}.get(status, "red")
