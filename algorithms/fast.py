"""Algorithms that finish quickly: for trying out an agent, and for `Trainer.dev`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.checked_files import digest_of
from agl_otel.algorithms.grpo.groups import requeue_failed
from agl_otel.algorithms.options import checked
from agl_otel.algorithms.run_folder import RunFolder, open_run
from agl_otel.algorithms.run_log import RunLog, flat
from agl_otel.algorithms.utils import items, retry_lost_runner
from agl_otel.store import Store
from agl_otel.traces.span_query import BOOKKEEPING, SpanQuery
from agl_otel.types import (
    AttemptedRollout,
    Dataset,
    EnqueueRolloutRequest,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutQuery,
    Span,
    TrainingStep,
)
from agl_otel.types.scores import Score

NAME: Final = "baseline"
RESOURCES_ID: Final = "default"
SHOWN_CHARACTERS: Final = 300
_log = logging.getLogger(__name__)


class FastAlgorithm(Algorithm):
    """Base class of algorithms that `Trainer.dev` accepts: they finish quickly and train nothing."""


class EndedRollout(NamedTuple):
    """A rollout that has ended."""

    rollout_id: str
    mode: RolloutMode
    status: str
    reward: float | None
    """The final reward; None where there is none."""
    attempt_id: str = ""
    """The latest attempt; empty where it had none."""


@checked
class Baseline(FastAlgorithm):
    """Runs the agent on the data and logs the results, without training.

    Initial resources are stored under the id `default`.

    Args:
        n_epochs: number of passes over the data.
        train_split: has no effect; must be between 0 and 1, as in Agent Lightning 0.3.
        polling_interval: maximal seconds between polls of a full queue.
        max_queue_length: rollouts are enqueued while at most this many of the run wait for a runner.
        span_verbosity: what is logged of spans: the keys of their attributes, also the values, or nothing.
        rollout_config: time limits and retries of every rollout; None: the store's, or retry_lost_runner() with a `run_dir`.
        run_dir: folder of the run: run.json, and a line for each epoch in metrics.jsonl. An existing run is resumed: rollouts that
            succeeded are read, not run again, and failed ones are retried while they have attempts left. Each epoch is then stored as
            a span that is linked to its attempts. None: in memory.

    Raises UsageError, a ValueError, for an option that is out of its bounds.
    """

    def __init__(
        self,
        *,
        n_epochs: Annotated[int, Field(ge=1, le=1_000_000, description="the agent runs at least once on each task")] = 1,
        train_split: Annotated[float, Field(gt=0, lt=1, description="it is a share of the data")] = 0.5,
        polling_interval: Annotated[float, Field(gt=0, le=3600, description="the queue is asked again after so many seconds")] = 5.0,
        max_queue_length: Annotated[int, Field(ge=0, le=1_000_000, description="it counts rollouts that wait")] = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
        rollout_config: RolloutConfig | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.n_epochs = n_epochs
        self.polling_interval = polling_interval
        self.max_queue_length = max_queue_length
        self.span_verbosity = span_verbosity
        self.rollout_config = rollout_config
        self.run_dir = run_dir
        self.ended: list[EndedRollout] = []
        """Rollouts in the order in which they ended."""

    def scores(self) -> dict[str, float]:
        """Return {mode: mean reward}; rollouts that did not succeed or have no reward count 0."""
        return {mode: score.mean for mode, score in self.scored().items()}

    def scored(self) -> dict[str, Score]:
        """Return {mode: score}, with how many rollouts have no reward."""
        return _scored(self.ended)

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Run the agent on every task: the first data set in mode train, then the second in mode val.

        Raises UsageError where `run_dir` holds a run of other tasks, InUseError where another process works on it.
        """
        datasets: tuple[tuple[RolloutMode, Dataset[Any] | None], ...] = (("train", train_dataset), ("val", val_dataset))
        work: list[tuple[Any, RolloutMode]] = [(task, mode) for mode, dataset in datasets for task in items(dataset)]
        if not work:
            _log.error("neither a train nor a val data set was given: there is nothing to run")
            return
        with open_run(self.run_dir, algorithm=NAME, options=lambda: {"tasks": digest_of(work)}, seed=None) as run:
            if run is None:
                await self._epochs(work, None, None)
            else:
                run.metrics(0)  # rewritten: ended rollouts are read again
                async with RunLog(self.get_store(), run_id=run.run_id, algorithm=NAME, folder=run.folder) as log:
                    await self._epochs(work, run, log)

    async def _epochs(self, work: Sequence[tuple[Any, RolloutMode]], run: RunFolder | None, log: RunLog | None) -> None:
        store, resources = self.get_store(), self.get_initial_resources()
        published = await store.publish(resources, resources_id=RESOURCES_ID) if resources is not None else None
        for epoch in range(1, self.n_epochs + 1):
            _log.info("epoch %d of %d: %d tasks", epoch, self.n_epochs, len(work))
            began, before = time.time(), len(self.ended)
            await self._epoch(store, self._requests(work, published, epoch, run))
            if run is not None and log is not None:
                step = _training_step(run, epoch, published, self.ended[before:], began)
                run.metric({"step": epoch, **step.metrics})
                await log.note(step, {"step": epoch, "reward_mean": step.metrics["reward_mean"]})

    def _requests(
        self, work: Sequence[tuple[Any, RolloutMode]], published: ResourcesUpdate | None, epoch: int, run: RunFolder | None
    ) -> list[EnqueueRolloutRequest]:
        """Build the requests. In a run with a folder, ids are made of run, epoch and index, so that enqueuing them again has no effect."""
        config = self.rollout_config if self.rollout_config is not None or run is None else retry_lost_runner()
        return [
            EnqueueRolloutRequest(
                input=task,
                mode=mode,
                resources_id=published.resources_id if published is not None else None,
                config=config,
                rollout_id=f"ro-{run.run_id}-{epoch:04d}-{place:06d}" if run is not None else None,
                metadata={"run": run.run_id, "step": epoch} if run is not None else None,
            )
            for place, (task, mode) in enumerate(work)
        ]

    async def _epoch(self, store: Store, requests: Sequence[EnqueueRolloutRequest]) -> None:
        followed: set[asyncio.Task[None]] = set()
        try:
            for request in requests:
                while await _waiting(store, [each.get_name() for each in followed if not each.done()]) > self.max_queue_length:
                    await self._wait(followed)
                (rollout,) = await store.enqueue([request])
                if request.rollout_id is not None:
                    await requeue_failed(store, [rollout])
                followed.add(asyncio.create_task(self._follow(store, rollout.rollout_id), name=rollout.rollout_id))
            await asyncio.gather(*followed)
        finally:
            for each in followed:
                each.cancel()

    async def _wait(self, followed: set[asyncio.Task[None]]) -> None:
        """Wait until a task has finished, or for the polling interval. Raises what a task raised."""
        running = {each for each in followed if not each.done()}
        if not running:
            await asyncio.sleep(self.polling_interval)
            return
        done, _ = await asyncio.wait(running, timeout=self.polling_interval, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()

    async def _follow(self, store: Store, rollout_id: str) -> None:
        async for rollout in store.watch([rollout_id]):
            await self._report(store, rollout)

    async def _report(self, store: Store, rollout: Rollout | AttemptedRollout) -> None:
        from agl_otel.spans.emitted import find_final_reward

        who = rollout.rollout_id
        attempt = rollout.attempt.attempt_id if isinstance(rollout, AttemptedRollout) else ""
        spans = list(await store.find_spans(SpanQuery(rollout_id=who, attempt_id=attempt, hidden=BOOKKEEPING))) if attempt else []
        reward = find_final_reward(spans)
        self.ended.append(EndedRollout(who, rollout.mode or "train", rollout.status, reward, attempt))
        _log.info("[Rollout %s] %s, mode %s, %d spans, final reward: %s", who, rollout.status, rollout.mode, len(spans), reward)
        for attempt in await store.attempts(who):
            error = (attempt.error or "").strip().rpartition("\n")[2]
            _log.info("[Rollout %s]   attempt %d: %s%s", who, attempt.sequence_id, attempt.status, f" ({error})" if error else "")
        for span in spans:
            if self.span_verbosity != "none":
                _log.info("[Rollout %s]   %s: %s", who, span.name, self._shown(span))
        if (adapter := self._adapter()) is not None and spans:
            try:
                _log.info("[Rollout %s]   adapted: %s", who, str(adapter(spans))[:SHOWN_CHARACTERS])
            except Exception:  # noqa: BLE001  # user code, whose errors this algorithm exists to log
                _log.exception("[Rollout %s]   the adapter cannot read these spans", who)

    def _shown(self, span: Span) -> str:
        shown: object = span.attributes if self.span_verbosity == "key_values" else sorted(span.attributes)
        return str(shown)[:SHOWN_CHARACTERS]


def _scored(ended: Sequence[EndedRollout]) -> dict[str, Score]:
    found: dict[str, list[float | None]] = {}
    for each in ended:
        found.setdefault(each.mode, []).append(each.reward if each.status == "succeeded" else None)
    return {mode: Score.of(rewards) for mode, rewards in found.items()}


def _training_step(
    run: RunFolder, epoch: int, published: ResourcesUpdate | None, ended: Sequence[EndedRollout], began: float
) -> TrainingStep:
    """Build the step of an epoch. Nothing is trained, so both versions are the same."""
    rewards = [each.reward if each.status == "succeeded" else None for each in ended]
    score = Score.of(rewards)
    succeeded = sum(each.status == "succeeded" for each in ended)
    means = {mode: each.mean for mode, each in _scored(ended).items()}
    metrics = {"rollouts": len(ended), "succeeded": succeeded, "reward_mean": score.mean, "score": means}
    version = str(published.version) if published is not None else ""
    return TrainingStep(
        run_id=run.run_id,
        algorithm=NAME,
        step=epoch,
        resources_id=published.resources_id if published is not None else "",
        version_before=version,
        version_after=version,
        samples=score.asked - score.missing,
        refused=score.missing,
        start_time=began,
        end_time=time.time(),
        metrics=flat(metrics),
        attempts=[(each.rollout_id, each.attempt_id) for each in ended if each.attempt_id],
    )


async def _waiting(store: Store, rollout_ids: Sequence[str]) -> int:
    """Count those of these rollouts that wait for a runner."""
    if not rollout_ids:
        return 0
    return (await store.rollouts(RolloutQuery(status_in=["queuing", "requeuing"], rollout_id_in=rollout_ids, limit=1))).total
