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
from agl_otel.proxy.parts import clean, dump, output_message
from agl_otel.proxy.reply import Choice, Reply

logger = logging.getLogger("agl_otel.proxy")
_REQUEST: Final[Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    "temperature": (gen_ai.GEN_AI_REQUEST_TEMPERATURE, (int, float)),
    "top_p": (gen_ai.GEN_AI_REQUEST_TOP_P, (int, float)),
    "max_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
    "max_completion_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
    "max_output_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
    "seed": (gen_ai.GEN_AI_REQUEST_SEED, int),
    "model": (gen_ai.GEN_AI_REQUEST_MODEL, str),
}
"""{field of the request: (attribute, its type)}."""
_DEFECTS: Final = {
    "no_logprobs": "the model server returned no log-probs",
    "logprobs_length": "the model server returned another number of log-probs than of token ids",
    "logprobs_not_finite": "the model server returned a log-prob that is not finite",
    "ids_out_of_range": "the model server returned token ids that are none, or beyond its vocabulary",
    "no_prompt_ids": "the model server returned token ids of the reply and none of the prompt",
}
"""{what is wrong with a reply: the same for the log}."""


@dataclass(slots=True)
class Call:
    """One forwarded request, from its start to its spans."""

    key: Key | None
    dialect: Dialect
    attempt: Attempt | None
    number: int
    span: Span
    """Of the first choice; those of the others are made when they are known."""
    context: Context
    attributes: dict[str, Any]
    """What the request says."""
    start_time: int
    """Unix nanoseconds."""
    reply: Reply
    status: int = 0
    model_version: str | None = None
    vocabulary: int | None = None
    tries: int = 1
    first_byte: int = 0
    """Unix nanoseconds; 0 while there is none."""
    incomplete: str | None = None
    """Why the answer is not whole."""

    @property
    def failed(self) -> str | None:
        """What went wrong; None where nothing did."""
        return self.incomplete or self.reply.error or (f"HTTP {self.status}" if self.status >= 400 else None)


class Recorder:
    """Makes the spans. `counts` says how often what was missing."""

    def __init__(self, tracer: Tracer, attempts: Attempts) -> None:
        self._tracer = tracer
        self._attempts = attempts
        self.counts: Counter[str] = Counter()

    def start(
        self,
        key: Key | None,
        dialect: Dialect,
        body: Mapping[str, Any],
        traceparent: str | None,
        *,
        retry: int = 0,
        fingerprint: bytes = b"",
    ) -> Call:
        """A request is about to be forwarded: it takes its number now. `retry` is the client's number of this try, 0 for the first."""
        attempt, number = self._attempts.begin(key) if key is not None and dialect.samples else (None, 0)
        attributes: dict[str, Any] = {
            gen_ai.GEN_AI_OPERATION_NAME: dialect.operation,
            gen_ai.GEN_AI_PROVIDER_NAME: dialect.provider,
            gen_ai.GEN_AI_INPUT_MESSAGES: dump(dialect.conversation(body)),
        }
        for name, (attribute, kind) in _REQUEST.items():
            value = body.get(name)
            if isinstance(value, kind):
                attributes[attribute] = clean(value) if isinstance(value, str) else value
        if attempt is not None:
            attributes |= {semconv.LLM_CALL: number, semconv.LLM_CHOICE: 0}
            earlier = attempt.tried(number, fingerprint, retry=retry > 0)
            if retry:
                attributes[semconv.LLM_RETRY] = retry
                self.counts["retries"] += 1
            if earlier is not None:
                attributes[semconv.LLM_RETRY_OF] = earlier
        context, now = _context(key, traceparent), time.time_ns()
        span = self._span(context, attributes, now)
        self.counts["calls"] += 1
        return Call(key, dialect, attempt, number, span, context, attributes, now, Reply())

    def finish(self, call: Call) -> None:
        """The request has ended, whichever way: complete its spans."""
        reply = call.reply
        defect = self._check_ids(call)
        replies = {index: choice.token_ids for index, choice in reply.choices.items() if choice.token_ids}
        prefix = None
        if call.attempt is not None:
            prefix = self._attempts.end(call.attempt, call.number, reply.prompt_token_ids, replies)
            call.attempt.tokens += reply.output_tokens or sum(map(len, replies.values()))
            call.attempt.ended(call.number, good=call.failed is None)
        failed = call.failed
        if failed:
            self._count("failed", failed)
        elif call.dialect.samples and not replies and not defect:
            self._count("without_token_ids", "the model server returned no token ids: these calls cannot be trained on")
        for place, index in enumerate(sorted(reply.choices) or [0]):
            span = call.span if place == 0 else self._span(call.context, call.attributes, call.start_time)
            choice = reply.choices.get(index, Choice())
            span.set_attributes(self._attributes(call, index, choice, prefix, defect))
            if failed:
                span.set_status(Status(StatusCode.ERROR, clean(failed)))
            span.end()

    def _check_ids(self, call: Call) -> str | None:
        """Why the token ids of the call cannot be used; then they are dropped."""
        reply = call.reply
        beyond = call.vocabulary is not None and any(
            ids and max(ids) >= call.vocabulary
            for ids in (reply.prompt_token_ids, *(choice.token_ids for choice in reply.choices.values()))
        )
        if reply.bad_ids or beyond:
            defect = "ids_out_of_range"
        elif reply.prompt_token_ids is None and any(choice.token_ids for choice in reply.choices.values()):
            defect = "no_prompt_ids"
        else:
            return None
        self._count(defect, _DEFECTS[defect])
        reply.prompt_token_ids = None
        for choice in reply.choices.values():
            choice.token_ids = []
            choice.logprobs = []
        return defect

    def _span(self, context: Context, attributes: Mapping[str, Any], start_time: int) -> Span:
        return self._tracer.start_span(semconv.SPAN_LLM, context, SpanKind.CLIENT, attributes, start_time=start_time)

    def _attributes(self, call: Call, index: int, choice: Choice, prefix: Prefix | None, defect: str | None) -> dict[str, Any]:
        reply = call.reply
        held: dict[str, Any] = {
            HTTP_RESPONSE_STATUS_CODE: call.status or None,
            gen_ai.GEN_AI_RESPONSE_ID: reply.id,
            gen_ai.GEN_AI_RESPONSE_MODEL: reply.model,
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: reply.input_tokens,
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: reply.output_tokens,
            semconv.LLM_MODEL_VERSION: call.model_version,
            semconv.LLM_INCOMPLETE: call.incomplete,
            semconv.LLM_TRIES: call.tries if call.tries > 1 else None,
            semconv.LLM_FIRST_BYTE: (call.first_byte - call.start_time) / 1e9 if call.first_byte else None,
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
            defect = choice.logprobs_defect()
            if defect is None:
                held[semconv.LLM_RESPONSE_LOGPROBS] = pack_doubles(choice.logprobs)
            else:
                self._count(defect, _DEFECTS[defect])
        held[semconv.LLM_DEFECT] = defect
        return {name: value for name, value in held.items() if value is not None}

    def _count(self, what: str, text: str) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1:
            logger.warning("%s (said once; see the counts of /health)", text)


def _context(key: Key | None, traceparent: str | None) -> Context:
    parent = parse_traceparent(traceparent) if traceparent else None
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent), Context()) if parent is not None else Context()
    return with_ids(key, context) if key is not None else context
