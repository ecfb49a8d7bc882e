"""Build the spans of a call: one for each choice, with token ids, log-probs, model version and the conversation."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import HTTP_RESPONSE_STATUS_CODE
from opentelemetry.trace import SpanKind
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from agl_otel.proxy.attempts import Attempt, Attempts
from agl_otel.proxy.bridge import Bridge
from agl_otel.proxy.dialects import Dialect
from agl_otel.proxy.engines import MAX_EXPERTS_BYTES, experts_of, versions_of
from agl_otel.proxy.journal import Journal
from agl_otel.proxy.parts import clean, dump, dump_checked, output_message, tool_definitions
from agl_otel.proxy.prefixes import Prefix
from agl_otel.proxy.reply import MAX_IDS, Choice, Reply, dense
from agl_otel.types.sampling import Contract, LogProbs
from agl_otel_hook import conventions
from agl_otel_hook.arrays import pack_doubles, pack_ints
from agl_otel_hook.context import Key, parse_traceparent
from agl_otel_hook.guard import never_raises, note_failure
from agl_otel_hook.whole import Begun, WholeSpan, WholeSpans

logger = logging.getLogger("agl_otel.proxy")
_FLOAT: Final[TypeAdapter[Any]] = TypeAdapter(FiniteFloat)
_INT: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)])
_TEXT: Final[TypeAdapter[Any]] = TypeAdapter(str)
_REQUEST: Final[Mapping[str, tuple[str, TypeAdapter[Any]]]] = {
    "temperature": (gen_ai.GEN_AI_REQUEST_TEMPERATURE, _FLOAT),
    "top_p": (gen_ai.GEN_AI_REQUEST_TOP_P, _FLOAT),
    "max_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, _INT),
    "max_completion_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, _INT),
    "max_output_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, _INT),
    "seed": (gen_ai.GEN_AI_REQUEST_SEED, _INT),
    "model": (gen_ai.GEN_AI_REQUEST_MODEL, _TEXT),
}
"""{field of the request: (attribute, its type)}. Numbers are read as vLLM and SGLang read them, by pydantic: "0.3" is 0.3."""
MAX_ARMS: Final = 100
OTHER_ARMS: Final = "others"
_SHORT: Final = 256  # characters of a text whose attribute is remembered
DEFECT_TEXTS: Final = {
    "no_logprobs": "the model server returned no log-probs",
    "logprobs_length": "the model server returned another number of log-probs than of token ids",
    "logprobs_not_finite": "the model server returned a log-prob that is not finite",
    "logprobs_other_tokens": "the model server returned log-probs that name other tokens than its token ids",
    "logprobs_above_zero": "the model server returned a log-prob above 0",
    "ids_out_of_range": "the model server returned invalid token ids, or ids beyond its vocabulary",
    "too_many_ids": f"the model server returned more than {MAX_IDS} token ids or log-probs",
    "no_prompt_ids": "the model server returned token ids of the reply and none of the prompt",
    "token_count": "the model server counted another number of tokens than it returned ids of",
    "ids_missing": "the model server returned text without token ids between others that have some",
    "mixed_choices": "the model server returned several choices without an index of their own",
    conventions.LLM_MISALIGNED: "the model server returned experts or weights versions of other tokens than it returned ids of",
    "experts_too_large": f"the experts of a call have more than {MAX_EXPERTS_BYTES} bytes: they are left out",
    "several_prompts": "a call asked for replies to several prompts: make a call for each",
}
"""{defect of a reply: its text for the log}."""


class _Completed(NamedTuple):
    """Results of a completed answer that are computed only once."""

    defect: str | None
    prefix: Prefix | None
    messages: tuple[dict[str, Any], dict[str, Any]]
    spans: list[Begun]
    """One for each choice."""
    end_time: int
    """Unix nanoseconds."""


@dataclass(slots=True)
class Call:
    """One forwarded request, from its start to its spans."""

    key: Key | None
    dialect: Dialect
    attempt: Attempt | None
    number: int
    """Number of a model call in its attempt, from 1; 0 for other calls."""
    span: Begun
    """The span of the first choice; those of further choices are built when the answer is complete."""
    body: Mapping[str, Any]
    """The request."""
    start_time: int
    """Unix nanoseconds."""
    reply: Reply
    caller: str | None = None
    """The marker of the calling process, from its baggage."""
    retry: int = 0
    """The client's retry count; 0 is the first try."""
    retry_of: int | None = None
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The agent's request, without what the rollout's policy replaced."""
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The sampling parameters that its resource adds."""
    overridden: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What of the agent's request the rollout's policy replaced."""
    honoured: str | None = None
    """The answer's header `agl-sampling` (types.sampling.Contract.of)."""
    probed: Callable[[str | None], LogProbs] = lambda _: ""
    """Tells by the answer's fingerprint what probes of the model server have found (Capabilities.logprobs)."""
    bridge: Bridge | None = None
    """What is done to continue an earlier call by its tokens; None where the resource does not ask for it."""
    logical_number: int = 0
    """Logical call number: a retry has the number of the call that it repeats, and so the same sampling seed."""
    status: int = 0
    model_version: str | None = None
    names_version: bool = False
    """Whether the answer's own header named it, which counts more than what an engine says."""
    vocabulary: int | None = None
    arm: str | None = None
    """The name of the resource that it went to last."""
    canary_failed: str | None = None
    """The name of the canary that could not answer it."""
    canary_full: str | None = None
    """The canary that had taken as many conversations as it may, as NAME@VERSION of the set."""
    conversation: str | None = None
    """The conversation that the caller of a call of no rollout named."""
    tries: int = 1
    first_byte: int = 0
    """Unix nanoseconds; 0 before the first byte."""
    incomplete: str | None = None
    """Why the answer was not received or passed on in full."""
    is_forwarded: bool = False
    """Whether the call may have reached a model server."""
    delivered: bool = False
    """Whether the whole answer was written to the client's connection; a client that closes after that did not abandon the call."""
    completed: _Completed | None = None
    built: list[WholeSpan] = field(default_factory=list[WholeSpan])
    """The spans, as written to the journal."""
    built_from: tuple[Any, ...] = ()
    """The value of `changeable` when `built` was built."""

    _contract: tuple[tuple[Any, ...], Contract] | None = None
    """What a contract was made of, and the contract."""

    @property
    def contract(self) -> Contract:
        """From which distribution the reply is."""
        made_of = (self.asked, self.told, self.honoured, self.overridden, self.probed(self.reply.fingerprint))
        if self._contract is None or self._contract[0] != made_of:
            self._contract = made_of, Contract.of(*made_of)
        return self._contract[1]

    @property
    def no_whole_reply(self) -> str | None:
        """Why there is no whole reply, in a word; None if there is one."""
        if self.incomplete:
            return self.incomplete
        if self.status and not 200 <= self.status < 300:
            return "upstream_status"
        if self.reply.error is not None:
            return "upstream_failed"
        return self.reply.unfinished() if self.dialect.samples else None

    @property
    def failed(self) -> str | None:
        """Why the call failed; None if it succeeded."""
        return self.incomplete or self.reply.error or (f"HTTP {self.status}" if self.status >= 400 else self.no_whole_reply)

    @property
    def changeable(self) -> tuple[Any, ...]:
        """The values that sending the last bytes to the agent may still change."""
        reply = self.reply
        return self.incomplete, self.status, self.first_byte, reply, reply.id, reply.error, reply.unreadable, reply.ended


