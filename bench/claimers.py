"""Clients that claim rollouts and report success, in a separate process, so that their CPU is not counted as the server's.

Reads one job a line from stdin (JSON, see `Job`), runs it, and prints the number of rollouts claimed and completed. Our clients use gRPC,
each over its own connection; those of Agent Lightning 0.3 use its HTTP interface over kept-alive connections. 0.3 completes one attempt
per request, however many were claimed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import aiohttp
import grpc.aio

from agl_otel.queue.calls import OPTIONS, new_request_id
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.proto import queue_pb2_grpc
from bench.otlp import attempt_request

INPUT: Final = json.dumps({"question": "x" * 200})
FILLED_AT_ONCE: Final = 500
SPANS: Final = 4
ATTRIBUTES: Final = 32  # per span
LABELS: Final = {"gpu": "a100", "pool": "train"}
Export = Callable[[str, str], Awaitable[None]]
"""Sends the spans of this rollout and attempt."""
Work = Callable[[int], Awaitable[int]]
"""One or two calls of the client with this number; returns the number of rollouts."""


@dataclass(frozen=True)
class Job:
    """A task ("fill", "complete", "trace", "empty") for so many rollouts, at a server of a kind ("ours", "agentlightning").

    "trace" sends four spans of 32 attributes each, in one OTLP request to `collector`, before it completes the attempt.
    """

    kind: str
    address: str
    task: str
    rollouts: int
    clients: int = 1
    limit: int = 1
    collector: str = ""
    """URL for OTLP over HTTP."""
    labelled: bool = False
    """Whether our rollouts have LABELS, by which they are claimed."""

    def line(self) -> bytes:
        """Encode the job as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


class OurClients:
    """Stubs of a queue, each on its own connection."""

    def __init__(self, address: str, count: int, *, labelled: bool = False) -> None:
        self._labels = LABELS if labelled else {}
        self._channels = [
            grpc.aio.insecure_channel(address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]) for _ in range(count)
        ]
        self._stubs: list[Any] = [queue_pb2_grpc.QueueStub(channel) for channel in self._channels]

    async def fill(self, _: int) -> int:
        """Enqueue a batch."""
        rollouts = [pb.NewRollout(input_json=INPUT, labels=self._labels)] * FILLED_AT_ONCE
        await self._stubs[0].Enqueue(pb.EnqueueRequest(rollouts=rollouts, request_id=new_request_id()))
        return FILLED_AT_ONCE

    async def empty(self, index: int) -> int:
        """Call a server that does nothing (claims.EmptyServicer)."""
        await self._stubs[index].Claim(pb.ClaimRequest(limit=1, request_id=new_request_id()))
        return 1

    async def claim(self, index: int, limit: int) -> pb.Rollouts:
        """Claim `limit` rollouts."""
        request = pb.ClaimRequest(limit=limit, worker_id=f"w{index}", request_id=new_request_id(), labels=self._labels)
        answer = cast("pb.Rollouts", await self._stubs[index].Claim(request))
        assert len(answer.rollouts) == limit, f"{len(answer.rollouts)} instead of {limit} rollouts were claimed"
        return answer

    async def complete(self, index: int, limit: int) -> int:
        """Claim rollouts and complete all of them in one call."""
        updates = [
            pb.AttemptUpdate(rollout_id=r.rollout_id, attempt_id=r.attempt.attempt_id, status="succeeded", token=r.token)
            for r in (await self.claim(index, limit)).rollouts
        ]
        await self._stubs[index].UpdateAttempts(pb.UpdateAttemptsRequest(updates=updates, request_id=new_request_id()))
        return limit

    async def trace(self, index: int, export: Export) -> int:
        """Claim a rollout, export spans, complete it."""
        [rollout] = (await self.claim(index, 1)).rollouts
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        await export(rollout_id, attempt_id)
        updates = [pb.AttemptUpdate(rollout_id=rollout_id, attempt_id=attempt_id, status="succeeded", token=rollout.token)]
        await self._stubs[index].UpdateAttempts(pb.UpdateAttemptsRequest(updates=updates, request_id=new_request_id()))
        return 1

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels))


