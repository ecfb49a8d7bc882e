"""Spans of the same model call, put together: an SDK's instrumentation, a framework and our proxy may each record one. Pure.

Joiner counts calls, for adapters: on spans that a dialect knows. `pairs` finds the agent's own span for each that our proxy recorded, for
people: also on spans that only look like calls, and without reading messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from agl_otel.spans.conversations import ModelCall
from agl_otel.spans.dialects.dialect import Conversation
from agl_otel.spans.history import SpanKey, place_of
from agl_otel.types import Span
from agl_otel_hook import conventions

HTTP_SPANS: Final = 3  # between an agent's model call and the proxy's, at most
_STREAMED: Final = ("gen_ai.is_streaming", "llm.is_streaming")  # by OpenLLMetry
AGENT_SPANS: Final = ("invoke_agent", "create_agent")  # by OpenTelemetry's conventions: around calls, and no call


@dataclass(eq=False)
class JoinedCall:
    """One model call with all its spans."""

    calls: list[ModelCall]
    """The outermost span's first."""
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
        """The messages, of the outermost span that has any; None where none has.

        Raises SpanShapeError (also a ValueError) that names a span which does not have its dialect's shape.
        """
        return next((found for each in self.calls if (found := each.conversation).prompt or found.reply), None)

    @property
    def is_cut_off(self) -> bool:
        """Whether the reply is known not to be whole: as our proxy recorded it or, for a call that it did not see, the agent's own spans.

        Raises as `conversation`.
        """
        proxied = [call for call in self.calls if _is_proxied(call)]
        return any(map(_is_cut_off, proxied)) if proxied else any(map(_looks_cut_off, self.calls))


class Joiner:
    """Collects calls depth first; `calls` holds each once.

    Two spans are of one call where they name the same response, or where one is inside the other and one of them names no response. Of
    several calls whose replies have one name the first counts. Further choices of one call that the proxy recorded (n > 1) are calls of
    their own. Token ids come from whichever span has them, the innermost first, because a proxy's are those of the model server.
    """

    def __init__(self) -> None:
        self.calls: list[JoinedCall] = []
        self._by_id: dict[str, JoinedCall] = {}

    def add(self, call: ModelCall, agent: str, node: Any, outer: JoinedCall | None) -> JoinedCall:
        """A call inside of `outer`, which is the nearest call around it: the joined one that it belongs to."""
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
    """Whether this is a later call whose reply the model server named like the known one's: the first one counts."""
    if _is_proxied(call) and any(map(_is_proxied, known.calls)):
        return True
    return outer is not known and known.tokens is not None and bool(call.prompt_token_ids and call.response_token_ids)


def _is_proxied(call: ModelCall) -> bool:
    return conventions.LLM_CALL in (call.span.attributes or {})


def _is_cut_off(call: ModelCall) -> bool:
    why = (call.span.attributes or {}).get(conventions.LLM_INCOMPLETE)
    return bool(why) and (why != conventions.LLM_MASKED or _has_error(call))


def _looks_cut_off(call: ModelCall) -> bool:
    """An error, or a streamed reply without a finish reason, which OpenLLMetry writes with status OK where the stream was closed."""
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
    """The response's id; a further choice of it is something else."""
    choice = (call.span.attributes or {}).get(conventions.LLM_CHOICE)
    return f"{call.response_id}#{choice}" if call.response_id and choice else call.response_id


def repeated(spans: Iterable[Span]) -> set[SpanKey]:
    """The proxy's spans of calls that the agent's SDK repeated: their replies were never used."""
    proxied = [span for span in spans if conventions.LLM_CALL in span.attributes]
    again = {place_of(span, conventions.LLM_RETRY_OF) for span in proxied if conventions.LLM_RETRY_OF in span.attributes}
    return {(span.trace_id, span.span_id) for span in proxied if place_of(span, conventions.LLM_CALL) in again} if again else set()


class Outline(NamedTuple):
    """What `pairs` has to know of a span."""

    key: SpanKey
    parent: SpanKey
    attempt_id: str
    name: str
    response_id: str
    model: str
    """Empty where it is no model call."""
    is_http: bool
    """Of an HTTP client."""
    is_proxied: bool
    """Recorded by our proxy."""
    choice: int


class Pair(NamedTuple):
    """A call that our proxy recorded, and the agent's own span of it."""

    proxied: SpanKey
    agents: SpanKey
    between: tuple[SpanKey, ...]
    """Spans of HTTP clients."""


def pairs(spans: Iterable[Outline]) -> list[Pair]:
    """The agent's own span of each call that the proxy recorded and the agent, too.

    That is one that names the same response, or the model call around it, with spans of HTTP clients between. Several may be in one (tries
    of an SDK, a framework's loop); of those in a span that names its response, the one with that response. Further choices are in none.
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
    return bool(span.model) and not span.is_proxied and not span.name.startswith(AGENT_SPANS)


def _around(span: Outline, places: Mapping[SpanKey, Outline]) -> tuple[Outline | None, tuple[SpanKey, ...]]:
    between: list[SpanKey] = []
    at = places.get(span.parent)
    while at is not None and not at.model and at.is_http and len(between) < HTTP_SPANS:
        between.append(at.key)
        at = places.get(at.parent)
    return (at, tuple(between)) if at is not None and _is_agents_call(at) else (None, ())
