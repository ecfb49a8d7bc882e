"""Converts spans to triplets (prompt, response and reward of a model call), in the form and by the rules of Agent Lightning 0.3.

For training at scale use trajectories.py, which reads columns; this is for code that already has spans, and for a few rollouts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.base import TraceToTripletBase
from agl_otel.adapters.messages import image_urls, unfit_media
from agl_otel.adapters.tree import RewardMatchPolicy, TraceTree
from agl_otel.spans.attributes import filter_attributes, unflatten_attributes
from agl_otel.spans.calls import JoinedCall, repeated
from agl_otel.spans.conversations import ModelCall, read_call
from agl_otel.spans.dialects import agl, litellm
from agl_otel.spans.dialects.dialect import Message
from agl_otel.spans.history import SpanKey, expand_prompts, expand_spans
from agl_otel.spans.rewards import emitted_reward, evaluations_by_call, last_of, usable
from agl_otel.types import Span, Triplet
from agl_otel.types.columns import shared
from agl_otel_hook import conventions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_log = logging.getLogger(__name__)
_NOT_SETTINGS: Final = frozenset({"messages", "choices", "prompt_token_ids", "response_token_ids"})
"""Attributes left out of `metadata`, since they hold the prompt and the response."""
_RAW: Final = (
    ("gen_ai.prompt", "gen_ai.completion"),
    (f"{conventions.OPERATION_INPUT}.messages", f"{conventions.OPERATION_OUTPUT}.choices"),
)
"""Prefixes of 0.3's own dialects, which `raw_content` keeps as nested objects; other dialects become OpenAI messages."""


class TracerTraceToTriplet(TraceToTripletBase):
    """Makes triplets from the spans of instrumentations and of the proxy.

    Args:
        repair_hierarchy: move spans under the one that encloses them in time, if an instrumentation lost the context.
        llm_call_match: a regular expression for the names of spans to treat as model calls; None: model calls in any dialect.
        agent_match: a regular expression for the names of the agents to train; None takes every call.
        exclude_llm_call_in_reward: leave out calls that a reward function made.
        reward_match: which call a reward belongs to.
        _skip_empty_token_spans: leave out calls without token ids.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str | None = None,
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

    def tree(self, source: Sequence[Span | ReadableSpan]) -> TraceTree:
        """Return the trace's tree, repaired if requested. Raises UsageError (also a ValueError) without spans."""
        tree = TraceTree.from_spans(expand_spans(source))
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        return tree

    def adapt(self, source: Sequence[Span | ReadableSpan], /) -> list[Triplet]:
        """Return one triplet per model call. Raises UsageError (also a ValueError) without spans."""
        return self.to_trajectory(self.tree(source))

    def to_trajectory(self, tree: TraceTree, *, final_reward: float | None = None) -> list[Triplet]:
        """Return the triplets of a trace; `final_reward` becomes the last one's reward."""
        triplets = [triplet for _, triplet in self.calls(tree)]
        if final_reward is not None and triplets:
            triplets[-1] = triplets[-1].model_copy(update={"reward": final_reward})
        return triplets

    def calls(self, tree: TraceTree) -> list[tuple[JoinedCall, Triplet]]:
        """Return the model calls of a trace with their triplets."""
        calls = tree.find_llm_calls(
            llm_call_match=self.llm_call_match,
            agent_match=self.agent_match,
            exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
        )
        rewards = tree.match_rewards(self.reward_match, calls)
        prompts = expand_prompts(node.span for node in tree.traverse())
        kept = [call for call in calls if call.tokens is not None] if self._skip_empty_token_spans else calls
        return [(call, _triplet(call, rewards.get(call.node.id), prompts)) for call in kept]

    def visualize(
        self, source: Sequence[Span | ReadableSpan], /, filename: str = "trace_tree", interested_span_match: str | None = None
    ) -> TraceTree:
        """Draw the trace to `filename`.png and return the tree. Raises UsageError if graphviz is not installed."""
        tree = self.tree(source)
        tree.visualize(filename, interested_span_match)
        return tree


def whole_triplets(spans: Sequence[Span], refused: Counter[str], *, agent_match: str | None = None) -> list[Triplet]:
    """Return the triplets of calls with a complete reply; count the others in `refused` by chats.CHAT_REFUSALS.

    Raises what TracerTraceToTriplet raises.
    """
    adapter = TracerTraceToTriplet(agent_match=agent_match)
    whole: list[Triplet] = []
    for call, triplet in adapter.calls(adapter.tree(spans)):
        if call.is_cut_off:
            refused["incomplete_reply"] += 1
        elif not triplet.response["token_ids"] and not triplet.response["raw_content"]:
            refused["no_reply"] += 1
        elif why := next(filter(None, (unfit_media(each.readable.prompt) for each in call.calls)), ""):
            refused[why] += 1
        else:
            whole.append(triplet)
    return whole


