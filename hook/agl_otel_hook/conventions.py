"""Every name that crosses a boundary: attributes, span names, headers, baggage keys and environment variables.

The names are Agent Lightning 0.3's where it had one, so that its users' spans, rewards and queries keep working.
This module imports nothing of ours, and no other module spells one of these strings out.
"""

from __future__ import annotations

import re
from typing import Final

# --- identity: span and resource attribute, and W3C baggage key -------------------------------------------------
ROLLOUT_ID: Final = "agentlightning.rollout_id"
ATTEMPT_ID: Final = "agentlightning.attempt_id"
SEQUENCE_ID: Final = "agentlightning.span_sequence_id"
PROCESS: Final = "agentlightning.process"
"""Span attribute only: the process marker, one random id for each process, new after a fork."""
INVALID: Final = "agentlightning.invalid"
"""Set by the Go collector on a span whose ids it refused (the Python collector rejects it instead); holds the reason."""

# --- the same in HTTP headers and gRPC metadata -----------------------------------------------------------------
HEADER_ROLLOUT_ID: Final = "agl-rollout-id"
HEADER_ATTEMPT_ID: Final = "agl-attempt-id"
HEADER_PROCESS: Final = "agl-process"
"""In the answer of a hooked HTTP agent: its process marker, and how many spans of the attempt it has begun and ended by then."""
HEADER_OPENAI_BASE_URL: Final = "agl-openai-base-url"
"""To an agent that is an HTTP endpoint: the attempt's own address of the model."""
HEADER_OPENAI_API_KEY: Final = "agl-openai-api-key"
"""The same: the attempt's own key for it, where the stack has a token."""
HEADER_OTLP_KEY: Final = "agl-otlp-key"
"""The same: the attempt's own key for its telemetry. Under the hook the service uses it by itself."""
HEADER_ACK: Final = "agl-ack"
"""Ack level a client asks the collector for: `durable` (default) or `stored`."""
HEADER_MODEL_VERSION: Final = "agl-model-version"
"""Answered by a model server that knows which version of the weights sampled the reply."""

HEADER_VOCABULARY: Final = "agl-vocabulary-size"
"""Answered by a model server that says how many token ids it has: ids beyond are refused."""

# --- environment of the agent's process -------------------------------------------------------------------------
ENV_ROLLOUT_ID: Final = "AGL_ROLLOUT_ID"
ENV_ATTEMPT_ID: Final = "AGL_ATTEMPT_ID"
ENV_LEDGER: Final = "AGL_LEDGER"
"""The folder below which the processes of attempts count their spans (records.py)."""
ENV_TASK: Final = "AGL_TASK"
"""The rollout's input, as JSON."""
ENV_RESOURCES: Final = "AGL_RESOURCES"
"""The rollout's resources, as JSON: {name: resource}."""
ENV_TASK_FILE: Final = "AGL_TASK_FILE"
"""Instead of AGL_TASK where that is too long for an environment (100,000 bytes): the path of a file that holds it."""
ENV_RESOURCES_FILE: Final = "AGL_RESOURCES_FILE"
"""The same for AGL_RESOURCES."""

# --- spans that mean something ----------------------------------------------------------------------------------
SPAN_ATTEMPT: Final = "agentlightning.attempt"
"""Zero-length root span of an attempt, exported by the runner and acked before the agent starts; carries no marker."""
SPAN_SEAL: Final = "agentlightning.seal"
SPAN_LLM: Final = "agentlightning.llm"
"""A model call, as the proxy saw it. No agent's key may send it, or an attribute below this name."""
SPAN_ANNOTATION: Final = "agentlightning.annotation"
SPAN_MESSAGE: Final = "agentlightning.message"
SPAN_OBJECT: Final = "agentlightning.object"
SPAN_EXCEPTION: Final = "agentlightning.exception"
SPAN_OPERATION: Final = "agentlightning.operation"
SPAN_VIRTUAL: Final = "agentlightning.virtual"
SPAN_REWARD: Final = "agentlightning.reward"
"""An operation that computed a reward (a reward itself is an annotation)."""

ATTEMPT_HOOKED: Final = "agentlightning.attempt.hooked"
"""On the attempt span: true where the runner started the agent under our hook, so that its spans must carry a marker."""

LOG_STREAM: Final = "log.iostream"
"""OpenTelemetry's name for where a log record was printed: stdout or stderr."""

