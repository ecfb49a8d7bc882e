"""Join spans of the same model call: an SDK's instrumentation, a framework and our proxy may each record one. Pure.

Joiner collects calls for adapters, from spans that a dialect matches. `pairs` matches the proxy's spans with the agent's own, for display:
it also takes spans that only look like calls, and does not read messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from agl_otel.spans.conversations import ModelCall
from agl_otel.spans.dialects.dialect import Conversation
from agl_otel.spans.history import SpanKey, place_of
from agl_otel.spans.operations import is_no_call
from agl_otel.text import printable
from agl_otel.types import Span
from agl_otel_hook import conventions

HTTP_SPANS: Final = 3  # at most, between an agent's model call and the proxy's
_STREAMED: Final = ("gen_ai.is_streaming", "llm.is_streaming")  # by OpenLLMetry
UPSTREAM: Final = "upstream_"
"""How a value of agentlightning.llm.incomplete begins if the model server gave no whole reply."""


@dataclass(eq=False)
class JoinedCall:
    """One model call with all its spans."""

    calls: list[ModelCall]
    """Outermost first."""
    agent: str
    response_id: str = ""
    node: Any = field(default=None, repr=False)
    """The outermost span's place in the trace (TraceTree)."""

    @property
    def span(self) -> Span:
        """The outermost span."""
        return self.node.span

    @property
    def tokens(self) -> ModelCall | None:
        """The innermost span that has token ids of prompt and response."""
        return next((call for call in reversed(self.calls) if call.prompt_token_ids and call.response_token_ids), None)

    @property
    def conversation(self) -> Conversation | None:
        """The messages of the outermost span that has a reply, else of the outermost that has any; None if none has.

        The span of a request that a product answers may have its input, and no reply, around the model call that has both.
        Raises SpanShapeError (also a ValueError) that names a span without its dialect's shape.
        """
        asked: Conversation | None = None
        for each in self.calls:
            if (found := each.conversation).reply:
                return found
            asked = asked or (found if found.prompt else None)
        return asked

    @property
    def is_cut_off(self) -> bool:
        """Whether the reply is known to be truncated, by our proxy's record or, without one, by the agent's own spans.

        Raises as `conversation`.
        """
        proxied = [call for call in self.calls if _is_proxied(call)]
        return any(map(_is_cut_off, proxied)) if proxied else any(map(_looks_cut_off, self.calls))


class Joiner:
    """Collects calls depth first; `calls` holds each once.

    Two spans belong to one call if they have the same response id, or if one encloses the other and one of them has no response id. If
    several calls have the same response id, the first counts. Further choices of a call that the proxy recorded (n > 1) are separate
    calls. Token ids are taken from the innermost span that has them, because a proxy's are those of the model server.
    """

    def __init__(self) -> None:
        self.calls: list[JoinedCall] = []
        self._by_id: dict[str, JoinedCall] = {}

    def add(self, call: ModelCall, agent: str, node: Any, outer: JoinedCall | None) -> JoinedCall:
        """Add a call whose nearest enclosing call is `outer`; return the joined call that it belongs to."""
        name = _identity(call)
        known = self._by_id.get(name) if name else None
        if known is not None and _is_another(call, known, outer):
            return JoinedCall([call], agent, name, node)
        if known is None and outer is not None and not _further_choice(call) and not (name and outer.response_id):
            known = outer
        if known is None:
            known = JoinedCall([], agent, node=node)
            self.calls.append(known)
        known.calls.append(call)
        if name and not known.response_id:
            known.response_id = name
            self._by_id[name] = known
        return known


def _is_another(call: ModelCall, known: JoinedCall, outer: JoinedCall | None) -> bool:
    """Whether this is a later call with the response id of the known one, which is the one that counts."""
    if _is_proxied(call) and any(map(_is_proxied, known.calls)):
        return True
    return outer is not known and known.tokens is not None and bool(call.prompt_token_ids and call.response_token_ids)


def _is_proxied(call: ModelCall) -> bool:
    return conventions.LLM_CALL in (call.span.attributes or {})


def _is_cut_off(call: ModelCall) -> bool:
    why = (call.span.attributes or {}).get(conventions.LLM_INCOMPLETE)
    return bool(why) and (why not in (conventions.LLM_MASKED, conventions.LLM_MISALIGNED) or _has_error(call))


