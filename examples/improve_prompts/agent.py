"""What the product asks its model; here for tasks that are made of its traffic, and for the held-out ones."""

from __future__ import annotations

from openai import AsyncOpenAI

import agl_otel as agl


async def answer(task: dict[str, str], prompt_template: agl.PromptTemplate, llm: agl.LLM) -> float:
    """Answer a question with a prompt; return whether that is what users want."""
    messages = [{"role": "system", "content": prompt_template.format()}, {"role": "user", "content": task["input"]}]
    async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "none") as client:
        reply = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(reply.choices[0].message.content == task["expected"])
