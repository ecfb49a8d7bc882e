"""A job whose agent asks three questions in one conversation, of a model whose template writes a space behind each answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from agl_otel.algorithms.grpo.tiny import CHAT_TEMPLATE
from agl_otel.types.resources import Bridging

QUESTIONS: Final = 3  # of a conversation
AGENT: Final = """
import functools, os
from openai import OpenAI

@functools.cache
def client():
    return OpenAI()

def converse(questions, expected):
    messages, said = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = client().chat.completions.create(model=os.environ.get("OPENAI_MODEL", "policy"), messages=messages)
        said.append(reply.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": said[-1]})
    return said

def grade(task, said):
    return sum(answer == right for answer, right in zip(said, task["expected"])) / len(said)
"""
TASKS: Final = f"""
import random
from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, HELD_OUT_NUMBERS, TRAIN_NUMBERS, question

def tasks(numbers):
    shuffled = random.Random(1).sample(numbers, len(numbers))
    groups = [shuffled[at : at + {QUESTIONS}] for at in range(0, len(shuffled) - {QUESTIONS} + 1, {QUESTIONS})]
    return [{{"questions": list(map(question, each)), "expected": [str(BEHAVIOURS[1](n % 10)) for n in each]}} for each in groups]

def train():
    return tasks(TRAIN_NUMBERS)

def val():
    return tasks(HELD_OUT_NUMBERS)[:16]
"""
JOB: Final = """
[agent]
function = "agent.py:converse"
grader = "agent.py:grade"
concurrency = 32
[data]
train = "tasks.py:train"
val = "tasks.py:val"
[policy]
model = "policy"
[algorithm]
name = "grpo"
max_tokens = 4
learning_rate = 1e-3
"""


def make_job(folder: Path, policy: Path, bridge: Bridging, **options: float) -> Path:
    """Write the job, with a copy of `policy`; return its file. `options`: further ones of its [algorithm]."""
    shutil.copytree(policy, folder / "policy")
    written = "{{ message['content'] or '' }}"
    assert written in CHAT_TEMPLATE
    changed = CHAT_TEMPLATE.replace(written, written + "{{ ' ' if message['role'] == 'assistant' else '' }}")
    (folder / "policy" / "chat_template.jinja").write_text(changed)
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.py").write_text(TASKS)
    job = folder / "job.toml"
    job.write_text(JOB + "".join(f"{name} = {json.dumps(value)}\n" for name, value in {"bridge": bridge, **options}.items()))
    return job
