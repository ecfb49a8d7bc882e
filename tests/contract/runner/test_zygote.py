"""Command agents that are forked from a warm parent behave like processes that were started afresh."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from agl_otel.net.auth import attempt_ingest_key, attempt_key
from agl_otel.queue.client import RolloutUpdate
from agl_otel.runner import groups
from agl_otel.runner.agents.command import CommandAgent
from agl_otel.runner.job import Grader
from agl_otel.runner.starting import WarmStarter
from agl_otel.types import LLM, Attempt, Rollout
from agl_otel_hook import conventions
from tests.contract.runner.conftest import Stack
from tests.environments import AbsentError, unhooked

SPAN = "from opentelemetry import trace\ntrace.get_tracer('a').start_span('work').end()\n"


class Kept(CommandAgent):
    """A command agent with access to its warm parent."""

    @property
    def warm(self) -> WarmStarter:
        assert isinstance(self._starter, WarmStarter)
        return self._starter

    @property
    def parent(self) -> int:
        assert self.warm._zygote is not None  # pyright: ignore[reportPrivateUsage]  # a process to be killed
        return self.warm._zygote.pid  # pyright: ignore[reportPrivateUsage]  # as above


def agent(stack: Stack, code: str, *arguments: str, grader: Grader | None = None, **options: Any) -> Kept:
    path = stack.directory / "agent.py"
    path.write_text(textwrap.dedent(code))
    return Kept([sys.executable, "agent.py", *arguments], cwd=stack.directory, warm=True, grader=grader, **options)


async def run(stack: Stack, kept: CommandAgent, *tasks: Any, concurrency: int = 2, **config: Any) -> list[tuple[Rollout, Attempt]]:
    rollouts = await stack.enqueue(*(tasks or ("t",)), **config)
    await stack.run(kept, max_rollouts=len(rollouts), concurrency=concurrency, grace_seconds=100.0)
    return list(zip(rollouts, await stack.finished(*rollouts), strict=True))


async def test_forks_have_ids_markers_randomness_and_seals_of_their_own(stack: Stack) -> None:
    code = """
        import json, os, random, sys, uuid
        import numpy
        from opentelemetry import trace
        with trace.get_tracer('a').start_as_current_span('work'):
            numbers = [random.random(), float(numpy.random.random()), str(uuid.uuid4())]
            print(json.dumps([numbers, sys.argv, os.environ['AGL_TASK'], os.getcwd(), __name__, __file__, os.getpid() == os.getpgid(0)]))
    """
    said: list[Any] = []
    kept = agent(stack, code, "{n}", grader=lambda task, answer: said.append((task, json.loads(answer))) or 1.0)
    ended = await run(stack, kept, *({"n": n} for n in range(5)))
    assert [attempt.status for _, attempt in ended] == ["succeeded"] * 5
    assert kept.warm.forks == 5
    for task, (_, argv, task_text, cwd, *rest) in said:
        assert argv == ["agent.py", str(task["n"])] and json.loads(task_text) == task
        assert Path(cwd) == stack.directory and rest == ["__main__", "agent.py", True]
    for kind in range(3):
        assert len({numbers[kind] for _, (numbers, *_) in said}) == 5, "one random state in two forks"
    works = [span for rollout, _ in ended for span in stack.spans(rollout, "work")]
    assert sorted(span.key for span in works) == sorted((rollout.rollout_id, attempt.attempt_id) for rollout, attempt in ended)
    assert len({span.marker for span in works}) == 5
    assert {span.marker: stack.receiver.seals().get(span.marker) for span in works} == {span.marker: (1, 0) for span in works}
    roots = {root.span_id for rollout, _ in ended for root in stack.spans(rollout, conventions.SPAN_ATTEMPT)}
    assert {span.parent_id for span in works} == roots


@pytest.mark.full  # an environment of its own
@pytest.mark.parametrize("name", ["the oldest sdk", "nothing"])
async def test_a_python_without_anything_of_ours_is_forked_too(stack: Stack, name: str) -> None:
    try:
        python = unhooked(name)
    except AbsentError as absent:
        pytest.skip(str(absent))
    (stack.directory / "agent.py").write_text(
        SPAN + f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPAN!r}], check=True)\n"
    )
    kept = Kept([str(python), "agent.py"], cwd=stack.directory, warm=True, inject=name == "nothing")
    ended = await run(stack, kept, "a", "b")
    assert ([attempt.status for _, attempt in ended], kept.warm.forks) == (["succeeded"] * 2, 2)
    assert [len(stack.spans(rollout, "work")) for rollout, _ in ended] == [2, 2], "of the agent, and of a process that it starts"


async def test_a_fork_has_its_attempts_keys_and_the_warm_parent_has_none(stack: Stack) -> None:
    code = """
        import json, os
        from pathlib import Path
        names = ("OTEL_EXPORTER_OTLP_HEADERS", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
        print(json.dumps([Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace"), *(unquoted(os.environ[n]) for n in names)]))
    """.replace("unquoted(", "__import__('urllib.parse').parse.unquote(")
    said: list[list[str]] = []
    kept = agent(stack, code, grader=lambda task, answer: said.append(json.loads(answer)) or 1.0)
    rollouts = await stack.enqueue("a", "b", resources={"main": LLM(endpoint="http://model/v1", model="m")})
    await stack.run(kept, max_rollouts=2, concurrency=1, grace_seconds=100.0, token="secret")
    attempts = await stack.finished(*rollouts)
    ids = [(attempt.rollout_id, attempt.attempt_id) for attempt in attempts]
    bound = {f"authorization=Bearer {attempt_ingest_key('secret', *each)}": attempt_key("secret", *each) for each in ids}
    assert kept.warm.forks == 2 and {headers: (one, two) for _, headers, one, two in said} == {k: (v, v) for k, v in bound.items()}
    parents = unquote("".join(environment for environment, *_ in said))
    assert "PATH=" in parents and not any(key in parents for headers, model in bound.items() for key in (headers.split()[1], model))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("import sys; sys.exit('no model')", "ended with exit code 1: no model"),
        (
            "raise ValueError('no gold')",
            'ended with exit code 1: ValueError: no gold\nTraceback (most recent call last):\n  File "agent.py", line 1',
        ),
        ("import os; os._exit(7)", "ended with exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("def broken(:", "SyntaxError"),
    ],
)
async def test_a_fork_exits_like_an_interpreter(stack: Stack, code: str, message: str) -> None:
    kept = agent(stack, code)
    [(_, attempt)] = await run(stack, kept)
    assert kept.warm.forks == 1
    assert attempt.status == "failed"
    assert message in (attempt.error or "")


async def test_threads_and_exit_handlers_finish_and_child_processes_are_ended(stack: Stack) -> None:
    code = """
        import atexit, os, subprocess, sys, threading, time
        from opentelemetry import trace
        tracer = trace.get_tracer('a')
        atexit.register(lambda: tracer.start_span('at exit').end())
        def late():
            time.sleep(0.2); tracer.start_span('late').end()
        threading.Thread(target=late).start()
        server = subprocess.Popen([sys.executable, '-S', '-c', 'import sys\\nfor line in sys.stdin: print(line, end="", flush=True)\\n'
            'import time; time.sleep(60)'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # as an MCP server over stdio
        server.stdin.write('ping\\n'); server.stdin.flush()
        assert server.stdout.readline() == 'ping\\n'
        open('pid', 'w').write(str(server.pid))
    """
    [(rollout, attempt)] = await run(stack, agent(stack, code))
    assert attempt.status == "succeeded", attempt.error
    assert stack.spans(rollout, "late") and stack.spans(rollout, "at exit")
    pid = int((stack.directory / "pid").read_text())
    await stack.until(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())


async def test_modules_and_code_are_forked_and_other_options_start_afresh(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    (stack.directory / "mine.py").write_text(f"import sys\nassert __name__ == '__main__' and sys.argv[1:] == ['x']\n{SPAN}")
    for arguments, forks in ((["-m", "mine", "x"], 1), (["-u", "-c", SPAN], 1), (["-B", "mine.py", "x"], 0)):
        kept = Kept([sys.executable, *arguments], cwd=stack.directory, warm=True)
        with caplog.at_level(logging.WARNING):
            [(rollout, attempt)] = await run(stack, kept)
        assert (attempt.status, kept.warm.forks, len(stack.spans(rollout, "work"))) == ("succeeded", forks, 1), attempt.error
    assert "started afresh each time, which is slower: the interpreter's option -B" in caplog.text


UNFIT = {
    "thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='poller', daemon=True).start()", "poller"),
    "socket": ("import socket\nkept = socket.socket()", "holds 1 open sockets"),
    "failure": ("raise OSError('no card')", "OSError: no card"),
}


async def test_forks_of_a_fork_are_recorded_with_the_agents_command(stack: Stack) -> None:
    code = """
        import multiprocessing
        from opentelemetry import trace
        def work():
            trace.get_tracer('a').start_span('work').end()
        work()
        worker = multiprocessing.get_context('fork').Process(target=work)
        worker.start()
        worker.join()
    """
    [(rollout, attempt)] = await run(stack, agent(stack, code, "{n}"), {"n": 7})
    assert attempt.ledger is not None and attempt.status == "succeeded"
    assert [record.command for record in attempt.ledger.processes] == [f"{sys.executable} agent.py 7"] * 2
    assert len(stack.spans(rollout, "work")) == 2
    assert stack.events[-1].spans == 2 + stack.proxy.spans


@pytest.mark.parametrize("why", UNFIT)
async def test_a_program_that_cannot_be_forked_is_started_afresh(stack: Stack, why: str, caplog: pytest.LogCaptureFixture) -> None:
    module, words = UNFIT[why]
    (stack.directory / f"starts_{why}.py").write_text(module)
    kept = agent(stack, SPAN, preload=[f"starts_{why}"])
    with caplog.at_level(logging.WARNING):
        [(rollout, attempt)] = await run(stack, kept)
    assert attempt.error is None
    assert (attempt.status, kept.warm.forks, len(stack.spans(rollout, "work"))) == ("succeeded", 0, 1)
    assert "agents are started afresh each time" in caplog.text and words in caplog.text


@pytest.mark.full
async def test_a_fork_that_ignores_sigterm_is_killed_at_its_time_limit(stack: Stack) -> None:
    code = """
        import os, signal, time
        if "stay" in os.environ["AGL_TASK"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.fork()
            open('group', 'w').write(str(os.getpgid(0)))
            time.sleep(600)
    """
    kept = agent(stack, code, grace_seconds=0.3)
    await stack.enqueue("go")  # whose fork waits for the warm parent, so that the time limit of the other is its own
    [stay] = await stack.enqueue("stay", timeout_seconds=10.0)
    await stack.run(kept, max_rollouts=2, concurrency=1, grace_seconds=100.0)
    [first] = await stack.finished(stay)
    assert kept.warm.forks == 2
    assert first.status == "timeout"  # as the runner finds, or the queue, whichever looks first
    assert (first.error or "").endswith(("the agent ran past the attempt's 10 s", "ran longer than 10 s"))
    assert not groups.is_alive(int((stack.directory / "group").read_text()))


async def test_a_killed_warm_parent_fails_its_attempts_and_is_replaced(stack: Stack) -> None:
    kept = agent(stack, "import time\nopen('up', 'w').close()\ntime.sleep(60 if open('hang').read() == 'yes' else 0)\n")
    hang = stack.directory / "hang"
    hang.write_text("yes")
    first, second = await stack.enqueue("a", "b")
    async with stack.running(kept, concurrency=1):
        await stack.until((stack.directory / "up").exists)
        hang.write_text("no")
        os.kill(kept.parent, 9)
        attempts = await stack.finished(first, second)
        assert [attempt.status for attempt in attempts] == ["failed", "succeeded"]
        assert "ended with its warm parent" in (attempts[0].error or "")
        assert kept.warm.forks == 2
        parent = kept.parent
    assert not os.access(f"/proc/{parent}", os.F_OK), "a warm parent outlives its runner"


async def test_a_cancelled_attempt_ends_without_its_warm_parent(stack: Stack) -> None:
    kept = agent(stack, "import time\nopen('up', 'w').close()\ntime.sleep(60)\n")
    [rollout] = await stack.enqueue("a")
    async with stack.running(kept):
        await stack.until((stack.directory / "up").exists)
        await stack.queue.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
        await stack.until(lambda: any(event.outcome == "cancelled" for event in stack.events))
        assert kept.warm._zygote is not None and kept.warm._zygote.alive  # pyright: ignore[reportPrivateUsage]  # looked at only
