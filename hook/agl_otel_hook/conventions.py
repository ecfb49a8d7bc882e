"""All names on the wire: attributes, span names, headers, baggage keys and environment variables.

Names that Agent Lightning 0.3 had are kept, so that its users' spans, rewards and queries keep working.
This module imports nothing of ours, and no other module repeats one of these strings.
"""

from __future__ import annotations

import re
from typing import Final

# --- identity: span and resource attribute, and W3C baggage key -------------------------------------------------
ROLLOUT_ID: Final = "agentlightning.rollout_id"
ATTEMPT_ID: Final = "agentlightning.attempt_id"
SEQUENCE_ID: Final = "agentlightning.span_sequence_id"
PROCESS: Final = "agentlightning.process"
"""Span attribute and baggage key: the process marker, one random id for each process, new after a fork."""
INVALID: Final = "agentlightning.invalid"
"""Reason why the Go collector stored a span without ids: its ids, text, nesting or time are invalid. The Python collector rejects it."""

# --- the same in HTTP headers and gRPC metadata -----------------------------------------------------------------
HEADER_ROLLOUT_ID: Final = "agl-rollout-id"
HEADER_ATTEMPT_ID: Final = "agl-attempt-id"
HEADER_PROCESS: Final = "agl-process"
"""In the response of an HTTP agent under the hook: MARKER;BEGUN;ENDED, its spans of the attempt so far."""
HEADER_OPENAI_BASE_URL: Final = "agl-openai-base-url"
"""In a request to an HTTP agent: the attempt's own base URL of the model."""
HEADER_OPENAI_API_KEY: Final = "agl-openai-api-key"
"""In the same request: the attempt's own key for the model, if the stack has a token and a proxy."""
HEADER_OTLP_KEY: Final = "agl-otlp-key"
"""In the same request: the attempt's own key for its telemetry. The hook uses it automatically."""
HEADER_ACK: Final = "agl-ack"
"""Ack level that a client requests of the collector: `durable` (default) or `stored`; the collector refuses any other with status 400."""
HEADER_INHERIT: Final = "agl-inherit"
"""In a request with telemetry: with INHERIT_NONE, what names no rollout gets none by its trace or parent. Trainers send it, for the ids of
their traces can be computed."""
INHERIT_NONE: Final = "none"
"""The value of HEADER_INHERIT."""
HEADER_MODEL_VERSION: Final = "agl-model-version"
"""In the response of a model server: the version of the weights that sampled the reply."""
HEADER_CONVERSATION_ID: Final = "agl-conversation-id"
"""In a call of no rollout: the conversation that it is a part of, where no baggage has `gen_ai.conversation.id`."""
HEADER_SAMPLING: Final = "agl-sampling"
"""In the response of a model server: the sampling parameters that it heeds (`*`: all), of which it fills in none by itself."""

HEADER_VOCABULARY: Final = "agl-vocabulary-size"
"""In the response of a model server: its number of token ids; a call with larger ids is recorded without ids."""

# --- environment of the agent's process -------------------------------------------------------------------------
ENV_ROLLOUT_ID: Final = "AGL_ROLLOUT_ID"
ENV_ATTEMPT_ID: Final = "AGL_ATTEMPT_ID"
ENV_LEDGER: Final = "AGL_LEDGER"
"""The root folder of the ledgers in which processes of attempts count their spans (records.py)."""
ENV_OTLP_HTTP: Final = "AGL_OTLP_HTTP"
"""The collector's address for OTLP over HTTP, if OTEL_EXPORTER_OTLP_PROTOCOL is grpc: its exporter may be missing."""
ENV_TASK: Final = "AGL_TASK"
"""The rollout's input, as JSON."""
ENV_RESOURCES: Final = "AGL_RESOURCES"
"""The rollout's resources, as JSON: {name: resource}."""
ENV_TASK_FILE: Final = "AGL_TASK_FILE"
"""Replaces AGL_TASK if that is too long for an environment (100,000 bytes): the path of a file with it."""
ENV_RESOURCES_FILE: Final = "AGL_RESOURCES_FILE"
"""The same for AGL_RESOURCES."""
ENV_HOOK: Final = "AGL_HOOK"
"""`off`: no hook is loaded. `inject`: OpenTelemetry is brought with it into interpreters that have none, as by `--inject`."""
ENV_HOOK_SKIP: Final = "AGL_HOOK_SKIP"
"""Programs in which the hook is not loaded, nor in what they start: names of scripts and of modules (`python -m`) of Python, separated by
commas, which may end in `*`. One that matches the program of the agent's own command is left out. Default: runners of tests."""
ENV_HOOK_PACKAGES: Final = "AGL_HOOK_PACKAGES"
"""The runner's own folder of packages, for what the hook needs and an interpreter lacks."""
HOOK_OFF: Final = "off"
HOOK_INJECT: Final = "inject"
HOOK_SKIP: Final = "pytest,pytest-3*,py.test,coverage,coverage3,coverage-3*,tox,nox,unittest"
"""The default of AGL_HOOK_SKIP: agents run other people's tests."""

