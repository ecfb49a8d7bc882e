"""An agent whose users say later whether its answer was right: it keeps each answer with its rollout's id, as an application would."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from openai import OpenAI

import agl_otel as agl

MODEL = os.environ.get("OPENAI_MODEL", "policy")
ANSWERED = Path(__file__).with_name("answered.jsonl")


@functools.cache
def client() -> OpenAI:
    return OpenAI()


def answer(question: str, expected: str, rollout: agl.Rollout) -> float | None:
    """Answer; in validation return whether it was right, so that the score does not depend on users. Training has only their word."""
    reply = client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
    text = (reply.choices[0].message.content or "").strip()
    if rollout.mode == "val":
        return float(text == expected)
    with ANSWERED.open("a") as file:
        file.write(json.dumps({"rollout_id": rollout.rollout_id, "answer": text, "expected": expected}) + "\n")
    return None
