"""Translate a request of generateContent to one of chat/completions. Pure.

Names may be written in camelCase or snake_case, as Google's API takes them. Fields that do not change what is sampled (safetySettings,
labels, includeThoughts, thought signatures), and schemas of what functions return, are left out. Any other without a counterpart is
refused.
"""

from __future__ import annotations

from typing import Any, Final, cast

from agl_otel.errors import UsageError
from agl_otel.proxy.google.contents import messages, system
from agl_otel.proxy.google.fields import camel, fields, instance, objects
from agl_otel.proxy.reply import Json

_UNSENT: Final = frozenset({"safetySettings", "labels", "serviceTier", "store", "model"})
_TRANSLATED: Final = frozenset({"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"})
_SAMPLING: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "candidateCount": "n",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_CONFIG: Final = _SAMPLING.keys() | {"responseMimeType", "responseSchema", "responseJsonSchema", "responseModalities", "thinkingConfig"}
_DECLARATION: Final = frozenset({"name", "description", "parameters", "parametersJsonSchema"})
_OUTPUT: Final = frozenset({"response", "responseJsonSchema"})
"""What a function returns: chat/completions tells the model of its parameters only."""
_CHOICE: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto"}
"""VALIDATED is text or calls whose arguments are held to their schemas: with `strict`, which servers that enforce it heed."""
_EFFORTS: Final = ("minimal", "low", "medium", "high")
_UNSPECIFIED: Final = "thinking_level_unspecified"
_BUDGET: Final = "thinking_budget"
"""A limit of thinking by the name that DashScope has for it. vLLM and SGLang ignore it; vLLM's `thinking_token_budget` is refused by each
server without a reasoning parser, and Gemini CLI sends budgets by itself."""


def chat_request(model: str, asked: Json, *, streamed: bool) -> Json:
    """Return the request of chat/completions. Raises UsageError."""
    if any(camel(name) == "cachedContent" and value is not None for name, value in asked.items()):
        raise UsageError("cachedContent is not available: send the whole conversation in contents")
    given = fields(asked, "the request", _TRANSLATED | _UNSENT)
    config = fields(given.get("generationConfig"), "generationConfig", _CONFIG)
    held: Json = {"model": model, "messages": [*system(given.get("systemInstruction")), *messages(given.get("contents"))]}
    held |= {theirs: config[ours] for ours, theirs in _SAMPLING.items() if ours in config}
    held |= _format(config) | _thinking(config)
    if config.get("responseModalities", []) not in ([], ["TEXT"]):
        raise UsageError('responseModalities must be ["TEXT"]: chat/completions answers with text')
    tools = [_tool(each) for tool in objects(given.get("tools"), "tools") for each in _declarations(tool)]
    mode, choice = _tool_choice(given.get("toolConfig"), {tool["function"]["name"] for tool in tools})
    if mode == "VALIDATED":
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    if tools:
        held |= {"tools": tools, **choice}
    return held | ({"stream": True, "stream_options": {"include_usage": True}} if streamed else {})


def tokenize_request(model: str, asked: Json) -> Json:
    """Return the request to /tokenize for one of countTokens. Raises UsageError."""
    given = fields(asked, "the request", {"generateContentRequest", *_TRANSLATED, "model"})
    whole = given.pop("generateContentRequest", None)
    if whole is not None and given.keys() & _TRANSLATED:
        raise UsageError(f"send generateContentRequest or {min(given.keys() & _TRANSLATED)}, not both")
    chat = chat_request(model, given if whole is None else instance(whole, dict, "generateContentRequest"), streamed=False)
    return {name: chat[name] for name in ("model", "messages", "tools") if name in chat} | {"add_generation_prompt": True}


def _declarations(tool: Json) -> list[Json]:
    for name, value in tool.items():
        if value is not None and camel(name) != "functionDeclarations":
            raise UsageError(f"the tool {name[:100]!r} is Google's own, which no model server has: send functionDeclarations only")
    return objects(fields(tool, "a tool", {"functionDeclarations"}).get("functionDeclarations"), "functionDeclarations")


def _tool(declaration: Json) -> Json:
    given = fields(declaration, "a function's declaration", _DECLARATION | _OUTPUT)
    function: Json = {"name": instance(given.get("name"), str, "the name of a function")}
    if "description" in given:
        function["description"] = given["description"]
    if (schema := _schema(given, "parameters", "parametersJsonSchema")) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _schema(given: Json, googles: str, standard: str) -> Json | None:
    """Return the schema in either of two fields, as JSON Schema."""
    if googles in given and standard in given:
        raise UsageError(f"send {googles} or {standard}, not both")
    found = given.get(standard, _in_lower_case(given.get(googles)))
    return None if found is None else instance(found, dict, standard if standard in given else googles)


def _in_lower_case(schema: Any) -> Any:
    """Return a schema of Google's as JSON Schema, whose types are in lower case."""
    if isinstance(schema, list):
        return [_in_lower_case(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    held = {name: _in_lower_case(value) for name, value in cast("Json", schema).items()}
    return held | ({"type": held["type"].lower()} if isinstance(held.get("type"), str) else {})


def _tool_choice(given: Any, names: set[str]) -> tuple[str, Json]:
    """Return Google's mode, and which of the tools with these names must be called."""
    held = fields(given, "toolConfig", {"functionCallingConfig"}).get("functionCallingConfig")
    config = fields(held, "functionCallingConfig", {"mode", "allowedFunctionNames"})
    mode, allowed = config.get("mode", "AUTO"), instance(config.get("allowedFunctionNames", []), list, "allowedFunctionNames")
    if not isinstance(mode, str) or mode not in _CHOICE:
        raise UsageError(f"the mode of functionCallingConfig is one of {', '.join(_CHOICE)}, not {mode!r:.100}")
    only = {instance(each, str, "each of allowedFunctionNames") for each in cast("list[Any]", allowed)}
    if mode == "ANY" and len(only) == 1:
        return mode, {"tool_choice": {"type": "function", "function": {"name": only.pop()}}}
    if only and not (mode in ("ANY", "VALIDATED") and only >= names):
        raise UsageError(
            "allowedFunctionNames cannot be translated: chat/completions requires one function, or any of all; with mode ANY allow one, or "
            "declare only those that are allowed"
        )
    return mode, {"tool_choice": _CHOICE[mode]} if config else {}


def _format(config: Json) -> Json:
    kind, schema = config.get("responseMimeType", "text/plain"), _schema(config, "responseSchema", "responseJsonSchema")
    if kind == "application/json":
        if schema is None:
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}
    if kind != "text/plain":
        raise UsageError(f"responseMimeType is 'text/plain' or 'application/json', not {kind!r:.100}")
    if schema is not None:
        raise UsageError("responseSchema and responseJsonSchema need the responseMimeType 'application/json'")
    return {}


def _thinking(config: Json) -> Json:
    """Return how much the model shall think. A budget of -1 leaves that to the model, as chat/completions does."""
    given = fields(config.get("thinkingConfig"), "thinkingConfig", {"includeThoughts", "thinkingBudget", "thinkingLevel"})
    budget = instance(given.get("thinkingBudget", -1), int, "thinkingBudget")
    level = instance(given.get("thinkingLevel", _UNSPECIFIED), str, "thinkingLevel").lower()
    if level not in (*_EFFORTS, _UNSPECIFIED):
        raise UsageError(f"thinkingLevel is one of {', '.join(_EFFORTS).upper()}, not {level[:100]!r}")
    return ({_BUDGET: budget} if budget != -1 else {}) | ({"reasoning_effort": level} if level != _UNSPECIFIED else {})