class Recorder:
    """Builds the spans: written to the journal before the last byte is sent, exported afterwards. `counts` counts calls and defects."""

    def __init__(self, spans: WholeSpans, attempts: Attempts, journal: Journal | None = None) -> None:
        self._spans = spans
        self._attempts = attempts
        self._journal = journal
        self._ended: deque[Call] = deque()
        self.counts: Counter[str] = Counter()
        self.arms: Counter[str] = Counter()
        """Calls by the resource that they went to; MAX_ARMS at most, then OTHER_ARMS."""

    def start(
        self,
        key: Key | None,
        dialect: Dialect,
        body: Mapping[str, Any],
        traceparent: str | None,
        *,
        caller: str | None = None,
        retry: int = 0,
        fingerprint: bytes = b"",
    ) -> Call:
        """Start a call and give it its number. `retry` is the client's retry count, 0 for the first try."""
        attempt, number = self._attempts.begin(key, numbered=dialect.samples) if key is not None else (None, 0)
        span = self._spans.begin(key, parse_traceparent(traceparent) if traceparent else None)
        if self._journal is not None:
            self._journal.known(span)
        call = Call(key, dialect, attempt, number, span, body, time.time_ns(), Reply(), caller, retry)
        if attempt is not None and number:
            call.retry_of, call.logical_number = attempt.record_request(number, fingerprint, retry=retry > 0)
            self.counts["retries"] += retry > 0
        self.counts["calls"] += 1
        return call

    def forwarded(self, call: Call) -> None:
        """Record that the request is about to be sent to a model server. Called before each try."""
        if not call.is_forwarded and self._journal is not None:
            self._journal.start(call.span)
        call.is_forwarded = True

    @never_raises
    def write_down(self, call: Call) -> None:
        """Write the spans of a completed answer to the journal; again after a change."""
        self._write_down(call)

    def _write_down(self, call: Call) -> None:
        if call.built and call.built_from == call.changeable:
            return
        self.forwarded(call)  # calls refused before that count as well
        earlier, call.built, call.built_from = call.built, self._build(call), call.changeable
        if self._journal is not None:
            self._journal.settled(earlier)
            self._journal.end(call.span, call.built)

    def ended(self, call: Call) -> None:
        """Queue an ended call for `settle`, which exports its spans later, so that no call waits for the export."""
        self.write_down(call)
        self._ended.append(call)

    @property
    def unsettled(self) -> bool:
        """Whether calls are queued for `settle`."""
        return bool(self._ended)

    def settle(self) -> None:
        """Export the spans of all ended calls, in order; a call that cannot be recorded counts as dropped."""
        while self._ended:
            call = self._ended.popleft()
            try:
                self.finish(call)
            except Exception as error:  # noqa: BLE001 - boundary: one call's content must keep neither others nor the next request
                self.counts["unrecorded"] += 1
                note_failure("recording a call", error)
                self._spans.give_up(call.span)

    def finish(self, call: Call) -> None:
        """Export the spans of an ended call now."""
        if call.attempt is not None:
            call.attempt.active -= 1
        self._write_down(call)
        assert call.completed is not None, "it is written down"
        failed = call.failed
        if call.attempt is not None:
            call.attempt.record_end(call.number, succeeded=failed is None)
        sampled = any(choice.token_ids for choice in call.reply.choices.values())
        if call.arm is not None:
            self.arms[call.arm if call.arm in self.arms or len(self.arms) < MAX_ARMS else OTHER_ARMS] += 1
        if call.canary_failed is not None:
            self.counts["canary_failed"] += 1
        if call.canary_full is not None:
            self.counts["canary_full"] += 1
        if failed:
            self._count("failed", failed)
        elif call.dialect.samples and not sampled and not call.completed.defect:
            self._count("without_token_ids", "the model server returned no token ids: these calls cannot be trained on")
        for span, built in zip(call.completed.spans, call.built, strict=True):
            self._spans.end(span, built)

    def _build(self, call: Call) -> list[WholeSpan]:
        """Build the spans of a call from its current state."""
        if call.completed is None:
            call.completed = self._complete(call)
        failed = call.failed
        requested, error = _request_attributes(call), clean(failed) if failed else None
        built: list[WholeSpan] = []
        for place, (span, index) in enumerate(zip(call.completed.spans, sorted(call.reply.choices) or [0], strict=False)):
            messages, choice = call.completed.messages[min(place, 1)], call.reply.choices.get(index, Choice())
            attributes = requested | messages | self._attributes(call, index, choice, call.completed.prefix, call.completed.defect)
            built.append(
                self._spans.made(span, conventions.SPAN_LLM, SpanKind.CLIENT, attributes, call.start_time, call.completed.end_time, error)
            )
        return built

    def _complete(self, call: Call) -> _Completed:
        reply = call.reply
        defect = self._check_ids(call)
        replies = {index: choice.token_ids for index, choice in reply.choices.items() if choice.token_ids}
        prefix = None
        if call.attempt is not None and call.number:
            prefix = self._attempts.continued(call.attempt, call.number, reply.prompt_token_ids, replies)
            if call.bridge is not None:
                call.bridge.settle(reply.prompt_token_ids)
                if not call.failed:
                    self._attempts.answered(call.attempt, call.number, call.asked, reply, call.bridge)
                self.counts["bridged" if call.bridge.prompt and not call.bridge.refused else "not_bridged"] += 1
            call.attempt.tokens += reply.output_tokens or sum(map(len, replies.values()))
        further = [self._spans.begin(call.key, call.span.parent) for _ in range(len(reply.choices) - 1)]
        (first, others), tools = self._messages(call), self._tools(call)
        again = {conventions.LLM_TOOLS_CALL: call.number} if gen_ai.GEN_AI_TOOL_DEFINITIONS in tools and call.number else tools
        return _Completed(defect, prefix, (first | tools, others | again), [call.span, *further], time.time_ns())

    def _check_ids(self, call: Call) -> str | None:
        """Return the defect of the call's token ids, and drop them if there is one."""
        reply = call.reply
        beyond = call.vocabulary is not None and any(
            ids and max(ids) >= call.vocabulary
            for ids in (reply.prompt_token_ids, *(choice.token_ids for choice in reply.choices.values()))
        )
        sampled = sum(len(choice.token_ids) for choice in reply.choices.values())
        if reply.too_many_ids:
            defect = "too_many_ids"
        elif reply.bad_ids or beyond:
            defect = "ids_out_of_range"
        elif reply.mixed_choices:
            defect = "mixed_choices"
        elif reply.several_prompts or (sampled and call.dialect.several_prompts(call.body)):
            defect = "several_prompts"  # not all servers tell which reply belongs to which prompt
        elif sampled and reply.prompt_token_ids is None:
            defect = "no_prompt_ids"
        elif sampled and reply.output_tokens not in (None, sampled):
            defect = "token_count"
        elif reply.ids_missing and reply.output_tokens is None:
            defect = "ids_missing"
        else:
            return None
        self._count(defect, DEFECT_TEXTS[defect])
        reply.prompt_token_ids = None
        for choice in reply.choices.values():
            choice.token_ids = []
            choice.logprobs = []
        return defect

    def _messages(self, call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
        """Input message attributes for the first choice's span and for the others, each without what an earlier span of the attempt has."""
        messages, convert = call.dialect.messages(call.body), call.dialect.convert
        if call.attempt is None or not call.number:
            held = {gen_ai.GEN_AI_INPUT_MESSAGES: dump(map(convert, messages))}
            return held, held
        base, digests = call.attempt.message_prefixes.continued(call.dialect.path, messages)
        text, all_there = dump_checked(map(convert, messages[base[1] :] if base is not None else messages))
        first: dict[str, Any] = {gen_ai.GEN_AI_INPUT_MESSAGES: text}
        if base is not None:
            first |= {conventions.LLM_MESSAGES_CALL: base[0], conventions.LLM_MESSAGES_BEFORE: base[1]}
        if not all_there:  # truncated messages cannot be referred to
            return first, first
        self._attempts.remember(call.attempt, call.number, digests)
        if len(messages) < 2 or len(call.reply.choices) < 2:
            return first, first
        before = {conventions.LLM_MESSAGES_CALL: call.number, conventions.LLM_MESSAGES_BEFORE: len(messages) - 1}
        return first, {gen_ai.GEN_AI_INPUT_MESSAGES: dump([convert(messages[-1])]), **before}

    def _tools(self, call: Call) -> dict[str, Any]:
        """The request's tool definitions, or the number of the attempt's first call with the same ones."""
        text = tool_definitions(call.body)
        if text is None:
            return {}
        if call.attempt is not None and call.number:
            base, digests = call.attempt.message_prefixes.continued("tools", [text, None])  # the last message is never referred to
            if base is not None:
                return {conventions.LLM_TOOLS_CALL: base[0]}
            self._attempts.remember(call.attempt, call.number, digests[:1])
        return {gen_ai.GEN_AI_TOOL_DEFINITIONS: text}

    def _attributes(self, call: Call, index: int, choice: Choice, prefix: Prefix | None, defect: str | None) -> dict[str, Any]:
        reply = call.reply
        held: dict[str, Any] = {
            HTTP_RESPONSE_STATUS_CODE: call.status or None,
            gen_ai.GEN_AI_RESPONSE_ID: reply.id,
            gen_ai.GEN_AI_RESPONSE_MODEL: reply.model,
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: _prompt_tokens(reply),
            gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: reply.cache_read_tokens,
            gen_ai.GEN_AI_USAGE_CACHE_CREATION_INPUT_TOKENS: reply.cache_creation_tokens,
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: reply.output_tokens,
            conventions.LLM_MODEL_VERSION: clean(call.model_version) if call.model_version is not None else None,
            conventions.LLM_ARM: clean(call.arm) if call.arm is not None else None,
            conventions.LLM_CANARY_FAILED: clean(call.canary_failed) if call.canary_failed is not None else None,
            conventions.LLM_CANARY_FULL: clean(call.canary_full) if call.canary_full is not None else None,
            conventions.LLM_INCOMPLETE: call.no_whole_reply,
            conventions.LLM_TRIES: call.tries if call.tries > 1 else None,
            conventions.LLM_FIRST_BYTE: (call.first_byte - call.start_time) / 1e9 if call.first_byte else None,
            ERROR_TYPE: call.incomplete or (str(call.status) if call.status >= 400 else call.no_whole_reply),
        }
        if index in reply.choices and defect != "mixed_choices":  # the text of several choices is mixed
            held[gen_ai.GEN_AI_OUTPUT_MESSAGES] = output_message(choice)
            held[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] = [choice.finish_reason] if choice.finish_reason else None
        if call.number:
            held[conventions.LLM_CHOICE] = index
        if reply.prompt_token_ids is not None:
            start = prefix.length if prefix is not None else 0
            held[conventions.LLM_PROMPT_TOKEN_IDS] = pack_ints(reply.prompt_token_ids[start:])
            if prefix is not None:
                held |= {conventions.LLM_PREFIX_CALL: prefix.call, conventions.LLM_PREFIX_CHOICE: prefix.choice}
        if choice.token_ids:
            held[conventions.LLM_RESPONSE_TOKEN_IDS] = pack_ints(choice.token_ids)
            defect = choice.logprobs_defect()
            if defect is None:
                held[conventions.LLM_RESPONSE_LOGPROBS] = pack_doubles(choice.logprobs)
            elif not call.built:  # counted once
                self._count(defect, DEFECT_TEXTS[defect])
        held[conventions.LLM_DEFECT] = defect
        if choice.versions or choice.experts:
            held |= self._of_engine(call, choice)
        return {name: value for name, value in held.items() if value is not None}

    def _of_engine(self, call: Call, choice: Choice) -> dict[str, Any]:
        """Return attributes for what the engine said of the tokens: the weights that sampled them, and their experts."""
        held: dict[str, Any] = {}
        if isinstance(choice.versions, str) or choice.token_ids:
            versions = versions_of(choice)
            if versions and not call.names_version:
                held[conventions.LLM_MODEL_VERSION] = clean(versions[0].version)  # of several the first, which is the oldest
            if versions and len(versions) > 1:
                held[conventions.LLM_WEIGHT_VERSIONS] = clean(dense(versions))
        else:
            versions = []
        prompt = call.reply.prompt_token_ids
        experts = experts_of(choice, len(prompt), call.body) if prompt is not None and choice.token_ids else ""
        if experts and len(experts) > MAX_EXPERTS_BYTES:
            if not call.built:
                self._count("experts_too_large", DEFECT_TEXTS["experts_too_large"])
        elif experts:
            held[conventions.LLM_ROUTED_EXPERTS] = experts
        if versions is None or experts is None:
            if not call.built:
                self._count(conventions.LLM_MISALIGNED, DEFECT_TEXTS[conventions.LLM_MISALIGNED])
            held[conventions.LLM_DEFECT] = conventions.LLM_MISALIGNED
            held[conventions.LLM_INCOMPLETE] = call.no_whole_reply or conventions.LLM_MISALIGNED
        return held

    def _count(self, what: str, text: str) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1:
            logger.warning("%s (logged once; /health has the count)", text)


@lru_cache(maxsize=1024)
def _requested(name: str, _: type, given: float | str) -> dict[str, Any]:
    """Return the attribute for a field of a request. Calls of one agent are alike; 1, 1.0 and True are equal, and not of one type."""
    return _read(name, given)


def _read(name: str, given: Any) -> dict[str, Any]:
    attribute, kind = _REQUEST[name]
    try:
        value = kind.validate_python(given)
    except ValidationError:
        return {}
    return {attribute: clean(value) if isinstance(value, str) else value}


def _prompt_tokens(reply: Reply) -> int | None:
    """Return the length of the whole prompt: by the server's count, else (a stream without usage) by its token ids."""
    ids = reply.prompt_token_ids
    return len(ids) if reply.input_tokens is None and ids is not None else reply.input_tokens


def _request_attributes(call: Call) -> dict[str, Any]:
    """Attributes from the request."""
    held: dict[str, Any] = {
        gen_ai.GEN_AI_OPERATION_NAME: call.dialect.operation,
        gen_ai.GEN_AI_PROVIDER_NAME: call.dialect.provider,
    }
    for name in _REQUEST:
        if (given := call.body.get(name)) is not None:
            is_small = isinstance(given, int | float) or (isinstance(given, str) and len(given) <= _SHORT)
            held |= _requested(name, type(given), given) if is_small else _read(name, given)
    if call.dialect.samples:
        held[conventions.LLM_SAMPLING] = call.contract.dumps()
    if call.bridge is not None and (bridge := call.bridge.described()):
        held[conventions.LLM_BRIDGE] = dense(bridge)
    if call.conversation is not None:
        held[conventions.CONVERSATION_ID] = call.conversation
    if call.caller is not None:
        held[conventions.LLM_CALLER] = call.caller
    if call.number:
        held[conventions.LLM_CALL] = call.number
        if call.retry:
            held[conventions.LLM_RETRY] = call.retry
        if call.retry_of is not None:
            held[conventions.LLM_RETRY_OF] = call.retry_of
    return held
