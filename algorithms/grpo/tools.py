"""Parse tool calls in replies: <tool_call>{"name": …, "arguments": {…}}</tool_call>, the format of Hermes and Qwen. Pure.

The chat template writes the tools into the prompt, and earlier calls into later prompts. These continue the sampled reply token for
token only where the model formats JSON as the template does.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from agl_otel.spans.tolerant import json_of

_END: Final = "</tool_call>"
_CALL: Final = re.compile(rf"<tool_call>(.*?){_END}", re.DOTALL)


def read_calls(text: str, prefix: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Split a reply into (its other text or None, its tool calls in OpenAI's format with ids that start with `prefix`).

    A block that is not a JSON object with a name stays in the text.
    """
    calls: list[dict[str, Any]] = []

    def taken(found: re.Match[str]) -> str:
        try:
            call = json_of(found[1].strip())
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return found[0]
        if not isinstance(name, str):
            return found[0]
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"id": f"{prefix}-{len(calls)}", "type": "function", "function": {"name": name, "arguments": spelled}})
        return ""

    called, end, after = text.rpartition(_END)
    rest = _CALL.sub(taken, called + end) + after  # what begins there ends there, or all of it would be read again from each
    return (rest.strip() or None, calls) if calls else (text, calls)


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a message's tool calls, which chat templates serialise to JSON themselves."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed(call) for call in calls]} if isinstance(calls, list) else message


def _parsed(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json_of(function["arguments"])}}
    except (ValueError, KeyError, TypeError, AttributeError):
        return call
