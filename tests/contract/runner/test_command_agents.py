"""Command agents with a real queue and OTLP receivers: every way in which a process can end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_otel.errors import UsageError
from agl_otel.queue.client import RolloutUpdate
from agl_otel.runner import groups
from agl_otel.runner.__main__ import event_line
from agl_otel.runner.agents.command import CommandAgent, wrapper_of
from agl_otel.runner.job import Grader
from agl_otel.runner.limits import Limits
from agl_otel.traces.verdict import NOT_LOADED
from agl_otel.types import LLM, Attempt, Rollout
from agl_otel_hook import conventions
from tests.contract.runner.conftest import Stack

MODEL = LLM(endpoint="http://vllm.example/v1", model="m", api_key="sk-secret")


def python(code: str, *arguments: str, grader: Grader | None = None, **options: Any) -> CommandAgent:
    """Make an agent that runs a Python program without the hook, which starts quickly."""
    return CommandAgent([sys.executable, "-S", "-c", code, *arguments], grader=grader, instrument=False, **options)


def rewards(stack: Stack, rollout: Rollout) -> list[Any]:
    return [span.attributes[conventions.reward_value_key(0)] for span in stack.spans(rollout, conventions.SPAN_ANNOTATION)]


async def one(stack: Stack, agent: CommandAgent, task: Any = "t", **config: Any) -> tuple[Rollout, Attempt]:
    [rollout] = await stack.enqueue(task, **config)
    await stack.run(agent, max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    return rollout, attempt


async def test_output_is_graded_and_stored_as_logs(stack: Stack) -> None:
    graded: list[Any] = []

    def grade(task: Any, answer: str) -> float:
        graded.append((task, answer))
        return 0.5

    agent = python("import sys; print(' ', sys.argv[1], '\\x1b[0m'); print('note', file=sys.stderr)", "{question}", grader=grade)
    rollout, attempt = await one(stack, agent, {"question": "2+2?"})
    assert graded == [({"question": "2+2?"}, "2+2? \x1b[0m")]
    assert (attempt.status, attempt.error, rewards(stack, rollout)) == ("succeeded", None, [0.5])
    assert stack.logs.printed[attempt.attempt_id] == {"stdout": "  2+2? \x1b[0m\n", "stderr": "note\n"}
    assert (attempt.seals or {})["proxy-marker"] == 2
    ended = stack.events[-1]
    assert (ended.spans, "Collected" in event_line(ended)) == (None, False), "nobody counts the spans of its processes"


async def test_the_environment_names_the_attempt_the_model_and_the_collector(stack: Stack) -> None:
    path = stack.directory / "environment.json"
    await stack.queue.put_resources({"main": MODEL})
    agent = python("import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))", str(path), env={"MINE": "kept"})
    rollout, attempt = await one(stack, agent, {"q": 1})
    env = json.loads(path.read_text())
    [root] = stack.spans(rollout, conventions.SPAN_ATTEMPT)
    assert env["AGL_ROLLOUT_ID"] == rollout.rollout_id
    assert env["TRACEPARENT"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert env["OPENAI_BASE_URL"].endswith(f"/rollout/{rollout.rollout_id}/attempt/{attempt.attempt_id}/v1")
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == stack.receiver.http_url
    assert env["MINE"] == "kept"
    assert "sk-secret" not in json.dumps(env)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('wrong', file=sys.stderr); sys.exit(1)", "ended with exit code 1: wrong"),
        ("raise ValueError('no gold')", "ended with exit code 1: ValueError: no gold"),
        ("import sys; print('only this'); sys.exit(3)", "ended with exit code 3: only this"),
        ("import os; os._exit(7)", "ended with exit code 7 and printed nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    ],
)
async def test_a_failing_process_fails_the_attempt_with_its_last_output(stack: Stack, code: str, message: str) -> None:
    rollout, attempt = await one(stack, python(code, grader=lambda task, answer: 1.0))
    assert attempt.status == "failed"
    assert message in (attempt.error or "")
    assert rewards(stack, rollout) == []


async def test_a_process_that_prints_nothing_is_graded_with_an_empty_answer(stack: Stack) -> None:
    rollout, attempt = await one(stack, python("", grader=lambda task, answer: float(answer == "")))
    assert (attempt.status, rewards(stack, rollout)) == ("succeeded", [1.0])


async def test_a_grader_that_raises_fails_the_attempt_and_gives_no_reward(stack: Stack) -> None:
    def strict(task: Any, answer: str) -> float:
        return float(answer)

    rollout, attempt = await one(stack, python("print('four')", grader=strict))
    assert attempt.status == "failed"
    assert "strict raised ValueError: could not convert string to float: 'four'" in (attempt.error or "")
    assert rewards(stack, rollout) == []


async def test_a_hanging_process_is_ended_at_its_time_limit_and_its_output_kept(stack: Stack) -> None:
    code = "import sys, time; print('so far', flush=True); time.sleep(600)"
    _, attempt = await one(stack, python(code, grace_seconds=200.0), timeout_seconds=5.0)
    assert attempt.status == "timeout"
    assert stack.logs.printed[attempt.attempt_id] == {"stdout": "so far\n"}
    assert stack.events[-1].seconds < 200, "it was asked to end"


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(stack: Stack) -> None:
    pids = stack.directory / "pids"
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
        "time.sleep(60)\n"
    )
    _, attempt = await one(stack, python(code, str(pids), grace_seconds=0.2), timeout_seconds=5.0)
    assert attempt.status == "timeout"
    found = [int(line) for line in pids.read_text().split()]
    assert len(found) == 2
    assert not any(running(pid) for pid in found)


async def test_cancelling_a_rollout_ends_the_whole_process_group(stack: Stack) -> None:
    path = stack.directory / "pid"
    code = "import os, sys, time; os.fork(); open(sys.argv[1], 'w').write(str(os.getpgid(0))); time.sleep(60)"
    [rollout] = await stack.enqueue("t")
    async with stack.running(python(code, str(path))):
        await stack.until(lambda: path.exists() and path.read_text())
        group = int(path.read_text())
        assert groups.is_alive(group)
        await stack.queue.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
        await stack.until(lambda: stack.events[-1].outcome == "cancelled")
        assert not groups.is_alive(group)
    [found] = await stack.queue.query_rollouts(rollout_id_in=[rollout.rollout_id])
    assert found.status == "cancelled"


async def test_background_processes_end_with_their_agent(stack: Stack) -> None:
    path = stack.directory / "pid"
    code = "import os, sys, time\nif os.fork(): os._exit(0)\nopen(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    _, attempt = await one(stack, python(code, str(path), grace_seconds=0.5))
    assert attempt.status == "succeeded"
    assert not path.exists() or not path.read_text() or not running(int(path.read_text()))


async def test_a_stop_lets_running_attempts_finish(stack: Stack) -> None:
    go = stack.directory / "go"
    code = "import os, sys, time\nprint('in', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    first, second = await stack.enqueue("a", "b")
    async with stack.running(python(code, str(go)), concurrency=1) as run:
        await stack.until(lambda: stack.events)
        stack.stop.set()
        await asyncio.sleep(0)
        go.touch()
        await run
    [attempt] = await stack.finished(first)
    assert attempt.status == "succeeded"
    [left] = await stack.queue.query_rollouts(rollout_id_in=[second.rollout_id])
    assert left.status == "queuing"


async def test_a_stop_ends_attempts_that_exceed_the_grace_period(stack: Stack) -> None:
    [rollout] = await stack.enqueue("t")
    async with stack.running(python("import time; time.sleep(60)"), grace_seconds=1.0):
        await stack.until(lambda: stack.events)
    [attempt] = await stack.finished(rollout)
    assert (attempt.status, attempt.error) == ("failed", "the runner was stopped before the agent had ended")


async def test_a_task_that_lacks_a_placeholder_fails_before_the_process_starts(stack: Stack) -> None:
    _, attempt = await one(stack, python("", "{gold}"), {"question": "q"})
    assert attempt.status == "failed"
    assert "the command asks for {gold}, which the task does not have" in (attempt.error or "")


async def test_a_task_too_large_for_the_environment_is_passed_by_file(stack: Stack) -> None:
    code = "import json, os; path = os.environ['AGL_TASK_FILE']; print(path, len(json.load(open(path))), 'AGL_TASK' in os.environ)"
    said: list[str] = []
    agent = python(code, grader=lambda task, answer: said.append(answer) or 1.0)
    _, attempt = await one(stack, agent, "x" * 200_000)
    assert attempt.status == "succeeded", attempt.error
    path, *rest = said[0].split()
    assert rest == ["200000", "False"]
    assert not os.access(path, os.F_OK)


async def test_an_argument_too_large_for_the_system_is_reported(stack: Stack) -> None:
    _, attempt = await one(stack, python("", "{task}"), "x" * 200_000)
    assert attempt.status == "failed"
    assert "the command could not be started" in (attempt.error or "")


async def test_an_agent_that_uses_too_much_memory_or_prints_too_much_is_ended(stack: Stack) -> None:
    hungry = python("import os, time\nif os.fork() == 0: kept = b'x' * (200 << 20)\ntime.sleep(60)", limits=Limits(memory_bytes=100 << 20))
    _, attempt = await one(stack, hungry)
    assert attempt.status == "failed" and "of memory: its limit is 100 MiB" in (attempt.error or "")
    chatty = python("while True: print('x' * 1000)", limits=Limits(output_bytes=1_000_000))
    _, attempt = await one(stack, chatty)
    assert attempt.status == "failed" and "bytes: its limit is 1000000" in (attempt.error or "")


async def test_a_detached_process_that_names_the_attempt_is_ended(stack: Stack) -> None:
    path = stack.directory / "pid"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
    )
    _, attempt = await one(stack, python(code, str(path)))
    assert attempt.status == "succeeded"
    await stack.until(lambda: not running(int(path.read_text())))


DAEMON = """
import ctypes, os, sys, time
from opentelemetry import trace
tracer = trace.get_tracer("daemon")
said, says = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        begin, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
        ctypes.memset(begin, 0, end - begin)  # the environment, as /proc shows it; setting a process's title does that
        for number in range(3): os.dup2(os.open(os.devnull, os.O_RDWR), number)
        open(sys.argv[1], "w").write(str(os.getpid()))
        for _ in range(100): tracer.start_span("ended").end()
        with tracer.start_as_current_span("open"):
            os.write(says, b".")
            time.sleep(600)
    os._exit(0)
