"""Continue a conversation by the tokens that were sampled, instead of the chat template's rendering of the answers. Pure.

A template may write an answer otherwise than the model sampled it: without its thinking, or with other spaces in a tool call. The next
prompt then does not begin with what was sampled, and one conversation becomes several samples. A bridge is the earlier call's prompt and
reply as they were, and after them what the template writes for the new messages (docs/bridging.md).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from agl_otel.proxy.parts import arguments_value
from agl_otel.proxy.prefixes import DIGEST_BYTES
from agl_otel.proxy.reply import Choice, Json, Reply, dense, dicts
from agl_otel.types.resources import Bridging
from agl_otel.types.sampling import SHAPES

FORMS: Final = ("prompt_token_ids", "kv_transfer_params", "input_ids")
"""Fields by which servers take a prompt's token ids beside its messages: this package's and newer vLLM, vLLM from 0.26 on, SGLang."""
_ENDED: Final = frozenset({"stop", "tool_calls", "function_call"})
_TOKENIZED: Final = ("messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
_UNRENDERED: Final = frozenset(
    {
        *("model", "messages", "temperature", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "logprobs", "top_logprobs"),
        *("stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier", "return_token_ids"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "ignore_eos", "stop_token_ids", "length_penalty"),
        *(SHAPES.keys() - {"response_format", "tool_choice"}),
    }
)
"""Fields of a request that reach no template."""
_MESSAGE: Final = frozenset({"role", "content", "tool_calls", "reasoning", "reasoning_content"})
_MARKS: Final = ("x", "y")
_THOUGHT: Final = "</think>"


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """An answered call that a later one may continue."""

    call: int
    choice: int
    server: tuple[str, str]
    """Address and model."""
    frame: bytes
    before: Earlier | None
    """The call that it continues itself by a bridge."""
    own: array[int]
    """Token ids of its prompt, without those of `before`, and of its reply."""
    reply: int
    """The number of the reply's."""
    barred: str
    """The key of types.bridges.UNBRIDGED that keeps calls from continuing it; empty: they may."""
    reasoning: str
    thinks: bool
    """Whether it has thinking, in its own field or in its text."""

    def ids(self) -> list[int]:
        """Return the token ids of its prompt and reply."""
        parts: list[array[int]] = []
        at = self
        while True:
            parts.append(at.own)
            if at.before is None:
                return [token for part in reversed(parts) for token in part]
            at = at.before


@dataclass(slots=True)
class Bridge:
    """What is done with one call of a resource that asks for bridges."""

    server: tuple[str, str]
    frame: bytes
    earlier: Earlier | None = None
    refused: str = ""
    """The key of types.bridges.UNBRIDGED; empty: bridged, or there is no answer among its messages."""
    prompt: list[int] = field(default_factory=list[int])
    """What was sent, if it is bridged."""
    template: list[int] = field(default_factory=list[int])
    """What the template alone gives."""
    form: str = FORMS[0]
    """The field in which the prompt was sent."""

    def fields(self, form: str) -> Json:
        """Return the fields that hand the prompt to the model server in that form; none if there is no bridge."""
        if self.refused or not self.prompt:
            return {}
        self.form = form
        return {form: {FORMS[0]: self.prompt}} if form == "kv_transfer_params" else {form: self.prompt}

    def refuse(self, why: str) -> None:
        """Note why there is no bridge."""
        self.refused = why

    def settle(self, prompt: Sequence[int] | None) -> None:
        """Compare with the prompt that the model server says it had."""
        if self.prompt and not self.refused and prompt is not None and prompt != self.prompt:
            self.refuse("not_taken")

    def described(self) -> Json:
        """Return what is recorded of it; empty for the first call of a conversation."""
        if self.refused:
            return {"refused": self.refused}
        if self.earlier is None:
            return {}
        alone = {"tokens": len(self.template), "shared": shared_start(self.template, self.prompt)}
        return {"call": self.earlier.call, "choice": self.earlier.choice, "template": alone}


