"""The agent of the tutorial: a plain function of a task and a prompt template that returns its reward.

It needs no model, so that the tutorial runs anywhere: its reward is higher the more precise the prompt is.
"""

from __future__ import annotations

import agl_otel as agl

WANTED = ("friendly", "short", "example")


def tasks() -> list[str]:
    return ["What is a rollout?"]


def simple_agent(task: str, prompt_template: agl.PromptTemplate) -> float:
    prompt = prompt_template.format(question=task)
    agl.emit_message(f"asked: {prompt}")
    return sum(word in prompt for word in WANTED) / len(WANTED)
