"""Commands on the queue, against a queue service in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agl_otel.cli import main
from agl_otel.errors import UsageError
from agl_otel.queue.client import AttemptUpdate, QueueClient, RolloutUpdate
from agl_otel.settings import free_port
from agl_otel.types import LLM, EnqueueRolloutRequest, PromptTemplate

T = TypeVar("T")


class Stack:
    """Runs commands against one queue."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.address = address
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command, check its exit code, and return its stdout and stderr."""
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--store", self.address])
        captured = self._capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out + captured.err

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run a command with --json and parse its output."""
        return json.loads(self.run(*arguments, "--json", code=code))

    def do(self, work: Callable[[QueueClient], Awaitable[T]]) -> T:
        """Call the queue's client, for steps that no command offers."""

        async def client() -> T:
            async with QueueClient(self.address, retry_seconds=300) as queue:
                return await work(queue)

        return asyncio.run(client())

    def fail(self, count: int, why: str) -> None:
        """Claim `count` rollouts and complete them as failed."""

        async def work(queue: QueueClient) -> None:
            for claim in await queue.claim(count, worker_id="w-1"):
                attempt_id = claim.attempt.attempt_id
                failed = AttemptUpdate(rollout_id=claim.rollout_id, attempt_id=attempt_id, status="failed", error=why)
                await queue.update_attempts([failed])

        self.do(work)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("queue")
    port = free_port()
    environment = {**os.environ, "AGL_DATA_DIR": str(folder), "AGL_QUEUE_PORT": str(port), "AGL_LOG_LEVEL": "WARNING"}
    queue = subprocess.Popen([sys.executable, "-m", "agl_otel.queue"], env=environment)

    async def answers() -> None:  # commands do not wait for a queue that is still starting
        async with QueueClient(f"127.0.0.1:{port}", retry_seconds=300) as client:
            await client.describe()

    try:
        asyncio.run(answers())
        yield f"127.0.0.1:{port}"
    finally:
        queue.kill()
        queue.wait()


