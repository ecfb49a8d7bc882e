"""Function agents that leave a thread in a model call, or that end their process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agl_otel.algorithms.report import final_rewards
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.store import LightningStore
from agl_otel.types import LLM
from agl_otel_hook import conventions
from tests.model_server import ModelServer
from tests.system.test_runner import World, eventually

pytestmark = [pytest.mark.full, pytest.mark.asyncio]

AGENT = """
import contextvars, os, threading, time
import agl_otel
from openai import OpenAI

client = OpenAI(max_retries=0)

def ask(question):
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])

def leaves_a_call(question):
    if question == "leave":
        threading.Thread(target=ask, args=("held",), daemon=True).start()
        while not os.path.exists("asked"): time.sleep(0.01)
    else:
        ask(question)
    return 1.0

def goes_on(question):
    def later():
        while not os.path.exists("over"): time.sleep(0.01)
        agl_otel.emit_reward(100.0)
    ask(question)
    agl_otel.emit_reward(0.5)
    threading.Thread(target=contextvars.copy_context().run, args=(later,), daemon=True).start()
"""


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    model = ModelServer()
    await model.start()
    yield model
    await model.stop()


@pytest.fixture
async def world(tmp_path: Path, model: ModelServer) -> AsyncIterator[World]:
    """A stack of its own, whose latest resources have the model."""
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port"), 0)
    async with (
        Stack(Settings.load(data_dir=tmp_path / "stack", **ports), only=("queue", "collector", "proxy")) as stack,
        await LightningStore.connect(stack.address) as store,
    ):

        async def announced() -> bool:
            store.description = await store.queue.describe()
            return bool(store.description.proxies and store.description.collectors)

        await eventually(announced)
        await store.publish({"main": LLM(endpoint=model.url, model="m", api_key="sk")})
        world = World(store, tmp_path)
        yield world
        await world.end()


async def test_a_call_left_open_by_a_thread_is_reported_and_the_next_rollout_runs(world: World, model: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(AGENT)
    [first] = await world.enqueue("leave")
    [second] = await world.enqueue("plain")
    model.hold = asyncio.Event()
    process = await world.runner("--function", f"{tmp_path}/leaves.py:leaves_a_call", "--max-rollouts", "2", "--concurrency", "1")
    await model.asked.wait()
    (tmp_path / "asked").touch()
    await world.store.wait([first.rollout_id], timeout_seconds=60)
    open_call = await world.store.traces([first], deadline_seconds=0)
    [verdict] = open_call.verdicts.values()
    assert (verdict.kind, verdict.missing) == ("incomplete", 1) and "proxy" in verdict.reasons[0]
    model.hold.set()
    traces = await world.finished([first, second])
    assert {verdict.kind for verdict in traces.verdicts.values()} == {"complete"}, traces.verdicts
    notes = [note for verdict in traces.verdicts.values() for note in verdict.notes]
    assert any("still open when it ended" in note for note in notes) and any("stored after it had ended" in note for note in notes)
    assert sorted(traces.calls.rollout_id) == sorted([first.rollout_id, second.rollout_id])
    assert await process.wait() == 0


async def test_a_reward_that_a_thread_emits_after_its_rollout_has_ended_does_not_count(world: World, tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(AGENT)
    [first] = await world.enqueue("first")
    await world.runner("--function", f"{tmp_path}/threads.py:goes_on")
    traces = await world.finished([first])
    [before] = traces.verdicts.values()
    assert before.kind == "complete" and final_rewards(traces) == {first.rollout_id: 0.5}
    (tmp_path / "over").touch()

    async def emitted() -> bool:
        return any(span.attributes.get(conventions.LATE) is True for span in await world.store.spans([first.rollout_id]))

    await eventually(emitted)
    traces = await world.store.traces([first.rollout_id])
    assert final_rewards(traces) == {first.rollout_id: 0.5}
    assert list(traces.verdicts.values()) == [before]
