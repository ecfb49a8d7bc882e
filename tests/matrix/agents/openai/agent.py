"""The OpenAI SDK by itself: chat completions and responses, whole and streamed, sync and async."""

import asyncio
import json
import pathlib
import sys

from openai import AsyncOpenAI, OpenAI

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

MODEL = "gpt-4.1"
INSTRUCTIONS = "Answer questions about cities."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
DESCRIBED = {"name": "population", "description": population.__doc__, "parameters": PARAMETERS, "strict": True}
CHAT_TOOLS = [{"type": "function", "function": DESCRIBED}]
RESPONSES_TOOLS = [{"type": "function", **DESCRIBED}]


def answers(calls):
    return [{"role": "tool", "tool_call_id": call.id, "content": population(**json.loads(call.function.arguments))} for call in calls]


def begin(question):
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]


def chat(question):
    client, messages = OpenAI(), begin(question)
    while True:
        said = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message
        if not said.tool_calls:
            return said.content
        messages += [said, *answers(said.tool_calls)]


def chat_edited(question):
    """An agent that does not send back what the model said, but its own words for it."""
    client, messages = OpenAI(), begin(question)
    while True:
        said = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message
        if not said.tool_calls:
            return said.content
        messages += [{**said.model_dump(exclude_none=True), "content": "I look it up."}, *answers(said.tool_calls)]


def chat_stream(question):
    client, messages = OpenAI(), begin(question)
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
            said = stream.get_final_completion().choices[0].message
        if not said.tool_calls:
            return said.content
        messages += [said, *answers(said.tool_calls)]


async def chat_async(question):
    client, messages = AsyncOpenAI(), begin(question)
    while True:
        said = (await client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)).choices[0].message
        if not said.tool_calls:
            return said.content
        messages += [said, *answers(said.tool_calls)]


async def chat_async_stream(question):
    """With the chunks put together by hand, as many agents do."""
    client, messages = AsyncOpenAI(), begin(question)
    while True:
        text, calls = "", {}
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for piece in choice.delta.tool_calls or []:
                    call = calls.setdefault(piece.index, {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}})
                    call["function"]["name"] += piece.function.name or ""
                    call["function"]["arguments"] += piece.function.arguments or ""
        if not calls:
            return text
        messages.append({"role": "assistant", "content": text or None, "tool_calls": list(calls.values())})
        for call in calls.values():
            known = population(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": known})


def outputs(response):
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": population(**json.loads(c.arguments))} for c in calls]


def responses(question):
    client, items = OpenAI(), [{"role": "user", "content": question}]
    while True:
        response = client.responses.create(model=MODEL, instructions=INSTRUCTIONS, input=items, tools=RESPONSES_TOOLS)
        if not (found := outputs(response)):
            return response.output_text
        items += [*response.output, *found]


def responses_stream(question):
    client, items = OpenAI(), [{"role": "user", "content": question}]
    while True:
        with client.responses.stream(model=MODEL, instructions=INSTRUCTIONS, input=items, tools=RESPONSES_TOOLS) as stream:
            response = stream.get_final_response()
        if not (found := outputs(response)):
            return response.output_text
        items += [*response.output, *found]


async def responses_async(question):
    """Each call names the one before instead of repeating it."""
    client, items, before = AsyncOpenAI(), question, None
    while True:
        response = await client.responses.create(
            model=MODEL, instructions=INSTRUCTIONS if not before else None, input=items, tools=RESPONSES_TOOLS, previous_response_id=before
        )
        if not (items := outputs(response)):
            return response.output_text
        before = response.id


if __name__ == "__main__":
    answer = globals()[sys.argv[1].replace("-", "_")](sys.argv[2])
    print(asyncio.run(answer) if asyncio.iscoroutine(answer) else answer)
