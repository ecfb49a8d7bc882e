"""Triplets of Agent Lightning 0.3: prompt, response, reward for each model call. What trains on batches takes trajectories.py instead.

Two readers: TracerTraceToTriplet goes through the tree of what an agent's own instrumentation recorded, LlmProxyTraceToTriplet through
what a proxy recorded, in the order of sequence numbers alone (clocks may differ).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from agl_otel import semconv
from agl_otel.adapters.base import TraceAdapter
from agl_otel.adapters.tree import TraceTree
from agl_otel.attributes import filter_and_unflatten_attributes
from agl_otel.types import Span, Triplet

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ANY_CALL: Final = rf"^openai\.chat|openai\.chat\.completion|anthropic\.chat|ChatOpenAI\.chat|^{re.escape(semconv.SPAN_LLM)}$|^chat "
"""A model call in any dialect: OpenLLMetry's names, 0.3's, our proxy's, OpenTelemetry's ("chat MODEL")."""
Reward = Callable[[Span], float | None]


class RewardMatchPolicy(StrEnum):
    """Which model call a reward belongs to."""

    FIRST_OCCURRENCE = "first_occurrence"
    """The latest call that had ended before the reward, and has none yet."""
    FIRST_SIBLING = "first_sibling"
    """The same among earlier siblings."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Base of adapters to triplets."""


def _reward_of(span: Span) -> float | None:
    attributes = span.attributes
    value = attributes.get(semconv.reward_value_key(0))
    if value is None:
        for key in ("agentops.task.output", "agentops.entity.output"):
            said = _parsed(attributes.get(key))
            if isinstance(said, dict) and said.get("type") == "reward":  # pyright: ignore[reportUnknownMemberType]  # of anything
                value = said.get("value")  # pyright: ignore[reportUnknownMemberType]  # as above
    if value is None and span.name == semconv.SPAN_ANNOTATION:
        value = attributes.get("reward")
    return float(value) if isinstance(value, (int, float)) else None


