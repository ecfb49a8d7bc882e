"""Rows as trainers read them: the last step before a file, after masking. Pure; which columns a format has is decided here alone.

`sft` has what TRL, Unsloth and Axolotl take without tokenising (input_ids, labels, attention_mask). `dpo` has ids for TRL's collator
(DataCollatorForPreference) and the same as messages (prompt, chosen, rejected). `tinker` has the columns of a Datum: what goes in, what
should come out one place later, and how much each of these counts. `openai` and `openai_dpo` hold nothing but what OpenAI's fine-tuning
knows, because it refuses unknown keys; the pin beside the file says which rollouts it was made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from agl_otel.adapters.chats import split_pair
from agl_otel.adapters.records import IGNORED, SAMPLING, Row
from agl_otel.spans.dialects.dialect import Message

_HASHED: Final = re.compile(r"sha256:[0-9a-f]{64}")
"""What a masking rule leaves of a text (MaskRule.silence)."""


def as_written(form: str, row: Row) -> Row:
    """The row of a form of records.FORMS with the columns that its file has; forms without a format of their own stay as they are."""
    return WRITTEN.get(form, dict)(row)


def _sft(row: Row) -> Row:
    """Without `images`: TRL takes a data set with such a column for one of pictures, and reads no ids. They stand in the messages, too."""
    rest = {key: value for key, value in row.items() if key != "images"}
    return {**rest, "attention_mask": [1] * len(row["input_ids"])}


def _dpo(row: Row) -> Row:
    prompt, chosen, rejected = split_pair(row["messages"], row["rejected_messages"])
    rest = {key: value for key, value in row.items() if key not in ("messages", "rejected_messages")}
    return {**rest, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _tinker(row: Row) -> Row:
    """Weight 1 where the next token is the model's."""
    ids, labels = row["input_ids"], row["labels"]
    kept = {key: row[key] for key in ("rollout_id", "attempt_id", "agent", "reward", "model_version", *SAMPLING)}
    weights = [0.0 if label == IGNORED else 1.0 for label in labels[1:]]
    return {**kept, "model_input": ids[:-1], "target_tokens": ids[1:], "weights": weights}


def _openai(row: Row) -> Row:
    return {"messages": [_said(message) for message in row["messages"]], **_tools(row)}


def _openai_dpo(row: Row) -> Row:
    prompt, chosen, rejected = (
        [{key: value for key, value in _said(message).items() if key != "weight"} for message in part]
        for part in split_pair(row["messages"], row["rejected_messages"])
    )
    return {"input": {"messages": prompt, **_tools(row)}, "preferred_output": chosen, "non_preferred_output": rejected}


def _tools(row: Row) -> dict[str, Any]:
    return {"tools": row["tools"]} if row.get("tools") else {}


def _said(message: Message) -> Message:
    """A message that OpenAI takes: text that a masking rule took out is empty, and nothing to learn."""
    content = message.get("content")
    gone = content is None and not message.get("tool_calls")
    if message["role"] == "assistant" and (gone or _HASHED.fullmatch(str(content))):
        return {**message, "content": content or "", "weight": 0}
    return {**message, "content": ""} if gone else message


WRITTEN: Final[dict[str, Callable[[Row], Row]]] = {
    "sft": _sft,
    "dpo": _dpo,
    "tinker": _tinker,
    "openai": _openai,
    "openai_dpo": _openai_dpo,
}
"""{form: a row of it as its file holds it}."""
