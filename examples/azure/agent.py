"""An ordinary agent: the OpenAI SDK and one model call. It contains no code for training."""

import functools
import os

from openai import OpenAI

MODEL = os.environ.get("OPENAI_MODEL", "gpt-4.1-mini")


@functools.cache
def client() -> OpenAI:
    return OpenAI()


def answer(number: int) -> str:
    messages = [{"role": "system", "content": "Reply with one digit."}, {"role": "user", "content": f"number {number}"}]
    return client().chat.completions.create(model=MODEL, messages=messages).choices[0].message.content or ""
