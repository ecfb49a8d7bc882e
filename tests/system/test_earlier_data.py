"""Data and clients of the first schema (tests/recordings/first_schema): opened and served by today's code, and nothing is lost.

test_previous_release.py does the same with the release before this one, once there is one.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_tools import protoc

from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.queue.migrate import migrations
from agl_otel.queue.proto import queue_pb2
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.migrate import migrate
from agl_otel.types import AttemptedRollout
from tests.contract.collector.otlp import post_spans, span_request
from tests.contract.collector.stack import Stack, new_stack, start
from tests.local_queue import LocalQueue

pytestmark = pytest.mark.system
KEPT: Final = Path(__file__).parents[1] / "recordings" / "first_schema"
PACKAGE: Final = "agl.queue.v1"


def unpacked(data_dir: Path) -> None:
    """The kept folder."""
    data_dir.mkdir(parents=True)
    with sqlite3.connect(data_dir / "queue.db") as queue:
        queue.executescript((KEPT / "queue.sql").read_text())
    queue.close()
    with tarfile.open(KEPT / "traces.tar.xz") as archive:
        archive.extractall(data_dir, filter="data")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Stack]:
    stack = new_stack(tmp_path)
    yield stack
    stack.close()


async def test_a_folder_of_the_first_schema_is_opened_read_and_goes_on(made: Stack) -> None:
    unpacked(made.settings.data_dir)
    await start(made)
    async with QueueClient(made.queue, timeout_seconds=60) as queue, made.reader() as reader:
        rollouts = await queue.query_rollouts()
        assert [each.rollout_id for each in rollouts] == [f"ro-{number}" for number in range(6)]
        by_id = {each.rollout_id: each for each in rollouts}
        assert (by_id["ro-3"].input, by_id["ro-3"].metadata) == ({"q": 3}, {"run": "first", "step": 3, "note": 'é "x"'})
        counted = (await queue.statistics())["rollouts_by_status"]
        assert counted == {"queuing": 3, "preparing": 1, "succeeded": 1, "failed": 1}, "counters were made of what was there"
        [run] = await queue.query_runs()
        assert (run.run_id, run.rollouts, run.attempts, run.last_step) == ("first", 6, 3, 5)
        sets = await queue.query_resources()
        assert [(each.resources_id, each.version) for each in sets] == [("rs-1", 1)]

        done = by_id["ro-0"]
        assert isinstance(done, AttemptedRollout)
        traces = await reader.traces([done], [done.attempt], texts=True)
        [verdict] = traces.verdicts.values()
        assert verdict.kind == "complete", verdict
        assert [reward.value for rewards in traces.rewards.values() for reward in rewards] == [0.75]
        [call] = [span for span in await reader.spans(["ro-0"]) if span.name == "agentlightning.llm"]
        assert traces.calls.response.values.tolist() == [4, 5] and call.attributes["agentlightning.llm.response_logprobs"] == "[-0.5,-2.0]"
        assert [each.rollout_id for each in await queue.query_rollouts(input_contains='"q":3')] == ["ro-3"]
        assert await reader.saying([done.attempt], "four") == {"ro-0"}

        [claimed] = await queue.claim(1)
        assert claimed.rollout_id == "ro-3", "the queue's order was kept"
        ids = (claimed.rollout_id, claimed.attempt.attempt_id)
        await post_spans(made, span_request([ids], spans=2))
        await queue.update_attempts([AttemptUpdate(rollout_id=ids[0], attempt_id=ids[1], status="succeeded")])
        await reader.barrier()
        assert len(await reader.spans(["ro-0", "ro-3"])) == 7
        assert await queue.take_sequence([("ro-0", 1, 0)]) == [4], "numbers go on where they were"


def objects(database: Path) -> dict[str, set[str]]:
    with sqlite3.connect(database) as queue:
        names = [name for (name,) in queue.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {name: {str(row[1:]) for row in queue.execute(f"PRAGMA table_info({name})")} for name in names}
        columns["indexes"] = {name for (name,) in queue.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    queue.close()
    return columns


async def test_what_is_migrated_has_the_tables_of_what_is_new(tmp_path: Path) -> None:
    unpacked(tmp_path / "old")
    for name in ("old", "new"):
        async with LocalQueue(f"sqlite:///{tmp_path / name / 'queue.db'}"):
            pass
    assert objects(tmp_path / "old" / "queue.db") == objects(tmp_path / "new" / "queue.db")
    assert len(migrations()) > 1
    found: list[list[Any]] = []
    for name in ("old", "new"):
        engine = ChdbEngine(tmp_path / name / "traces")
        applied = migrate(engine, where=name)
        assert (applied[0] > 1) == (name == "old")
        found.append(
            engine.select(
                "SELECT table, name, type, default_kind, default_expression, compression_codec FROM system.columns WHERE database = 'otel' "
                "ORDER BY table, name"
            )
        )
        engine.close()
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pool.DescriptorPool:
    """The messages that a client of that day has."""
    out = tmp_path_factory.mktemp("proto") / "queue.desc"
    assert protoc.main(["protoc", f"-I{KEPT}", f"--descriptor_set_out={out}", str(KEPT / "queue.proto")]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)
    return pool


def shape(field: FieldDescriptor) -> tuple[Any, ...]:
    message = field.message_type.full_name if field.message_type else None
    return field.number, field.name, field.type, field.is_repeated, message


def test_no_field_or_method_of_the_first_wire_has_changed(earlier: descriptor_pool.DescriptorPool) -> None:
    ours: Any = queue_pb2.DESCRIPTOR
    theirs: Any = earlier.FindFileByName("queue.proto")
    for name, message in theirs.message_types_by_name.items():
        present: Descriptor = ours.message_types_by_name[name]
        assert {shape(field) for field in message.fields} <= {shape(field) for field in present.fields}, name
    then, now = (file.services_by_name["Queue"].methods_by_name for file in (theirs, ours))
    for name, method in then.items():
        kinds = [(each.input_type.full_name, each.output_type.full_name, each.server_streaming) for each in (method, now[name])]
        assert kinds[0] == kinds[1], name


async def test_a_client_of_the_first_wire_runs_a_rollout(earlier: descriptor_pool.DescriptorPool, tmp_path: Path) -> None:
    def message(name: str) -> Any:
        return message_factory.GetMessageClass(earlier.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    async with (
        LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}") as queue,
        grpc.aio.insecure_channel(queue.server.service.address) as channel,
    ):

        async def call(method: str, answer: str, request: Any) -> Any:
            ask = channel.unary_unary(
                f"/{PACKAGE}.Queue/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=message(answer).FromString,
            )
            return await ask(request, timeout=60)

        new = message("EnqueueRequest")(request_id="a")
        new.rollouts.add(input_json=json.dumps({"q": 1}), mode="train")
        [made] = (await call("Enqueue", "Rollouts", new)).rollouts
        [claimed] = (await call("Claim", "Rollouts", message("ClaimRequest")(limit=1, request_id="b", worker_id="w"))).rollouts
        assert claimed.rollout_id == made.rollout_id and json.loads(claimed.input_json) == {"q": 1}
        update = message("UpdateAttemptsRequest")(request_id="c")
        update.updates.add(rollout_id=made.rollout_id, attempt_id=claimed.attempt.attempt_id, status="succeeded")
        await call("UpdateAttempts", "Attempts", update)
        found = await call("QueryRollouts", "Rollouts", message("QueryRolloutsRequest")())
        assert [(each.rollout_id, each.status) for each in found.rollouts] == [(made.rollout_id, "succeeded")]
        assert (await call("Statistics", "StatisticsResponse", message("StatisticsRequest")())).ListFields()
