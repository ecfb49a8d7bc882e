"""Tasks for a search for prompts, made of the conversations of a product's users. Pure.

A task has what a user asked, and what should have been answered: as users corrected it, else the reply itself, where no reply of the window
has a higher reward.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from agl_otel.adapters.messages import corrected_messages, whole_calls
from agl_otel.adapters.reviews import corrections_in
from agl_otel.spans.dialects.dialect import Message
from agl_otel.types import Span

Task = dict[str, Any]
EXAMPLE: Final[Task] = {"input": "", "messages": [], "expected": ""}
"""A task: the text of the last message that a user sent, all messages of the call, and what should have been answered."""
LEFT_OUT: Final = {
    "no_answer": "nobody said what should have been answered, and its reward is not the highest",
    "no_call": "it has no model call with messages",
    "no_text": "its last message of a user, or what should have been answered, is no text",
}
"""{why an attempt makes no task: its text}; besides chats.CHAT_REFUSALS, of its call."""


def task_of(spans: Sequence[Span], *, is_best: bool, sources: Collection[str] = (), agent_match: str | None = None) -> Task | str:
    """Return the task of an attempt, else why it makes none: a key of LEFT_OUT or of chats.CHAT_REFUSALS.

    Args:
        spans: of the attempt.
        is_best: whether its reward is the highest, so that its last reply is what should have been answered.
        sources: of the corrections that count; empty: all.
        agent_match: a regular expression for the names of agents; None: all.
    """
    refused = Counter[str]()
    if corrected := corrected_messages(spans, corrections_in(spans, sources=sources), refused, agent_match=agent_match):
        *messages, answer = corrected[-1]["messages"]
    elif not is_best:
        return "no_answer"
    elif whole := whole_calls(spans, refused, agent_match=agent_match):
        messages, answer = whole[-1][1].prompt, whole[-1][1].reply[0]
    else:
        return next(iter(refused), "no_call")
    asked = next((_text(each) for each in reversed(messages) if each.get("role") == "user"), "")
    expected = _text(answer)
    return {"input": asked, "messages": messages, "expected": expected} if asked and expected else "no_text"


def is_validated_on(task: Task) -> bool:
    """Return whether a search scores prompts on a task, and does not learn from it: by a hash, so that equal questions are on one side."""
    return hashlib.sha256(task["input"].encode()).digest()[0] % 2 == 0


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return "\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text").strip()