@pytest.fixture
def stack(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Stack:
    """An empty queue."""
    monkeypatch.setenv("COLUMNS", "200")
    stack = Stack(address, capsys)

    async def empty(queue: QueueClient) -> None:
        await queue.delete([rollout.rollout_id for rollout in await queue.query_rollouts()])

    stack.do(empty)
    return stack


def tasks(folder: Path, *lines: object) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_tasks_of_a_file_are_enqueued_once_under_a_key(stack: Stack, tmp_path: Path) -> None:
    file = tasks(tmp_path, {"question": 1}, {"input": "b", "mode": "val", "priority": 5}, "", 7)
    options = ("rollouts", "enqueue", "--file", file, "--mode", "train", "--label", "gpu=yes", "--max-attempts", "3", "--key", "k")
    ids = stack.json(*options)["rollout_ids"]
    assert stack.json(*options)["rollout_ids"] == ids
    items = stack.json("rollouts", "ls")["items"]
    assert [(i["input"], i["mode"], i["priority"], i["labels"]) for i in items] == [
        (7, "train", 0, {"gpu": "yes"}),
        ("b", "val", 5, {"gpu": "yes"}),
        ({"question": 1}, "train", 0, {"gpu": "yes"}),
    ]
    assert items[0]["config"]["max_attempts"] == 3
    assert [i["rollout_id"] for i in stack.json("rollouts", "--mode", "val")["items"]] == [ids[1]]
    assert "1 of 3 rollouts" in stack.run("rollouts", "--limit", "1")


def test_tasks_are_enqueued_from_the_command_line(stack: Stack) -> None:
    stack.run("rollouts", "enqueue", '{"question": "how many?"}', '{"input": "b", "mode": "val"}', "--mode", "train")
    assert [(i["input"], i["mode"]) for i in stack.json("rollouts", "ls")["items"]] == [("b", "val"), ({"question": "how many?"}, "train")]
    assert "task 2 is not JSON" in stack.run("rollouts", "enqueue", "1", "how many?", code=2)
    assert "give tasks, or --file" in stack.run("rollouts", "enqueue", code=2)


def test_a_list_without_a_collector_says_why_it_has_no_verdicts(stack: Stack) -> None:
    (rollout_id,) = stack.json("rollouts", "enqueue", '"a"')["rollout_ids"]
    stack.fail(1, "it broke")
    text = stack.run("rollouts", "ls")
    assert rollout_id in text and "failed" in text and "verdicts and rewards could not be read" in text


def test_times_of_a_rollout_are_shown_as_times(stack: Stack) -> None:
    (rollout_id,) = stack.json("rollouts", "enqueue", '"a"')["rollout_ids"]
    shown = re.search(r"queued\W+(\S+ \S+)", stack.run("rollouts", "show", rollout_id))
    assert shown is not None and abs(datetime.fromisoformat(shown[1]).timestamp() - time.time()) < 3600, shown


@pytest.mark.parametrize(
    ("options", "seconds"), [((), 60.0), (("--max-attempts", "2"), 60.0), (("--unresponsive", "9"), 9.0), (("--unresponsive", "0"), None)]
)
def test_enqueued_tasks_survive_the_death_of_their_runner(
    stack: Stack, tmp_path: Path, options: tuple[str, ...], seconds: float | None
) -> None:
    own: list[dict[str, Any]] = [{"max_attempts": 4}, {"unresponsive_seconds": 7}, {"unresponsive_seconds": None}]
    file = tasks(tmp_path, 1, *({"input": 2, "config": config} for config in own))
    ids = stack.json("rollouts", "enqueue", "--file", file, *options)["rollout_ids"]
    found = {item["rollout_id"]: item["config"] for item in stack.json("rollouts", "ls")["items"]}
    configs = [found[rollout_id] for rollout_id in ids]
    assert [config["unresponsive_seconds"] for config in configs] == [seconds, seconds, 7.0, None]
    attempts = 2 if "--max-attempts" in options else 1
    assert [config["max_attempts"] for config in configs] == [attempts, 4, attempts, attempts]
    assert all(("unresponsive" in config["retry_condition"]) == ("--max-attempts" in options) for config in configs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "tasks.jsonl:2 is not JSON"),
        ({"input": 1, "mode": "holiday"}, "tasks.jsonl:2: mode"),
        ({"input": 1, "config": {"max_attempts": 0}}, "tasks.jsonl:2: config.max_attempts"),
        ({"input": 1, "rollout_id": "../x"}, "tasks.jsonl:2: rollout id '../x'"),
        ({"input": 1, "mode": "production"}, "tasks.jsonl:2: the mode production is of rollouts made from traces"),
        ('{"input": NaN}', "tasks.jsonl:2 is not JSON (NaN is no JSON"),
        ("[1e999]", "tasks.jsonl:2 is not JSON (the number 1e999 is beyond"),
        ("-Infinity", "tasks.jsonl:2 is not JSON (-Infinity is no JSON"),
        ("9" * 5000, "tasks.jsonl:2 is not JSON"),
        ("[" * 200_000, "tasks.jsonl:2 is not JSON (it is nested too deeply"),
        ('{"input": 1, "resources_id": "\\ud800"}', "tasks.jsonl:2 is not JSON (it has an unpaired surrogate"),
        ('{"input": 1, "labels": {"\\ud800": "x"}}', "tasks.jsonl:2 is not JSON (it has an unpaired surrogate"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_enqueued(stack: Stack, tmp_path: Path, line: object, message: str) -> None:
    assert message in stack.run("rollouts", "enqueue", "--file", tasks(tmp_path, 1, line), code=2)
    assert stack.json("queue", "stats")["total_rollouts"] == 0


@pytest.mark.parametrize(("options", "line"), [(["--resources-id", "none"], 1), ([], {"input": 1, "resources_id": "none"})])
def test_unknown_resources_are_refused_and_the_known_ones_named(stack: Stack, tmp_path: Path, options: list[str], line: object) -> None:
    stack.do(
        lambda queue: queue.put_resources({"prompt": PromptTemplate(template="x", engine="f-string")}, resources_id="mine", aside=True)
    )
    output = stack.run("rollouts", "enqueue", "--file", tasks(tmp_path, 2, line), *options, code=2)
    assert "no resources 'none'; known: " in output and "mine" in output
    assert stack.json("rollouts", "ls")["items"] == []
    assert stack.json("rollouts", "enqueue", "--file", tasks(tmp_path, 1), "--resources-id", "mine")["rollout_ids"]


def test_an_empty_resources_id_is_refused(stack: Stack, tmp_path: Path) -> None:
    output = stack.run("rollouts", "enqueue", "--file", tasks(tmp_path, 1), "--resources-id", "", code=2)
    assert "resources ''" in output and stack.json("rollouts", "ls")["items"] == []


@pytest.mark.parametrize(("command", "what"), [("retry", "requeued"), ("cancel", "cancelled")])
def test_what_cannot_be_changed_is_named_with_its_status(stack: Stack, tmp_path: Path, command: str, what: str) -> None:
    done, open_one = stack.json("rollouts", "enqueue", "--file", tasks(tmp_path, 1, 2))["rollout_ids"]
    if command == "retry":
        stack.run("rollouts", "cancel", open_one)
    stack.do(lambda queue: queue.update_rollouts([RolloutUpdate(rollout_id=done, status="succeeded")]))
    output = stack.run("rollouts", command, done, open_one)
    assert f"{what} 1 rollouts" in output and f"left as it is: {done} (succeeded)" in output
    assert f"{what} 0 rollouts" in stack.run("rollouts", command, done)


def test_adopted_rollouts_are_refused_alike_by_enqueue_and_runner(stack: Stack, tmp_path: Path) -> None:
    enqueued = stack.run("rollouts", "enqueue", "--mode", "production", "--file", tasks(tmp_path, 1), code=2)
    served = stack.run("runner", "--mode", "production", code=2)
    sentence = "the mode production is of rollouts made from traces of a running product (AGL_UNIDENTIFIED=adopt), which no runner runs"
    for output in (enqueued, served):
        assert sentence in " ".join(output.split()), output
    with pytest.raises(UsageError, match="the mode production"):
        stack.do(lambda queue: queue.enqueue([EnqueueRolloutRequest(input=1, mode="production")]))
    assert stack.json("queue", "stats")["total_rollouts"] == 0


def test_a_line_that_is_not_utf_8_is_named(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"q": 1}\n{"q": "caf\xe9"}\n')
    assert "tasks.jsonl:2 is not UTF-8 (byte 11 is 0xe9)" in stack.run("rollouts", "enqueue", "--file", str(path), code=2)


def test_failed_rollouts_are_listed_with_reasons_and_can_be_retried(stack: Stack, tmp_path: Path) -> None:
    ids = stack.json("rollouts", "enqueue", "--file", tasks(tmp_path, 1, 2))["rollout_ids"]
    stack.fail(1, "the agent raised ValueError")
    text = stack.run("queue", "dead")
    assert "the agent raised ValueError" in text
    assert "1 of 1 dead" in text
    shown = stack.json("rollouts", "show", ids[0][5:])
    assert [a["error"] for a in shown["attempts"]] == ["the agent raised ValueError"]
    assert stack.json("rollouts", "wait", ids[0], code=1) == {"ended": {ids[0]: "failed"}, "open": []}
    assert stack.json("rollouts", "retry", "--status", "failed") == {"requeued": 1}
    assert stack.json("queue", "dead")["total"] == 0
    assert stack.json("queue", "stats")["rollouts_by_status"] == {"queuing": 1, "requeuing": 1}
    assert stack.json("rollouts", "wait", "--timeout", "0", code=1) == {"ended": {}, "open": ids}


def test_rollouts_are_cancelled_and_deleted_by_id_or_status(stack: Stack, tmp_path: Path) -> None:
    ids = stack.json("rollouts", "enqueue", "--file", tasks(tmp_path, 1, 2, 3))["rollout_ids"]
    assert "cancelled 1 rollouts" in stack.run("rollouts", "cancel", ids[0])
    assert stack.json("rollouts", "cancel", *ids) == {"cancelled": 2, "left": {ids[0]: "cancelled"}}
    assert "nothing was deleted" in (text := stack.run("rollouts", "delete", "--yes", ids[1], code=1))
    assert "start one with `agl-otel up`" in text
    assert stack.json("rollouts", "delete", ids[1], "--keep-spans") == {"deleted": 1}
    assert "deleted 2 rollouts" in stack.run("rollouts", "delete", "--status", "cancelled", "--yes", "--keep-spans")
    assert "select rollouts by their ids" in stack.run("rollouts", "cancel", code=2)
    for command in (("rollouts", "delete", ids[2], "--wait", "--keep-spans"), ("queue", "prune", "--keep-spans", "--wait")):
        assert "do not go together" in stack.run(*command, code=2)
    assert f"there is no rollout {ids[1]!r}" in stack.run("rollouts", "retry", ids[1], code=2)


def test_old_rollouts_are_pruned_and_open_ones_stay(stack: Stack, tmp_path: Path) -> None:
    stack.run("rollouts", "enqueue", "--file", tasks(tmp_path, *range(5)))
    stack.fail(3, "x")
    assert "--older-than 30d" in stack.run("queue", "prune", code=2)
    assert "is not a span of time" in stack.run("queue", "prune", "--older-than", "soon", code=2)
    assert stack.json("queue", "prune", "--older-than", "1h") == {"found": 0, "removed": 0}
    assert stack.json("queue", "prune", "--older-than", "0s", "--dry-run") == {"found": 3, "removed": 0}
    assert "nothing was deleted" in stack.run("queue", "prune", "--older-than", "0s", code=1)
    assert stack.json("queue", "prune", "--older-than", "0s", "--status", "failed", "--keep-spans") == {"found": 3, "removed": 3}
    assert stack.json("queue", "stats")["rollouts_by_status"] == {"queuing": 2}


def test_resources_and_workers_are_shown_without_keys(stack: Stack) -> None:
    assert "no resources yet" in stack.run("resources", "show", code=2)
    llm = LLM(endpoint="http://me:pa55word@a/v1", model="m", api_key="sk-0123456789")
    prompt = PromptTemplate(template="{x}", engine="f-string")
    stack.do(lambda queue: queue.put_resources({"main_llm": llm, "p": prompt}, resources_id="mine"))
    stack.do(lambda queue: queue.enqueue([EnqueueRolloutRequest(input=1)]))
    stack.do(lambda queue: queue.claim(1, worker_id="w-1"))
    assert "main_llm (llm), p (prompt_template)" in stack.run("resources", "ls")
    shown = stack.run("resources", "show")
    for text in (shown, stack.run("resources", "show", "--json"), stack.run("resources", "ls", "--json")):
        assert "sk-0123456789" not in text and "pa55word" not in text and "@a/v1" in text
    assert stack.json("resources", "show", "mine", "--version", "1")["version"] == 1
    [worker] = stack.json("workers", "ls", "--status", "busy")["items"]
    assert worker["worker_id"] == "w-1"
    assert "w-1" in stack.run("workers", "ls")


def test_top_takes_two_readings_without_a_terminal(stack: Stack) -> None:
    stack.do(lambda queue: queue.enqueue([EnqueueRolloutRequest(input="one"), EnqueueRolloutRequest(input="two")]))
    text = stack.run("top", "--every", "0.2")
    assert "2 rollouts, 0 attempts" in text and "queuing 2" in text and "no collector has registered" in text
    reading = stack.json("top", "--every", "0.2")
    assert reading["statistics"]["claimable"] == 2 and reading["finished_per_second"] == 0.0 and reading["collectors"] == []


def test_top_runs_on_a_terminal_until_ctrl_c(stack: Stack) -> None:
    stack.do(lambda queue: queue.enqueue([EnqueueRolloutRequest(input="one")]))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "agl_otel", "top", "--every", "0.2", "--store", stack.address]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"1 rollouts") < 3:  # it refreshes
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0, process.stderr and process.stderr.read()
    os.close(ours)
