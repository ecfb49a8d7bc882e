"""Spans that tell of the same model call, put together: what an SDK's instrumentation, a framework and our proxy each saw. Pure.

A call is counted once. Two spans are of one call where they name the same response, or where one is inside the other and one of them
names no response. Of several calls whose replies have one name the first counts. Further choices of one call that the proxy recorded
(n > 1) are calls of their own. Token ids come from whichever span has them, the innermost first, because a proxy's are those of the model
server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agl_otel.adapters.dialects import ModelCall
from agl_otel.adapters.dialects.table import numbers
from agl_otel.adapters.merge import StoredCall, full_prompts
from agl_otel.spans.tolerant import whole_of
from agl_otel.types import Span
from agl_otel_hook import conventions

SpanKey = tuple[str, str]
"""(trace id, span id)."""


@dataclass(eq=False)
class JoinedCall:
    """One model call as all its spans tell it."""

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


class Joiner:
    """Collects calls depth first; `calls` holds each once."""

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


def _further_choice(call: ModelCall) -> bool:
    return bool((call.span.attributes or {}).get(conventions.LLM_CHOICE))


def _identity(call: ModelCall) -> str:
    """The response's id; a further choice of it is something else."""
    choice = (call.span.attributes or {}).get(conventions.LLM_CHOICE)
    return f"{call.response_id}#{choice}" if call.response_id and choice else call.response_id


def repeated(spans: Iterable[Span]) -> set[SpanKey]:
    """The proxy's spans of calls that the agent's SDK repeated: nobody ever used their replies."""
    proxied = [span for span in spans if conventions.LLM_CALL in span.attributes]
    again = {_place(span, conventions.LLM_RETRY_OF) for span in proxied if conventions.LLM_RETRY_OF in span.attributes}
    return {(span.trace_id, span.span_id) for span in proxied if _place(span, conventions.LLM_CALL) in again} if again else set()


def _place(span: Span, call: str) -> tuple[str, str, str, int]:
    held = span.attributes
    return span.rollout_id, span.attempt_id, str(held.get(conventions.PROCESS, "")), whole_of(held[call])


def prompts_in_full(spans: Iterable[Span]) -> dict[SpanKey, list[int]]:
    """The full prompt of every call that a proxy stored in prefix form; [] where what it goes on from is not among `spans`."""
    processes: dict[tuple[str, str, str], list[tuple[int, int, Span]]] = {}
    for span in spans:
        if (call := span.attributes.get(conventions.LLM_CALL)) is not None:
            marker = str(span.attributes.get(conventions.PROCESS, ""))
            key = (whole_of(call), whole_of(span.attributes.get(conventions.LLM_CHOICE, 0)), span)
            processes.setdefault((span.rollout_id, span.attempt_id, marker), []).append(key)
    found: dict[SpanKey, list[int]] = {}
    for calls in processes.values():
        if any(conventions.LLM_PREFIX_CALL in span.attributes for _, _, span in calls):
            calls.sort(key=lambda entry: entry[:2])
            prompts = full_prompts([_stored(*entry) for entry in calls])
            for (_, _, span), prompt in zip(calls, prompts, strict=True):
                if span.attributes.get(conventions.LLM_PREFIX_CALL):
                    found[span.trace_id, span.span_id] = [] if prompt is None else prompt.tolist()
    return found


def _stored(call: int, choice: int, span: Span) -> StoredCall:
    a = span.attributes
    base, base_choice = (whole_of(a.get(key, 0)) for key in (conventions.LLM_PREFIX_CALL, conventions.LLM_PREFIX_CHOICE))
    return StoredCall(
        call, choice, base, base_choice, _ids(a.get(conventions.LLM_PROMPT_TOKEN_IDS)), _ids(a.get(conventions.LLM_RESPONSE_TOKEN_IDS))
    )


def _ids(value: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids; none where the value is not the list of them that our proxy writes."""
    ids = numbers(value) if isinstance(value, (list, tuple)) else []
    return np.array(ids if all(type(each) is int and 0 <= each < 1 << 31 for each in ids) else [], np.int32)
