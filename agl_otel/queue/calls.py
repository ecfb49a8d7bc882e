"""The client's calls: deadline, token, and retries with jitter while the queue does not answer.

Every call may be retried: reads change nothing, and every mutating call carries a request id or is idempotent.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from agl_otel.errors import AglError, UnavailableError, UsageError, from_grpc
from agl_otel.net import tls
from agl_otel.net.auth import refused_error
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.proto import queue_pb2_grpc
from agl_otel.service.retry import QUICK, Tries

T = TypeVar("T")
R = TypeVar("R")
RETRY_SECONDS: Final = 10.0  # longer than a restart of the queue
PART_ROLLOUTS: Final = 1_000
"""Most rollouts in one message of an enqueue: a message is one transaction, which others wait for."""
KEYED_ROLLOUTS: Final = 10_000
"""The same with an idempotency key, whose call must be split alike when an agl-otel of another release repeats it."""
PART_BYTES: Final = 16 << 20
LARGEST_ROLLOUT_BYTES: Final = 32 << 20  # the rollout must also fit into the 64 MiB of an answer and of a claim
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),  # the answer to an update of many rollouts holds all their inputs
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
WHERE: Final = "the queue's HOST:PORT or the web service's http://HOST:PORT (--store, AGL_STORE)"
PIECE: Final = 100
"""Items that `in_pieces` converts at a time: some milliseconds."""
_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of a service that is down or stops; a call that its own client cancels raises asyncio.CancelledError."""
_HTTP1: Final = "http1.x server"  # in gRPC's details
_TOO_LARGE: Final = "larger than max"  # in gRPC's own refusals; those of the queue mean a full disk
_LATE: Final = "the queue at {} did not answer in time: it is overloaded, or the network is slow"


def new_request_id() -> str:
    """Return a request id; ids grow with time, so that inserts into the queue's index stay local."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(8).hex()}"


def parts(rollouts: Sequence[pb.NewRollout], *, keyed: bool = False) -> Iterator[list[pb.NewRollout]]:
    """Split rollouts into messages, in order; at least one part. Raises UsageError if a single rollout exceeds LARGEST_ROLLOUT_BYTES."""
    most = KEYED_ROLLOUTS if keyed else PART_ROLLOUTS
    part: list[pb.NewRollout] = []
    size = 0
    for index, rollout in enumerate(rollouts):
        own = rollout.ByteSize()
        if own > LARGEST_ROLLOUT_BYTES:
            raise UsageError(
                f"rollout {index} has {own >> 20} MiB, and {LARGEST_ROLLOUT_BYTES >> 20} MiB is the most for one: "
                "put the data somewhere else, and its address into the input"
            )
        if part and (len(part) >= most or size + own > PART_BYTES):
            yield part
            part, size = [], 0
        part.append(rollout)
        size += own
    yield part


async def in_pieces(convert: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `convert` of each item. Other tasks of the event loop run in between, however many items there are."""
    converted: list[R] = []
    for start in range(0, len(items), PIECE):
        converted += map(convert, items[start : start + PIECE])
        await asyncio.sleep(0)
    return converted


class Calls:
    """A channel to one queue, opened at the first call."""

    def __init__(self, address: str, *, token: str, timeout_seconds: float, retry_seconds: float, trust: tls.Trust | None = None) -> None:
        self.address = address.removeprefix("http://").removeprefix("grpc://").removesuffix("/")
        self._token = token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._trust = trust
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        """The generated stub, untyped: there is no type for its async form."""
        if self._stub is None:
            self._channel = tls.aio_channel(self.address, OPTIONS, self.trust)
            self._stub = queue_pb2_grpc.QueueStub(self._channel)
        return self._stub

    @property
    def trust(self) -> tls.Trust:
        """The trusted certificates; by default those of the environment."""
        if self._trust is None:
            self._trust = tls.ambient()
        return self._trust

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = self._stub = None

    async def call(self, method: str, request: object, answer: type[T], *, extra_seconds: float = 0.0) -> T:
        """Make a unary call; `extra_seconds` (a long poll's wait) extends the deadline. Raises the AglError of its status."""
        tries = None
        while True:
            try:
                reply = await getattr(self.stub, method)(request, timeout=self._timeout_seconds + extra_seconds, metadata=self._metadata)
                assert isinstance(reply, answer)
                return reply
            except grpc.aio.AioRpcError as error:
                tries = await self._pause(tries, error)

    async def stream(self, method: str, request: Callable[[], object], answer: type[T]) -> AsyncIterator[T]:
        """Make a streaming call; after a lost connection make it again with a new `request()`."""
        tries = None
        while True:
            try:
                async for reply in getattr(self.stub, method)(request(), metadata=self._metadata):
                    assert isinstance(reply, answer)
                    tries = None
                    yield reply
                return
            except grpc.aio.AioRpcError as error:
                tries = await self._pause(tries, error)

    async def collect(self, method: str, request: object, answer: type[T], take: Callable[[T], R]) -> list[R]:
        """Make a streaming call and return `take` of each reply. After a lost connection it starts over.

        The timeout applies to each reply.
        """
        tries = None
        while True:
            try:
                return await self._read_all(getattr(self.stub, method)(request, metadata=self._metadata), answer, take)
            except TimeoutError:
                raise UnavailableError(_LATE.format(self.address)) from None
            except grpc.aio.AioRpcError as error:
                tries = await self._pause(tries, error)

    async def _read_all(self, replies: AsyncIterable[object], answer: type[T], take: Callable[[T], R]) -> list[R]:
        taken: list[R] = []
        async with asyncio.timeout(self._timeout_seconds) as patience:
            async for reply in replies:
                assert isinstance(reply, answer)
                taken.append(take(reply))
                patience.reschedule(asyncio.get_running_loop().time() + self._timeout_seconds)
        return taken

    async def _pause(self, tries: Tries | None, error: grpc.aio.AioRpcError) -> Tries:
        """Wait before the next of `tries`, which the first failure begins; raise the AglError for `error` if they are useless or over."""
        tries = tries or Tries(QUICK, seconds=self._retry_seconds)
        passing = error.code() in _AWAY and _HTTP1 not in (error.details() or "")
        if not passing or (seconds := tries.pause()) is None:
            raise translated(error, self.address, self._token, secure=self.trust.uses_tls(self.address)) from None
        await asyncio.sleep(seconds)
        return tries


def translated(error: grpc.aio.AioRpcError, address: str, token: str, *, secure: bool) -> AglError:
    """Return the AglError for a gRPC error of a client with this token."""
    details = error.details() or ""
    code = error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return refused_error(f"the stack at {address}", token, details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UsageError(f"what answers at {address} is no queue of agl-otel, or one of another version ({details}): give {WHERE}")
    if code is grpc.StatusCode.UNAVAILABLE and _HTTP1 in details:
        url = f"{'https' if secure else 'http'}://{tls.target(address)}"
        return UnavailableError(f"what answers at {address} speaks HTTP/1: if it is a stack's web service, write {url}")
    if code in _AWAY:
        what_to_do = tls.advice(details, secure=secure) or "is it running? (agl-otel up, or AGL_STORE)"
        return UnavailableError(f"the queue at {address} does not answer ({details}): {what_to_do}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(_LATE.format(address))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return AglError(f"a message to the queue at {address} is too large (64 MiB): send fewer at once. {details}")
    return from_grpc(code.name, details)
