"""One release apart: services, clients and data of the release before this one work together with ours, both ways round.

Which release that is says tests/previous.txt; until there is one, every test here but the first skips with that reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from agl_otel.queue.client import QueueClient
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import EnqueueRolloutRequest
from tests.contract.collector.otlp import post_spans, span_request
from tests.contract.collector.stack import Stack, new_stack
from tests.environments import AbsentError, over_ours

pytestmark = pytest.mark.system
PINS = Path(__file__).parents[1] / "previous.txt"
UNKNOWN = b"\xfa\x3f\x05later"  # field 1023, of which no release knows
AGENT = """
import agl_otel as agl

def agent(task):
    agl.emit_reward(task["reward"])
"""


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that has the release before this one, over our packages."""
    wheel = os.environ.get("AGL_PREVIOUS_WHEEL", "")
    pins = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    if not wheel and not pins:
        pytest.skip("there is no release before this one: tests/previous.txt names none")
    named = tmp_path_factory.mktemp("previous") / "previous.txt"
    named.write_text(f"{Path(wheel).resolve()}\n" if wheel else "\n".join(pins) + "\n")
    try:
        python = str(over_ours("previous-release", named))
    except AbsentError as reason:
        pytest.skip(str(reason))
    where = subprocess.run([python, "-I", "-c", "import agl_otel; print(agl_otel.__file__)"], capture_output=True, text=True, check=True)
    assert "previous-release" in where.stdout, f"the previous release is not what is imported: {where.stdout}"
    return python


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Stack]:
    stack = new_stack(tmp_path)
    yield stack
    stack.close()


def start(stack: Stack, python: str, service: str) -> None:
    environment = {**os.environ, **stack.settings.environment()}
    with stack.log.open("ab") as out:
        command = [python, "-I", "-m", f"agl_otel.{service}"]
        stack.processes[service] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)


@contextlib.asynccontextmanager
async def running(stack: Stack, python: str) -> AsyncGenerator[QueueClient]:
    """Queue and collector of the release that `python` has, and a client of ours."""
    for service in ("queue", "collector"):
        start(stack, python, service)
    await stack.wait_healthy(stack.processes["collector"])
    async with QueueClient(stack.queue, timeout_seconds=60) as queue:
        yield queue
    for service in ("collector", "queue"):
        await stack.end(service)


async def rewards(stack: Stack, rollouts: list[str]) -> dict[str, float]:
    async with stack.reader() as reader:
        await reader.barrier()
        rows = await reader.query(
            "SELECT RolloutId, toFloat64(SpanAttributes['agentlightning.reward.0.value']) AS Reward FROM otel.otel_traces "
            "WHERE SpanName = 'agentlightning.annotation' AND RolloutId IN {rollouts:Array(String)}",
            params={"rollouts": rollouts},
        )
    return {row["RolloutId"]: row["Reward"] for row in rows}


async def play(stack: Stack, python: str, queue: QueueClient, folder: Path, count: int) -> list[str]:
    """Rollouts that a runner of the release that `python` has claims, runs and reports; all succeed, with their rewards stored."""
    (folder / "agent.py").write_text(AGENT)
    asked = [EnqueueRolloutRequest(input={"reward": number + 0.5}) for number in range(count)]
    ids = [each.rollout_id for each in await queue.enqueue(asked)]
    command = [python, "-I", "-m", "agl_otel.runner", "--function", "agent.py:agent", "--store", stack.queue, "--max-rollouts", str(count)]
    with stack.log.open("ab") as out:
        runner = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=out, stderr=out)
    try:
        assert await asyncio.wait_for(runner.wait(), 300) == 0, stack.log.read_text()[-3000:]
    finally:
        if runner.returncode is None:
            runner.kill()
            await runner.wait()
    assert {each.status for each in await queue.query_rollouts(rollout_id_in=ids)} == {"succeeded"}
    assert await rewards(stack, ids) == {name: number + 0.5 for number, name in enumerate(ids)}
    return ids


@pytest.mark.parametrize("services", ["ours", "theirs"])
async def test_clients_and_services_one_release_apart_run_rollouts(services: str, previous: str, made: Stack, tmp_path: Path) -> None:
    ours = sys.executable
    async with running(made, ours if services == "ours" else previous) as queue:
        await play(made, previous if services == "ours" else ours, queue, tmp_path, 3)


async def test_data_of_the_previous_release_is_opened_and_goes_on(previous: str, made: Stack, tmp_path: Path) -> None:
    async with running(made, previous) as queue:
        before = await play(made, previous, queue, tmp_path, 2)
        await post_spans(made, span_request([("ro-kept", "at-1")], spans=3))
    async with running(made, sys.executable) as queue:
        assert {each.rollout_id for each in await queue.query_rollouts()} == {*before}
        after = await play(made, sys.executable, queue, tmp_path, 2)
        assert set(await rewards(made, [*before, *after])) == {*before, *after}
        async with made.reader() as reader:
            assert len(await reader.spans(["ro-kept"])) == 3


def test_a_message_with_fields_of_a_later_release_is_read_and_keeps_them() -> None:
    for message in (pb.ClaimRequest(limit=2), pb.AttemptUpdate(rollout_id="ro-1"), pb.Rollouts(total=1), pb.DescribeResponse(version="9")):
        read = type(message).FromString(message.SerializeToString() + UNKNOWN)
        assert read != message and read.SerializeToString() == message.SerializeToString() + UNKNOWN
        read.DiscardUnknownFields()
        assert read == message