class Conversations:
    """The answers of an attempt's calls, by the messages that led to them."""

    def __init__(self) -> None:
        self._answered: dict[bytes, Earlier] = {}
        self._asked: set[bytes] = set()

    def find(self, body: Mapping[str, Any], bridge: Bridge) -> Earlier | None:
        """Return the call whose answer is the last one among a request's messages; note in `bridge` why there is none.

        Without an answer among them the conversation begins, and nothing is noted.
        """
        messages = dicts(body.get("messages"))
        if (last := _last_answer(messages)) is None:
            return None
        if last == len(messages) - 1 or body.get("add_generation_prompt") is False or body.get("continue_final_message"):
            bridge.refuse("prefill")
        elif any(body.get(form) is not None for form in FORMS):
            bridge.refuse("own_ids")
        elif any(not _is_text(message.get("content")) for message in messages):
            bridge.refuse("media")
        else:
            asked = _digest(messages[:last])
            given = _as_answered(messages[last])
            found = self._answered.get(_and(asked, given)) if given is not None else None
            if found is None:
                bridge.refuse("edited" if asked in self._asked else "unknown")
            else:
                return self._fitting(found, messages[last], bridge)
        return None

    @staticmethod
    def _fitting(found: Earlier, message: Json, bridge: Bridge) -> Earlier | None:
        thought = message.get("reasoning_content", message.get("reasoning"))
        if thought is not None and thought != found.reasoning:
            bridge.refuse("edited")
        elif found.barred:
            bridge.refuse(found.barred)
        elif found.server != bridge.server:
            bridge.refuse("server")
        elif found.frame != bridge.frame:
            bridge.refuse("request")
        else:
            return found
        return None

    def remember(self, call: int, body: Mapping[str, Any], reply: Reply, bridge: Bridge) -> int:
        """Remember the answers of a call; return how many items that holds."""
        asked = _digest(dicts(body.get("messages")))
        self._asked.add(asked)
        bridged = bridge.earlier if bridge.earlier is not None and not bridge.refused else None
        held, prompt = 1, reply.prompt_token_ids
        new = list(prompt or ())[len(bridged.ids()) if bridged is not None else 0 :]
        for index, choice in reply.choices.items():
            barred = "cut" if choice.finish_reason not in _ENDED else "no_ids" if not prompt or not choice.token_ids else ""
            own = array("i", () if barred else new + choice.token_ids)
            held += 1 + len(own) // 16
            sampled, reasoning, text = len(choice.token_ids), "".join(choice.reasoning), "".join(choice.text)
            thinks = bool(reasoning) or _THOUGHT in text
            answer = Earlier(call, index, bridge.server, bridge.frame, bridged, own, sampled, barred, reasoning, thinks)
            self._answered[_and(asked, _as_said(text, choice))] = answer
        return held


def frame_of(body: Mapping[str, Any]) -> bytes:
    """Return a digest of what a template may read of a request beside its messages."""
    return _digest([(name, body[name]) for name in sorted(body) if name not in _UNRENDERED and body[name] is not None])


def renderings(body: Mapping[str, Any], *, model: str, first: bool) -> dict[str, Json]:
    """Return the requests to /tokenize that `bridged` needs of a request whose last answer is an earlier call's.

    `first`: whether that call was rendered by its server alone, so that its prompt shows whether /tokenize does the same.
    """
    messages = dicts(body.get("messages"))
    last = _last_answer(messages)
    assert last is not None, "find() has found it"
    before, answer, new = messages[:last], messages[last], messages[last + 1 :]
    given = {name: body[name] for name in _TOKENIZED if body.get(name) is not None}
    whole: Json = {"model": model, "add_special_tokens": False, **given, "add_generation_prompt": True}
    asked = {
        "whole": whole,
        "other_answer": {**whole, "messages": [*before, _changed(answer), *new]},
        "other_question": {**whole, "messages": [*before, answer, *map(_changed, new)]},
        "answered": {**whole, "messages": [*before, answer], "add_generation_prompt": False},
    }
    if "tools" in whole:
        asked["without_tools"] = {name: value for name, value in whole.items() if name not in ("tools", "tool_choice")}
    return asked | {"before": {**whole, "messages": before}} if first else asked


def bridged(bridge: Bridge, earlier: Earlier, rendered: Mapping[str, list[int]], how: Bridging) -> None:
    """Set the bridge's prompt from the token ids of `renderings`, or why there is none."""
    whole, ids = rendered["whole"], earlier.ids()
    start = seam(whole, rendered["other_answer"], rendered["answered"], ids[-1])
    if "before" in rendered and rendered["before"] != ids[: len(ids) - earlier.reply]:
        bridge.refuse("other_template")
    elif start is None:
        bridge.refuse("no_seam")
    elif shared_start(whole, rendered["other_question"]) < start or not _ends_with(rendered.get("without_tools", whole), whole[start:]):
        bridge.refuse("moved")
    else:
        bridge.template, bridge.prompt = whole, ids + whole[start:]
        if how == "drop" and earlier.thinks and bridge.prompt != whole:
            bridge.refuse("thinking")
        bridge.earlier = earlier


