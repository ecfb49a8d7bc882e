"""An ordinary agent: the OpenAI SDK, one prompt, one model call. It contains no code for training.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py "digit 437"
"""

import functools
import os
import sys

from openai import OpenAI

MODEL = os.environ.get("OPENAI_MODEL", "policy")


@functools.cache
def client() -> OpenAI:
    return OpenAI()


def answer(question: str) -> str:
    reply = client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""


if __name__ == "__main__":
    print(answer(sys.argv[1]))