class TracerTraceToTriplet(TraceToTripletBase):
    """Triplets from the tree of an agent's spans.

    Args:
        repair_hierarchy: put spans that hang under the root where they belong by time.
        llm_call_match: pattern of the names of model calls.
        agent_match: pattern of the names of agents whose calls count; None: all calls.
        exclude_llm_call_in_reward: leave out calls below a reward (a judge's).
        reward_match: which call a reward belongs to.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = ANY_CALL,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self._skip_empty_token_spans = _skip_empty_token_spans

    def adapt(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> list[Triplet]:
        """A triplet for each model call, in the order of the tree. Raises UsageError where there are no spans."""
        spans = [span if isinstance(span, Span) else Span.from_opentelemetry(span, "", "", 0) for span in source]
        spans = [span for span in spans if span.name not in (semconv.SPAN_ATTEMPT, semconv.SPAN_SEAL)] or spans
        tree = TraceTree.from_spans(spans)
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        rewards = [node for node in tree.walk() if _reward_of(node.span) is not None]
        skip = {node.span.span_id for node in rewards} | {
            node.span.span_id for node in tree.walk() if node.span.attributes.get(semconv.OPERATION_NAME) == semconv.SPAN_REWARD
        }
        calls = tree.llm_calls(self.llm_call_match, self.agent_match, frozenset(skip) if self.exclude_llm_call_in_reward else frozenset())
        given = self._rewards(tree, [node for node, _ in calls], rewards)
        whole = _whole_prompts(spans)
        triplets = [_triplet(node, agent, given.get(id(node)), whole) for node, agent in calls]
        if self._skip_empty_token_spans:
            triplets = [t for t in triplets if t.prompt["token_ids"] and t.response["token_ids"]]
        return triplets

    def _rewards(self, tree: TraceTree, calls: list[TraceTree], rewards: list[TraceTree]) -> dict[int, float]:
        """{id of a call's node: its reward}."""
        siblings = {id(child): {id(other) for other in node.children} for node in tree.walk() for child in node.children}
        given: dict[int, float] = {}
        for reward in sorted(rewards, key=lambda node: node.start):
            near = siblings.get(id(reward), set[int]())
            candidates = [
                call
                for call in calls
                if call.end <= reward.start and (self.reward_match is RewardMatchPolicy.FIRST_OCCURRENCE or id(call) in near)
            ]
            latest = max(candidates, key=lambda call: call.start, default=None)
            if latest is not None and id(latest) not in given:
                given[id(latest)] = _reward_of(reward.span) or 0.0
        return given

    def visualize(self, source: Sequence[Span] | Sequence[ReadableSpan], filename: str = "trace_tree") -> None:
        """Write the tree as text to FILENAME.txt."""
        from pathlib import Path

        spans = [span if isinstance(span, Span) else Span.from_opentelemetry(span, "", "", 0) for span in source]

        def lines(node: TraceTree, depth: int) -> list[str]:
            return [f"{'  ' * depth}{node.span.name}", *(line for child in node.children for line in lines(child, depth + 1))]

        Path(f"{filename}.txt").write_text("\n".join(lines(TraceTree.from_spans(spans), 0)) + "\n")


_OUTPUT: Final = semconv.OPERATION_OUTPUT
_PROMPT_IDS: Final = (semconv.LLM_PROMPT_TOKEN_IDS, "prompt_token_ids", f"{_OUTPUT}.prompt_token_ids")
_RESPONSE_IDS: Final = (
    *(semconv.LLM_RESPONSE_TOKEN_IDS, "response_token_ids", f"{_OUTPUT}.response_token_ids.0"),
    *(f"{_OUTPUT}.choices.0.token_ids", f"{_OUTPUT}.choices.0.provider_specific_fields.token_ids"),
)


def _whole_prompts(spans: Sequence[Span]) -> dict[str, list[int]]:
    """{span id: its whole prompt} of our proxy's calls; one whose beginning is in a call that is not here is left out."""
    conversations: dict[tuple[Any, Any, Any], list[int]] = {}
    prompts: dict[str, list[int]] = {}
    ours = [span for span in spans if span.name == semconv.SPAN_LLM]
    for span in sorted(ours, key=lambda span: (span.attributes.get(semconv.LLM_CALL) or 0, span.attributes.get(semconv.LLM_CHOICE) or 0)):
        held, marker = span.attributes, span.attributes.get(semconv.PROCESS)
        prompt = _ids(span, _PROMPT_IDS)
        if (call := held.get(semconv.LLM_PREFIX_CALL)) is not None:
            before = conversations.get((marker, call, held.get(semconv.LLM_PREFIX_CHOICE) or 0))
            if before is None:
                continue
            prompt = before + prompt
        prompts[span.span_id] = prompt
        key = (marker, held.get(semconv.LLM_CALL), held.get(semconv.LLM_CHOICE) or 0)
        conversations[key] = prompt + _ids(span, _RESPONSE_IDS)
    return prompts


def _triplet(node: TraceTree, agent: str, reward: float | None, whole: Mapping[str, list[int]]) -> Triplet:
    span, attributes = node.span, node.span.attributes
    recorded = next((below.span for below in node.walk() if below.span.name == semconv.SPAN_LLM), span)  # the proxy knows the tokens
    prompt = _content(span, "gen_ai.input.messages", "gen_ai.prompt", f"{semconv.OPERATION_INPUT}.messages")
    response: dict[str, Any] = {
        "token_ids": _ids(recorded, _RESPONSE_IDS),
        "raw_content": _content(span, "gen_ai.output.messages", "gen_ai.completion", f"{_OUTPUT}.choices"),
    }
    if (logprobs := _parsed(attributes.get("logprobs.content"))) is not None:
        response["logprobs"] = logprobs
    elif (values := attributes.get(semconv.LLM_RESPONSE_LOGPROBS)) is not None:
        response["logprobs"] = [{"logprob": value} for value in values]
    return Triplet(
        prompt={"token_ids": _tokens_of(recorded, whole), "raw_content": prompt, "image_urls": _images(prompt)},
        response=response,
        reward=reward,
        metadata={
            "request": _nested(span, "gen_ai.request"),
            "response": _nested(span, "gen_ai.response"),
            "response_id": attributes.get("gen_ai.response.id") or attributes.get(f"{_OUTPUT}.id"),
            "agent_name": agent,
        },
    )


def _tokens_of(span: Span, whole: Mapping[str, list[int]]) -> list[int]:
    return whole.get(span.span_id, []) if span.name == semconv.SPAN_LLM else _ids(span, _PROMPT_IDS)


def _ids(span: Span, keys: Sequence[str]) -> list[int]:
    found = next((span.attributes[key] for key in keys if key in span.attributes), None)
    found = _parsed(found)
    return [int(token) for token in found] if isinstance(found, (list, tuple)) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # of numbers


def _content(span: Span, json_key: str, *prefixes: str) -> Any:
    if json_key in span.attributes:
        return _parsed(span.attributes[json_key])
    return next((found for prefix in prefixes if (found := _nested(span, prefix))), [])


def _nested(span: Span, prefix: str) -> Any:
    held = {key: value for key, value in span.attributes.items() if key.startswith(f"{prefix}.")}
    return filter_and_unflatten_attributes(held, prefix) if held else {}


def _images(messages: Any) -> list[str]:
    urls: list[str] = []
    for message in messages if isinstance(messages, list) else []:  # pyright: ignore[reportUnknownVariableType]  # of anything
        content = _parsed(message.get("content")) if isinstance(message, dict) else None  # pyright: ignore[reportUnknownMemberType]  # as above
        for part in content if isinstance(content, list) else []:  # pyright: ignore[reportUnknownVariableType]  # as above
            if isinstance(part, dict) and part.get("type") == "image_url":  # pyright: ignore[reportUnknownMemberType]  # as above
                image: Any = part.get("image_url")  # pyright: ignore[reportUnknownMemberType]  # as above
                urls.append(str(image.get("url") if isinstance(image, dict) else image))  # pyright: ignore[reportUnknownMemberType]  # as above
    return urls


def _parsed(value: Any) -> Any:
    """Text that holds JSON or a Python literal as what it says; anything else as it is."""
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value)
        except (ValueError, SyntaxError):
            continue
    return value


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Triplets from what a proxy recorded: ours, or litellm's of 0.3."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """A triplet for each call with token ids; each reward goes to the latest call before it that has none."""
        triplets: list[Triplet] = []
        seen: set[str] = set()
        whole = _whole_prompts(source)
        for span in sorted(source, key=lambda span: (span.sequence_id, span.start_time or 0.0)):
            reward = _reward_of(span)
            if reward is not None:
                open_ = next((triplet for triplet in reversed(triplets) if triplet.reward is None), None)
                if open_ is not None:
                    open_.reward = reward
                continue
            read = _PROXY_DIALECTS.get(span.name)
            if read is None:
                continue
            prompt, response, response_id = read(span)
            prompt = _tokens_of(span, whole) if span.name == semconv.SPAN_LLM else prompt
            if prompt and response and not (response_id and response_id in seen):
                seen.add(response_id or "")
                triplets.append(
                    Triplet(prompt={"token_ids": prompt}, response={"token_ids": response}, metadata={"response_id": response_id})
                )
        return triplets


Read = tuple[list[int], list[int], str | None]


def _response_id(span: Span) -> str | None:
    found = span.attributes.get("gen_ai.response.id") or span.attributes.get("llm.hosted_vllm.id")
    return str(found) if found else None


def _raw_request(span: Span) -> Read:
    responses = _parsed(span.attributes.get("llm.hosted_vllm.response_token_ids"))
    if not responses:
        choices = _parsed(span.attributes.get("llm.hosted_vllm.choices")) or [{}]
        responses = [choices[0].get("token_ids") or []]
    first = responses[0] if isinstance(responses[0], (list, tuple)) else responses  # pyright: ignore[reportUnknownVariableType]  # of numbers
    return _ids(span, ["llm.hosted_vllm.prompt_token_ids"]), [int(token) for token in first], _response_id(span)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # as above


def _plain_request(span: Span) -> Read:
    return _ids(span, _PROMPT_IDS), _ids(span, _RESPONSE_IDS), _response_id(span)


_PROXY_DIALECTS: Final[dict[str, Callable[[Span], Read]]] = {
    "raw_gen_ai_request": _raw_request,
    "litellm_request": _plain_request,
    semconv.SPAN_LLM: _plain_request,
}