def _looks_cut_off(call: ModelCall) -> bool:
    """Whether there is an error, or a streamed reply without a finish reason: OpenLLMetry writes a closed stream with status OK."""
    attributes = call.span.attributes or {}
    if _has_error(call):
        return True
    streamed = any(attributes.get(key) for key in _STREAMED)
    return streamed and bool(call.conversation.reply) and not any(map(_is_finish_reason, attributes.items()))


def _is_finish_reason(attribute: tuple[str, Any]) -> bool:
    key, value = attribute
    return bool(value) and key.endswith(("finish_reason", "finish_reasons"))


def _has_error(call: ModelCall) -> bool:
    return cast("Span", call.span).status.status_code == "ERROR"


def _further_choice(call: ModelCall) -> bool:
    return bool((call.span.attributes or {}).get(conventions.LLM_CHOICE))


def _identity(call: ModelCall) -> str:
    """The response id, with the number of a further choice."""
    choice = (call.span.attributes or {}).get(conventions.LLM_CHOICE)
    return f"{call.response_id}#{choice}" if call.response_id and choice else call.response_id


def error_of_call(status: int, said: str) -> str:
    """Describe what a model server answered instead of a reply: the status of HTTP, if it is one of an error, and its words."""
    code = f"HTTP {status}" if status >= 400 and str(status) not in said else ""
    return printable(": ".join(filter(None, (code, said))))


def repeated(spans: Iterable[Span]) -> set[SpanKey]:
    """Return the proxy's spans of calls that the agent's SDK retried: their replies were never used."""
    proxied = [span for span in spans if conventions.LLM_CALL in span.attributes]
    again = {place_of(span, conventions.LLM_RETRY_OF) for span in proxied if conventions.LLM_RETRY_OF in span.attributes}
    return {(span.trace_id, span.span_id) for span in proxied if place_of(span, conventions.LLM_CALL) in again} if again else set()


class Outline(NamedTuple):
    """The fields of a span that `pairs` needs."""

    key: SpanKey
    parent: SpanKey
    attempt_id: str
    name: str
    response_id: str
    model: str
    """Empty unless it is a model call."""
    is_http: bool
    """Whether it is a span of an HTTP client."""
    is_proxied: bool
    """Whether our proxy recorded it."""
    choice: int
    operation: str
    """By OpenTelemetry's conventions for generative AI; empty if it has none."""


class Pair(NamedTuple):
    """A proxy's span of a call, and the agent's own span of it."""

    proxied: SpanKey
    agents: SpanKey
    between: tuple[SpanKey, ...]
    """Spans of HTTP clients between them."""


def pairs(spans: Iterable[Outline]) -> list[Pair]:
    """Match each call recorded by the proxy with the agent's own span of it, if there is one.

    That is the span with the same response id, else the enclosing model call, with at most HTTP_SPANS spans of HTTP clients in between. One
    span may match several calls (retries of an SDK, a framework's loop); a span with a response id only the call with that id. Further
    choices are not matched.
    """
    found = list(spans)
    places = {span.key: span for span in found}
    named = {(span.attempt_id, span.response_id): span for span in found if _is_agents_call(span) and span.response_id}
    made: list[Pair] = []
    for span in found:
        if span.is_proxied and not span.choice:
            between: tuple[SpanKey, ...] = ()
            host = named.get((span.attempt_id, span.response_id))
            around, passed = _around(span, places)
            if host is None or host is around:
                host, between = around, passed
            if host is not None and host.response_id in ("", span.response_id):
                made.append(Pair(span.key, host.key, between))
    return made


def _is_agents_call(span: Outline) -> bool:
    return bool(span.model) and not span.is_proxied and not is_no_call(span.operation, span.name)


def _around(span: Outline, places: Mapping[SpanKey, Outline]) -> tuple[Outline | None, tuple[SpanKey, ...]]:
    between: list[SpanKey] = []
    at = places.get(span.parent)
    while at is not None and not at.model and at.is_http and not at.operation and len(between) < HTTP_SPANS:
        between.append(at.key)
        at = places.get(at.parent)
    return (at, tuple(between)) if at is not None and _is_agents_call(at) else (None, ())
