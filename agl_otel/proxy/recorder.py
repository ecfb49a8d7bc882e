"""From a call to its spans: one for each choice, with token ids, log-probs, model version and the conversation."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import HTTP_RESPONSE_STATUS_CODE
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from agl_otel import semconv
from agl_otel.instrumentation.arrays import pack_doubles, pack_ints
from agl_otel.instrumentation.context import Key, parse_traceparent, with_ids
from agl_otel.proxy.attempts import Attempt, Attempts, Prefix
from agl_otel.proxy.dialects import Dialect
from agl_otel.proxy.messages import input_messages, output_message
from agl_otel.proxy.reply import Choice, Reply

logger = logging.getLogger("agl_otel.proxy")
_REQUEST: Final[Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    "temperature": (gen_ai.GEN_AI_REQUEST_TEMPERATURE, (int, float)),
    "top_p": (gen_ai.GEN_AI_REQUEST_TOP_P, (int, float)),
    "max_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
    "max_completion_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
    "seed": (gen_ai.GEN_AI_REQUEST_SEED, int),
    "model": (gen_ai.GEN_AI_REQUEST_MODEL, str),
}
"""{field of the request: (attribute, its type)}."""


@dataclass(slots=True)
class Call:
    """One forwarded request, from its start to its spans."""

    attempt: Attempt | None
    number: int
    span: Span
    """Of the first choice; those of the others are made when they are known."""
    context: Context
    attributes: Mapping[str, Any]
    """What the request says."""
    start_time: int
    """Unix nanoseconds."""
    reply: Reply
    status: int = 0
    model_version: str | None = None
    incomplete: str | None = None
    """Why the answer is not whole."""


class Recorder:
    """Makes the spans. `counts` says how often what was missing."""

    def __init__(self, tracer: Tracer, attempts: Attempts) -> None:
        self._tracer = tracer
        self._attempts = attempts
        self.counts: Counter[str] = Counter()

    def start(self, key: Key | None, dialect: Dialect, body: Mapping[str, Any], traceparent: str | None) -> Call:
        """A request is about to be forwarded: it takes its number now."""
        attempt, number = self._attempts.begin(key) if key is not None else (None, 0)
        attributes: dict[str, Any] = {
            gen_ai.GEN_AI_OPERATION_NAME: dialect.operation,
            gen_ai.GEN_AI_PROVIDER_NAME: "openai",
            gen_ai.GEN_AI_INPUT_MESSAGES: input_messages(body),
            **{attribute: body[name] for name, (attribute, kind) in _REQUEST.items() if isinstance(body.get(name), kind)},
        }
        if number:
            attributes |= {semconv.LLM_CALL: number, semconv.LLM_CHOICE: 0}
        context, now = _context(key, traceparent), time.time_ns()
        span = self._span(context, attributes, now)
        self.counts["calls"] += 1
        return Call(attempt, number, span, context, attributes, now, Reply())

    def finish(self, call: Call) -> None:
        """The request has ended, whichever way: complete its spans."""
        reply = call.reply
        replies = {index: choice.token_ids for index, choice in reply.choices.items() if choice.token_ids}
        prefix = self._attempts.end(call.attempt, call.number, reply.prompt_token_ids, replies) if call.attempt is not None else None
        failed = call.incomplete or reply.error or (f"HTTP {call.status}" if call.status >= 400 else None)
        if not failed and not replies:
            self._count("without_token_ids", "the model server returned no token ids: these calls cannot be trained on")
        for place, index in enumerate(sorted(reply.choices) or [0]):
            span = call.span if place == 0 else self._span(call.context, call.attributes, call.start_time)
            choice = reply.choices.get(index, Choice())
            span.set_attributes(self._attributes(call, index, choice, prefix))
            if failed:
                self._count("failed", failed)
                span.set_status(Status(StatusCode.ERROR, failed))
            span.end()

    def _span(self, context: Context, attributes: Mapping[str, Any], start_time: int) -> Span:
        return self._tracer.start_span(semconv.SPAN_LLM, context, SpanKind.CLIENT, attributes, start_time=start_time)

    def _attributes(self, call: Call, index: int, choice: Choice, prefix: Prefix | None) -> dict[str, Any]:
        reply = call.reply
        held: dict[str, Any] = {
            HTTP_RESPONSE_STATUS_CODE: call.status or None,
            gen_ai.GEN_AI_RESPONSE_ID: reply.id,
            gen_ai.GEN_AI_RESPONSE_MODEL: reply.model,
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: reply.input_tokens,
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: reply.output_tokens,
            semconv.LLM_MODEL_VERSION: call.model_version,
            semconv.LLM_INCOMPLETE: call.incomplete,
            ERROR_TYPE: call.incomplete or (str(call.status) if call.status >= 400 else None),
        }
        if index in reply.choices:
            held[gen_ai.GEN_AI_OUTPUT_MESSAGES] = output_message(choice)
            held[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] = [choice.finish_reason] if choice.finish_reason else None
        if call.number:
            held[semconv.LLM_CHOICE] = index
        if reply.prompt_token_ids is not None:
            start = prefix.length if prefix is not None else 0
            held[semconv.LLM_PROMPT_TOKEN_IDS] = pack_ints(reply.prompt_token_ids[start:])
            if prefix is not None:
                held |= {semconv.LLM_PREFIX_CALL: prefix.call, semconv.LLM_PREFIX_CHOICE: prefix.choice}
        if choice.token_ids:
            held[semconv.LLM_RESPONSE_TOKEN_IDS] = pack_ints(choice.token_ids)
            logprobs = choice.finite_logprobs()
            if logprobs is not None:
                held[semconv.LLM_RESPONSE_LOGPROBS] = pack_doubles(logprobs)
            else:
                self._count("without_logprobs", "the model server returned no finite log-prob for each token")
        return {name: value for name, value in held.items() if value is not None}

    def _count(self, what: str, text: str) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1:
            logger.warning("%s (said once; see the counts of /health)", text)


def _context(key: Key | None, traceparent: str | None) -> Context:
    parent = parse_traceparent(traceparent) if traceparent else None
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent), Context()) if parent is not None else Context()
    return with_ids(key, context) if key is not None else context
