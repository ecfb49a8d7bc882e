"""Tool calls as chat models write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>, the form of Hermes and Qwen. Pure.

The model's chat template puts the tools into the prompt; here replies are read. What was sampled stays as it is: a call that comes back in
the next prompt is printed by the template, and goes on from the reply token for token where the model spells JSON as the template does.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from agl_otel.spans.tolerant import json_of

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_calls(text: str, prefix: str) -> tuple[str | None, list[dict[str, Any]]]:
    """(what a reply says beside its calls; None where that is nothing, its calls in OpenAI's form with ids that begin with `prefix`).

    What is no JSON object with a name stays in the text.
    """
    calls: list[dict[str, Any]] = []

    def taken(found: re.Match[str]) -> str:
        try:
            call = json_of(found[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return found[0]
        if not isinstance(name, str):
            return found[0]
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"id": f"{prefix}-{len(calls)}", "type": "function", "function": {"name": name, "arguments": spelled}})
        return ""

    rest = _CALL.sub(taken, text)
    return (rest.strip() or None, calls) if calls else (text, calls)


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: the arguments of its tool calls parsed, for they print them as JSON themselves."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed(call) for call in calls]} if isinstance(calls, list) else message


def _parsed(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json_of(function["arguments"])}}
    except (ValueError, KeyError, TypeError, AttributeError):
        return call