# --- seal: how many spans with this marker the attempt has ended so far (annotations included, seals not) --------
SEAL_SPANS: Final = "agentlightning.seal.spans"
SEAL_DROPPED: Final = "agentlightning.seal.dropped"
"""How many spans of this marker and attempt the exporter gave up."""
SEAL_CLOSING: Final = "agentlightning.seal.closing"
"""True on a process's last seal of an attempt: it ended, or the attempt was closed."""
LATE: Final = "agentlightning.late"
"""True on a span that began after the attempt's ledger was read: shown, and no part of the verdict."""

# --- a model call, one span for each (call, choice) -------------------------------------------------------------
LLM_CALL: Final = "agentlightning.llm.call"
"""1, 2, … within the attempt and proxy process; every forwarded request takes a number when it starts."""
LLM_CALLER: Final = "agentlightning.llm.caller"
"""The process marker in the baggage of the request: who made the call."""
LLM_CHOICE: Final = "agentlightning.llm.choice"
LLM_PROMPT_TOKEN_IDS: Final = "agentlightning.llm.prompt_token_ids"
LLM_RESPONSE_TOKEN_IDS: Final = "agentlightning.llm.response_token_ids"
LLM_RESPONSE_LOGPROBS: Final = "agentlightning.llm.response_logprobs"
"""Natural log under the sampling distribution, one for each response token."""
LLM_MODEL_VERSION: Final = "agentlightning.llm.model_version"
LLM_PREFIX_CALL: Final = "agentlightning.llm.prefix_call"
LLM_PREFIX_CHOICE: Final = "agentlightning.llm.prefix_choice"
LLM_MESSAGES_CALL: Final = "agentlightning.llm.messages_call"
"""The earlier call of the same process marker whose messages this one's begin with; its first choice's span has them."""
LLM_MESSAGES_BEFORE: Final = "agentlightning.llm.messages_before"
"""How many of that call's messages: `gen_ai.input.messages` holds only what follows them. Absent: it holds all."""
LLM_INCOMPLETE: Final = "agentlightning.llm.incomplete"
"""Why the reply was cut off (`client_gone`, `upstream_error`, …); absent on a whole reply."""
LLM_MASKED: Final = "masked"
"""Of LLM_INCOMPLETE: the collector put 0 in place of token ids of the prompt or the reply, by a rule; no loss may be taken of the reply."""
LLM_DEFECT: Final = "agentlightning.llm.defect"
"""Why token ids or log-probs are not recorded though the server sent some (`logprobs_length`, `ids_out_of_range`, …)."""
LLM_RETRY: Final = "agentlightning.llm.retry"
"""The client's number of this try: 1 for its first retry; absent on a first try."""
LLM_RETRY_OF: Final = "agentlightning.llm.retry_of"
"""The call that this one repeats: the agent never used that one's reply."""
LLM_TRIES: Final = "agentlightning.llm.tries"
"""How often the proxy asked a model server before the first byte came; absent where once was enough."""
LLM_FIRST_BYTE: Final = "agentlightning.llm.first_byte_seconds"
"""From the start of the call to the first byte of the answer."""

# --- a step of a training run: what made a version of the weights or prompts, linked to the attempts it consumed -----
TRAIN: Final = "agentlightning.train"
"""Prefix of the names of these spans and of their attributes. No agent's key may send them."""
SPAN_TRAIN_STEP: Final = "agentlightning.train.step"
"""All steps of a run are one trace, which belongs to no rollout."""
SPAN_TRAIN_EVIDENCE: Final = "agentlightning.train.evidence"
"""Child of a step's span: further links of a step that consumed more attempts than one span may link to."""
TRAIN_RUN: Final = "agentlightning.train.run_id"
TRAIN_ALGORITHM: Final = "agentlightning.train.algorithm"
TRAIN_STEP_NUMBER: Final = "agentlightning.train.step_number"
"""1, 2, … (a search's score of what it began with is step 0)."""
TRAIN_RESOURCES: Final = "agentlightning.train.resources_id"
TRAIN_VERSION_BEFORE: Final = "agentlightning.train.version_before"
TRAIN_VERSION_AFTER: Final = "agentlightning.train.version_after"
"""Equal to the one before where the step changed nothing."""
TRAIN_SAMPLES: Final = "agentlightning.train.samples"
TRAIN_REFUSED: Final = "agentlightning.train.refused"
TRAIN_ATTEMPTS: Final = "agentlightning.train.attempts"
"""How many attempts were consumed: all links of the step, those of SPAN_TRAIN_EVIDENCE included, and what no span was stored of."""
TRAIN_DIGEST: Final = "agentlightning.train.digest"
"""Of what the step made of what: a step that was done again, with another outcome, has another one, and the latest counts."""
TRAIN_EVIDENCE_PLACE: Final = "agentlightning.train.evidence.place"
"""Of a SPAN_TRAIN_EVIDENCE: 1, 2, … within its step."""
TRAIN_METRIC: Final = "agentlightning.train.metric"
"""Prefix: `agentlightning.train.metric.{name}`."""
TRAINING_FIGURES: Final = "agl.training."
"""Prefix of the names of metrics: what a trainer found. No agent's key may send it."""

