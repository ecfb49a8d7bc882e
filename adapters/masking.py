"""Masks text and tokens before export: rules over rows of records.py. Pure.

A rule selects messages by role, by a regular expression for their text, and by agent, and defines an action: `drop_text` and `hash_text`
change the messages and keep the ids; `drop_ids` replaces ids by 0 and removes the loss from them and from everything sampled after them.
Which token belongs to which message is not stored, so `drop_ids` affects all tokens of a kind: the model's own if an assistant message
matches, else all tokens of the prompt. Rows with unknown messages lose all ids.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.adapters.records import IGNORED
from agl_otel.adapters.texts import MASKED, is_masked
from agl_otel.errors import SettingsError, UsageError
from agl_otel.types.patterns import checked_pattern

ACTIONS: Final = ("drop_text", "hash_text", "drop_ids")
_TEXTS: Final = ("messages", "rejected_messages", "prompt", "response")
DROPPED_ID: Final = 0


@dataclass(frozen=True)
class MaskRule:
    """An action on messages that match all given conditions."""

    action: str
    role: str = ""
    """Empty matches every role."""
    text: str = ""
    """A regular expression that must match somewhere; empty matches every message."""
    agent: str = ""
    """A regular expression for the agent's name; empty matches every agent."""
    salt: str = ""
    """Prepended to hashed texts, so that likely texts cannot be guessed."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"a masking rule says action = {self.action!r}: use one of {', '.join(ACTIONS)}")
        for pattern in (self.text, self.agent):
            checked_pattern(pattern, f"a masking rule's {pattern!r}")

    def matches(self, message: dict[str, Any]) -> bool:
        """Whether the rule applies to this message."""
        return (not self.role or message.get("role") == self.role) and re.search(self.text, text_of(message)) is not None

    def covers(self, role: str, text: str) -> bool:
        """Whether the rule applies to this text; an empty `role` matches any."""
        return (not self.role or role in ("", self.role)) and re.search(self.text, text) is not None

    def replacement(self, text: str) -> str:
        """Return the replacement of `text`; a text that is already masked is kept."""
        if is_masked(text):
            return text
        return MASKED if self.action == "drop_text" else "sha256:" + hashlib.sha256(f"{self.salt}{text}".encode()).hexdigest()


def parse_rules(text: bytes, where: str) -> list[MaskRule]:
    """Parse [[rule]] tables of TOML. Raises SettingsError, which names `where`."""
    try:
        return [MaskRule(**rule) for rule in tomllib.loads(text.decode())["rule"]]
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise SettingsError(f"{where} holds no masking rules ({error}): write [[rule]] tables with an action") from None


def masked(row: dict[str, Any], rules: Sequence[MaskRule]) -> dict[str, Any]:
    """Apply all rules to a row, in order; each rule matches the original texts."""
    out = dict(row)
    for rule in rules:
        if rule.agent and re.search(rule.agent, str(row.get("agent", ""))) is None:
            continue
        if rule.action == "drop_ids":
            out = _without_ids(out, row, rule)
            continue
        for name in _TEXTS:
            if isinstance(row.get(name), list):
                out[name] = [
                    _masked_message(new, rule) if rule.matches(old) else new for old, new in zip(row[name], out[name], strict=True)
                ]
            elif isinstance(row.get(name), dict):  # a triplet: its text has several forms
                out[name] = {**out[name], "raw_content": None, **({"image_urls": []} if "image_urls" in out[name] else {})}
        if "images" in row and rule.role in ("", "user"):
            out["images"] = []
    return out


def text_of(message: dict[str, Any]) -> str:
    """Return a message's text, or its parts and tool calls as canonical JSON if it is not a plain text."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps([content, message.get("tool_calls")], ensure_ascii=False, sort_keys=True)


def _masked_message(message: dict[str, Any], rule: MaskRule) -> dict[str, Any]:
    content = None if rule.action == "drop_text" else rule.replacement(text_of(message))
    return {**{key: message[key] for key in ("role", "tool_call_id", "weight") if key in message}, "content": content}


def _without_ids(out: dict[str, Any], row: dict[str, Any], rule: MaskRule) -> dict[str, Any]:
    messages = [*row.get("messages", ()), *row.get("rejected_messages", ())]
    hits = [message for message in messages if rule.matches(message)]
    if messages and not hits:
        return out
    written = not messages or any(message.get("role") == "assistant" for message in hits)
    given = not messages or any(message.get("role") != "assistant" for message in hits)
    out = {key: value for key, value in out.items() if key != "routed_experts"}  # they tell something of each token
    for ids, mask in (("response_ids", "response_mask"), ("chosen_ids", "chosen_mask"), ("rejected_ids", "rejected_mask")):
        if ids not in row:
            continue
        dropped = [written if own else given for own in row[mask]]
        out[ids] = [DROPPED_ID if drop else token for token, drop in zip(out[ids], dropped, strict=True)]
        out[mask] = [0] * len(out[mask])  # the replies are masked, or what they were sampled after
        if ids == "response_ids":
            out["logprobs"] = [0.0] * len(out["logprobs"])
    if given and "prompt_ids" in row:
        out["prompt_ids"] = [DROPPED_ID] * len(row["prompt_ids"])
    if "labels" in row:
        dropped = [given if label == IGNORED else written for label in row["labels"]]
        out["input_ids"] = [DROPPED_ID if drop else token for token, drop in zip(out["input_ids"], dropped, strict=True)]
        out["labels"] = [IGNORED] * len(out["labels"])
    for name in ("prompt", "response"):
        if isinstance(row.get(name), dict):
            kept = {key: value for key, value in out[name].items() if key != "logprobs"}
            out[name] = {**kept, "token_ids": [DROPPED_ID] * len(row[name]["token_ids"])}
    return out
