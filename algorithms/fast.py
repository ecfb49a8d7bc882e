"""Algorithms that are done in no time: for a first look at an agent, and for `Trainer.dev`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Literal

from agl_otel.algorithms.base import Algorithm
from agl_otel.store import Store
from agl_otel.types import AttemptedRollout, Dataset, EnqueueRolloutRequest, Rollout, RolloutMode, Span

SHOWN_CHARACTERS: Final = 300
_log = logging.getLogger(__name__)


class FastAlgorithm(Algorithm):
    """Base of algorithms that `Trainer.dev` takes: they finish soon and change nothing."""


class Baseline(FastAlgorithm):
    """Runs the agent on the data and logs what came of it; learns nothing.

    Args:
        n_epochs: how often it goes through the data.
        train_split: which part of the first data set is run in mode train where no second one is given; the rest is run in mode val.
        polling_interval: changes nothing: a rollout is reported when it has finished.
        max_queue_length: at most so many rollouts wait or run at a time.
        span_verbosity: what is logged of spans: keys of their attributes, their values too, or nothing.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        super().__init__()
        self.n_epochs = n_epochs
        self.train_split = train_split
        self.max_queue_length = max(1, max_queue_length)
        self.span_verbosity = span_verbosity

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Run the agent on every task."""
        train = list(_items(train_dataset))
        val = list(_items(val_dataset))
        if val_dataset is None and train:
            middle = max(1, round(self.train_split * len(train)))
            train, val = train[:middle], train[middle:]
        if not train and not val:
            _log.error("neither a train nor a val data set was given: there is nothing to run")
            return
        store = self.get_store()
        resources_id = None
        if (resources := self.get_initial_resources()) is not None:
            resources_id = (await store.add_resources(resources)).resources_id
        modes: tuple[tuple[RolloutMode, Sequence[Any]], ...] = (("train", train), ("val", val))
        work: list[tuple[Any, RolloutMode]] = [(task, mode) for mode, tasks in modes for task in tasks]
        for epoch in range(self.n_epochs):
            _log.info("epoch %d of %d: %d tasks", epoch + 1, self.n_epochs, len(work))
            for start in range(0, len(work), self.max_queue_length):
                await self._batch(store, work[start : start + self.max_queue_length], resources_id)

    async def _batch(self, store: Store, work: Sequence[tuple[Any, RolloutMode]], resources_id: str | None) -> None:
        requests = [EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id) for task, mode in work]
        rollouts = await store.enqueue_many_rollouts(requests)
        async for rollout in store.watch([rollout.rollout_id for rollout in rollouts]):
            await self._report(store, rollout)

    async def _report(self, store: Store, rollout: Rollout | AttemptedRollout) -> None:
        from agl_otel.emit import find_final_reward

        spans = list(await store.query_spans(rollout.rollout_id))
        reward = find_final_reward(spans)
        _log.info(
            "[Rollout %s] %s, mode %s, %d spans, final reward: %s", rollout.rollout_id, rollout.status, rollout.mode, len(spans), reward
        )
        for span in spans:
            if self.span_verbosity != "none":
                _log.info("[Rollout %s]   %s: %s", rollout.rollout_id, span.name, self._shown(span))

    def _shown(self, span: Span) -> str:
        shown: object = span.attributes if self.span_verbosity == "key_values" else sorted(span.attributes)
        return str(shown)[:SHOWN_CHARACTERS]


def _items(dataset: Dataset[Any] | None) -> list[Any]:
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))]