# --- shown to viewers, never stored ------------------------------------------------------------------------------
SHOWN_VERDICT: Final = "agentlightning.verdict"
"""Of an attempt, on its first span."""
SHOWN_VERDICT_REASON: Final = "agentlightning.verdict.reason"
SHOWN_REWARD: Final = "agentlightning.reward.final"
"""The last primary reward of an attempt, on its first span."""
SHOWN_PROMPT_TOKENS: Final = "agentlightning.llm.prompt_tokens"
"""How many there are: the arrays themselves are not shown. The same of the two below."""
SHOWN_RESPONSE_TOKENS: Final = "agentlightning.llm.response_tokens"
SHOWN_LOGPROBS: Final = "agentlightning.llm.logprobs"
SHOWN_CUT: Final = "agentlightning.shown.cut"
"""On a span that is too large to be sent whole to a viewer: what was cut, and where all of it is."""

# --- rewards, links, tags, messages, objects, operations ---------------------------------------------------------
REWARD: Final = "agentlightning.reward"
"""Prefix: `agentlightning.reward.{i}.name` and `.value`; index 0 is the primary reward."""
REWARD_GIVEN: Final = "agentlightning.reward.given"
"""True on a reward that the runner gives, by its grader or from what the agent returned: it counts before all that the agent emitted.
No agent's key may send it."""
LINK: Final = "agentlightning.link"
LINK_KEY_MATCH: Final = "key_match"
LINK_VALUE_MATCH: Final = "value_match"
"""What stands below `agentlightning.link.{i}`."""
TAG: Final = "agentlightning.tag"
MESSAGE_BODY: Final = "agentlightning.message.body"
OBJECT_TYPE: Final = "agentlightning.object.type"
OBJECT_LITERAL: Final = "agentlightning.object.literal"
OBJECT_JSON: Final = "agentlightning.object.json"
OPERATION_NAME: Final = "agentlightning.operation.name"
OPERATION_INPUT: Final = "agentlightning.operation.input"
OPERATION_OUTPUT: Final = "agentlightning.operation.output"
TRACER_NAME: Final = "agentlightning.tracer.name"

ID_PATTERN: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a rollout, attempt or resources id may look like: they travel in paths, headers and the environment."""


def reward_name_key(index: int) -> str:
    """The attribute key of the name of reward dimension `index`."""
    return f"{REWARD}.{index}.name"


def reward_value_key(index: int) -> str:
    """The attribute key of the value of reward dimension `index`."""
    return f"{REWARD}.{index}.value"


def is_valid_id(value: str) -> bool:
    """Whether `value` may be a rollout, attempt or resources id."""
    return ID_PATTERN.fullmatch(value) is not None


BOUND_PREFIX: Final = "aglo-"
"""Of the key with which one attempt sends telemetry: `aglo-ROLLOUT/ATTEMPT-SIGNATURE` (agl_otel/net makes and checks it)."""


def named_by(key: str) -> tuple[str, str] | None:
    """(rollout, attempt) that a text of the form of an attempt's key names, whoever made it; None of any other text."""
    named, dash, _ = key.removeprefix(BOUND_PREFIX).rpartition("-")
    rollout_id, _, attempt_id = named.partition("/")
    if not (dash and key.startswith(BOUND_PREFIX) and is_valid_id(rollout_id) and is_valid_id(attempt_id)):
        return None
    return rollout_id, attempt_id
