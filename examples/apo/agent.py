"""The agent: one model call, whose system prompt is what the algorithm improves."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

import agl_otel as agl


async def answer(task: dict[str, Any], prompt_template: agl.PromptTemplate, llm: agl.LLM) -> float:
    messages = [{"role": "system", "content": prompt_template.format()}, {"role": "user", "content": str(task["digit"])}]
    async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "none") as client:
        reply = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(reply.choices[0].message.content == task["wanted"])