class AgentLightningClients:
    """HTTP clients of Agent Lightning 0.3's store."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/v1/agl"
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def _post(self, path: str, body: Any) -> Any:
        async with self._session.post(f"{self._url}/{path}", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def fill(self, _: int) -> int:
        """Enqueue a batch."""
        await self._post("queues/rollouts/enqueue", {"rollouts": [{"input": json.loads(INPUT)}] * FILLED_AT_ONCE})
        return FILLED_AT_ONCE

    async def claim(self, index: int, limit: int) -> list[dict[str, Any]]:
        """Claim `limit` rollouts."""
        answer = await self._post("queues/rollouts/dequeue", {"limit": limit, "worker_id": f"w{index}"})
        assert len(answer) == limit, f"{len(answer)} instead of {limit} rollouts were claimed"
        return answer

    async def complete(self, index: int, limit: int) -> int:
        """Claim rollouts and complete them one by one."""
        for rollout in await self.claim(index, limit):
            await self._post(f"rollouts/{rollout['rollout_id']}/attempts/{rollout['attempt']['attempt_id']}", {"status": "succeeded"})
        return limit

    async def trace(self, index: int, export: Export) -> int:
        """Claim a rollout, export spans, complete it."""
        [rollout] = await self.claim(index, 1)
        rollout_id, attempt_id = rollout["rollout_id"], rollout["attempt"]["attempt_id"]
        await export(rollout_id, attempt_id)
        await self._post(f"rollouts/{rollout_id}/attempts/{attempt_id}", {"status": "succeeded"})
        return 1

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def exporter(session: aiohttp.ClientSession, url: str) -> Export:
    """Make a function that sends the spans of one attempt."""
    headers = {"Content-Type": "application/x-protobuf"}

    async def export(rollout_id: str, attempt_id: str) -> None:
        body = attempt_request(rollout_id, attempt_id, SPANS, ATTRIBUTES)
        async with session.post(url, data=body, headers=headers) as answer:
            answer.raise_for_status()
            await answer.read()

    return export


async def spread(calls: int, clients: int, work: Work) -> int:
    """Distribute `calls` over concurrent clients; return the number of rollouts."""
    numbers = iter(range(calls))

    async def client(index: int) -> int:
        done = 0
        for _ in numbers:
            done += await work(index)
        return done

    return sum(await asyncio.gather(*(client(index) for index in range(clients))))


async def perform(job: Job, clients: OurClients | AgentLightningClients) -> int:
    """Run a job; return the number of rollouts."""
    if job.task == "fill":
        return await spread(-(-job.rollouts // FILLED_AT_ONCE), 1, clients.fill)
    if job.task == "empty":
        assert isinstance(clients, OurClients)
        return await spread(job.rollouts, job.clients, clients.empty)
    if job.task == "trace":
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            export = exporter(session, job.collector)
            return await spread(job.rollouts, job.clients, lambda index: clients.trace(index, export))
    return await spread(job.rollouts // job.limit, job.clients, lambda index: clients.complete(index, job.limit))


async def serve() -> None:
    """Run the jobs from stdin until it ends."""
    connected: dict[tuple[str, int, bool], OurClients | AgentLightningClients] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = Job(**json.loads(line))
        key = (job.address, job.clients, job.labelled)
        if key not in connected:
            ours = job.kind == "ours"
            connected[key] = OurClients(job.address, job.clients, labelled=job.labelled) if ours else AgentLightningClients(job.address)
        print(await perform(job, connected[key]), flush=True)
    for clients in connected.values():
        await clients.close()


@contextlib.asynccontextmanager
async def claimers() -> AsyncGenerator[Callable[[Job], Awaitable[int]]]:
    """Start the process; yield a function that runs a job in it and returns the number of rollouts."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.claimers", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    reader, writer = child.stdout, child.stdin
    assert reader is not None and writer is not None

    async def submit(job: Job) -> int:
        writer.write(job.line())
        if answer := await reader.readline():
            return int(answer)
        raise RuntimeError(f"the claimers ended at {job} (see above)")

    try:
        yield submit
    finally:
        writer.close()
        await child.wait()


if __name__ == "__main__":
    asyncio.run(serve())
