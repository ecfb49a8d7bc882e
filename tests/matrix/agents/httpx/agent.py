"""No SDK at all: an agent's loop over HTTP."""

import asyncio
import json
import os
import pathlib
import sys

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "population", "description": population.__doc__, "parameters": PARAMETERS}}]


def body(messages, **more):
    return {"model": "gpt-4.1", "messages": messages, "tools": TOOLS, **more}


def go_on(messages, said):
    """The answer; None where tools were called, whose results then stand in `messages`."""
    if not said.get("tool_calls"):
        return said["content"]
    messages.append(said)
    for call in said["tool_calls"]:
        known = population(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": known})
    return None


def sync(question):
    messages = [{"role": "user", "content": question}]
    with httpx.Client(headers=HEADERS, timeout=60) as client:
        while True:
            reply = client.post(URL, json=body(messages)).raise_for_status().json()
            if answer := go_on(messages, reply["choices"][0]["message"]):
                return answer


async def in_async(question):
    messages = [{"role": "user", "content": question}]
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        while True:
            reply = (await client.post(URL, json=body(messages))).raise_for_status().json()
            if answer := go_on(messages, reply["choices"][0]["message"]):
                return answer


def stream(question):
    messages = [{"role": "user", "content": question}]
    with httpx.Client(headers=HEADERS, timeout=60) as client:
        while True:
            said, calls = {"role": "assistant", "content": ""}, {}
            with client.stream("POST", URL, json=body(messages, stream=True)) as response:
                for line in response.raise_for_status().iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    said["content"] += delta.get("content") or ""
                    for piece in delta.get("tool_calls", []):
                        call = calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                        call["id"] = piece.get("id", call.get("id"))
                        for name, text in piece["function"].items():
                            call["function"][name] += text
            if calls:
                said["tool_calls"] = list(calls.values())
            if answer := go_on(messages, said):
                return answer


if __name__ == "__main__":
    run = {"sync": sync, "async": lambda question: asyncio.run(in_async(question)), "stream": stream}
    print(run[sys.argv[1]](sys.argv[2]))
