"""Readers for the shapes in which instrumentations write a conversation, each to OpenAI's messages; dialects are built of them. Pure.

A reader takes a span and raises an error of tolerant.MALFORMED if the attributes do not have the dialect's shape; absent messages (content
capture off, a streamed reply that was not kept) read as none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from agl_otel.spans.attributes import filter_attributes, unflatten_attributes
from agl_otel.spans.dialects.dialect import Attributes, Conversation, Message, as_text, loads, text_or_none
from agl_otel.spans.tolerant import json_of
from agl_otel.types import SpanLike

Json = Mapping[str, Any]


# --- OpenTelemetry's conventions from 1.37 on: JSON with parts ----------------------------------------------------


def from_parts(span: SpanLike) -> Conversation:
    """`gen_ai.input.messages`, `.output.messages`, `.system_instructions`, `.tool.definitions`."""
    return parts_of(span.attributes or {})


def parts_of(attributes: Attributes) -> Conversation:
    """`from_parts` of the attributes alone."""
    instructions = _list(attributes, "gen_ai.system_instructions")
    prompt = [message for entry in _list(attributes, "gen_ai.input.messages") for message in _of_entry(entry)]
    if instructions:
        prompt.insert(0, {"role": "system", "content": _content(instructions)})
    reply = [message for entry in _list(attributes, "gen_ai.output.messages") for message in _of_entry(entry)]
    return Conversation(prompt, reply, [openai_tool(tool) for tool in _list(attributes, "gen_ai.tool.definitions")] or None)


def _list(attributes: Attributes, key: str) -> list[Any]:
    value = attributes.get(key) or []
    value = json_of(value) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{key} is not a list")
    return [json_of(entry) if isinstance(entry, str) else entry for entry in cast("Sequence[Any]", value)]


def _of_entry(entry: Any) -> list[Message]:
    """`of_parts`; an entry without a role, or that is no message, gets the role None, which `checked` rejects and displays show."""
    if not isinstance(entry, Mapping):
        return [{"role": None, "content": entry}]
    return of_parts({"role": None, **cast("Json", entry)})


def of_parts(entry: Json) -> list[Message]:
    """Convert an entry to one message, or to one for each tool answer in it.

    The message keeps its other `parts` unchanged: `text_of` shows them, `checked` drops them. An entry without parts is read as OpenAI's
    message.
    """
    if "parts" not in entry and not _OPENAI_FIELDS.isdisjoint(entry):
        return [plain_message(entry)]
    parts: list[Json] = entry.get("parts") or []
    answers: list[Message] = [
        {"role": "tool", "tool_call_id": part.get("id"), "content": as_text(part.get("response", part.get("result")))}
        for part in parts
        if part.get("type") == "tool_call_response"
    ]
    calls = [openai_call(part.get("id"), part.get("name"), part.get("arguments")) for part in parts if part.get("type") == "tool_call"]
    rest = [part for part in parts if part.get("type") not in ("tool_call", "tool_call_response", "reasoning", "thinking")]
    if answers and not rest and not calls:
        return answers
    message: Message = {"role": entry["role"], "content": _content(rest)}
    if calls:
        message = {**message, "content": message["content"] or None, "tool_calls": calls}
    message["parts"] = [part for part in parts if part.get("type") != "tool_call_response"] if answers else parts
    return [message, *answers]


_OPENAI_FIELDS: Final = frozenset({"content", "tool_calls"})


def _content(parts: Sequence[Json]) -> Any:
    """Return text if all parts are text; else OpenAI's content parts, so that images and other media are kept."""
    made = [PARTS.get(str(part.get("type")), _text_part)(part) for part in parts]
    if all(part["type"] == "text" for part in made):
        return "".join(part["text"] for part in made)
    return made


def _text_part(part: Json) -> Message:
    return {"type": "text", "text": as_text(part.get("content", part.get("text", "")))}


def _image_part(url: Any) -> Message:
    return {"type": "image_url", "image_url": url if isinstance(url, Mapping) else {"url": url}}