# --- spans ------------------------------------------------------------------------------------------------------
SPAN_ATTEMPT: Final = "agentlightning.attempt"
"""Zero-length root span of an attempt, exported by the runner and acknowledged before the agent starts; has no marker."""
SPAN_SEAL: Final = "agentlightning.seal"
SPAN_LLM: Final = "agentlightning.llm"
"""A model call, recorded by the proxy. Agents' keys may not send it, or attributes with this prefix."""
SPAN_ANNOTATION: Final = "agentlightning.annotation"
SPAN_MESSAGE: Final = "agentlightning.message"
SPAN_OBJECT: Final = "agentlightning.object"
SPAN_EXCEPTION: Final = "agentlightning.exception"
SPAN_OPERATION: Final = "agentlightning.operation"
SPAN_VIRTUAL: Final = "agentlightning.virtual"
SPAN_REWARD: Final = "agentlightning.reward"
"""An operation that computed a reward; the reward itself is an annotation."""

ATTEMPT_HOOKED: Final = "agentlightning.attempt.hooked"
"""On the attempt span: true if the runner started the agent under the hook, so that its spans must have a marker."""

LOG_STREAM: Final = "log.iostream"
"""OpenTelemetry's name for the stream of a printed log record: stdout or stderr."""

# --- seals ------------------------------------------------------------------------------------------------------
SEAL_SPANS: Final = "agentlightning.seal.spans"
"""Number of spans that the attempt has ended under this marker so far, annotations included, seals and the attempt span excluded."""
SEAL_DROPPED: Final = "agentlightning.seal.dropped"
"""Number of these that the exporter dropped."""
SEAL_CLOSING: Final = "agentlightning.seal.closing"
"""True on a process's last seal of an attempt: the process ended, or the attempt was closed."""
LATE: Final = "agentlightning.late"
"""True on a span that began after the attempt had ended and its ledger was read: shown; not part of the verdict, nor its reward."""

