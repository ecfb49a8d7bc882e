"""A runner during outages of the stack, with faulty observers and with wrong options."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from agl_otel.compat.runner import LitAgentRunner
from agl_otel.compat.tracer import DummyTracer
from agl_otel.errors import UsageError
from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.queue.server import QueueServer, open_engine
from agl_otel.runner.agents import CommandAgent, FunctionAgent
from agl_otel.runner.completion import Completion, Ended
from agl_otel.runner.environment import Addresses
from agl_otel.runner.job import Job
from agl_otel.runner.ledgers import Ledgers
from agl_otel.runner.output import LogExporter
from agl_otel.runner.process import check_waiting_tasks
from agl_otel.runner.runner import Runner
from agl_otel.runner.running import RunnerEvent
from agl_otel.types import AttemptedRollout, AttemptLedger, EnqueueRolloutRequest, PromptTemplate, ResourcesUpdate
from agl_otel_hook import conventions, records
from tests.contract.runner.conftest import Proxy, Stack


@pytest.mark.full
async def test_a_result_survives_a_queue_outage_at_the_agents_end(stack: Stack) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        began.set()
        await go_on.wait()
        return 0.25

    [rollout] = await stack.enqueue("t")
    async with stack.running(FunctionAgent(agent)):
        await began.wait()
        port = stack.server.port
        await stack.server.stop(0)
        go_on.set()
        await stack.until(lambda: stack.runner and stack.runner.counts["heartbeat_errors"] + len(stack.proxy.closed))
        stack.server = QueueServer(open_engine(f"sqlite:///{stack.directory / 'queue.db'}"), sweep_seconds=0.05)
        await stack.server.start("127.0.0.1", port)
        [attempt] = await stack.finished(rollout)
    assert attempt.status == "succeeded"
    assert [s.attributes[conventions.reward_value_key(0)] for s in stack.spans(rollout, conventions.SPAN_ANNOTATION)] == [0.25]


class Releasing(QueueClient):
    """A client that records what was released."""

    released: list[Sequence[AttemptedRollout]]

    async def release(self, claims: Sequence[AttemptedRollout]) -> int:
        self.released.append(claims)
        return await super().release(claims)


async def test_a_runner_that_holds_nothing_ends_without_a_call_to_the_queue_which_may_be_away(stack: Stack) -> None:
    queue = Releasing(stack.queue.address)
    async with queue:
        queue.released = []
        stack.queue, original = queue, stack.queue
        [rollout] = await stack.enqueue("t")
        async with stack.running(FunctionAgent(lambda task: 1.0), heartbeat_seconds=0) as run:
            await stack.finished(rollout)
            await stack.server.stop(0)
            await stack.until(lambda: stack.runner and stack.runner.counts["claim_errors"])
            stack.stop.set()
            await run
        stack.queue = original
    assert queue.released == []


async def test_agents_wait_until_the_collector_accepts_their_root_spans(stack: Stack) -> None:
    stack.receiver.refuse = True
    try:
        [rollout] = await stack.enqueue("t")
        async with stack.running(FunctionAgent(lambda task: 1.0)):
            await stack.until(lambda: stack.runner and stack.runner.counts["claimed"])
            assert not stack.events
            stack.receiver.refuse = False
            [attempt] = await stack.finished(rollout)
    finally:
        stack.receiver.refuse = False
    assert attempt.status == "succeeded"
    assert len(stack.spans(rollout, conventions.SPAN_ATTEMPT)) == 1


async def test_a_result_is_dropped_once_a_newer_attempt_exists(stack: Stack) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        began.set()
        await go_on.wait()
        return 1.0

    rollout, other = await stack.enqueue("t", "u")
    async with stack.running(FunctionAgent(agent), heartbeat_seconds=0) as run:
        await began.wait()
        [newer] = await stack.queue.start_attempt([rollout.rollout_id], worker_id="other")
        go_on.set()
        attempts = await stack.finished(other)
        await stack.until(lambda: sum(event.kind == "ended" for event in stack.events) == 2)
        stack.stop.set()
        counts = await run
    assert counts["fenced"] == 1
    assert [attempt.status for attempt in attempts] == ["succeeded"]
    first, latest = await stack.queue.query_attempts([rollout.rollout_id])
    assert (first.status, latest.attempt_id, latest.status) == ("failed", newer.attempt.attempt_id, "preparing")
    await stack.queue.update_attempts([AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id="latest", status="succeeded")])


class Forgetful(QueueClient):
    """A client that cannot find one set of resources, and records which were requested."""

    lost = ""
    asked: list[tuple[str | None, int | None]]

    async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
        self.asked.append((resources_id, version))
        return None if resources_id == self.lost else await super().get_resources(resources_id, version=version)


async def test_resources_are_fetched_once_and_missing_ones_fail_only_their_rollouts(stack: Stack) -> None:
    sets = [await stack.queue.put_resources({"p": PromptTemplate(template=text, engine="f-string")}) for text in ("a", "b")]
    requests = [EnqueueRolloutRequest(input="t", resources_id=sets[i].resources_id) for i in (0, 1, 0)]
    first, lost, third = await stack.queue.enqueue(requests)
    queue = Forgetful(stack.queue.address)
    async with queue:
        queue.lost, queue.asked = sets[1].resources_id, []
        stack.queue, original = queue, stack.queue
        seen: list[str] = []
        await stack.run(FunctionAgent(lambda task, resources: seen.append(resources["p"].template)), max_rollouts=3, concurrency=1)
        stack.queue = original
        assert queue.asked == [(sets[0].resources_id, 1), (sets[1].resources_id, 1)]
    assert seen == ["a", "a"]
    attempts = await stack.finished(first, lost, third)
    assert [attempt.status for attempt in attempts] == ["succeeded", "failed", "succeeded"]
    assert f"no resources {sets[1].resources_id} version 1" in (attempts[1].error or "")


_DIES_IN_ITS_SECOND_SPAN = """
import os, signal, sys
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook.context import attempt_scope
from agl_otel.runner.ledgers import Ledgers
endpoint, rollout_id, attempt_id, ends = sys.argv[1:]
ledgers, telemetry = Ledgers(), Telemetry(otlp_endpoint=endpoint, service_name="runner")
ledgers.create([(rollout_id, attempt_id)])
telemetry.keep_records(ledgers.root)
with attempt_scope(rollout_id, attempt_id):
    telemetry.tracer("agent").start_span("first").end()
    telemetry.seal([(rollout_id, attempt_id)])
    if ends != "between":
        telemetry.tracer("agent").start_span("second")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("ends", "kind"), [("between", "complete"), ("within", "incomplete")])
