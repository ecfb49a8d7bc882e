"""Converts rows to trainers' formats, after masking, as the last step before a file. Pure; only this module decides a format's columns.

`sft` has the columns that TRL, Unsloth and Axolotl accept without tokenising (input_ids, labels, attention_mask). `dpo` has ids for TRL's
collator (DataCollatorForPreference) and also messages (prompt, chosen, rejected). `tinker` has the columns of a Datum: the input, the
targets one position later, and their weights. `openai` and `openai_dpo` hold only the keys of OpenAI's fine-tuning, which refuses unknown
ones; the pin beside the file names the rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from agl_otel.adapters.chats import split_pair
from agl_otel.adapters.records import DEMONSTRATIONS, IGNORED, SAMPLING, Row
from agl_otel.spans.dialects.dialect import Message

_HASHED: Final = re.compile(r"sha256:[0-9a-f]{64}")
"""The form of a text that a masking rule has hashed (MaskRule.replacement)."""


def as_written(form: str, row: Row) -> Row:
    """Convert a row of a form of records.FORMS to its file's columns; forms without their own format are unchanged."""
    return WRITTEN.get(form, dict)(row)


def _sft(row: Row) -> Row:
    """Drop `images`: TRL treats a data set with that column as images and ignores the ids. The messages hold them, too."""
    rest = {key: value for key, value in row.items() if key != "images"}
    return {**rest, "attention_mask": [1] * len(row["input_ids"])}


def _dpo(row: Row) -> Row:
    prompt, chosen, rejected = split_pair(row["messages"], row["rejected_messages"])
    rest = {key: value for key, value in row.items() if key not in ("messages", "rejected_messages")}
    return {**rest, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _tinker(row: Row) -> Row:
    """Make a Datum's columns; the weight is 1 where the next token is the model's, or the return of its call."""
    ids, labels = row["input_ids"], row["labels"]
    kept = {key: row[key] for key in ("rollout_id", "attempt_id", "agent", "reward", "model_version", *SAMPLING)}
    weights = row.get("weights") or [0.0 if label == IGNORED else 1.0 for label in labels]
    return {**kept, "model_input": ids[:-1], "target_tokens": ids[1:], "weights": weights[1:]}


def _openai(row: Row) -> Row:
    return {"messages": [_openai_message(message) for message in row["messages"]], **_tools(row)}


def _openai_dpo(row: Row) -> Row:
    prompt, chosen, rejected = (
        [{key: value for key, value in _openai_message(message).items() if key != "weight"} for message in part]
        for part in split_pair(row["messages"], row["rejected_messages"])
    )
    return {"input": {"messages": prompt, **_tools(row)}, "preferred_output": chosen, "non_preferred_output": rejected}


def _tools(row: Row) -> dict[str, Any]:
    return {"tools": row["tools"]} if row.get("tools") else {}


def _openai_message(message: Message) -> Message:
    """Convert a message for OpenAI: text dropped by a masking rule becomes empty and is not learnt."""
    content = message.get("content")
    dropped = content is None and not message.get("tool_calls")
    if message["role"] == "assistant" and (dropped or _HASHED.fullmatch(str(content))):
        return {**message, "content": content or "", "weight": 0}
    return {**message, "content": ""} if dropped else message


WRITTEN: Final[dict[str, Callable[[Row], Row]]] = {
    "sft": _sft,
    "dpo": _dpo,
    "tinker": _tinker,
    "openai": _openai,
    "openai_dpo": _openai_dpo,
    DEMONSTRATIONS: _openai,
}
"""{form: conversion of a row to its file's format}."""
