"""One small table for each instrumentation: which span is a model call, and where its parts stand.

`read_call` is the way in. A library that writes otherwise is one more Dialect in DIALECTS, which are asked in order: those whose mark
is unmistakable first, OpenTelemetry's general conventions last. Which agent made a call does not depend on the dialect of the call,
because agents are spans of their own: agents.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.adapters.dialects import agent_lightning, agl, gen_ai, langsmith, openinference, openllmetry, vercel
from agl_otel.adapters.dialects.agents import agent_name
from agl_otel.adapters.dialects.events import with_records
from agl_otel.adapters.dialects.table import Conversation, Dialect, Message, checked, first, numbers
from agl_otel.errors import SpanShapeError
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.types import Span, SpanLike

__all__ = ["DIALECTS", "Conversation", "Dialect", "Message", "ModelCall", "agent_name", "dialect_of", "read_call", "with_records"]

DIALECTS: Final[Sequence[Dialect]] = (
    agl.DIALECT,
    agent_lightning.LITELLM,
    agent_lightning.WEAVE,
    vercel.DIALECT,
    openinference.DIALECT,
    langsmith.DIALECT,
    gen_ai.MESSAGES,
    openllmetry.DIALECT,
    gen_ai.EVENTS,
)
_log = logging.getLogger(__name__)
ANYTHING: Final = openllmetry.DIALECT
"""Reads a span that a pattern of the user's called a model call though no dialect knows it."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What one span says about one model call; messages are read when they are asked for."""

    span: SpanLike
    dialect: Dialect
    model: str
    response_id: str
    """Empty where the span does not say."""
    prompt_token_ids: list[int]
    """As stored; [] where there are none."""
    response_token_ids: list[int]
    logprobs: list[float] | None
    """One for each response token; None where there are none."""

    @property
    def conversation(self) -> Conversation:
        """Prompt, reply and tools. Raises SpanShapeError that names the span where it does not have the shape of its dialect."""
        try:
            return checked(self.dialect.read(self.span))
        except MALFORMED as error:
            ids = f"{getattr(self.span, 'span_id', '?')} ({self.span.name}) of rollout {getattr(self.span, 'rollout_id', '?')}"
            why = f"{type(error).__name__}: {error!s:.200}"
            raise SpanShapeError(f"span {ids} holds no readable messages ({self.dialect.name}): {why}") from error

    @property
    def readable(self) -> Conversation:
        """`conversation`; an empty one, with a line in the log, where it cannot be read."""
        try:
            return self.conversation
        except SpanShapeError as error:
            _log.warning("what was said in a model call is left out: %s", error)
            return Conversation([], [], None)

    @property
    def usage(self) -> tuple[int | None, int | None]:
        """(input, output) tokens as counted by the provider."""
        attributes = self.span.attributes or {}
        counts = (first(attributes, self.dialect.input_tokens), first(attributes, self.dialect.output_tokens))
        return (_count(counts[0]), _count(counts[1]))


def dialect_of(span: SpanLike) -> Dialect | None:
    """The dialect in which `span` is a model call; None where it is none."""
    attributes: Mapping[str, Any] = span.attributes or {}
    return next((dialect for dialect in DIALECTS if dialect.matches(span.name, attributes)), None)


def read_call(span: SpanLike, *, anyway: bool = False) -> ModelCall | None:
    """The model call that `span` is; None where it is none, unless `anyway` (then what can be read is read)."""
    dialect = dialect_of(span) or (ANYTHING if anyway else None)
    if dialect is None:
        return None
    attributes = span.attributes or {}
    logprobs = numbers(first(attributes, dialect.logprobs))
    return ModelCall(
        span=span,
        dialect=dialect,
        model=str(first(attributes, dialect.model) or ""),
        response_id=str(first(attributes, dialect.response_id) or ""),
        prompt_token_ids=numbers(first(attributes, dialect.prompt_token_ids)),
        response_token_ids=numbers(first(attributes, dialect.response_token_ids)),
        logprobs=logprobs or None,
    )


def is_call(span: Span) -> bool:
    """Whether `span` is a model call in any dialect."""
    return dialect_of(span) is not None


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None