async def test_attempts_of_a_killed_function_runner_are_judged_by_their_ledger(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, ends: str, kind: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(stack.directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    [started] = await stack.queue.start([EnqueueRolloutRequest(input="t")], worker_id="dead")
    key = started.rollout_id, started.attempt.attempt_id
    arguments = [sys.executable, "-c", _DIES_IN_ITS_SECOND_SPAN, stack.receiver.grpc_address, *key, ends]
    dead = await asyncio.create_subprocess_exec(*arguments)
    assert await dead.wait() == -signal.SIGKILL
    [before] = await stack.queue.query_attempts([started.rollout_id])
    assert stack.verdict(before).kind == "incomplete", "there is no ledger, and its seal is not a closing one"
    stack.proxy.spans = 0
    async with stack.running(FunctionAgent(lambda task: 1.0)):
        async with asyncio.timeout(300):
            while (after := (await stack.queue.query_attempts([started.rollout_id]))[0]).ledger is None:  # noqa: ASYNC110 - the queue has no event for it
                await asyncio.sleep(0.02)
    assert [key] in stack.proxy.closed and after.seals == {"proxy-marker": 0}
    assert stack.verdict(after).kind == kind


async def test_the_ledger_of_an_attempt_of_another_store_is_left_for_a_runner_of_that_store(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(stack.directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    arguments = [sys.executable, "-c", _DIES_IN_ITS_SECOND_SPAN, stack.receiver.grpc_address, "ro-elsewhere", "at-elsewhere", "within"]
    dead = await asyncio.create_subprocess_exec(*arguments)
    assert await dead.wait() == -signal.SIGKILL
    [rollout] = await stack.enqueue("t")
    counts = await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=1)
    await stack.finished(rollout)
    assert counts["ledger_errors"] == 0
    left = Ledgers()
    [orphan] = left.orphaned()
    ledger = left.read_orphaned(orphan)
    left.close()
    assert ledger is not None and (orphan.rollout_id, [process.begun for process in ledger.processes]) == ("ro-elsewhere", [2])


async def test_a_ledger_reported_by_the_dead_runner_itself_is_kept(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(stack.directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    [started] = await stack.queue.start([EnqueueRolloutRequest(input="t")], worker_id="dead")
    key = started.rollout_id, started.attempt.attempt_id
    arguments = [sys.executable, "-c", _DIES_IN_ITS_SECOND_SPAN, stack.receiver.grpc_address, *key, "within"]
    dead = await asyncio.create_subprocess_exec(*arguments)
    assert await dead.wait() == -signal.SIGKILL
    own = AttemptLedger(reach="elsewhere", over=5.0)
    await stack.queue.report([AttemptUpdate(rollout_id=key[0], attempt_id=key[1], ledger=own, seals={"own": 1})])
    folder = Path(tempfile.gettempdir()) / records.own_folder_name()
    async with stack.running(FunctionAgent(lambda task: 1.0)):
        await stack.until(lambda: not [*folder.glob("*/*.json")])
    [after] = await stack.queue.query_attempts([started.rollout_id])
    assert (after.ledger, after.seals, stack.proxy.closed) == (own, {"own": 1}, [])


async def test_an_observer_that_raises_does_not_stop_the_runner(stack: Stack) -> None:
    def watch(event: RunnerEvent) -> None:
        raise RuntimeError("no")

    [rollout] = await stack.enqueue("t")
    runner = Runner(stack.queue, stack.telemetry, FunctionAgent(lambda task: 1.0), on_event=watch, max_rollouts=1)
    counts = await runner.run(stack.stop)
    assert (counts["event_errors"], counts["succeeded"]) == (2, 1)
    await stack.finished(rollout)


async def test_a_runner_claims_only_rollouts_with_its_labels(stack: Stack) -> None:
    requests = [
        EnqueueRolloutRequest(input=n, labels=labels) for n, labels in enumerate(({}, {"gpu": "yes"}, {"gpu": "yes", "team": "blue"}))
    ]
    await stack.queue.enqueue(requests)
    seen: list[int] = []
    await stack.run(FunctionAgent(lambda task: seen.append(task)), max_rollouts=1, labels={"gpu": "yes", "team": "blue"})
    assert ([r.status for r in await stack.queue.query_rollouts()], seen) == (["queuing", "queuing", "succeeded"], [2])
    await check_waiting_tasks(FunctionAgent(lambda nothing_of_the_kind: 1.0), stack.queue, [], {"gpu": "no"})


async def test_the_queue_shows_what_a_worker_does(stack: Stack) -> None:
    await stack.enqueue("t")
    await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=1, worker_id="w-1")
    [worker] = await stack.queue.query_workers()
    assert (worker.worker_id, worker.status) == ("w-1", "idle")
    assert worker.heartbeat_stats is not None
    assert worker.heartbeat_stats["concurrency"] == 8
    assert {"host", "cpu_threads", "load_1m", "disk_pct"} <= set(worker.heartbeat_stats)


async def test_a_runner_without_a_heartbeat_interval_sends_no_heartbeats(stack: Stack) -> None:
    await stack.enqueue("t")
    counts = await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=1, worker_id="w-silent", heartbeat_seconds=0)
    assert counts["succeeded"] == 1
    [worker] = await stack.queue.query_workers()
    assert (worker.worker_id, worker.heartbeat_stats, worker.last_heartbeat_time) == ("w-silent", None, None)


async def test_the_root_span_states_whether_the_agent_is_hooked(stack: Stack) -> None:
    [counted] = await stack.enqueue("t")
    await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=1)
    [unknown] = await stack.enqueue("t")
    await stack.run(CommandAgent(["true"]), max_rollouts=1)
    said = [stack.spans(rollout, conventions.SPAN_ATTEMPT)[0].attributes.get(conventions.ATTEMPT_HOOKED) for rollout in (counted, unknown)]
    assert said == [True, None]
    python = [sys.executable, "-c", ""]
    hooks = (CommandAgent(python), CommandAgent(python, instrument=False), CommandAgent(["true"], hooked=True))
    assert [agent.hooked for agent in hooks] == [True, False, True]


_LIT_AGENT = """
import asyncio, json, sys, threading
import agl_otel as agl

async def main():
    async with await agl.LightningStore.connect(sys.argv[1]) as store:
        never = threading.Event()
        never.set()
        runner = agl.LitAgentRunner(agl.OtelTracer(), heartbeat_interval=0.05, heartbeat_launch_mode=sys.argv[2])
        with runner.run_context(agent=lambda task, rollout: 1.0, store=store):
            await runner.iter(event=never)
            await runner.iter(event=never)
        assert not list(await store.query_workers())
        stop = threading.Event()
        with runner.run_context(agent=lambda task, rollout: 1.0, store=store, worker_id=3):
            running = asyncio.create_task(runner.iter(event=stop))
            while not ((worker := await store.get_worker_by_id("Worker-3")) and worker.heartbeat_stats) and not running.done():
                await asyncio.sleep(0.02)
            stop.set()
            await running
        print(json.dumps(worker.heartbeat_stats))

asyncio.run(main())
"""


@pytest.mark.parametrize("launch_mode", ["thread", "asyncio"])
async def test_a_lit_agent_runner_sends_heartbeats_only_with_a_worker_id(stack: Stack, launch_mode: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LIT_AGENT, stack.queue.address, launch_mode),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(300):
            said, logged = (text.decode() for text in await process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, logged
    assert logged.count("has no worker id, so it sends no heartbeats") == 1
    assert {"host", "disk_pct", "running"} <= set(json.loads(said))


def test_an_unknown_heartbeat_launch_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'thread' or 'asyncio'"):
        LitAgentRunner(DummyTracer(), heartbeat_launch_mode="fork")


async def test_attempts_are_closed_at_a_proxy_that_registered_after_the_runner(stack: Stack) -> None:
    newer = Proxy()
    await newer.server.start_server()

    async def agent(task: str) -> float:
        await stack.queue.announce("proxy", "newer", {"proxy": str(newer.server.make_url("")).rstrip("/")})
        return 1.0

    await stack.enqueue("t")
    await stack.run(FunctionAgent(agent), max_rollouts=1, heartbeat_seconds=0)
    await newer.server.close()
    assert len(stack.proxy.closed) == len(newer.closed) == 1


async def test_closing_is_retried_only_for_attempts_that_a_proxy_could_not_close(stack: Stack) -> None:
    stack.proxy.late = 1
    rollouts = await stack.enqueue("t", "u")
    claimed = await stack.queue.claim(2, worker_id="worker")
    keys = [(each.rollout_id, each.attempt.attempt_id) for each in claimed]
    logs = LogExporter(stack.receiver.grpc_address)
    address = str(stack.proxy.server.make_url(""))

    async def proxies() -> tuple[str, ...]:
        return (address,)

    completion = Completion(stack.queue, stack.telemetry, logs, proxies, Counter(), lambda _: None)
    for each in claimed:
        completion.put(Ended(Job(each, {}, Addresses("", ""), ""), "succeeded"))
    running = asyncio.create_task(completion.run())
    attempts = await stack.finished(*rollouts)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await logs.close()
    assert stack.proxy.closed == [keys, keys[:1]]
    assert [attempt.seals for attempt in attempts] == [{"proxy-marker": 2}] * 2


async def no_proxies() -> tuple[str, ...]:
    return ()


async def test_in_a_batch_of_results_only_the_refused_one_is_dropped(stack: Stack) -> None:
    await stack.enqueue("t", "u")
    old, good = await stack.queue.claim(2, worker_id="worker")
    [newer] = await stack.queue.start_attempt([old.rollout_id])
    counts: Counter[str] = Counter()
    ended: list[str] = []
    logs = LogExporter(stack.receiver.grpc_address)
    completion = Completion(stack.queue, stack.telemetry, logs, no_proxies, counts, lambda one: ended.append(one.job.attempt_id))
    for claimed in (old, good):
        completion.put(Ended(Job(claimed, {}, Addresses("", ""), ""), "succeeded"))
    running = asyncio.create_task(completion.run())
    async with asyncio.timeout(300):
        await completion.drained()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await logs.close()
    assert ended == [old.attempt.attempt_id, good.attempt.attempt_id]
    assert counts == {"fenced": 1}
    attempts = {attempt.attempt_id: attempt.status for attempt in await stack.queue.query_attempts([old.rollout_id, good.rollout_id])}
    assert attempts == {
        old.attempt.attempt_id: "failed", newer.attempt.attempt_id: "preparing", good.attempt.attempt_id: "succeeded",
    }  # fmt: skip


async def test_a_stop_of_an_idle_runner_leaves_nothing_claimed(stack: Stack) -> None:
    async with stack.running(FunctionAgent(lambda task: 1.0)):
        async with asyncio.timeout(300):
            while not list(await stack.queue.query_workers()):  # noqa: ASYNC110 - its heartbeat: the claim waits by now
                await asyncio.sleep(0.01)
        stack.stop.set()
    [rollout] = await stack.enqueue("t")
    [found] = await stack.queue.query_rollouts(rollout_id_in=[rollout.rollout_id])
    assert found.status == "queuing"


async def test_waiting_tasks_that_the_agent_cannot_run_are_refused_before_any_claim(stack: Stack) -> None:
    await stack.enqueue({"question": "q"})
    agent = FunctionAgent(lambda a, b: None)
    with pytest.raises(UsageError, match="takes a, b"):
        await check_waiting_tasks(agent, stack.queue, [])
    await stack.enqueue({"a": 1, "b": 2})
    await check_waiting_tasks(agent, stack.queue, [])


def test_a_concurrency_of_zero_is_refused(stack: Stack) -> None:
    with pytest.raises(UsageError, match="concurrency is 0"):
        Runner(stack.queue, stack.telemetry, FunctionAgent(lambda task: 1.0), concurrency=0)


async def test_a_refused_root_span_is_resent_unchanged_before_the_agent_starts(stack: Stack) -> None:
    started: list[str] = []
    [rollout] = await stack.enqueue("task")
    stack.receiver.refuse = True
    try:
        async with stack.running(FunctionAgent(lambda task: started.append(task) or 1.0), max_rollouts=1) as running:
            await stack.until(lambda: stack.traces.refused >= 2)
            assert started == []
            stack.receiver.refuse = False
            await running
    finally:
        stack.receiver.refuse = False
    [attempt] = await stack.finished(rollout)
    assert (attempt.status, started) == ("succeeded", ["task"])
    assert len(stack.spans(rollout, conventions.SPAN_ATTEMPT)) == 1
