"""Backup, restore and move, with the commands that a user types: afterwards everything acked is there, or nothing was changed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.types import EnqueueRolloutRequest
from tests.clickhouse_server import PASSWORD, ClickHouseServer
from tests.command import run_command

from .otlp import post_spans, span_request
from .stack import Stack, new_stack

pytestmark = pytest.mark.full


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Stack]:
    """A second stack without a data directory, not started."""
    made = new_stack(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    yield made
    made.close()


def agl(stack: Stack, *args: str, fails: bool = False, **environment: str) -> Any:
    command = (*args, "--data-dir", str(stack.settings.data_dir))
    done = run_command(command, {**os.environ, **environment}, cwd=stack.log.parent)
    assert bool(done.returncode) == fails, done.stderr
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    return done.stderr if fails else json.loads(done.stdout)


async def fill(stack: Stack) -> None:
    """Store one rollout in the queue, five spans in ClickHouse, and two acked spans that are only in the log."""
    await stack.start_queue()
    await stack.start_collector()
    async with QueueClient(stack.queue) as queue:
        await queue.enqueue([EnqueueRolloutRequest(input="kept")])
    await post_spans(stack, span_request([("ro-1", "at-1")], spans=5), ack="stored")
    await stack.end("queue")
    await post_spans(stack, span_request([("ro-2", "at-1")], spans=2))
    await stack.end("collector")


async def check(stack: Stack) -> None:
    await stack.start_queue()
    await stack.start_collector()
    async with QueueClient(stack.queue) as queue:
        assert [rollout.input for rollout in await queue.query_rollouts()] == ["kept"]
    async with stack.reader() as reader:
        await reader.barrier()
        spans = await reader.spans(["ro-1", "ro-2"])
        assert [(span.rollout_id, span.sequence_id) for span in spans] == [("ro-1", n) for n in range(1, 6)] + [("ro-2", 1), ("ro-2", 2)]
    for service in ("collector", "queue"):
        await stack.end(service)


async def test_a_backup_is_restored_elsewhere_with_spans_only_in_the_log(own_stack: Stack, elsewhere: Stack, tmp_path: Path) -> None:
    """The disk usage of a stopped stack, with its log, is measured too."""
    await fill(own_stack)
    place = tmp_path / "backup"
    made = agl(own_stack, "data", "backup", str(place), "--json")
    assert made["traces"]["otel_traces"] == 5
    assert made["queue"]["rows"]["rollouts"] == 1
    assert "not empty" in agl(own_stack, "data", "backup", str(place), fails=True)
    assert "not empty" in agl(own_stack, "data", "restore", str(place), fails=True)
    agl(elsewhere, "data", "restore", str(place), "--json")
    await check(elsewhere)

    (own_stack.settings.data_dir / "VERSION").write_text("1\n")  # `up` writes this file into a data directory
    found = agl(own_stack, "disk", "--json")
    assert found["bytes"]["traces"] > 0 and found["bytes"]["queue.db"] > 0 and found["embedded"]
    await check(own_stack)


async def test_a_backup_of_a_running_stack_under_load_has_all_that_was_acked_before(
    own_stack: Stack, elsewhere: Stack, tmp_path: Path
) -> None:
    """Rollouts are created and ended, each with its spans, before, during and after the copy."""
    await own_stack.start_queue()
    await own_stack.start_collector()
    (own_stack.settings.data_dir / "VERSION").write_text("1\n")  # `up` writes this file into a data directory
    ended: list[str] = []
    async with QueueClient(own_stack.queue) as queue:

        async def load() -> None:
            while True:
                (claimed,) = await queue.start([EnqueueRolloutRequest(input=len(ended))])
                await post_spans(own_stack, span_request([(claimed.rollout_id, claimed.attempt.attempt_id)], spans=3))
                update = AttemptUpdate(rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, status="succeeded")
                await queue.update_attempts([update])
                ended.append(claimed.rollout_id)

        loads = [asyncio.create_task(load()) for _ in range(4)]
        while len(ended) < 100:  # noqa: ASYNC110 - the tasks append to it
            await asyncio.sleep(0.01)
        (gone,) = ended[:1]
        await asyncio.to_thread(agl, own_stack, "rollouts", "delete", gone, "--yes", "--store", own_stack.queue, "--json")
        before = ended[1:]
        place = tmp_path / "backup"
        await asyncio.to_thread(agl, own_stack, "data", "backup", str(place), "--store", own_stack.queue, "--json")
        while_copied = len(ended) - len(before)
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    assert while_copied > 1, "nothing happened while the copy was made"
    agl(elsewhere, "data", "restore", str(place), "--json")
    await elsewhere.start_queue()
    await elsewhere.start_collector()
    async with QueueClient(elsewhere.queue) as queue, elsewhere.reader() as reader:
        known = {each.rollout_id: each.status for each in await queue.query_rollouts()}
        assert set(before) <= {name for name, status in known.items() if status == "succeeded"} and gone not in known
        await reader.barrier()  # what was in the log when it was copied is stored after the start
        spans = await reader.query("SELECT RolloutId, count() AS n, uniqExact(SpanId) AS ids FROM otel.otel_traces GROUP BY RolloutId")
        stored = {row["RolloutId"]: (int(row["n"]), int(row["ids"])) for row in spans}
        assert {name: stored.get(name) for name, status in known.items() if status == "succeeded"} == {
            name: (3, 3) for name, status in known.items() if status == "succeeded"
        }
        assert gone not in stored
        assert await queue.take_sequence([(before[0], 1, 0)]) == [4]


async def test_an_unnamed_running_stack_and_a_damaged_backup_are_refused(own_stack: Stack, elsewhere: Stack, tmp_path: Path) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    assert "open in another process" in agl(own_stack, "data", "backup", str(tmp_path / "backup"), fails=True)
    assert not (tmp_path / "backup").exists()
    await own_stack.end("collector")
    await own_stack.end("queue")
    agl(own_stack, "data", "backup", str(tmp_path / "backup"), "--json")
    manifest = tmp_path / "backup" / "backup.json"
    written = manifest.read_text()
    manifest.write_text(json.dumps({**(parsed := json.loads(written)), "queue": {**parsed["queue"], "version": 99}}))
    assert "has schema version 99" in agl(elsewhere, "data", "restore", str(tmp_path / "backup"), fails=True)
    manifest.write_text(written)
    (tmp_path / "backup" / "queue.db").write_bytes(b"no database")
    assert "missing or damaged" in agl(elsewhere, "data", "restore", str(tmp_path / "backup"), fails=True)
    assert not elsewhere.settings.data_dir.exists()
    assert "not a finished backup" in agl(elsewhere, "data", "restore", str(tmp_path), fails=True)
    assert "no data directory" in agl(elsewhere, "data", "backup", str(tmp_path / "other"), fails=True)


async def test_embedded_traces_move_to_a_server(own_stack: Stack, tmp_path: Path) -> None:
    await fill(own_stack)
    with ClickHouseServer(tmp_path / "server") as server:
        moved = agl(own_stack, "data", "move", "--clickhouse", server.url(), "--json")
        assert moved["traces"]["otel_traces"] == 5
        assert "nothing is overwritten" in agl(own_stack, "data", "move", "--clickhouse", server.url(), fails=True)
        own_stack.settings = own_stack.settings.model_copy(update={"clickhouse_url": server.url()})
        await check(own_stack)
        (own_stack.settings.data_dir / "VERSION").write_text("1\n")  # `up` writes this file into a data directory
        disk = agl(own_stack, "disk", "--json", AGL_CLICKHOUSE_URL=server.url())
        assert disk["server"]["bytes"] > 0 and not disk["embedded"]
    assert "does not answer" in agl(own_stack, "data", "move", "--clickhouse", server.url(), fails=True)
