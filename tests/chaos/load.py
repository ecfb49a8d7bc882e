"""Traffic of which everything can be recomputed: a span's id says who sent it, in which request and at which place in it.

As a process (`python -m tests.chaos.load CONFIG`, CONFIG as JSON) it sends until SIGTERM, over HTTP and gRPC, each sender one request at
a time, and notes each ack in a file the moment it comes. A sender goes on through any outage; `resend` says whether it then sends the
same bytes again, as SDKs do, or the next request. A span's name is the rollout and attempt that it belongs to, as the sender knows it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import aiohttp
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.signals import PROTOCOLS
from agl_otel_hook import conventions
from tests.contract.collector.otlp import attributes

ACK: Final = struct.Struct(">HIH")  # sender, request, spans
SIZES: Final = (1, 3, 30, 200)
"""Spans for each of a request's two attempts; requests take turns."""
SHARED: Final = 8  # rollouts that all senders write to
OWN_REQUESTS: Final = 16  # after so many a sender goes on to a new rollout of its own
REQUEST_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 0.05  # after a failure
TRACES: Final = PROTOCOLS[0]


@dataclass(frozen=True)
class Config:
    """What one load process does."""

    run: str
    """Part of every rollout id."""
    http: str
    grpc: str
    acks: str
    """The file of acks; stats go to the same name with .json."""
    first_sender: int = 1
    senders: int = 6
    sizes: Sequence[int] = SIZES
    resend: bool = False
    pause_seconds: float = 0.0
    """Between two requests of a sender."""
    rollout: Sequence[str] | None = None
    """(rollout, attempt) that everything belongs to, instead of many."""


def span_id(sender: int, request: int, place: int) -> int:
    """As a number; its bytes are big-endian."""
    return sender << 48 | request << 16 | place


def spans_of(config: Config, request: int) -> int:
    """How many spans request number `request` has."""
    return 2 * config.sizes[request % len(config.sizes)]


def build(config: Config, sender: int, number: int) -> bytes:
    """The body of request `number`: half of it for a rollout of the sender's own, half for one that is shared."""
    request = ExportTraceServiceRequest()
    size = config.sizes[number % len(config.sizes)]
    own = (f"ro-{config.run}-{sender}-{number // OWN_REQUESTS}", f"at-{number % 2}")
    shared = (f"ro-{config.run}-shared-{number % SHARED}", "at-0")
    now = time.time_ns()
    for half, ids in enumerate((own, shared) if config.rollout is None else (tuple(config.rollout),) * 2):
        group = request.resource_spans.add()
        group.resource.attributes.extend(
            attributes({conventions.ROLLOUT_ID: ids[0], conventions.ATTEMPT_ID: ids[1], "service.name": "chaos"})
        )
        part = group.scope_spans.add()
        for place in range(half * size, (half + 1) * size):
            span = part.spans.add(
                trace_id=struct.pack(">QHIH", 0xC4A05, sender, number, half), span_id=span_id(sender, number, place).to_bytes(8),
                name="|".join(ids), start_time_unix_nano=now, end_time_unix_nano=now + 1000,
                attributes=attributes({"place": place, "text": f"span {place} of request {number} " * 4}),
            )  # fmt: skip
            if number % 5 == 0 and place % 3 == 0:  # what the fast road does not know
                span.events.add(name="event", time_unix_nano=now)
    return request.SerializeToString()


Send = Callable[[bytes], Awaitable[str]]
"""Sends a body; answers "" when it is acked in full, else why not."""


def over_http(session: aiohttp.ClientSession, config: Config) -> Send:
    """Requests of one sender over HTTP."""

    async def send(body: bytes) -> str:
        headers = {"Content-Type": "application/x-protobuf"}
        try:
            async with session.post(f"{config.http}{TRACES.path}", data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"away {type(error).__name__}"
        return _partial(answer) if response.status == 200 else f"{response.status}"

    return send


def over_grpc(channel: grpc.aio.Channel) -> Send:
    """Requests of one sender over gRPC."""
    call = channel.unary_unary(TRACES.method, request_serializer=None, response_deserializer=None)

    async def send(body: bytes) -> str:
        try:
            return _partial(await call(body, timeout=REQUEST_SECONDS))
        except grpc.aio.AioRpcError as error:
            return error.code().name

    return send


def _partial(answer: bytes) -> str:
    found = TRACES.response.FromString(answer).partial_success
    return f"rejected {found.rejected_spans}: {found.error_message}" if found.rejected_spans else ""


async def sender(config: Config, number: int, send: Send, acks: IO[bytes], stop: asyncio.Event, answers: Counter[str]) -> None:
    """Send until told to stop."""
    request = 0
    body = b""
    while not stop.is_set():
        body = body or build(config, number, request)
        why = await send(body)
        answers[why] += 1
        if not why:
            acks.write(ACK.pack(number, request, spans_of(config, request)))
            acks.flush()
        if not why or not config.resend:
            request, body = request + 1, b""
        await asyncio.sleep(PAUSE_SECONDS if why else config.pause_seconds)


async def main(config: Config) -> None:
    """Run all senders."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    answers: Counter[str] = Counter()
    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200), ("grpc.enable_retries", 0)]
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    path = Path(config.acks)
    with path.open("wb") as acks:  # noqa: ASYNC230 - a local file, a few bytes at a time
        async with aiohttp.ClientSession(timeout=timeout) as session, grpc.aio.insecure_channel(config.grpc, options=options) as channel:
            ways = (over_http(session, config), over_grpc(channel))
            numbers = range(config.first_sender, config.first_sender + config.senders)
            await asyncio.gather(*(sender(config, n, ways[n % 2], acks, stop, answers) for n in numbers))
    path.with_suffix(".json").write_text(json.dumps(answers))


def command(config: Config) -> list[str]:
    """The command line of a load process."""
    return [sys.executable, "-m", "tests.chaos.load", json.dumps(asdict(config))]


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(main(Config(**given)))
