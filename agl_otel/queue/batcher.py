"""Batches small requests of one kind that wait for the engine into one operation, which costs little more than a single request.

A request joins the last operation submitted to the engine until the engine begins it, so no request waits longer than it would alone.
Under load the engine is busy longer, so batches grow.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from agl_otel.errors import UnavailableError
from agl_otel.queue.engine import Engine, Transaction

R = TypeVar("R")
T = TypeVar("T")
AT_MOST: Final = 256
"""The weight of an operation that no further request may join."""


class _Batch(Generic[R, T]):
    """Requests that run as one operation."""

    def __init__(self, kind: Hashable) -> None:
        self.kind = kind
        self.requests: list[R] = []
        self.futures: list[asyncio.Future[T]] = []
        self.keys: set[str] = set()
        self.weight = 0

    def fits(self, key: str, weight: int) -> bool:
        return self.weight + weight <= AT_MOST and key not in self.keys

    def add(self, request: R, key: str, weight: int, future: asyncio.Future[T]) -> None:
        self.requests.append(request)
        self.futures.append(future)
        self.keys.add(key)
        self.weight += weight


class RequestBatcher(Generic[R, T]):
    """Runs `operation` on batches of requests; it returns for each request, in order, its result or its error.

    If `operation` raises, each request runs again by itself, so that one refused request does not fail the others.
    """

    def __init__(self, engine: Engine, operation: Callable[[Transaction, Sequence[R]], Sequence[T | Exception]]) -> None:
        self._engine = engine
        self._operation = operation
        self._lock = threading.Lock()  # the engine runs operations in its own threads
        self._open: dict[Hashable, _Batch[R, T]] = {}

    def write(self, request: R, key: str, weight: int = 1, kind: Hashable = None) -> asyncio.Future[T]:
        """Run a request as Engine.write does, in a batch of its kind.

        Requests with the same key run one after the other; one of weight AT_MOST runs alone.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            batch = self._open.get(kind)
            if batch is not None and batch.fits(key, weight):
                batch.add(request, key, weight, future)
                return future
            batch = self._open[kind] = _Batch[R, T](kind)
            batch.add(request, key, weight, future)
        self._engine.write(partial(self._run, batch)).add_done_callback(partial(self._deliver, batch))
        return future

    def _run(self, batch: _Batch[R, T], tx: Transaction) -> Sequence[T | Exception]:
        self._shut(batch)
        return self._operation(tx, batch.requests)

    def _shut(self, batch: _Batch[R, T]) -> None:
        with self._lock:
            if self._open.get(batch.kind) is batch:
                del self._open[batch.kind]

    def _deliver(self, batch: _Batch[R, T], done: asyncio.Future[Sequence[T | Exception]]) -> None:
        self._shut(batch)  # the engine may have refused it without running it
        error = done.exception()
        if error is None:
            for future, outcome in zip(batch.futures, done.result(), strict=True):
                _settle(future, outcome)
        elif len(batch.requests) == 1 or isinstance(error, UnavailableError):
            for future in batch.futures:
                _settle(future, error)
        else:
            for request, future in zip(batch.requests, batch.futures, strict=True):
                if not future.done():
                    alone = self._engine.write(partial(self._run_alone, request))
                    alone.add_done_callback(partial(_pass_on, future))

    def _run_alone(self, request: R, tx: Transaction) -> T | Exception:
        return self._operation(tx, [request])[0]


def _settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    if future.done():  # its caller disconnected
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _pass_on(future: asyncio.Future[T], done: asyncio.Future[T | Exception]) -> None:
    error = done.exception()
    _settle(future, done.result() if error is None else error)
