"""Runner processes on a real stack: queue, collector, proxy, and a model server; the results are read back from ClickHouse."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agl_otel.queue.client import RolloutUpdate
from agl_otel.runner import groups
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.store import LightningStore
from agl_otel.traces.verdict import NOT_HANDED_IN
from agl_otel.types import LLM, EnqueueRolloutRequest, Rollout, RolloutConfig
from agl_otel.types.columns import Traces
from agl_otel_hook import conventions
from tests.model_server import ModelServer

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

AGENTS = '''
import multiprocessing, os, sys, time
from openai import AsyncOpenAI, OpenAI
from opentelemetry import trace

async def ask(question, llm):
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": question}])
    return answer.choices[0].message.content

client = OpenAI(max_retries=0)

def ask_by_environment(question):
    """Knows nothing of attempts: the client's address is the proxy's, and baggage says whose call it is."""
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    return answer.choices[0].message.content

def work():
    trace.get_tracer("agent").start_span("in a fork").end()

def forks(question):
    work()
    if question == "os.fork":
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ
    else:
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0
    return 1.0

def exits(question):
    if question == "sync":
        os._exit(3)
    if os.fork() == 0:
        os._exit(0)
    return 1.0

async def exits_async(question):
    if question == "async":
        os._exit(4)
    return 1.0

if __name__ == "__main__":
    print(ask_by_environment(sys.argv[1]))
    print("thinking", file=sys.stderr)
'''  # fmt: skip

GRADER = """
def grade(task, answer):
    return float(answer == f"0:{task['question']}"[::-1])
"""


class World:
    """A stack, a store, a model, and runner processes that end with the test."""

    def __init__(self, store: LightningStore, directory: Path) -> None:
        self.store = store
        self.directory = directory
        self.agents = directory / "agents.py"
        self.agents.write_text(AGENTS)
        self.grader = directory / "grader.py"
        self.grader.write_text(GRADER)
        self._processes: list[asyncio.subprocess.Process] = []

    async def runner(self, *arguments: str, cwd: Path | None = None) -> asyncio.subprocess.Process:
        """Start `python -m agl_otel.runner`."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "OPENAI_"))}
        env["AGL_STORE"] = self.store.description.queue
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agl_otel.runner", *arguments, env=env, stdout=asyncio.subprocess.PIPE, cwd=cwd or self.directory
        )
        self._processes.append(process)
        return process

    async def enqueue(self, *questions: str, **config: Any) -> list[Rollout]:
        requests = [EnqueueRolloutRequest(input={"question": q}, config=RolloutConfig(**config)) for q in questions]
        return await self.store.enqueue(requests)

    async def finished(self, rollouts: list[Rollout], timeout_seconds: float = 300.0) -> Traces:
        ids = [rollout.rollout_id for rollout in rollouts]
        found = await self.store.wait(ids, timeout_seconds=timeout_seconds)
        assert len(found) == len(ids), f"only {len(found)} of {len(ids)} rollouts finished"
        return await self.store.traces(rollouts)

    async def end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LightningStore]:
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port"), 0)
    settings = Settings.load(data_dir=tmp_path_factory.mktemp("stack"), **ports)
    model = ModelServer()
    await model.start()
    async with Stack(settings, only=("queue", "collector", "proxy")) as stack, await LightningStore.connect(stack.address) as store:

        async def announced() -> bool:
            store.description = await store.queue.describe()
            return bool(store.description.proxies and store.description.collectors)

        await eventually(announced)
        await store.publish({"main": LLM(endpoint=model.url, model="m", api_key="sk-secret")})
        yield store
    await model.stop()


