"""How the client makes a call: deadline, token, and retries with jitter while the queue is away.

Every call may be retried: reads change nothing, and every mutating call carries a request id or says the same thing twice.
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
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.proto import queue_pb2_grpc
from agl_otel.service.retry import QUICK, Tries

T = TypeVar("T")
R = TypeVar("R")
RETRY_SECONDS: Final = 10.0  # a restart of the queue takes less
PART_ROLLOUTS: Final = 10_000
"""Rollouts in one message of an enqueue: one transaction, which all others wait for."""
PART_BYTES: Final = 16 << 20
LARGEST_ROLLOUT_BYTES: Final = 32 << 20  # its answer, and a claim of it, must fit a message of 64 MiB too
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),  # the answer to a change of many rollouts holds all their inputs
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_TOO_LARGE: Final = "larger than max"  # of gRPC's own refusals; the queue's are of a full disk
_LATE: Final = "the queue at {} did not answer in time: it is overloaded, or the network is slow"


def new_request_id() -> str:
    """A request id; grows with time, so that the queue's index of them stays local."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(8).hex()}"


def parts(rollouts: Sequence[pb.NewRollout]) -> Iterator[list[pb.NewRollout]]:
    """Rollouts by the message, in order: at least one part. Raises UsageError where one rollout alone is more than a message."""
    part: list[pb.NewRollout] = []
    size = 0
    for index, rollout in enumerate(rollouts):
        own = rollout.ByteSize()
        if own > LARGEST_ROLLOUT_BYTES:
            raise UsageError(
                f"rollout {index} has {own >> 20} MiB, and {LARGEST_ROLLOUT_BYTES >> 20} MiB is the most for one: "
                "put the data somewhere else, and its address into the input"
            )
        if part and (len(part) >= PART_ROLLOUTS or size + own > PART_BYTES):
            yield part
            part, size = [], 0
        part.append(rollout)
        size += own
    yield part


class Calls:
    """A channel to one queue, opened at the first call."""

    def __init__(self, address: str, *, token: str, timeout_seconds: float, retry_seconds: float, trust: tls.Trust | None = None) -> None:
        self.address = address.removeprefix("http://").removeprefix("grpc://").removesuffix("/")
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._trust = trust
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        """The generated stub; its async flavour has no type of its own."""
        if self._stub is None:
            self._channel = tls.aio_channel(self.address, OPTIONS, self.trust)
            self._stub = queue_pb2_grpc.QueueStub(self._channel)
        return self._stub

    @property
    def trust(self) -> tls.Trust:
        """The certificates that it trusts; by default those that the environment names."""
        if self._trust is None:
            self._trust = tls.ambient()
        return self._trust

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = self._stub = None

    async def call(self, method: str, request: object, answer: type[T], *, extra_seconds: float = 0.0) -> T:
        """One unary call; `extra_seconds` is added to the deadline (a long poll's wait). Raises the AglError that its status stands for."""
        retry = Retry(self._retry_seconds, self.address, secure=self.trust.dialled_securely(self.address))
        while True:
            try:
                reply = await getattr(self.stub, method)(request, timeout=self._timeout_seconds + extra_seconds, metadata=self._metadata)
                assert isinstance(reply, answer)
                return reply
            except grpc.aio.AioRpcError as error:
                await retry.pause(error)

    async def stream(self, method: str, request: Callable[[], object], answer: type[T]) -> AsyncIterator[T]:
        """One streaming call; after a lost connection it is made again with a new `request()`."""
        retry = Retry(self._retry_seconds, self.address, secure=self.trust.dialled_securely(self.address))
        while True:
            try:
                async for reply in getattr(self.stub, method)(request(), metadata=self._metadata):
                    assert isinstance(reply, answer)
                    retry = Retry(self._retry_seconds, self.address, secure=self.trust.dialled_securely(self.address))
                    yield reply
                return
            except grpc.aio.AioRpcError as error:
                await retry.pause(error)

    async def collect(self, method: str, request: object, answer: type[T], take: Callable[[T], R]) -> list[R]:
        """One streaming call to its end: what `take` makes of each reply. After a lost connection it begins anew.

        The time of a try runs from reply to reply.
        """
        retry = Retry(self._retry_seconds, self.address, secure=self.trust.dialled_securely(self.address))
        while True:
            try:
                return await self._read_all(getattr(self.stub, method)(request, metadata=self._metadata), answer, take)
            except TimeoutError:
                raise UnavailableError(_LATE.format(self.address)) from None
            except grpc.aio.AioRpcError as error:
                await retry.pause(error)

    async def _read_all(self, replies: AsyncIterable[object], answer: type[T], take: Callable[[T], R]) -> list[R]:
        taken: list[R] = []
        async with asyncio.timeout(self._timeout_seconds) as patience:
            async for reply in replies:
                assert isinstance(reply, answer)
                taken.append(take(reply))
                patience.reschedule(asyncio.get_running_loop().time() + self._timeout_seconds)
        return taken


class Retry:
    """The pauses between the tries of one call, until `seconds` are over."""

    def __init__(self, seconds: float, address: str, *, secure: bool = False) -> None:
        self._secure = secure
        self._tries = Tries(QUICK, seconds=seconds)
        self._address = address

    async def pause(self, error: grpc.aio.AioRpcError) -> None:
        """Wait before the next try; raises what `error` stands for where there is no point in one."""
        failure = translated(error, self._address, secure=self._secure)
        if error.code() is not grpc.StatusCode.UNAVAILABLE or (seconds := self._tries.pause()) is None:
            raise failure from None
        await asyncio.sleep(seconds)


def translated(error: grpc.aio.AioRpcError, address: str, *, secure: bool = False) -> AglError:
    """Our error for a gRPC one."""
    details = error.details() or ""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        what_to_do = tls.advice(details, secure=secure) or "is it running? (agl-otel up, or AGL_STORE)"
        return UnavailableError(f"the queue at {address} does not answer ({details}): {what_to_do}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(_LATE.format(address))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return AglError(f"a message to the queue at {address} is too large (64 MiB): send fewer at once. {details}")
    return from_grpc(code.name, details)
