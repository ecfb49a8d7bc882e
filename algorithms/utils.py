"""Helpers for algorithms: what they are given, and how they go through data."""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from agl_otel.adapters import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agl_otel.errors import UsageError
from agl_otel.types import UNRESPONSIVE_SECONDS, AttemptedRollout, Dataset, Rollout, RolloutConfig

MAX_ATTEMPTS: Final = 3
_TAKEN: Final = ("agent_match", "_skip_empty_token_spans")
"""Options of TracerTraceToTriplet that trajectories have, too; calls without token ids are refused, and counted, in any case."""

Method = TypeVar("Method", bound=Callable[..., Any])
T = TypeVar("T")


def with_store(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Give an algorithm's async method the algorithm's store as its first argument after self."""

    @functools.wraps(function)
    async def given(self: Any, *args: Any, **kwargs: Any) -> T:
        return await function(self, self.get_store(), *args, **kwargs)

    return given


def with_llm_proxy(required: bool = False, auto_start: bool = True) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Give an algorithm's async method the algorithm's proxy (or None) as its first argument after self.

    Args:
        required: raise ValueError where there is none.
        auto_start: start it where it does not run, and stop it afterwards.
    """

    def decorate(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(function)
        async def given(self: Any, *args: Any, **kwargs: Any) -> T:
            proxy = self.get_llm_proxy()
            if proxy is None and required:
                raise ValueError(f"{function.__qualname__} needs a proxy: give Trainer(llm_proxy=…) or call set_llm_proxy")
            if proxy is None or not auto_start or proxy.is_running():
                return await function(self, proxy, *args, **kwargs)
            await _awaited(proxy.start())
            try:
                return await function(self, proxy, *args, **kwargs)
            finally:
                await _awaited(proxy.stop())

        return given

    return decorate


async def _awaited(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer


def items(dataset: Dataset[T] | None) -> list[T]:
    """The tasks of a data set; none where there is none."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))]


def batch_iter_over_dataset(dataset: Dataset[T], batch_size: int, source: random.Random | None = None) -> Iterator[Sequence[T]]:
    """Batches of a shuffled data set, without end; no task is twice in one batch.

    A batch size of the data set or more gives all of it, shuffled anew, each time. What is left of a pass begins the next batch.
    `source` shuffles; without one Python's own does.
    """
    sample = random.sample if source is None else source.sample
    size = len(dataset)
    if size == 0:
        raise ValueError("the data set is empty")
    left: list[int] = []
    while True:
        if batch_size >= size:
            yield [dataset[index] for index in sample(range(size), size)]
            continue
        batch, left = left[:batch_size], left[batch_size:]
        if len(batch) < batch_size:
            fresh = sample(range(size), size)
            missing = batch_size - len(batch)
            taken = [index for index in fresh if index not in batch][:missing]
            left = [index for index in fresh if index not in taken]
            batch += taken
        yield [dataset[index] for index in batch]


def survives_its_runner(timeout_seconds: float | None = None, unresponsive_seconds: float = UNRESPONSIVE_SECONDS) -> RolloutConfig:
    """How rollouts are run so that one whose runner was killed, perhaps together with the algorithm, is run again and not waited for."""
    return RolloutConfig(
        timeout_seconds=timeout_seconds,
        unresponsive_seconds=unresponsive_seconds,
        max_attempts=MAX_ATTEMPTS,
        retry_condition=["unresponsive"],
    )


def may_be_tried_again(rollout: Rollout) -> bool:
    """Whether a rollout that did not succeed has attempts left, or was cancelled."""
    if rollout.status != "failed":
        return rollout.status == "cancelled"
    return isinstance(rollout, AttemptedRollout) and rollout.attempt.sequence_id < rollout.config.max_attempts


def failures_of(rollouts: Iterable[Rollout]) -> Counter[str]:
    """{why a rollout did not succeed, in its attempt's own words: how many}."""
    left = [rollout for rollout in rollouts if rollout.status != "succeeded"]
    return Counter((isinstance(one, AttemptedRollout) and one.attempt.error) or str(one.status) for one in left)


def why_not(rollouts: Iterable[Rollout]) -> str:
    """The most frequent of `failures_of`, for a message; "" where all succeeded."""
    return in_words(failures_of(rollouts))


def in_words(failures: Counter[str]) -> str:
    """The three most frequent, for a message."""
    return "; ".join(f"{count} × {text}" for text, count in failures.most_common(3))


def sampling_seed(*names: object) -> int:
    """48 bits that stand for these names: the seed of what a rollout samples."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=6).digest())


def agent_match_of(algorithm: str, adapter: Any, own: str | None) -> str | None:
    """Which agents are trained by an algorithm that reads trajectories: its `own` agent_match, or the adapter's that a user chose for it.

    Trajectories are made of token ids as they were captured, so nothing else that an adapter does has a place there. Raises UsageError
    that names it.
    """
    remedy = f"leave it out: {algorithm} reads token ids as they were captured, and its own agent_match says whose"
    if isinstance(adapter, LlmProxyTraceToTriplet):
        return own
    if type(adapter) is not TracerTraceToTriplet:
        raise UsageError(f"{algorithm} does not go by a {type(adapter).__name__}: {remedy}")
    usual = vars(TracerTraceToTriplet())
    other = [name for name, value in vars(adapter).items() if name not in _TAKEN and value != usual[name]]
    if other:
        raise UsageError(f"{algorithm} does not go by the adapter's {', '.join(other)}: {remedy}")
    if own is not None and adapter.agent_match not in (None, own):
        raise UsageError(f"agent_match of {algorithm} is {own!r}, and the adapter's is {adapter.agent_match!r}: give one")
    return own if adapter.agent_match is None else adapter.agent_match
