"""Small requests become one operation while the engine is busy, on a real engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from agl_otel.errors import UnavailableError, UsageError
from agl_otel.queue.batcher import AT_MOST, RequestBatcher
from agl_otel.queue.engine import Transaction
from agl_otel.queue.sqlite import SqliteEngine


class Busy:
    """A SQLite engine, held until `release`, and what was run on it since."""

    def __init__(self, path: Path) -> None:
        self.engine = SqliteEngine(path)
        self.operations: list[list[str]] = []
        self.batcher: RequestBatcher[str, str] = RequestBatcher(self.engine, self._operation)
        self._over = threading.Event()
        self._holding = self.engine.write(lambda _: self._over.wait(300))

    def _operation(self, tx: Transaction, requests: Sequence[str]) -> list[str | Exception]:
        self.operations.append([*requests])
        for request in requests:
            tx.run("key_insert", {"idempotency_key": request, "item": 0, "rollout_id": "r", "fingerprint": ""})
            if request == "breaks":
                raise UsageError("it breaks")
        return [UsageError("refused") if request == "refused" else request.upper() for request in requests]

    async def release(self) -> None:
        self._over.set()
        await self._holding

    def kept(self, tx: Transaction) -> list[str]:
        return [row[0] for row in tx.rows_of("SELECT idempotency_key FROM enqueue_keys ORDER BY idempotency_key", {})]


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Busy]:
    busy = Busy(tmp_path / "queue.db")
    yield busy
    await busy.release()
    await busy.engine.close()


async def test_only_requests_of_one_kind_share_an_operation(busy: Busy) -> None:
    kinds = (("a", 1), ("b", 2), ("c", 1), ("d", None), ("e", 2))
    answers = [busy.batcher.write(name, name, kind=kind) for name, kind in kinds]
    await busy.release()
    await asyncio.gather(*answers)
    assert busy.operations == [["a", "c"], ["b", "e"], ["d"]]


async def test_calls_that_wait_become_one_operation_and_each_gets_its_own_answer(busy: Busy) -> None:
    answers = [busy.batcher.write(name, name) for name in ("a", "refused", "b")]
    await busy.release()
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert busy.operations == [["a", "refused", "b"]]
    assert outcomes[::2] == ["A", "B"]
    assert isinstance(outcomes[1], UsageError)


async def test_a_request_that_makes_its_operation_raise_fails_alone(busy: Busy) -> None:
    answers = [busy.batcher.write(name, name) for name in ("a", "breaks", "b")]
    await busy.release()
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["A", "it breaks", "B"]
    assert busy.operations[-3:] == [["a"], ["breaks"], ["b"]]
    assert await busy.engine.read(busy.kept) == ["a", "b"]


async def test_a_retry_of_a_waiting_request_runs_after_it(busy: Busy) -> None:
    answers = [busy.batcher.write("a", "same"), busy.batcher.write("b", "same"), busy.batcher.write("c", "another")]
    await busy.release()
    assert await asyncio.gather(*answers) == ["A", "B", "C"]
    assert busy.operations == [["a"], ["b", "c"]]


async def test_a_request_of_full_weight_runs_alone(busy: Busy) -> None:
    answers = [busy.batcher.write("a", "a"), busy.batcher.write("b", "b", AT_MOST), busy.batcher.write("c", "c", 10 * AT_MOST)]
    await busy.release()
    assert await asyncio.gather(*answers) == ["A", "B", "C"]
    assert busy.operations == [["a"], ["b"], ["c"]]


async def test_a_request_that_is_cancelled_leaves_its_batch_as_it_is(busy: Busy) -> None:
    cancelled, stays = busy.batcher.write("a", "a"), busy.batcher.write("b", "b")
    cancelled.cancel()
    await busy.release()
    assert await stays == "B"


async def test_a_stopping_engine_refuses_requests_and_holds_none(busy: Busy) -> None:
    await busy.release()
    await busy.engine.close()
    for name in "ab":
        with pytest.raises(UnavailableError, match="stopping"):
            await busy.batcher.write(name, name)
