"""What the product asks its model; here for the held-out tasks."""

from __future__ import annotations

import functools

from openai import OpenAI


@functools.cache
def client() -> OpenAI:
    return OpenAI()


def answer(question: str, expected: str) -> float:
    """Answer a held-out task; return whether that is what users want."""
    reply = client().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return float((reply.choices[0].message.content or "").strip() == expected)