# --- model calls: one span for each (call, choice) --------------------------------------------------------------
LLM_CALL: Final = "agentlightning.llm.call"
"""Number of the call in its attempt and proxy process: 1, 2, …, assigned to every forwarded request at its start."""
LLM_CALLER: Final = "agentlightning.llm.caller"
"""Marker of the process that made the call, from the request's baggage."""
LLM_CHOICE: Final = "agentlightning.llm.choice"
LLM_PROMPT_TOKEN_IDS: Final = "agentlightning.llm.prompt_token_ids"
LLM_RESPONSE_TOKEN_IDS: Final = "agentlightning.llm.response_token_ids"
LLM_RESPONSE_LOGPROBS: Final = "agentlightning.llm.response_logprobs"
"""Natural log-probs under the sampling distribution, one for each response token."""
LLM_MODEL_VERSION: Final = "agentlightning.llm.model_version"
LLM_WEIGHT_VERSIONS: Final = "agentlightning.llm.weight_versions"
"""Where several weights sampled a reply, which ones: JSON [[version, first token, token after the last], …] over the response tokens."""
LLM_ROUTED_EXPERTS: Final = "agentlightning.llm.routed_experts"
"""Experts of each token of prompt and response but the last, where the request asked for them: base64 of .npy, one row for each token; of
fewer rows those of the first prompt tokens are left out."""
LLM_PREFIX_CALL: Final = "agentlightning.llm.prefix_call"
LLM_PREFIX_CHOICE: Final = "agentlightning.llm.prefix_choice"
LLM_MESSAGES_CALL: Final = "agentlightning.llm.messages_call"
"""The call with the same process marker whose messages this span's begin with (an earlier one, or the same); see its first choice."""
LLM_MESSAGES_BEFORE: Final = "agentlightning.llm.messages_before"
"""Number of messages shared with that call; `gen_ai.input.messages` holds only those after them. Absent: it holds all."""
LLM_TOOLS_CALL: Final = "agentlightning.llm.tools_call"
"""The call with the same process marker whose `gen_ai.tool.definitions` are also this span's (an earlier one, or the same)."""
LLM_INCOMPLETE: Final = "agentlightning.llm.incomplete"
"""Why there is no whole reply (`client_gone`, `upstream_failed`, …; training-files.md has all); absent on a whole one."""
LLM_MASKED: Final = "masked"
"""Value of LLM_INCOMPLETE: a masking rule replaced token ids of the prompt or reply by 0; the reply may not be trained on."""
LLM_MISALIGNED: Final = "routing_misaligned"
"""Value of LLM_INCOMPLETE and LLM_DEFECT: experts or weights versions are of other tokens than the reply's; it may not be trained on."""
LLM_DEFECT: Final = "agentlightning.llm.defect"
"""Why token ids or log-probs of the server are not recorded (`token_count`, `logprobs_length`, …; training-files.md has all)."""
LLM_SAMPLING: Final = "agentlightning.llm.sampling"
"""The call's sampling contract, as JSON: {"agent": {field: value}, "resource": {field: value}, "server": [field that it may fill in]}."""
LLM_BRIDGE: Final = "agentlightning.llm.bridge"
"""How the call continues an earlier one by its sampled tokens, as JSON: {"call": number, "choice": index, "template": {"tokens": length of
the template's own prompt, "shared": length of its beginning that is the same}}, or {"refused": why not}; absent where the resource does not
ask for it, and on the first call of a conversation."""
LLM_RETRY: Final = "agentlightning.llm.retry"
"""The client's retry number, 1 for its first retry; absent on a first try."""
LLM_RETRY_OF: Final = "agentlightning.llm.retry_of"
"""The call that this one retries; the agent did not use the reply of that call."""
LLM_ARM: Final = "agentlightning.llm.arm"
"""The resource name of the LLM that the call went to last, where its set of resources has a canary or serves calls of no rollout."""
SERVED_ARM: Final = "agentlightning.served.arm"
"""Of a product's own span: the `arm` of the prompts by which it answers (`/v1/agl/resources/served`)."""
LLM_CANARY_FAILED: Final = "agentlightning.llm.canary_failed"
"""The resource name of the canary that the call was for and that could not answer, so that another LLM was asked."""
LLM_CANARY_FULL: Final = "agentlightning.llm.canary_full"
"""The canary that the conversation was for and that had taken as many as it may (`most_conversations`), as NAME@VERSION of the set."""
LLM_TRIES: Final = "agentlightning.llm.tries"
"""Number of requests that the proxy made to model servers for the call; absent if it is 1."""
LLM_FIRST_BYTE: Final = "agentlightning.llm.first_byte_seconds"
"""Time from the start of the call to the first byte of the response."""