os.read(said, 1)
"""


async def test_a_detached_process_that_only_the_ledger_names_ends_by_sigterm(stack: Stack) -> None:
    """So it exports what it has ended, and closes its ledger."""
    path, stack.proxy.spans = stack.directory / "pid", 0
    try:
        rollout, attempt = await one(stack, CommandAgent([sys.executable, "-c", DAEMON, str(path)], grace_seconds=300.0))
        assert not running(int(path.read_text()))
    finally:
        with contextlib.suppress(OSError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    assert attempt.ledger is not None and stack.verdict(attempt).kind == "complete", stack.verdict(attempt).reasons
    (daemon,) = [process for process in attempt.ledger.processes if process.pid == int(path.read_text())]
    assert (daemon.begun, daemon.ended, daemon.abandoned, daemon.closed) == (101, 100, 1, True)
    assert len(stack.spans(rollout, "ended")) == 100


async def test_output_is_stored_while_the_agent_runs(stack: Stack) -> None:
    go = stack.directory / "go"
    code = (
        "import os, sys, time\nprint('begun', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('half a line', end='')\n"
    )
    [rollout] = await stack.enqueue("t")
    async with stack.running(python(code, str(go)), output_seconds=0.05):
        await stack.until(lambda: {"stdout": "begun\n"} in stack.logs.printed.values())
        go.touch()
        [attempt] = await stack.finished(rollout)
    assert stack.logs.printed[attempt.attempt_id] == {"stdout": "begun\nhalf a line"}


async def test_an_answer_larger_than_the_kept_output_is_not_graded(stack: Stack) -> None:
    rollout, attempt = await one(stack, python("print('x' * 1_000_000)", grader=lambda task, answer: 1.0))
    assert attempt.status == "failed"
    assert "1000001 bytes" in (attempt.error or "")
    assert rewards(stack, rollout) == []
    assert "bytes cut" in stack.logs.printed[attempt.attempt_id]["stdout"]


def test_a_missing_command_is_refused_before_any_claim() -> None:
    with pytest.raises(UsageError, match="no program 'no-such-agent'"):
        CommandAgent(["no-such-agent"])
    with pytest.raises(UsageError, match="no command was given"):
        CommandAgent([])


def test_a_python_program_runs_under_the_hook_beside_its_interpreter(tmp_path: Path) -> None:
    wrapper = str(Path(sys.executable).with_name("opentelemetry-instrument"))
    assert wrapper_of([sys.executable, "agent.py"]) == [wrapper]
    assert wrapper_of([wrapper, "python", "agent.py"]) == []
    assert wrapper_of(["/bin/sh", "-c", "true"]) == []
    bare = [str(tmp_path / "python3"), "agent.py"]
    assert wrapper_of(bare) == []
    with pytest.raises(UsageError, match="has no opentelemetry-instrument beside it"):
        wrapper_of(bare, required=True)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_the_runners_own_counts_do_not_prove_that_the_hook_was_loaded(stack: Stack) -> None:
    [rollout] = await stack.enqueue("t")
    await stack.run(CommandAgent(["true"], hooked=True, grader=lambda task, answer: 1.0), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert attempt.ledger is not None and attempt.ledger.reach == "hooked"
    ((process,), verdict) = attempt.ledger.processes, stack.verdict(attempt)
    assert (process.pid, process.runner, process.begun, process.ended) == (os.getpid(), True, 1, 1)
    assert (attempt.status, verdict.kind) == ("succeeded", "incomplete")
    assert any(reason.startswith(NOT_LOADED) for reason in verdict.reasons)