def _media_part(part: Json, url: Any) -> Message:
    """Return an image; a part whose `modality` or `mime_type` is another stays as it is, under the name of that."""
    kind = str(part.get("modality") or str(part.get("mime_type", "")).partition("/")[0])
    return {**part, "type": kind} if kind in OTHER_MEDIA else _image_part(url)


def _source(part: Json) -> str:
    """Return the URL of an image in Anthropic's form; empty for other forms."""
    source: Json = part.get("source") or {}
    return str(source.get("url", "")) or (
        f"data:{source.get('media_type', 'image/png')};base64,{source['data']}" if "data" in source else ""
    )


OTHER_MEDIA: Final = ("audio", "input_audio", "audio_url", "video", "input_video", "video_url")
"""Types of parts that are neither text nor an image. They are kept unchanged: no form of training data and no trainer here has them."""
PARTS: Final[dict[str, Callable[[Json], Message]]] = {
    "text": _text_part,
    "image_url": lambda part: _image_part(part.get("image_url") or part.get("content") or part.get("url")),
    "image": lambda part: _image_part(_source(part) or part.get("image") or part.get("content") or part.get("url")),
    "input_image": lambda part: _image_part(part.get("image_url")),
    "uri": lambda part: _media_part(part, part.get("uri")),
    "image-url": lambda part: _image_part(part.get("url")),
    "blob": lambda part: _media_part(part, f"data:{part.get('mime_type', 'image/png')};base64,{part.get('content', part.get('data', ''))}"),
    "file": lambda part: _media_part(part, part.get("data") or part.get("url")),
    **{kind: lambda part: {**part} for kind in OTHER_MEDIA},
}
"""{type of a part: its conversion to OpenAI's}; other types are text."""


# --- flat keys: OpenLLMetry before 0.50, AgentOps -----------------------------------------------------------------


def from_flat(span: SpanLike) -> Conversation:
    """`gen_ai.prompt.{i}.…`, `gen_ai.completion.{i}.…`, and `gen_ai.request.functions.{i}.…` or `llm.request.functions.{i}.…`."""
    attributes = span.attributes or {}
    prompt = [_of_fields(entry) for entry in nested_list(attributes, "gen_ai.prompt")]
    reply = [_of_fields({"role": "assistant", **entry}) for entry in nested_list(attributes, "gen_ai.completion")]
    if any(message["role"] != "assistant" for message in reply):
        raise ValueError("a completion's role is not assistant")
    for prefix in ("gen_ai.request.functions", "llm.request.functions", "gen_ai.request.tools"):
        if functions := nested_list(attributes, prefix):
            return Conversation(prompt, reply, [openai_tool(function) for function in functions])
    return Conversation(prompt, reply, None)


def nested_list(attributes: Attributes, prefix: str) -> list[Any]:
    """Nest the flat keys `prefix.{i}.field…` as a list. Raises ValueError if the indices are not 0 … n - 1."""
    below = {key[len(prefix) + 1 :]: value for key, value in filter_attributes(attributes, prefix).items() if key != prefix}
    flat = {key: value for key, value in below.items() if key not in NO_ITEMS}
    nested = unflatten_attributes(flat)
    if isinstance(nested, dict):
        if nested:
            raise ValueError(f"{prefix} is not a list: its keys are {sorted(nested)[:5]}")
        return []
    return nested


NO_ITEMS: Final = frozenset({"prompt_filter_results", "prompt_error"})
"""Keys that OpenLLMetry writes beside the indices: results of Azure's content filter for the whole prompt."""


def _of_fields(entry: Json) -> Message:
    content = entry.get("content", "")
    if isinstance(content, str) and content.startswith("[{"):
        content = _parsed_content(content)
    message: Message = {"role": entry["role"], "content": content}
    if "tool_call_id" in entry:
        message["tool_call_id"] = entry["tool_call_id"]
    if calls := entry.get("tool_calls"):
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls is not a list: its keys are {sorted(calls)[:5]}")
        message["content"] = content or None
        message["tool_calls"] = [openai_call(call.get("id"), call.get("name"), call.get("arguments")) for call in cast("list[Json]", calls)]
    return message