async def eventually(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until a condition of other processes holds; they set no event."""
    async with asyncio.timeout(300):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="module")
async def world(store: LightningStore, tmp_path: Path) -> AsyncIterator[World]:
    world = World(store, tmp_path)
    yield world
    await world.end()


async def pid_in(path: Path) -> int:
    """Wait until a process has written its id and a line end to `path`."""
    found: list[str] = []
    await eventually(lambda: path.exists() and path.read_text().endswith("\n") and not found.append(path.read_text()))
    return int(found[0])


def rewards(traces: Traces) -> list[float]:
    return [found[-1].value for _, found in sorted(traces.rewards.items())]


def verdicts(traces: Traces) -> set[tuple[str, tuple[str, ...]]]:
    return {(verdict.kind, tuple(verdict.reasons)) for verdict in traces.verdicts.values()}


@pytest.mark.parametrize("function", ["ask", "ask_by_environment"])
async def test_function_agents_make_complete_traces_with_calls_tokens_and_rewards(world: World, function: str) -> None:
    rollouts = await world.enqueue(*(f"q{i}" for i in range(12)))
    grader = ("--grader", f"{world.grader}:grade")
    process = await world.runner("--function", f"{world.agents}:{function}", *grader, "--max-rollouts", "12", "--concurrency", "4")
    traces = await world.finished(rollouts)
    assert verdicts(traces) == {("complete", ())}
    assert rewards(traces) == [1.0] * 12
    assert sorted(traces.calls.rollout_id) == sorted(rollout.rollout_id for rollout in rollouts)
    assert all(len(traces.calls.response[row]) > 0 for row in range(12))
    assert await process.wait() == 0


async def test_spans_of_a_function_agents_forks_are_stored_and_counted(world: World) -> None:
    rollouts = await world.enqueue(*(3 * ["os.fork", "multiprocessing"]))
    process = await world.runner("--function", f"{world.agents}:forks", "--max-rollouts", "6", "--concurrency", "2")
    traces = await world.finished(rollouts)
    assert verdicts(traces) == {("complete", ())}
    for rollout in rollouts:
        spans = [span for span in await world.store.query_spans(rollout.rollout_id) if span.name == "in a fork"]
        assert len(spans) == len({span.attributes[conventions.PROCESS] for span in spans}) == 2
    assert await process.wait() == 0


@pytest.mark.parametrize(("function", "question", "status"), [("exits", "sync", 3), ("exits_async", "async", 4)])
async def test_os_exit_in_a_function_fails_its_attempt_and_the_runner_continues(
    world: World, function: str, question: str, status: int
) -> None:
    [first, second] = await world.enqueue(question, "plain")
    process = await world.runner("--function", f"{world.agents}:{function}", "--max-rollouts", "2", "--concurrency", "1")
    await world.finished([first, second])
    [ended, other] = await world.store.queue.query_attempts([first.rollout_id, second.rollout_id])
    by_rollout = {attempt.rollout_id: attempt for attempt in (ended, other)}
    assert by_rollout[second.rollout_id].status == "succeeded" and by_rollout[first.rollout_id].status == "failed"
    assert f"the function called os._exit({status})" in (by_rollout[first.rollout_id].error or "")
    assert await process.wait() == 0


async def test_an_unmodified_command_makes_a_complete_trace_and_its_output_is_stored(world: World) -> None:
    [rollout] = await world.enqueue("abc")
    command = ("--", sys.executable, str(world.agents), "{question}")
    process = await world.runner("--grader", f"{world.grader}:grade", "--max-rollouts", "1", *command)
    traces = await world.finished([rollout])
    assert verdicts(traces) == {("complete", ())}
    assert rewards(traces) == [1.0]
    assert len(traces.calls) == 1
    assert await process.wait() == 0
    spans = await world.store.spans(rollout.rollout_id)
    root = next(span for span in spans if span.name == conventions.SPAN_ATTEMPT)
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert any(span.name.startswith("openai") for span in spans), [span.name for span in spans]
    await world.store.reader.barrier()
    logs = await world.store.reader.query(
        "SELECT Body, LogAttributes['log.iostream'] AS stream, AttemptId FROM otel_logs"
        " WHERE RolloutId = {r:String} AND stream != '' ORDER BY stream",
        params={"r": rollout.rollout_id},
    )
    assert [(row["Body"], row["stream"], row["AttemptId"]) for row in logs] == [
        ("thinking\n", "stderr", root.attempt_id),
        ("cba:0\n", "stdout", root.attempt_id),
    ]


async def test_forks_of_a_warm_parent_have_complete_traces_and_exit_codes(world: World) -> None:
    rollouts = await world.enqueue(*(f"q{i}" for i in range(10)))
    command = ("--", sys.executable, str(world.agents), "{question}")
    process = await world.runner("--warm", "--grader", f"{world.grader}:grade", "--max-rollouts", "10", "--concurrency", "2", *command)
    traces = await world.finished(rollouts, timeout_seconds=300)
    assert verdicts(traces) == {("complete", ())}
    assert rewards(traces) == [1.0] * 10
    said = (await process.communicate())[0].decode()
    assert re.search(r"Completed in \d+\.\d\ds\. Collected \d+ span\(s\)\. Final reward: 1\.0", said)
    assert "10 rollouts done: succeeded 10" in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)  # they have no handler
async def test_a_killed_agent_leaves_an_incomplete_attempt_and_the_retry_counts(world: World, number: signal.Signals) -> None:
    mark = world.directory / "mark"
    code = (
        "import os, sys\nfrom opentelemetry import trace\n"
        "trace.get_tracer('a').start_span('work').end(); trace.get_tracer_provider().force_flush()\n"
        "with trace.get_tracer('a').start_as_current_span('more'):\n"
        f"    if not os.path.exists(sys.argv[1]): open(sys.argv[1], 'w').close(); os.kill(os.getpid(), {int(number)})\n"
    )
    [rollout] = await world.enqueue("x", max_attempts=2, retry_condition=["failed"])
    await world.runner("--max-rollouts", "2", "--concurrency", "1", "--", sys.executable, "-c", code, str(mark))
    traces = await world.finished([rollout], timeout_seconds=300)
    attempts = await world.store.queue.query_attempts([rollout.rollout_id])
    assert [attempt.status for attempt in attempts] == ["failed", "succeeded"]
    kinds = [traces.verdicts[rollout.rollout_id, attempt.attempt_id].kind for attempt in attempts]
    assert kinds == ["incomplete", "complete"]
    (reason,) = traces.verdicts[rollout.rollout_id, attempts[0].attempt_id].reasons
    assert re.fullmatch(r"process \d+ \(.*python.*\): 1 span was in flight when it died", reason)


async def test_a_program_that_writes_no_span_still_gets_its_grade(world: World) -> None:
    [rollout] = await world.enqueue("abc")
    await world.runner("--grader", f"{world.grader}:grade", "--max-rollouts", "1", "--", "echo", "cba:0")
    traces = await world.finished([rollout])
    assert rewards(traces) == [1.0]
    assert len(traces.calls) == 0
    assert {kind for kind, _ in verdicts(traces)} == {"empty"}


async def test_a_killed_runners_agent_ends_and_its_rollout_runs_again(world: World) -> None:
    marks = world.directory / "marks"
    code = "import os, sys, time\nopen(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\nif sys.argv[2] == 'hang': time.sleep(120)\n"
    [rollout] = await world.enqueue("x", unresponsive_seconds=1.0, max_attempts=2, retry_condition=["unresponsive"])
    first = await world.runner("--no-instrument", "--", sys.executable, "-c", code, str(marks), "hang")
    group = await pid_in(marks)
    first.kill()
    await first.wait()
    await eventually(lambda: not groups.is_alive(group))
    await world.runner("--no-instrument", "--max-rollouts", "1", "--", sys.executable, "-c", code, str(marks), "run")
    await world.finished([rollout])
    attempts = await world.store.queue.query_attempts([rollout.rollout_id])
    assert [attempt.status for attempt in attempts] == ["unresponsive", "succeeded"]


@pytest.mark.parametrize(
    ("on_sigterm", "kind"),
    [
        pytest.param(
            "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))",
            "incomplete",
            id="incomplete-because-its-agent-died-in-a-span",
        ),
        pytest.param("pass", "complete", id="complete-because-the-agent's-hook-closes-on-the-kernel's-SIGTERM"),
    ],
)
async def test_the_ledger_of_a_killed_runner_is_exported_by_the_next_one(world: World, on_sigterm: str, kind: str) -> None:
    mark = world.directory / "mark"
    code = (
        "import os, signal, sys, time\nfrom opentelemetry import trace\n"
        f"{on_sigterm}\ntracer = trace.get_tracer('a')\n"
        "still_open = tracer.start_span('open')\ntracer.start_span('work').end(); trace.get_tracer_provider().force_flush()\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()}\\n')\ntime.sleep(120)\n"
    )
    [rollout] = await world.enqueue("x")
    runner = await world.runner("--", sys.executable, "-c", code, str(mark))
    agent = await pid_in(mark)
    runner.kill()
    await runner.wait()
    await eventually(lambda: not groups.is_alive(agent))
    [attempt] = await world.store.queue.query_attempts([rollout.rollout_id])
    key = (rollout.rollout_id, attempt.attempt_id)
    before = (await world.store.traces([rollout], deadline_seconds=0)).verdicts[key]
    assert (before.kind, before.reasons[0]) == ("incomplete", NOT_HANDED_IN)
    await world.runner("--", sys.executable, "-c", "pass")

    async def handed_in() -> bool:
        return (await world.store.queue.query_attempts([rollout.rollout_id]))[0].ledger is not None

    await eventually(handed_in)
    assert (await world.store.traces([rollout])).verdicts[key].kind == kind
    await world.store.queue.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])


async def test_sigterm_lets_the_agent_finish_and_a_second_one_ends_it_at_once(world: World) -> None:
    marks = world.directory / "marks"
    code = "import os, sys, time\nopen(sys.argv[1], 'w').write(f'{os.getpid()}\\n')\ntime.sleep(120)\n"
    await world.enqueue("x")
    process = await world.runner("--no-instrument", "--", sys.executable, "-c", code, str(marks))
    group = await pid_in(marks)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await process.wait()
    assert groups.is_alive(group)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 128 + signal.SIGTERM
    await eventually(lambda: not groups.is_alive(group))


async def test_wrong_usage_is_exit_code_2_before_anything_is_claimed(world: World) -> None:
    assert await (await world.runner()).wait() == 2
    assert await (await world.runner("--function", "no_such_file.py:agent")).wait() == 2
    assert await (await world.runner("--", "no-such-program")).wait() == 2
    await world.enqueue("x")
    assert await (await world.runner("--", "echo", "{gold}")).wait() == 2
