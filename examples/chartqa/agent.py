"""The agent: one call of a vision model with a picture and a question. It contains no code for training."""

from __future__ import annotations

from openai import AsyncOpenAI

import agl_otel as agl


async def answer(task: dict[str, str], llm: agl.LLM) -> str:
    picture = {"type": "image_url", "image_url": {"url": task["image"]}}
    content = [picture, {"type": "text", "text": task["question"]}]
    async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "none") as client:
        reply = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": content}])
    return reply.choices[0].message.content or ""