# --- steps of a training run: each makes a version of weights or prompts, and is linked to the attempts it consumed --
TRAIN: Final = "agentlightning.train"
"""Prefix of the names of these spans and their attributes. Agents' keys may not send them."""
SPAN_TRAIN_STEP: Final = "agentlightning.train.step"
"""Span of a step. All steps of a run form one trace, which belongs to no rollout."""
SPAN_TRAIN_EVIDENCE: Final = "agentlightning.train.evidence"
"""Child of a step's span, for the links beyond the number that one span may have."""
SPAN_TRAIN_STAGE: Final = "agentlightning.train.stage"
"""Prefix of the names of spans for the stages of a step, its children: `agentlightning.train.stage gate`."""
SPAN_TRAIN_RUN: Final = "agentlightning.train.run"
"""Span of a run's begin, and again of its end, which replaces it: it has TRAIN_OUTCOME."""
TRAIN_OUTCOME: Final = "agentlightning.train.outcome"
"""How a run ended: `finished`, `interrupted`, or `error: ` and the error; empty while it runs, and if it was killed."""
TRAIN_RUN: Final = "agentlightning.train.run_id"
TRAIN_ALGORITHM: Final = "agentlightning.train.algorithm"
TRAIN_STEP_NUMBER: Final = "agentlightning.train.step_number"
"""1, 2, …; 0 is a search's score of its starting point."""
TRAIN_RESOURCES: Final = "agentlightning.train.resources_id"
TRAIN_VERSION_BEFORE: Final = "agentlightning.train.version_before"
TRAIN_VERSION_AFTER: Final = "agentlightning.train.version_after"
"""Equal to TRAIN_VERSION_BEFORE if the step changed nothing."""
TRAIN_SAMPLES: Final = "agentlightning.train.samples"
TRAIN_REFUSED: Final = "agentlightning.train.refused"
TRAIN_ATTEMPTS: Final = "agentlightning.train.attempts"
"""Number of attempts consumed: all links of the step, those of SPAN_TRAIN_EVIDENCE included, and attempts without a stored span."""
TRAIN_DIGEST: Final = "agentlightning.train.digest"
"""Hash of the step's resources, versions, counts and attempts. A step repeated with another outcome has another one; the latest counts."""
TRAIN_EVIDENCE_PLACE: Final = "agentlightning.train.evidence.place"
"""Number of a SPAN_TRAIN_EVIDENCE within its step: 1, 2, …"""
TRAIN_STAGE: Final = "agentlightning.train.stage.name"
"""Of a SPAN_TRAIN_STAGE: the stage."""
TRAIN_METRIC: Final = "agentlightning.train.metric"
"""Prefix: `agentlightning.train.metric.{name}`."""
TRAINING_FIGURES: Final = "agl.training."
"""Prefix of the names of a trainer's metrics. Agents' keys may not send them."""

# --- the same as proposed for OpenTelemetry (semantic-conventions-genai, issue 88): written, read by nothing here ----
RL_SYSTEM: Final = "rl.system"
"""On the span of a step, not on the resource as proposed; the proposal may change. Always `agl-otel`."""
RL_RUN: Final = "rl.run.id"
RL_ALGORITHM: Final = "rl.algorithm"
RL_ITERATION: Final = "rl.loop.iteration"
"""The step's number."""
RL_BATCH_SIZE: Final = "rl.train.batch_size"
"""Number of samples that the step trained on."""

# --- shown to viewers, never stored ------------------------------------------------------------------------------
SHOWN_VERDICT: Final = "agentlightning.verdict"
"""Verdict of an attempt, on its first span."""
SHOWN_VERDICT_REASON: Final = "agentlightning.verdict.reason"
SHOWN_REWARD: Final = "agentlightning.reward.final"
"""The last primary reward of an attempt, on its first span."""
SHOWN_PROMPT_TOKENS: Final = "agentlightning.llm.prompt_tokens"
"""Number of prompt tokens, shown instead of the array; likewise the two below."""
SHOWN_RESPONSE_TOKENS: Final = "agentlightning.llm.response_tokens"
SHOWN_LOGPROBS: Final = "agentlightning.llm.logprobs"
SHOWN_CUT: Final = "agentlightning.shown.cut"
"""On a span that is too large for a viewer: what was cut, and where the whole span is."""