def _parsed_content(text: str) -> Any:
    """Parse content parts written as JSON; return other text unchanged."""
    parts = loads(text)
    return parts if isinstance(parts, list) and all(isinstance(p, Mapping) and "type" in p for p in cast("list[Any]", parts)) else text


# --- the bodies of OpenAI's request and response, as JSON ---------------------------------------------------------


def from_bodies(request_key: str, response_key: str) -> Callable[[SpanLike], Conversation]:
    """Make a reader of whole bodies: `messages` and `tools` of the request, `choices` of the response."""

    def read(span: SpanLike) -> Conversation:
        attributes = span.attributes or {}
        return of_bodies(_body(attributes, request_key), _body(attributes, response_key))

    return read


def _body(attributes: Attributes, key: str) -> Any:
    value = attributes.get(key)
    return (
        loads(value)
        if isinstance(value, str)
        else value
        or unflatten_attributes({name[len(key) + 1 :]: item for name, item in filter_attributes(attributes, key).items() if name != key})
    )


def of_bodies(request: Any, response: Any) -> Conversation:
    """Messages of an OpenAI request (or of a bare list of them) and of the response's choices."""
    asked: Json = cast("Json", request) if isinstance(request, Mapping) else {"messages": request if isinstance(request, list) else []}
    answered: Json = cast("Json", response) if isinstance(response, Mapping) else {}
    messages = asked.get("messages") or []
    messages = loads(messages) if isinstance(messages, str) else messages
    if not messages and isinstance(asked.get("prompt"), str):
        messages = [{"role": "user", "content": asked["prompt"]}]
    choices = answered.get("choices") or []
    choices = loads(choices) if isinstance(choices, str) else choices
    reply = [choice.get("message") or {"role": "assistant", "content": choice.get("text", "")} for choice in choices]
    if not reply and answered.get("role"):
        reply = [answered]
    tools = asked.get("tools") or None
    tools = loads(tools) if isinstance(tools, str) else tools
    return Conversation(
        [plain_message(m) for m in messages], [plain_message(m) for m in reply], [openai_tool(t) for t in tools] if tools else None
    )


def plain_message(message: Json) -> Message:
    """Return an OpenAI message without empty fields."""
    kept: Message = {"role": message["role"], "content": message.get("content")}
    if message.get("tool_calls"):
        kept["content"] = None if kept["content"] in ("", "null") else kept["content"]  # Agent Lightning 0.3 wrote None as JSON
    elif kept["content"] is None:
        kept["content"] = ""
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [openai_call(c.get("id"), _function(c).get("name"), _function(c).get("arguments")) for c in calls]
    return {**kept, **{key: message[key] for key in ("tool_call_id", "name") if message.get(key)}}


def _function(call: Json) -> Json:
    return call.get("function") or call


# --- span events of the conventions up to 1.36 --------------------------------------------------------------------


def from_events(span: SpanLike) -> Conversation:
    """Events `gen_ai.{system,user,assistant,tool}.message` and `gen_ai.choice`; a log record becomes one by `with_records`.

    Also the forms before 1.28: `gen_ai.prompt` and `gen_ai.completion`, on the span or on events `gen_ai.content.{prompt,completion}`.
    """
    prompt, reply = _of_lists(span.attributes or {})
    for event in getattr(span, "events", None) or ():
        if event.name in WHOLE_EVENTS:
            asked, answered = _of_lists(event.attributes or {})
            prompt, reply = prompt + asked, reply + answered
            continue
        body = _event_body(event.attributes or {})
        if event.name in EVENTS:
            entry = {"role": EVENTS[event.name], **body, **({"tool_call_id": body["id"]} if "id" in body else {})}
            prompt += _of_blocks(entry, body.get("content")) or [plain_message(entry)]
        elif event.name == "gen_ai.choice":
            message = body.get("message") or body
            parsed = loads(message) if isinstance(message, str) else message
            if isinstance(parsed, Mapping):
                reply += [plain_message({"role": "assistant", **parsed})]
            else:
                reply += _of_blocks({"role": "assistant"}, parsed) or [{"role": "assistant", "content": as_text(message)}]
    return Conversation(prompt, reply, None)


