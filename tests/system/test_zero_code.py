"""docs/zero-code.md, section 4, exactly as written: no resources are published, and the model is the stack's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.settings import PORTS
from tests.model_server import ModelServer
from tests.system.stack_process import Command, run, until

pytestmark = pytest.mark.full
KEY, OWN_KEY = "sk-of-the-stack", "sk-of-the-runners-shell"
COMMAND = """
import sys, openai
answer = openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": sys.argv[1]}])
print(answer.choices[0].message.content)
"""
FUNCTIONS = """
import openai

def by_environment(task):
    openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])

def by_parameter(task, llm):
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
"""


@pytest.fixture
def stack(tmp_path: Path, model_server: ModelServer) -> Iterator[str]:
    """Run a stack with a model server and without resources; yield the queue's address."""
    folder = tmp_path
    free = [argument for port in PORTS for argument in (f"--{port.replace('_', '-')}", "0")]
    env = {"AGL_UPSTREAM_URL": model_server.url, "AGL_UPSTREAM_KEY": KEY}
    stack_file = folder / "data" / "stack.json"
    with Command("up", "--data-dir", str(folder / "data"), *free, log=folder / "up.log", cwd=folder, env=env):
        until(stack_file.exists, "stack.json is written")
        yield json.loads(stack_file.read_text())["queue"]["address"]


def attempt(stack: str, folder: Path, *runner: str) -> dict[str, Any]:
    """Run one task; return its rollout as `rollouts show` prints it."""
    (folder / "tasks.jsonl").write_text('{"question": "2 + 2?"}\n')
    env = {"AGL_STORE": stack, "OPENAI_API_KEY": OWN_KEY}
    done = run("rollouts", "enqueue", "--file", "tasks.jsonl", "--json", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    done = run("runner", "--max-rollouts", "1", *runner, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    done = run("rollouts", "ls", "--limit", "1", "--json", cwd=folder, env=env)
    rollout_id = json.loads(done.stdout)["items"][0]["rollout_id"]
    done = run("rollouts", "show", rollout_id, "--json", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_resources_agents_call_the_stacks_own_model(stack: str, tmp_path: Path, model_server: ModelServer) -> None:
    (tmp_path / "my_agent.py").write_text(COMMAND)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    for agent in (
        ("--", sys.executable, "my_agent.py", "{question}"),
        ("--function", "functions.py:by_parameter"),
        ("--function", "functions.py:by_environment"),
    ):
        model_server.headers.clear()
        shown = attempt(stack, tmp_path, *agent)
        [verdict] = shown["verdicts"].values()
        assert (shown["rollout"]["status"], verdict["kind"]) == ("succeeded", "complete"), shown
        assert [headers["authorization"] for headers in model_server.headers] == [f"Bearer {KEY}"]
