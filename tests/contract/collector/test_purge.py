"""Deleted data leaves the disk: the files of the data directory, including those that ClickHouse compressed, are searched for its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest

from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.verl.sessions import RolloutRequest
from agl_otel.collector import orphans
from agl_otel.collector.deletion import Deletion
from agl_otel.queue.client import QueueClient
from agl_otel.types import EnqueueRolloutRequest
from agl_otel_hook import conventions
from tests.clickhouse_cluster import EachShard, two_shards
from tests.clickhouse_files import held
from tests.command import run_command

from .otlp import post_spans, request_of, span
from .stack import Stack, start

SECRET = "sEcReT-4711-of-Jane-Doe"
KEPT = "kept-0815-of-somebody-else"


def holding(folder: Path, text: str) -> set[str]:
    """Return the first path components of the files that contain `text`."""
    return {name.partition("/")[0] for name in held(folder, text)}


def delete(stack: Stack, rollout_id: str, *options: str) -> str:
    where = ("--store", stack.queue, "--data-dir", str(stack.settings.data_dir))
    return agl("rollouts", "delete", rollout_id, "--yes", *options, *where)


def agl(*command: str) -> str:
    done = run_command(command, os.environ, seconds=400)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


async def filled(stack: Stack) -> list[str]:
    """Start a stack with two rollouts, one with SECRET and one with KEPT, in files of every kind; return their ids."""
    data = stack.settings.data_dir
    await start(stack)
    (data / "VERSION").write_text("1\n")  # `up` writes this file into a data directory
    rollouts: list[str] = []
    async with QueueClient(stack.queue) as queue:
        for text, name in ((SECRET, "of-jane"), (KEPT, "of-others")):
            with contextlib.closing(RunFolder(data / "runs" / name, algorithm="verl", options={})) as run:  # no file in it names a rollout
                run_id = run.run_id
            (data / "runs" / name / "train.jsonl").write_text(text)
            rollout_id, who = f"ro-{run_id}-{RolloutRequest(None, 'train', 1, 0, 0).name}", {"who": text, "more": "x" * 5000}
            (begun,) = await queue.start([EnqueueRolloutRequest(input=who, metadata={"name": text}, rollout_id=rollout_id)])
            ids = {conventions.ROLLOUT_ID: begun.rollout_id, conventions.ATTEMPT_ID: begun.attempt.attempt_id}
            await post_spans(stack, request_of([span(values={"who": text}) for _ in range(20)], ids), ack="stored")
            rollouts.append(begun.rollout_id)
    (data / "refused").mkdir()
    (data / "refused" / "1-1-traces.otlp").write_text(SECRET)
    (data / "refused" / "1-1-traces.json").write_text(f'{{"reason": "{SECRET}", "rollouts": ["{rollouts[0]}"]}}')
    (data / "wal" / "00000000000000000000.damaged").write_text(SECRET)
    (data / "runs" / "run-1").mkdir(parents=True)
    (data / "runs" / "run-1" / "rows.jsonl").write_text(f'{{"rollout": "{rollouts[0]}", "text": "{SECRET}"}}')
    assert {"traces", "queue.db-wal", "refused", "wal", "runs"} <= holding(data, SECRET), "the search finds what is there"
    return rollouts


async def others_are_whole(stack: Stack, rollout_id: str) -> None:
    assert {"traces", "queue.db", "runs"} <= holding(stack.settings.data_dir, KEPT)
    async with stack.reader() as reader:
        assert len(await reader.spans([rollout_id])) == 20


async def test_deleted_data_is_in_no_file_once_the_command_has_waited(own_stack: Stack) -> None:
    data = own_stack.settings.data_dir
    rollouts = await filled(own_stack)
    output = await asyncio.to_thread(delete, own_stack, rollouts[0], "--wait")
    assert holding(data, SECRET) == set()
    assert f"{data / 'runs' / 'of-jane'} made them: its weights and checkpoints stay" in output
    assert "of-others" not in output and "logs" not in output
    assert holding(data, rollouts[0]) <= {"queue.db"}, "the queue keeps its answers for 10 minutes"
    await others_are_whole(own_stack, rollouts[1])


@pytest.mark.full
async def test_maintenance_clears_deleted_data_from_every_file(own_stack: Stack) -> None:
    data = own_stack.settings.data_dir
    rollouts = await filled(own_stack)
    await asyncio.to_thread(delete, own_stack, rollouts[0])
    async with own_stack.reader() as reader:
        assert await reader.spans([rollouts[0]]) == []
    assert {"traces", "wal"} <= holding(data, SECRET) <= {"traces", "wal", "queue.db-wal"}
    await asyncio.to_thread(agl, "maintain", "--once", "--store", own_stack.queue, "--data-dir", str(data))
    assert holding(data, SECRET) == set()
    await others_are_whole(own_stack, rollouts[1])


EACH = 12  # rollouts: enough for both shards to get some


@pytest.mark.full
async def test_a_purge_reaches_every_server_of_a_cluster(tmp_path: Path) -> None:
    with two_shards(tmp_path) as servers, contextlib.closing(EachShard(servers)) as engine:

        def stored(who: str) -> list[list[object]]:
            return engine.select(
                "SELECT RolloutId, count() FROM otel.otel_traces WHERE ServiceName = {w:String} GROUP BY ALL ORDER BY ALL", {"w": who}
            )

        ids = {who: [f"ro-of-{who}-{number}" for number in range(EACH)] for who in (SECRET, KEPT)}
        for who, rollouts in ids.items():
            common = {"Timestamp": "1750000000.000000001", "AttemptId": "at-1", "ServiceName": who}
            spans = [{**common, "TraceId": name, "SpanId": "s", "SpanName": f"of {who}", "RolloutId": name} for name in rollouts]
            spans += [{**span, "RolloutId": ""} for span in spans]  # the rows as received: each was copied later
            logs = [{**common, "TraceId": name, "Body": f"{who} says", "RolloutId": name} for name in rollouts]
            for table, rows in (("otel_traces", spans), ("otel_logs", logs)):
                engine.insert(f"otel.{table}", list(rows[0]), ["\n".join(json.dumps(row) for row in rows).encode()])
        before = stored(KEPT)
        assert len(before) == EACH + 1
        assert all(holding(server.directory, text) for server in servers for text in (SECRET, KEPT)), "the search finds what is there"
        deletion = Deletion(engine)
        await deletion.run(ids[SECRET])
        assert (stored(SECRET), stored(KEPT)) == ([], before)
        await deletion.purge()
        for server in servers:
            assert held(server.directory, SECRET) == {}, "nor do the ids stay, in which it stands, too"
            assert holding(server.directory, KEPT)
        assert orphans.forget(engine, (orphans.SERVICES, orphans.ROLLOUTS)) == 0
        assert stored(KEPT) == before
