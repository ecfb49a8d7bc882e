"""What to do about each reason for which training data is refused, or split into trajectories."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agl_otel.types.sampling import FILLED, NEUTRAL

_all: Final = ", ".join(f"{name} {value:g}" for name, value in {"temperature": 1.0, **NEUTRAL}.items() if name in FILLED)

REFUSED: Final = {
    "not_latest_attempt": "nothing: a rollout is trained on once",
    "no_attempt": "run a runner: `agl-otel runner`",
    "not_succeeded": "`agl-otel rollouts show ID` has the error and what the agent printed",
    "verdict_incomplete": "`agl-otel rollouts show ID` names the process that lacks spans; --take incomplete takes it all the same",
    "verdict_unproven": "run the agent under the hook, by `agl-otel runner -- python …`",
    "verdict_empty": "`agl-otel doctor -- COMMAND` says why nothing arrives",
    "no_verdict": "read it again: its spans may have been deleted",
    "no_reward": "emit one (agl_otel.emit_reward), name a grader, or give --fill-reward",
    "no_calls": "for token ids the agent must call its model at OPENAI_BASE_URL (`agl-otel doctor -- COMMAND` looks); "
    "calls that its own instrumentation recorded have messages (--as openai, --as messages)",
    "other_agent": "correct agent_match if it should be taken",
    "greedy": 'let the agent set no temperature, or one of at least 0.01, or let GRPO replace it: sampling_policy = "enforce_all"',
    "sampling_differs": 'let the agent leave these fields out, or let GRPO replace them: sampling_policy = "enforce" '
    "(docs/training.md#sampling)",
    "masked_ids": "mask texts (drop_text, hash_text), and ids of those only that nobody trains on",
    "routing_misaligned": "update the model server, or do not ask it for routed experts",
    "incomplete_reply": "`agl-otel traces show ID` has the reason of each call; raise timeouts, or mend the model server",
    "no_token_ids": "use a model server that returns token ids (vLLM 0.10.2 or newer, SGLang), or a form of messages (--as openai)",
    "empty_response": "nothing, where the model wrote nothing; else look at the call's agentlightning.llm.defect",
    "no_logprobs": "start the model server with log-probs",
    "logprobs_length": "update the model server: its log-probs are not those of its tokens",
    "logprobs_not_finite": "update the model server, or leave out sampling parameters that forbid tokens after they were drawn",
    "dangling_prefix": "nothing: an earlier call of the attempt was lost",
    "other_media": "leave audio and video out of the prompt",
    "no_image": "send images as data: URLs or public addresses, not as ids of files at a provider",
    "too_many_tokens": "shorten the conversation, or let it go on without edits, so that its calls become one trajectory",
    "no_reply": "record messages (OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only; older instrumentations: true), "
    "or use a form of token ids (--as sft)",
    "unreadable_messages": "use a form of token ids (--as sft), or an adapter of your own (--adapter)",
    "shortened": "use a form of token ids (--as sft)",
    "prompt_too_long": "raise max_prompt_tokens",
    "beyond_context": "lower max_prompt_tokens or max_response_tokens, or train a model with a longer context",
    "nothing_left": "raise max_response_tokens",
    "beyond_vocabulary": "serve the model that is trained",
    "other_weights": "nothing: the policy was replaced while the agent ran",
    "low_reward": "lower min_reward to keep more",
    "not_best_of_group": "raise best_of_group to keep more",
    "not_in_top": "raise top_fraction to keep more",
    "no_call_reward": "emit a reward after each call, or give --fill-reward",
    "no_correction": "write one on the dashboard's page /review, or by `agl-otel feedback --correction`",
    "no_pair": "sample more attempts of a task, or reward them more finely",
    "same_reply": "see why equal replies got different rewards: by chance, or for what else the attempt did",
    "no_other_attempt": "sample more attempts of a task: those with the same input",
    "unpaired_correction": "nothing, where the reply failed or was cut off: --as demonstrations takes the correction alone",
    "correction_without_prompt": "agl-otel doctor says why calls have no token ids; --as demonstrations takes the correction as text",
    "correction_without_tokens": "--as openai_dpo pairs it with the reply as text, --as demonstrations takes it alone",
    "filtered": "correct the filter to keep more",
    "unreadable_spans": "use a form of token ids (--as sft), or an adapter of your own (--adapter)",
}
"""{key of records.REASONS: remedy}."""

SAMPLING: Final = {
    "unsent": f"give the resource sampling_parameters: {_all} (docs/training.md#outside-a-job)",
    "unrecorded": "let the agent call its model through the proxy (docs/training.md#sampling)",
    "strict_tools": 'strict_tools = "drop" (docs/training.md#sampling)',
    "logprobs": "start vLLM with --logprobs-mode processed_logprobs (docs/training.md#sampling)",
}
"""{field by which a call is `sampling_differs`: remedy}, where it is another than that of REFUSED."""

SPLIT: Final = {
    "choice": "ask for one choice",
    "branch": "nothing, where the agent means to branch",
    "sub_agent": "nothing, where these are agents of their own: agent_match chooses among those with a name",
    "model_version": "nothing: the weights changed while the agent ran",
    "template_drift": 'bridge = "keep" in the job or LLM(…) (docs/bridging.md), or a chat template that keeps earlier replies as '
    "they were sampled, their reasoning included; and the same tools with each call",
    "truncated": "keep the whole conversation in the prompt, if the model's context allows it",
    "compacted": "nothing, where the agent has to shorten its conversation; a larger context makes it do so later",
    "history_edited": "only add to the conversation: leave what was sent and answered as it was",
    "response_changed": "only add to the conversation: leave the replies as they were",
    "prompt_changed": "only add to the conversation, in one list of messages",
    "process": "nothing, where several proxies serve",
    "unbridged_unknown": "send all calls of an attempt to one proxy process; nothing, where the conversation began elsewhere",
    "unbridged_edited": "send the answer back as it was, its thinking included or left out, and no other field with it",
    "unbridged_request": "give each call of a conversation the same tools and template arguments",
    "unbridged_server": "let one model server answer all calls of a conversation",
    "unbridged_no_ids": "use a model server that returns token ids (docs/model-servers.md)",
    "unbridged_cut": "raise max_tokens, or set no stop strings: an answer that was cut off has no end token to go on from",
    "unbridged_media": "nothing: conversations with media are not bridged",
    "unbridged_prefill": "let the model write its answer from the beginning",
    "unbridged_own_ids": "leave out the request's own token ids",
    "unbridged_thinking": 'bridge = "keep", where the model may see its earlier thinking',
    "unbridged_render": "use a model server whose /tokenize takes messages (docs/bridging.md)",
    "unbridged_other_template": "let /tokenize of the model server have the template and tokeniser of its chat completions",
    "unbridged_no_seam": "use a chat template that ends each answer with the token by which the model ends it",
    "unbridged_moved": "use a chat template that only appends, with tools and the date at the beginning",
    "unbridged_not_taken": "use a model server that takes token ids beside messages (docs/bridging.md)",
}
"""{key of split_reasons.SPLIT_REASONS: how its calls would become one trajectory}."""


def of(reason: str, differing: Collection[str] = ()) -> str:
    """Return the remedy of a key of REFUSED; `differing`: the fields by which calls are `sampling_differs`."""
    if reason != "sampling_differs":
        return REFUSED[reason]
    fields = {*differing} - {"logprobs"} or differing  # log-probs alone, or for want of what the others say
    own = REFUSED[reason]
    return "; ".join(sorted({SAMPLING.get(name, own) for name in fields}, key=lambda each: (each != own, each))) or own
