"""Converts spans to chat messages: one OpenAI-style conversation per model call. Pure; for prompts, SFT files and display.

agl_otel/spans/dialects decodes the calls. Token ids are not read here but in trajectories.py, for training by token.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agl_otel.adapters.base import TraceAdapter
from agl_otel.adapters.reviews import Correction
from agl_otel.adapters.tree import TraceTree
from agl_otel.spans.calls import JoinedCall
from agl_otel.spans.dialects.dialect import Conversation, Message
from agl_otel.spans.dialects.shapes import OTHER_MEDIA, openai_call
from agl_otel.spans.history import expand_spans
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.types import Span
from agl_otel_hook import conventions

_log = logging.getLogger(__name__)
_CHILD_CALL: Final = ("tool.call.id", "tool.name", "tool.parameters")


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """Makes `{"messages": [...], "tools": [...] or None}` of every model call, in the order of the spans.

    Args:
        llm_call_match: a regular expression for the names of spans to treat as calls; None: calls in any dialect.
        agent_match: a regular expression for the names of agents; None takes every call.
    """

    def __init__(self, llm_call_match: str | None = None, agent_match: str | None = None) -> None:
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match

    def adapt(self, source: Sequence[Span], /) -> list[dict[str, Any]]:
        """Return the conversations."""
        return to_messages(source, llm_call_match=self.llm_call_match, agent_match=self.agent_match)


def to_messages(spans: Sequence[Span], *, llm_call_match: str | None = None, agent_match: str | None = None) -> list[dict[str, Any]]:
    """Return `{"messages": [...], "tools": [...] or None}` of every model call, in the order of `spans`; see TraceToMessages.

    Messages are OpenAI's: prompt first, then the reply; an assistant message with tool calls and no text has content None. If a reply has
    no tool calls, they are taken from the span's children with `tool.*` attributes. Calls without captured messages are left out, and so
    are calls with unreadable messages, which are logged.
    """
    read = map(_read, _calls(spans, llm_call_match, agent_match))
    return [_row(each) for each in read if isinstance(each, Conversation)]


def whole_messages(spans: Sequence[Span], refused: Counter[str], *, agent_match: str | None = None) -> list[dict[str, Any]]:
    """Convert calls with a complete reply as `to_messages` does; count the others in `refused` by chats.CHAT_REFUSALS."""
    return [_row(found) for _, found in whole_calls(spans, refused, agent_match=agent_match)]


def whole_calls(spans: Sequence[Span], refused: Counter[str], *, agent_match: str | None = None) -> list[tuple[JoinedCall, Conversation]]:
    """Return the calls with a complete reply, and their messages, in the order of `spans`; count the others as `whole_messages` does."""
    whole: list[tuple[JoinedCall, Conversation]] = []
    for call in _calls(spans, None, agent_match):
        found = whole_call(call)
        if isinstance(found, str):
            refused[found] += 1
        else:
            whole.append((call, found))
    return whole


def whole_call(call: JoinedCall) -> Conversation | str:
    """Return the messages of a call with a complete reply, else why it is refused, a key of chats.CHAT_REFUSALS."""
    found = _read(call)
    if isinstance(found, str):
        return found
    if call.is_cut_off:
        return "incomplete_reply"
    return unfit_media(found.prompt) or found if found.reply else "no_reply"


def corrected_calls(
    spans: Sequence[Span], corrections: Mapping[str, Correction], *, agent_match: str | None = None
) -> list[tuple[JoinedCall, str]]:
    """Return the calls with a correction (reviews.corrections_in), and its text; of several that fit the first counts.

    One of no response is of the last call that had ended when it was given: a conversation may have gone on since.
    """
    if not corrections:
        return []
    last = _ids(_last_before(_calls(spans, None, None), corrections[""].time)) if "" in corrections else set[str]()
    corrected: list[tuple[JoinedCall, str]] = []
    for call in _calls(spans, None, agent_match):
        ids = {str((each.span.attributes or {}).get(conventions.RESPONSE_ID)) for each in call.calls}
        ids |= {""} if _ids([call]) & last else set[str]()
        corrected += [(call, found.text) for response, found in corrections.items() if response in ids][:1]
    return corrected


def _last_before(calls: Sequence[JoinedCall], time: int) -> Sequence[JoinedCall]:
    """Return the last call that had ended by then; where none had, for clocks differ, the last one."""
    ended = [call for call in calls if int((call.span.end_time or 0) * 1e9) <= time]
    return (ended or calls)[-1:]


def corrected_messages(
    spans: Sequence[Span], corrections: Mapping[str, Correction], refused: Counter[str], *, agent_match: str | None = None
) -> list[dict[str, Any]]:
    """Convert the calls that have a correction as `whole_messages` does, with it in place of their reply, which need not be whole."""
    rows: list[dict[str, Any]] = []
    for call, text in corrected_calls(spans, corrections, agent_match=agent_match):
        found = _read(call)
        if isinstance(found, str):
            refused[found] += 1
        elif why := unfit_media(found.prompt):
            refused[why] += 1
        else:
            rows.append(_row(found._replace(reply=[{"role": "assistant", "content": text}])))
    return rows


def without_others(spans: Sequence[Span], agent_match: str | None) -> list[Span]:
    """Return the spans without those of the model calls of agents whose name does not match; None keeps all."""
    if agent_match is None:
        return list(spans)
    others = _ids(_calls(spans, None, None)) - _ids(_calls(spans, None, agent_match))
    return [span for span in spans if span.span_id not in others]


def _ids(calls: Iterable[JoinedCall]) -> set[str]:
    return {str(getattr(each.span, "span_id", "")) for call in calls for each in call.calls}


def _calls(spans: Sequence[Span], llm_call_match: str | None, agent_match: str | None) -> list[JoinedCall]:
    """Return the model calls in the order of their spans."""
    if not spans:
        return []
    spans = expand_spans(spans)
    place = {id(span): number for number, span in enumerate(spans)}
    calls = TraceTree.from_spans(spans).find_llm_calls(
        llm_call_match=llm_call_match, agent_match=agent_match, exclude_llm_call_in_reward=False
    )
    return sorted(calls, key=lambda call: place[id(call.span)])


def _row(conversation: Conversation) -> dict[str, Any]:
    return {"messages": [*conversation.prompt, *conversation.reply], "tools": conversation.tools}


def _read(call: JoinedCall) -> Conversation | str:
    """Return the conversation, or a key of chats.CHAT_REFUSALS if there is none."""
    try:
        found = call.conversation
        return "no_reply" if found is None else found._replace(reply=_with_calls(call, found.reply))
    except MALFORMED as error:
        _log.warning("a model call is left out: %s", error)
        return "unreadable_messages"


def _with_calls(call: JoinedCall, reply: list[Message]) -> list[Message]:
    children = [child.span.attributes for child in call.node.children if "tool.name" in child.span.attributes]
    if not children or any(message.get("tool_calls") for message in reply):
        return reply
    calls = [openai_call(*(attributes.get(key) for key in _CHILD_CALL)) for attributes in children]
    return [*reply[:-1], {**(reply[-1] if reply else {"role": "assistant"}), "content": None, "tool_calls": calls}]


def image_urls(messages: Iterable[Message]) -> list[str]:
    """Return the addresses (or data: URLs) of the images in some messages, in order."""
    return [url for url in _images(messages) if url]


def unfit_media(messages: Sequence[Message]) -> str:
    """Return the reason, a key of chats.CHAT_REFUSALS, not to train on messages with these media; empty if they are fit."""
    if any(part.get("type") in OTHER_MEDIA for part in _parts(messages)):
        return "other_media"
    return "no_image" if any(not url or url.endswith(";base64,") for url in _images(messages)) else ""


def _images(messages: Iterable[Message]) -> list[str | None]:
    return [part["image_url"].get("url") for part in _parts(messages) if part.get("type") == "image_url"]


def _parts(messages: Iterable[Message]) -> list[Any]:
    return [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
