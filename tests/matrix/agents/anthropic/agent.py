"""The Anthropic SDK by itself: whole and streamed, sync and async."""

import asyncio
import pathlib
import sys

from anthropic import Anthropic, AsyncAnthropic

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 1000,
    "system": "Answer questions about cities.",
    "tools": [{"name": "population", "description": population.__doc__, "input_schema": SCHEMA}],
}


def go_on(messages, said):
    """The answer; None where tools were called, whose results then stand in `messages`."""
    used = [block for block in said.content if block.type == "tool_use"]
    if not used:
        return "".join(block.text for block in said.content if block.type == "text")
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": population(**block.input)} for block in used]
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    return None


def whole(question):
    client, messages = Anthropic(), [{"role": "user", "content": question}]
    while True:
        if answer := go_on(messages, client.messages.create(messages=messages, **ASKED)):
            return answer


def stream(question):
    client, messages = Anthropic(), [{"role": "user", "content": question}]
    while True:
        with client.messages.stream(messages=messages, **ASKED) as events:
            said = events.get_final_message()
        if answer := go_on(messages, said):
            return answer


async def in_async(question):
    client, messages = AsyncAnthropic(), [{"role": "user", "content": question}]
    while True:
        if answer := go_on(messages, await client.messages.create(messages=messages, **ASKED)):
            return answer


async def async_stream(question):
    client, messages = AsyncAnthropic(), [{"role": "user", "content": question}]
    while True:
        async with client.messages.stream(messages=messages, **ASKED) as events:
            said = await events.get_final_message()
        if answer := go_on(messages, said):
            return answer


if __name__ == "__main__":
    run = {
        "whole": whole,
        "stream": stream,
        "async": lambda question: asyncio.run(in_async(question)),
        "async-stream": lambda question: asyncio.run(async_stream(question)),
    }
    print(run[sys.argv[1]](sys.argv[2]))
