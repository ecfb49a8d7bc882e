"""Helpers of 0.3's algorithms: injected store and proxy, batches of data."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from agl_otel.algorithms import Algorithm, batch_iter_over_dataset, with_llm_proxy, with_store


@pytest.mark.parametrize(("size", "batch"), [(10, 3), (7, 7), (4, 9), (5, 1)])
def test_batches_have_no_task_twice_and_use_all_equally_often(size: int, batch: int) -> None:
    made = list(islice(batch_iter_over_dataset(range(size), batch, random.Random(0)), 4 * size))
    assert all(len(each) == min(batch, size) == len(set(each)) for each in made)
    seen = Counter(task for each in made for task in each)
    assert max(seen.values()) - min(seen.values()) <= 1


def test_a_batch_larger_than_the_data_set_is_a_permutation_of_it() -> None:
    first, second = islice(batch_iter_over_dataset(range(20), 20, random.Random(0)), 2)
    assert sorted(first) == sorted(second) and first != second
    with pytest.raises(ValueError, match="empty"):
        next(batch_iter_over_dataset([], 1))


class Proxy:
    """A fake with the three methods of a proxy that are called."""

    def __init__(self, *, running: bool) -> None:
        self.running, self.calls = running, list[str]()

    def is_running(self) -> bool:
        return self.running

    async def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


class Asks(Algorithm):
    """Methods that return their injected arguments."""

    @with_store
    async def the_store(self, store: Any, more: int) -> Any:
        return store, more

    @with_llm_proxy()
    async def the_proxy(self, proxy: Any) -> Any:
        return proxy and proxy.calls[:]

    @with_llm_proxy(required=True)
    async def needs_one(self, proxy: Any) -> None:
        raise RuntimeError("in the middle")


def test_a_method_is_given_the_store() -> None:
    made: Any = Asks()
    made.set_store("the store")
    assert asyncio.run(made.the_store(3)) == ("the store", 3)


def test_a_stopped_proxy_runs_for_the_call_and_is_stopped_after_errors() -> None:
    made: Any = Asks()
    assert asyncio.run(made.the_proxy()) is None
    with pytest.raises(ValueError, match="needs_one needs a proxy"):
        asyncio.run(made.needs_one())
    for running, during, after in ((False, ["start"], ["start", "stop"]), (True, [], [])):
        proxy = Proxy(running=running)
        made.set_llm_proxy(proxy)
        assert (asyncio.run(made.the_proxy()), proxy.calls) == (during, after)
    proxy = Proxy(running=False)
    made.set_llm_proxy(proxy)
    with pytest.raises(RuntimeError, match="in the middle"):
        asyncio.run(made.needs_one())
    assert proxy.calls == ["start", "stop"]