def _prompt(call: ModelCall, prompts: Mapping[SpanKey, NDArray[np.int32]]) -> list[int]:
    """The full prompt; `prompts` has those of calls in prefix form."""
    span = cast("Span", call.span)
    whole = prompts.get((span.trace_id, span.span_id))
    return call.prompt_token_ids if whole is None else shared(whole.tolist())


def _triplet(joined: JoinedCall, reward: float | None, prompts: Mapping[SpanKey, NDArray[np.int32]]) -> Triplet:
    outer = joined.calls[0]
    conversation = outer.readable
    if not conversation.prompt and not conversation.reply:  # content capture was off there: another span may hold more
        conversation = next((c for call in joined.calls[1:] if (c := call.readable).prompt), conversation)
    attributes = joined.span.attributes
    sampled = joined.tokens or max(joined.calls, key=lambda call: (bool(call.response_token_ids), bool(call.prompt_token_ids)))
    response: dict[str, Any] = {
        "token_ids": sampled.response_token_ids,
        "raw_content": _raw(attributes, 1) or conversation.reply,
    }
    if logprobs := next((call.logprobs for call in (sampled, *joined.calls) if call.logprobs is not None), None):
        response["logprobs"] = logprobs
    return Triplet(
        prompt={
            "token_ids": _prompt(sampled, prompts),
            "raw_content": _raw(attributes, 0) or conversation.prompt,
            "image_urls": image_urls(conversation.prompt),
        },
        response=response,
        reward=reward,
        metadata={
            "request": _settings(attributes, outer.dialect.request),
            "response": _settings(attributes, outer.dialect.response),
            "response_id": next((call.response_id for call in joined.calls if call.response_id), None),
            "agent_name": joined.agent,
        },
    )


def _raw(attributes: Mapping[str, Any], place: int) -> Any:
    return next((found for prefixes in _RAW if (found := _nested(attributes, prefixes[place]))), None)


def _nested(attributes: Mapping[str, Any], prefix: str) -> Any:
    flat = {key[len(prefix) + 1 :]: value for key, value in filter_attributes(attributes, prefix).items() if key != prefix}
    try:
        return unflatten_attributes(flat)
    except ValueError as error:
        _log.warning("attributes below %s are left out: %s", prefix, error)
        return {}


def _settings(attributes: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix in prefixes:
        nested = _nested(attributes, prefix)
        if isinstance(nested, dict):
            found = {**nested, **found}
    return {key: value for key, value in found.items() if key not in _NOT_SETTINGS}


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Makes triplets from a proxy's spans only: litellm's, as stored by Agent Lightning 0.3's proxy, or those of this package's proxy.

    They hold token ids only. Order and rewards follow sequence numbers, never clocks.
    """

    _DIALECTS: Final = (agl.DIALECT, litellm.DIALECT)

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Return one triplet per response with token ids of prompt and response."""
        spans = sorted(source, key=lambda span: (span.sequence_id, span.start_time or 0.0))
        prompts, unused, evaluated = expand_prompts(spans), repeated(spans), evaluations_by_call(spans)
        calls: list[tuple[int, Triplet]] = []
        waiting: list[int] = []
        judged: dict[int, float | None] = {}
        seen: set[str] = set()
        for span in spans:
            if (value := emitted_reward(span)) is not None:
                place = next((p for p in reversed(waiting) if calls[p][0] < span.sequence_id), None)
                if place is not None:
                    waiting.remove(place)
                    calls[place][1].reward = value
                continue
            call = read_call(span)
            if call is None or call.dialect not in self._DIALECTS or (span.trace_id, span.span_id) in unused:
                continue
            triplet = self._triplet(call, _prompt(call, prompts))
            name = f"{call.response_id}#{span.attributes.get(conventions.LLM_CHOICE, 0)}"
            if triplet is not None and not (call.response_id and name in seen):
                seen.add(name)
                waiting.append(len(calls))
                calls.append((span.sequence_id, triplet))
                names = (span.span_id, call.response_id)
                if last := last_of(evaluated[key] for key in names if key in evaluated):
                    judged[len(calls) - 1] = usable(last.value)
        for place, value in judged.items():
            calls[place][1].reward = value
        return [triplet for _, triplet in calls]

    @staticmethod
    def _triplet(call: ModelCall, prompt: list[int]) -> Triplet | None:
        if not prompt or not call.response_token_ids:
            return None
        response: dict[str, Message | list[Any]] = {"token_ids": call.response_token_ids}
        if call.logprobs is not None:
            response["logprobs"] = call.logprobs
        return Triplet(prompt={"token_ids": prompt}, response=response, metadata={"response_id": call.response_id or None})
