"""An agent of two separate calls: the second one asks about the answer of the first."""

import functools
import os
from typing import Any

from openai import AsyncOpenAI

MODEL = os.environ.get("OPENAI_MODEL", "policy")


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def ask(number: str) -> str:
    reply = await client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"digit {number}"}])
    return (reply.choices[0].message.content or "").strip()


async def answer(task: dict[str, Any]) -> list[str]:
    first = await ask(str(task["number"]))
    return [first, await ask(f"{task['tens']}{first}")] if first.isdigit() and len(first) == 1 else [first]
