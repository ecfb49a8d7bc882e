"""Algorithms that are done in no time: for a first look at an agent, and for `Trainer.dev`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.utils import items
from agl_otel.store import Store
from agl_otel.types import AttemptedRollout, Dataset, Rollout, RolloutConfig, RolloutMode, Span

RESOURCES_ID: Final = "default"
SHOWN_CHARACTERS: Final = 300
_log = logging.getLogger(__name__)


class FastAlgorithm(Algorithm):
    """Base of algorithms that `Trainer.dev` takes: they finish soon and change nothing."""


class Played(NamedTuple):
    """A rollout that has ended."""

    rollout_id: str
    mode: RolloutMode
    status: str
    reward: float | None
    """The last one; None where there is none."""


class Baseline(FastAlgorithm):
    """Runs the agent on the data and logs what came of it; learns nothing.

    Initial resources are stored under the id `default`.

    Args:
        n_epochs: how often it goes through the data.
        train_split: changes nothing; must be between 0 and 1, as in Agent Lightning 0.3.
        polling_interval: seconds, at most, between two looks at the queue while it is full.
        max_queue_length: another rollout is enqueued while no more than so many wait for a runner.
        span_verbosity: what is logged of spans: keys of their attributes, their values too, or nothing.
        rollout_config: time limits and retries of every rollout; None: the store's.

    Raises ValueError for a train_split that is no part of a whole.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
        rollout_config: RolloutConfig | None = None,
    ) -> None:
        super().__init__()
        if not 0 < train_split < 1:
            raise ValueError(f"train_split is {train_split}: it must be between 0 and 1")
        self.n_epochs = n_epochs
        self.polling_interval = polling_interval
        self.max_queue_length = max_queue_length
        self.span_verbosity = span_verbosity
        self.rollout_config = rollout_config
        self.ended: list[Played] = []
        """What has ended, in that order."""

    def scores(self) -> dict[str, float]:
        """{mode: mean reward}; a rollout that did not succeed, or has no reward, counts 0."""
        found: dict[str, list[float]] = {}
        for each in self.ended:
            found.setdefault(each.mode, []).append((each.reward or 0.0) if each.status == "succeeded" else 0.0)
        return {mode: sum(rewards) / len(rewards) for mode, rewards in found.items()}

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Run the agent on every task: the first data set in mode train, then the second in mode val."""
        datasets: tuple[tuple[RolloutMode, Dataset[Any] | None], ...] = (("train", train_dataset), ("val", val_dataset))
        work: list[tuple[Any, RolloutMode]] = [(task, mode) for mode, dataset in datasets for task in items(dataset)]
        if not work:
            _log.error("neither a train nor a val data set was given: there is nothing to run")
            return
        store = self.get_store()
        resources_id = None
        if (resources := self.get_initial_resources()) is not None:
            resources_id = (await store.update_resources(RESOURCES_ID, resources)).resources_id
        for epoch in range(self.n_epochs):
            _log.info("epoch %d of %d: %d tasks", epoch + 1, self.n_epochs, len(work))
            await self._epoch(store, work, resources_id)

    async def _epoch(self, store: Store, work: Sequence[tuple[Any, RolloutMode]], resources_id: str | None) -> None:
        followed: set[asyncio.Task[None]] = set()
        try:
            for task, mode in work:
                while await _waiting(store) > self.max_queue_length:
                    await self._moment(followed)
                rollout = await store.enqueue_rollout(task, mode=mode, resources_id=resources_id, config=self.rollout_config)
                followed.add(asyncio.create_task(self._follow(store, rollout.rollout_id)))
            await asyncio.gather(*followed)
        finally:
            for each in followed:
                each.cancel()

    async def _moment(self, followed: set[asyncio.Task[None]]) -> None:
        """Until one of them has finished, or it is time to look again. Raises what following one raised."""
        under_way = {each for each in followed if not each.done()}
        if not under_way:
            await asyncio.sleep(self.polling_interval)
            return
        done, _ = await asyncio.wait(under_way, timeout=self.polling_interval, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()

    async def _follow(self, store: Store, rollout_id: str) -> None:
        async for rollout in store.watch([rollout_id]):
            await self._report(store, rollout)

    async def _report(self, store: Store, rollout: Rollout | AttemptedRollout) -> None:
        from agl_otel.emit import find_final_reward

        who = rollout.rollout_id
        spans = list(await store.query_spans(who, "latest"))
        reward = find_final_reward(spans)
        self.ended.append(Played(who, rollout.mode or "train", rollout.status, reward))
        _log.info("[Rollout %s] %s, mode %s, %d spans, final reward: %s", who, rollout.status, rollout.mode, len(spans), reward)
        for attempt in await store.query_attempts(who):
            error = (attempt.error or "").strip().rpartition("\n")[2]
            _log.info("[Rollout %s]   attempt %d: %s%s", who, attempt.sequence_id, attempt.status, f" ({error})" if error else "")
        for span in spans:
            if self.span_verbosity != "none":
                _log.info("[Rollout %s]   %s: %s", who, span.name, self._shown(span))
        if (adapter := self._adapter()) is not None and spans:
            try:
                _log.info("[Rollout %s]   adapted: %s", who, str(adapter(spans))[:SHOWN_CHARACTERS])
            except Exception:  # noqa: BLE001  # the user's code, and this is where its errors are looked for
                _log.exception("[Rollout %s]   the adapter cannot read these spans", who)

    def _shown(self, span: Span) -> str:
        shown: object = span.attributes if self.span_verbosity == "key_values" else sorted(span.attributes)
        return str(shown)[:SHOWN_CHARACTERS]


async def _waiting(store: Store) -> int:
    """How many rollouts wait for a runner."""
    return (await store.query_rollouts(status_in=["queuing", "requeuing"], limit=1)).total