def _of_lists(attributes: Attributes) -> tuple[list[Message], list[Message]]:
    """Read `gen_ai.prompt` and `gen_ai.completion`: lists of messages, as JSON."""
    found = [loads(value) if isinstance(value := attributes.get(key), str) else value for key in ("gen_ai.prompt", "gen_ai.completion")]
    asked, answered = (cast("list[Json]", each) if isinstance(each, (list, tuple)) else [] for each in found)
    return [plain_message(each) for each in asked], [plain_message({"role": "assistant", **each}) for each in answered]


def _of_blocks(message: Json, content: Any) -> list[Message]:
    """Read messages from a list of Bedrock's content blocks, which strands-agents writes as JSON; [] for other content.

    Each tool answer is a separate message.
    """
    blocks = loads(content) if isinstance(content, str) and content.startswith("[") else content
    if (
        not isinstance(blocks, list)
        or not blocks
        or not all(isinstance(b, Mapping) and BLOCKS & b.keys() for b in cast("list[Any]", blocks))
    ):
        return []
    of = cast("list[Json]", blocks)
    answers: list[Message] = [
        {"role": "tool", "tool_call_id": answer.get("toolUseId"), "content": _block_text(answer.get("content") or [])}
        for block in of
        if isinstance(answer := block.get("toolResult"), Mapping)
    ]
    uses = [use for block in of if isinstance(use := block.get("toolUse"), Mapping)]
    calls = [openai_call(use.get("toolUseId"), use.get("name"), use.get("input")) for use in uses]
    rest = [_block_part(block) for block in of if not {"toolUse", "toolResult", "reasoningContent"} & block.keys()]
    text = "".join(part["text"] for part in rest) if all(part["type"] == "text" for part in rest) else rest
    if calls:
        return [{"role": message["role"], "content": text or None, "tool_calls": calls}, *answers]
    return answers if answers and not rest else [{"role": message["role"], "content": text}, *answers]


BLOCKS: Final = frozenset({"text", "image", "document", "toolUse", "toolResult", "reasoningContent", "json"})
"""The keys that identify the type of a Bedrock block."""


def _block_part(block: Json) -> Message:
    image = block.get("image")
    source: Any = image.get("source") if isinstance(image, Mapping) else None
    if isinstance(image, Mapping) and isinstance(source, Mapping) and isinstance(source.get("bytes"), str):
        return _image_part(f"data:image/{image.get('format', 'png')};base64,{source['bytes']}")
    return {"type": "text", "text": as_text(block["text"] if "text" in block else block.get("json", dict(block)))}


def _block_text(blocks: Sequence[Json]) -> str:
    return "\n".join(str(part["text"]) for part in map(_block_part, blocks) if part["type"] == "text")


WHOLE_EVENTS: Final = frozenset({"gen_ai.content.prompt", "gen_ai.content.completion"})
"""Events up to 1.27 with all messages of the prompt, or of the reply."""
EVENTS: Final = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
"""{name of an event: the role of its message}."""


def _event_body(attributes: Attributes) -> dict[str, Any]:
    """The fields of an event, with JSON parsed."""
    body: Any = unflatten_attributes(dict(attributes))
    fields = loads(body["body"]) if isinstance(body.get("body"), str) else body.get("body") or body
    calls = fields.get("tool_calls")
    return {**fields, "tool_calls": loads(calls)} if isinstance(calls, str) else dict(fields)


# --- shared -------------------------------------------------------------------------------------------------------


def openai_call(call_id: Any, name: Any, arguments: Any) -> Message:
    """Convert a tool call to OpenAI's form, in which id, name and arguments are strings."""
    text = as_text({} if arguments is None else arguments)
    return {"id": text_or_none(call_id), "type": "function", "function": {"name": text_or_none(name), "arguments": text}}


def openai_tool(tool: Any) -> Message:
    """Convert a tool definition to OpenAI's form. Raises KeyError without a name."""
    tool = loads(tool) if isinstance(tool, str) else tool
    if "function" in tool:
        return dict(tool)
    parameters = tool.get("parameters") or tool.get("inputSchema")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": loads(parameters) if isinstance(parameters, str) else parameters,
    }
    return {"type": "function", "function": function}