def seam(whole: list[int], other_answer: list[int], answered: list[int], end: int) -> int | None:
    """Return the place in a rendering after the end token of its last answer; None if the renderings do not show it.

    What another answer leaves alone follows the answer. If the end token is the first of it, it is the answer's. Else what is before it has
    to close the answer, as behind a tool call, and not to begin a new message: then the conversation that ends with the answer ends with
    the same. It may do so without the token itself: GLM's answers end with the one that opens the next turn.

    Args:
        whole: the rendering of the whole conversation, with the generation prompt.
        other_answer: the same with another text in its last answer.
        answered: the rendering that ends with that answer, without a generation prompt.
        end: the token with which the model ended it.
    """
    behind = len(whole) - shared_end(whole, other_answer)
    if behind in (0, len(whole) - len(other_answer)) or end not in whole[behind:]:
        return None
    place = whole.index(end, behind)
    closing = whole[behind - 1 : place]
    if len(closing) == 1 or _ends_with(answered, closing):
        return place + 1
    if end not in answered:
        return None
    last = len(answered) - 1 - answered[::-1].index(end)
    after = answered[last + 1 :]
    is_same = _ends_with(answered[:last], closing) and whole[place + 1 : place + 1 + len(after)] == after
    return place + 1 if is_same else None


def _ends_with(ids: list[int], end: list[int]) -> bool:
    return len(end) <= len(ids) and ids[len(ids) - len(end) :] == end


def shared_start(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def shared_end(first: list[int], second: list[int]) -> int:
    """Return the length of the longest common end."""
    return shared_start(first[::-1], second[::-1])


def _last_answer(messages: Sequence[Json]) -> int | None:
    """Return the place of the last answer; None if there is none."""
    return next((place for place in reversed(range(len(messages))) if messages[place].get("role") == "assistant"), None)


def _as_said(text: str, choice: Choice) -> bytes:
    """Return a digest of an answer as its model server gave it."""
    calls = [(call.id, "".join(call.name), arguments_value("".join(call.arguments))) for _, call in sorted(choice.tool_calls.items())]
    return _digest((text, calls))


def _as_answered(message: Json) -> bytes | None:
    """Return the digest that an answer among a request's messages has if the agent did not change it; None if it certainly did."""
    if any(value not in (None, [], {}) for name, value in message.items() if name not in _MESSAGE):
        return None
    calls = list[tuple[Any, Any, Any]]()
    for call in dicts(message.get("tool_calls")):
        function = call.get("function")
        if not isinstance(function, dict):
            return None
        calls.append((call.get("id"), function.get("name"), arguments_value(function.get("arguments"))))
    return _digest((_text(message.get("content")), calls))


def _changed(message: Json) -> Json:
    """Return a message with another end of its text and other arguments in its tool calls, so that a template writes it otherwise."""
    calls = [_with_other_arguments(call) for call in dicts(message.get("tool_calls"))]
    text = _text(message.get("content"))
    mark = next(each for each in _MARKS if not text.endswith(each))
    return {**message, "content": text + mark, **({"tool_calls": calls} if calls else {})}


def _with_other_arguments(call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = arguments_value(function.get("arguments"))
    mark = _MARKS[0]
    other = {**arguments, mark: f"{arguments.get(mark)}{mark}"} if isinstance(arguments, dict) else {mark: mark}
    return {**call, "function": {**function, "arguments": dense(other)}}


def _is_text(content: Any) -> bool:
    """Whether a message's content is text alone."""
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _text(content: Any) -> str:
    """Return a content that is text alone."""
    return "".join(str(part.get("text", "")) for part in dicts(content)) if isinstance(content, list) else content or ""


def _digest(value: Any) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), digest_size=DIGEST_BYTES).digest()


def _and(asked: bytes, answer: bytes) -> bytes:
    return blake2b(asked + answer, digest_size=DIGEST_BYTES).digest()