# --- rewards, links, tags, messages, objects, operations ---------------------------------------------------------
REWARD: Final = "agentlightning.reward"
"""Prefix: `agentlightning.reward.{i}.name` and `.value`; index 0 is the primary reward. Derived from evaluations, also `.time`
(Unix nanoseconds), `.label`, `.response` (the id of the model call's response) and `.source` (who gave feedback): never sent."""
EVALUATION: Final = "gen_ai.evaluation.result"
"""OpenTelemetry's event of an evaluation, on a span or as a log record: a reward."""
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_LABEL: Final = "gen_ai.evaluation.score.label"
"""Read if there is no score: some labels stand for 1 or 0 ([otlp.md](otlp.md#rewards))."""
EVALUATION_TEXT: Final = "gen_ai.evaluation.explanation"
FEEDBACK: Final = "agentlightning.feedback"
"""Prefix of what an evaluation has that came as feedback ([late-rewards.md](late-rewards.md)). Agents' keys may not send it."""
FEEDBACK_ID: Final = "agentlightning.feedback.id"
"""Feedback with the same id for the same attempt is the same."""
FEEDBACK_SOURCE: Final = "agentlightning.feedback.source"
"""Who gave it."""
FEEDBACK_RUBRIC: Final = "agentlightning.feedback.rubric"
"""By which rules."""
FEEDBACK_CORRECTION: Final = "agentlightning.feedback.correction"
"""What the agent should have answered."""
FEEDBACK_STORED: Final = "agentlightning.feedback.stored"
"""When it was stored (RFC 3339), where it counts as given at another time, as what a judge says does."""
JUDGE_EVENT: Final = "agentlightning.judge.call"
"""Event of a call to a judge's model, one before it and one after it ([judges.md](judges.md#what-it-may-spend)). It has the source and
the rubric of the judge's feedback."""
JUDGE_CALL: Final = "agentlightning.feedback.call.id"
JUDGE_PROMPT_TOKENS: Final = "agentlightning.feedback.call.prompt_tokens"
"""What the call may take at most, or took, and likewise:"""
JUDGE_ANSWER_TOKENS: Final = "agentlightning.feedback.call.answer_tokens"
JUDGE_ENDED: Final = "agentlightning.feedback.call.ended"
"""`true` after the call."""
CONVERSATION_ID: Final = "gen_ai.conversation.id"
"""OpenTelemetry's id of a conversation; adopted traces that share one become one rollout."""
RESPONSE_ID: Final = "gen_ai.response.id"
"""OpenTelemetry's id of a model call's response; on an evaluation, of the call that it is about."""
REWARD_GIVEN: Final = "agentlightning.reward.given"
"""True on a reward that the runner gives, by its grader or from the agent's result: it takes precedence over rewards that the agent emits.
Agents' keys may not send it."""
LINK: Final = "agentlightning.link"
LINK_KEY_MATCH: Final = "key_match"
LINK_VALUE_MATCH: Final = "value_match"
"""Like `key_match`, a key below `agentlightning.link.{i}`."""
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
"""Form of rollout, attempt and resources ids, which appear in paths, headers and environments."""


def reward_name_key(index: int) -> str:
    """Return the attribute key for the name of reward dimension `index`."""
    return f"{REWARD}.{index}.name"


def reward_value_key(index: int) -> str:
    """Return the attribute key for the value of reward dimension `index`."""
    return f"{REWARD}.{index}.value"


def reward_time_key(index: int) -> str:
    """Return the key for the time of an evaluation, which is reward dimension `index` of the column Rewards."""
    return f"{REWARD}.{index}.time"


def reward_label_key(index: int) -> str:
    """Return the key for the label of an evaluation, as `reward_time_key`."""
    return f"{REWARD}.{index}.label"


def reward_response_key(index: int) -> str:
    """Return the key for the response id that an evaluation names, as `reward_time_key`."""
    return f"{REWARD}.{index}.response"


def reward_source_key(index: int) -> str:
    """Return the key for the source of feedback, as `reward_time_key`."""
    return f"{REWARD}.{index}.source"


def is_valid_id(value: str) -> bool:
    """Return whether `value` has the form of a rollout, attempt or resources id."""
    return ID_PATTERN.fullmatch(value) is not None


BOUND_PREFIX: Final = "aglo-"
"""Prefix of the key with which an attempt sends telemetry: `aglo-ROLLOUT/ATTEMPT-SIGNATURE` (agl_otel/net makes and checks it)."""


def named_by(key: str) -> tuple[str, str] | None:
    """Return the (rollout, attempt) in a text of the form of an attempt's key, without checking its signature; None for other texts."""
    named, dash, _ = key.removeprefix(BOUND_PREFIX).rpartition("-")
    rollout_id, _, attempt_id = named.partition("/")
    if not (dash and key.startswith(BOUND_PREFIX) and is_valid_id(rollout_id) and is_valid_id(attempt_id)):
        return None
    return rollout_id, attempt_id
