"""An agent of five steps: the OpenAI SDK, five model calls. Each reward belongs to the step in whose span it is emitted."""

from __future__ import annotations

import functools
import os

from openai import OpenAI

import agl_otel as agl

MODEL = os.environ.get("OPENAI_MODEL", "policy")


@functools.cache
def client() -> OpenAI:
    return OpenAI()


def solve(questions: list[str], expected: list[str]) -> None:
    for question, right in zip(questions, expected, strict=True):
        with agl.operation(name="step"):
            reply = client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
            agl.emit_reward(float((reply.choices[0].message.content or "").strip() == right))
