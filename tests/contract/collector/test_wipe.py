"""What is to be gone is gone: the files of the data directory are searched for its bytes, in what ClickHouse compressed, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from agl_otel import semconv
from agl_otel.queue.client import QueueClient
from agl_otel.types import EnqueueRolloutRequest
from tests.clickhouse_files import blocks
from tests.nursery import ROOT, nursery

from .otlp import post_spans, request_of, span
from .stack import Stack, start

SECRET = "sEcReT-4711-of-Jane-Doe"
KEPT = "kept-0815-of-somebody-else"


def holding(folder: Path, text: str) -> set[str]:
    """The first parts of the names of files that hold `text`."""
    found: set[str] = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                if text.encode() in data or any(text.encode() in block for block in blocks(data)):
                    found.add(path.relative_to(folder).parts[0])
    return found


def wipe(stack: Stack, rollout_id: str) -> str:
    where = ("--store", stack.queue, "--data-dir", str(stack.settings.data_dir))
    command = ("rollouts", "delete", rollout_id, "--yes", "--wipe", *where)
    done = nursery().run(command, os.environ, cwd=ROOT, seconds=400)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


async def test_what_is_wiped_is_in_no_file(own_stack: Stack) -> None:
    data = own_stack.settings.data_dir
    await start(own_stack)
    (data / "VERSION").write_text("1\n")  # what `up` marks a data directory with
    rollouts: list[str] = []
    async with QueueClient(own_stack.queue) as queue:
        for text in (SECRET, KEPT):
            (begun,) = await queue.start([EnqueueRolloutRequest(input={"who": text, "more": "x" * 5000}, metadata={"name": text})])
            ids = {semconv.ROLLOUT_ID: begun.rollout_id, semconv.ATTEMPT_ID: begun.attempt.attempt_id}
            await post_spans(own_stack, request_of([span(values={"who": text}) for _ in range(20)], ids), ack="stored")
            rollouts.append(begun.rollout_id)
    (data / "refused").mkdir()
    (data / "refused" / "1-1-traces.otlp").write_text(SECRET)
    (data / "refused" / "1-1-traces.json").write_text(f'{{"reason": "{SECRET}", "rollouts": ["{rollouts[0]}"]}}')
    (data / "wal" / "00000000000000000000.damaged").write_text(SECRET)
    (data / "runs" / "run-1").mkdir(parents=True)
    (data / "runs" / "run-1" / "rows.jsonl").write_text(f'{{"rollout": "{rollouts[0]}"}}')
    assert {"traces", "queue.db-wal", "refused", "wal"} <= holding(data, SECRET), "the search finds what is there"
    told = await asyncio.to_thread(wipe, own_stack, rollouts[0])
    assert f"{data / 'runs' / 'run-1'} names them" in told and "logs" not in told
    assert holding(data, SECRET) == set()
    assert holding(data, rollouts[0]) <= {"runs", "queue.db"}, (
        "ClickHouse keeps the text of deletions, the queue its answers for 10 minutes"
    )
    assert {"traces", "queue.db"} <= holding(data, KEPT)
    async with own_stack.reader() as reader:
        assert len(await reader.spans([rollouts[1]])) == 20
