"""Helpers for algorithms: arguments, batches, rollout options and failure summaries."""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from agl_otel.adapters import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agl_otel.errors import DISK_IS_FULL, DiskFullError, UsageError
from agl_otel.types import UNRESPONSIVE_SECONDS, AttemptedRollout, Dataset, Rollout, RolloutConfig
from agl_otel.types.columns import Traces

MAX_ATTEMPTS: Final = 3
_SUPPORTED: Final = ("agent_match", "_skip_empty_token_spans")
"""Options of TracerTraceToTriplet that trajectories support; calls without token ids are refused, and counted, in any case."""
_FULL_DISK: Final = re.compile(rf"{DISK_IS_FULL}|Insufficient Storage|Error code: 507")  # ours, and HTTP 507 as clients write it

Method = TypeVar("Method", bound=Callable[..., Any])
T = TypeVar("T")


def with_store(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Pass the algorithm's store to an async method, as the first argument after self."""

    @functools.wraps(function)
    async def given(self: Any, *args: Any, **kwargs: Any) -> T:
        return await function(self, self.get_store(), *args, **kwargs)

    return given


def with_llm_proxy(required: bool = False, auto_start: bool = True) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass the algorithm's proxy (or None) to an async method, as the first argument after self.

    Args:
        required: raise ValueError where there is none.
        auto_start: start it if it does not run, and stop it afterwards.
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
    """List the tasks of a data set; empty for None."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))]


def batch_iter_over_dataset(dataset: Dataset[T], batch_size: int, source: random.Random | None = None) -> Iterator[Sequence[T]]:
    """Yield batches of a shuffled data set without end; no batch contains a task twice.

    A batch size of at least the data set's size gives the whole data set, reshuffled each time. The rest of a pass starts the next
    batch. `source` shuffles; None: the global generator. Raises ValueError for an empty data set.
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


def retry_lost_runner(timeout_seconds: float | None = None, unresponsive_seconds: float = UNRESPONSIVE_SECONDS) -> RolloutConfig:
    """Return a config with which a rollout is retried when its runner was lost, possibly together with the algorithm."""
    return RolloutConfig(
        timeout_seconds=timeout_seconds,
        unresponsive_seconds=unresponsive_seconds,
        max_attempts=MAX_ATTEMPTS,
        retry_condition=["unresponsive"],
    )


def is_retryable(rollout: Rollout) -> bool:
    """Return whether a rollout was cancelled, or failed with attempts left."""
    if rollout.status != "failed":
        return rollout.status == "cancelled"
    return isinstance(rollout, AttemptedRollout) and rollout.attempt.sequence_id < rollout.config.max_attempts


def count_failures(rollouts: Iterable[Rollout]) -> Counter[str]:
    """Count the rollouts that did not succeed: {error of the latest attempt, or the status: number of rollouts}."""
    left = [rollout for rollout in rollouts if rollout.status != "succeeded"]
    return Counter((isinstance(one, AttemptedRollout) and one.attempt.error) or str(one.status) for one in left)


def failures_in(traces: Traces) -> Counter[str]:
    """Count what failed in these rollouts: `count_failures`, and the model calls without an answer, which an agent may have caught."""
    return count_failures(traces.rollouts) + Counter({f"model call: {error}": count for error, count in traces.call_errors.items()})


def check_disk(rollouts: Iterable[Rollout]) -> None:
    """Raise DiskFullError where rollouts failed because a service's disk was full: that is no failure of the policy or the prompt."""
    failures = {error: count for error, count in count_failures(rollouts).items() if _FULL_DISK.search(error)}
    if failures:
        raise DiskFullError(
            f"{sum(failures.values())} rollouts failed because a disk is full, so nothing is learnt from this step or scored: "
            f"{summarise(Counter(failures))}. Make room (`agl-otel disk` shows what of a data directory is large), and start the run "
            "again: it repeats them"
        )


def failure_summary(rollouts: Iterable[Rollout]) -> str:
    """Return the most frequent failures, for a message; "" where all succeeded."""
    return summarise(count_failures(rollouts))


def summarise(failures: Counter[str]) -> str:
    """Format the three most frequent failures for a message."""
    return "; ".join(f"{count} × {text}" for text, count in failures.most_common(3))


def sampling_seed(*names: object) -> int:
    """Derive a 48-bit sampling seed from names."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=6).digest())


def agent_match_of(algorithm: str, adapter: Any, own: str | None) -> str | None:
    """Return the agent_match for an algorithm that reads trajectories: its `own`, or that of the adapter that the user chose.

    Trajectories are built from the captured token ids, so no other option of an adapter applies. Raises UsageError that names it.
    """
    remedy = f"leave it out: {algorithm} reads the captured token ids, and its agent_match selects the agents"
    if isinstance(adapter, LlmProxyTraceToTriplet):
        return own
    if type(adapter) is not TracerTraceToTriplet:
        raise UsageError(f"{algorithm} does not use a {type(adapter).__name__}: {remedy}")
    defaults = vars(TracerTraceToTriplet())
    other = [name for name, value in vars(adapter).items() if name not in _SUPPORTED and value != defaults[name]]
    if other:
        raise UsageError(f"{algorithm} does not support the adapter's {', '.join(other)}: {remedy}")
    if own is not None and adapter.agent_match not in (None, own):
        raise UsageError(f"agent_match of {algorithm} is {own!r}, and the adapter's is {adapter.agent_match!r}: give one")
    return own if adapter.agent_match is None else adapter.agent_match
