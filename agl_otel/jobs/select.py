"""Select attempts from traces: which are read, and which each step leaves out (adapters/batches.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from agl_otel.adapters.batches import beyond, by_value, task_of, task_text, variances
from agl_otel.adapters.failures import has_failed, named, what_failed
from agl_otel.adapters.near import leaders, shingles
from agl_otel.errors import UsageError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.store import Store
from agl_otel.traces.figures import AttemptFigures
from agl_otel.types import AttemptedRollout, Rollout, RolloutMode, RolloutQuery, is_trial
from agl_otel.types.columns import AttemptKey
from agl_otel.types.scores import HELD_OUT
from agl_otel.types.selections import Selected
from agl_otel.types.spans import by_attempt

PAGE: Final = 2_000  # rollouts whose figures are read at a time, and in one query of the queue
READ: Final = 100  # attempts whose spans are in memory at a time
OnRead = Callable[[int, int], object]
"""Called with the number of attempts that were read, and of all that are."""
COLUMNS: Final = ("RolloutId", "AttemptId", "Value")
"""Of a query: the first is needed."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which attempts are selected: of those that have ended, the latest of each rollout."""

    sql: str | None = None
    """A query that returns their rollouts (COLUMNS); None: all."""
    modes: Sequence[RolloutMode] = ()
    """Empty: all but HELD_OUT."""
    run: str | None = None
    since: float | None = None
    """Unix seconds; only rollouts that began then or later."""
    reward: str | None = None
    """The name of the reward dimension; None: the primary one."""
    failed: bool = False
    """Only what failed (failures.has_failed), by cluster."""
    below: float | None = None
    """A lower reward is a failure."""
    clusters: Sequence[str] = ()
    """Only clusters whose name has one of these texts in it; empty: all."""
    near: float | None = None
    """The similarity from which two tasks are near-duplicates; None: they are not compared."""
    by_value: bool = False
    per_task: int | None = None
    per_cluster: int | None = None
    top: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are not the default."""
        return {name: value for name, value in asdict(self).items() if value is not None and value is not False and value != ()}


@dataclass
class Chosen:
    """What was selected."""

    rows: list[Selected]
    read: int
    """Rollouts that were named."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """By batches.LEFT_OUT."""


class _Named(NamedTuple):
    """A rollout that a query names."""

    attempt_id: str
    """Empty: the latest."""
    value: float | None


class _Batch:
    """Attempts from which each step leaves some out."""

    def __init__(self, rollouts: Sequence[AttemptedRollout]) -> None:
        self.rollouts = {(each.rollout_id, each.attempt.attempt_id): each for each in rollouts}
        self.keys = list(self.rollouts)
        self.left_out = Counter[str]()

    def leave_out(self, keys: Iterable[AttemptKey], why: str) -> None:
        out = set(keys)
        self.left_out.update({why: len(out)} if out else {})
        self.keys = [key for key in self.keys if key not in out]

    def keep(self, keys: Collection[AttemptKey], why: str) -> None:
        self.leave_out([key for key in self.keys if key not in keys], why)


async def select(store: Store, choice: Choice, *, on_read: OnRead = lambda *_: None) -> Chosen:
    """Select attempts, in order: that of the query, else of their enqueue, else of their value. Nothing is stored.

    `on_read` is called as spans are read. Raises UsageError for a query without rollout ids, and QueryError.
    """
    await store.open()
    await store.reader.barrier()
    query = await _queried(store, choice.sql) if choice.sql is not None else None
    rollouts, left_out = await _rollouts(store, choice, query)
    batch = _Batch(rollouts)
    batch.left_out = left_out
    read = len(rollouts) + left_out.total()
    figures = await _figures(store, batch)
    tasks = {key: task_of(rollout) for key, rollout in batch.rollouts.items()}
    rewards = {key: _reward(each, choice.reward) for key, each in figures.items()}
    values = variances(rewards, tasks)
    if query is not None:
        values |= {key: query[key[0]].value for key in values if query[key[0]].value is not None}
    clusters: dict[AttemptKey, str] = {}
    if choice.failed:
        clusters = await _keep_failed(store, batch, figures, rewards, choice, on_read)
    if choice.near is not None:
        batch.leave_out(_near_duplicates(batch, tasks, choice.near), "near_duplicate")
    batch.keys = by_value(batch.keys, values, tasks) if choice.by_value else batch.keys
    if choice.per_task is not None:
        batch.leave_out(beyond(batch.keys, tasks, choice.per_task), "beyond_task")
    if choice.per_cluster is not None:
        batch.leave_out(beyond(batch.keys, clusters, choice.per_cluster), "beyond_cluster")
    if choice.top is not None:
        batch.leave_out(batch.keys[choice.top :], "beyond_top")
    rows = [
        Selected(rollout_id=key[0], attempt_id=key[1], reward=rewards[key], cluster=clusters.get(key, ""), value=values[key])
        for key in batch.keys
    ]
    return Chosen(rows, read, batch.left_out)


async def _queried(store: Store, sql: str) -> dict[str, _Named]:
    """Return {rollout id: what a query says of it}, in the order of its rows; of several rows the first counts."""
    found: dict[str, _Named] = {}
    rows = await store.reader.query(sql, own=False)
    names = {name.replace("_", "").casefold(): name for name in (rows[0] if rows else ())}
    rollout, attempt, value = (names.get(column.casefold()) for column in COLUMNS)
    if rows and rollout is None:
        raise UsageError(f"the query returns {', '.join(rows[0])}: it needs a column RolloutId, and may have AttemptId and Value")
    for row in rows:
        name = str(row[rollout]) if rollout is not None else ""
        number = row[value] if value is not None else None
        try:
            worth = float(number) if number is not None else None
        except (TypeError, ValueError):
            raise UsageError(f"the query returns the Value {number!r} of rollout {name!r}: a number is needed, or NULL") from None
        worth = worth if worth is not None and math.isfinite(worth) else None
        found.setdefault(name, _Named(str(row[attempt]) if attempt is not None else "", worth))
    return found


async def _rollouts(store: Store, choice: Choice, query: Mapping[str, _Named] | None) -> tuple[list[AttemptedRollout], Counter[str]]:
    """Return the rollouts with an attempt that may be selected, and why others may not."""
    out = Counter[str]()
    if query is None:
        modes = list(choice.modes) or None
        found = list(await store.queue.query_rollouts(RolloutQuery(status_in=sorted(FINISHED), mode_in=modes, run=choice.run)))
        within = None
    else:
        found = await _by_id(store, list(query))
        within = {each.rollout_id for each in await _by_id(store, list(query), run=choice.run)} if choice.run is not None else None
        out["not_in_queue"] = len(query) - len(found)
    kept: list[AttemptedRollout] = []
    for rollout in found:
        why = _why_not(rollout, choice, query)
        if within is not None and rollout.rollout_id not in within:
            why = "other_window"
        if why or not isinstance(rollout, AttemptedRollout):
            out[why or "not_ended"] += 1
        else:
            kept.append(rollout)
    return kept, +out


def _why_not(rollout: Rollout | AttemptedRollout, choice: Choice, query: Mapping[str, _Named] | None) -> str:
    if rollout.status not in FINISHED or not isinstance(rollout, AttemptedRollout):
        return "not_ended"
    if is_trial(rollout):
        return "trial"
    if not choice.modes and rollout.mode in HELD_OUT:
        return "held_out"
    if (choice.modes and rollout.mode not in choice.modes) or (choice.since is not None and rollout.start_time < choice.since):
        return "other_window"
    if query is not None and query[rollout.rollout_id].attempt_id not in ("", rollout.attempt.attempt_id):
        return "replaced"
    return ""


async def _by_id(store: Store, ids: Sequence[str], *, run: str | None = None) -> list[Rollout | AttemptedRollout]:
    """Return the rollouts of these ids, in their order, that the queue has; of `run` alone, if it is given."""
    found: dict[str, Rollout | AttemptedRollout] = {}
    for start in range(0, len(ids), PAGE):
        page = await store.queue.query_rollouts(RolloutQuery(rollout_id_in=ids[start : start + PAGE], run=run))
        found |= {each.rollout_id: each for each in page}
    return [found[each] for each in ids if each in found]


async def _figures(store: Store, batch: _Batch) -> dict[AttemptKey, AttemptFigures]:
    found: dict[AttemptKey, AttemptFigures] = {}
    attempts = [batch.rollouts[key].attempt for key in batch.keys]
    for start in range(0, len(attempts), PAGE):
        page = await store.reader.figures(attempts[start : start + PAGE])
        found |= {(each.rollout_id, each.attempt_id): each for each in page}
    return found


def _reward(figures: AttemptFigures, name: str | None) -> float | None:
    return figures.reward if name is None else figures.rewards.get(name)


async def _keep_failed(
    store: Store,
    batch: _Batch,
    figures: Mapping[AttemptKey, AttemptFigures],
    rewards: Mapping[AttemptKey, float | None],
    choice: Choice,
    on_read: OnRead,
) -> dict[AttemptKey, str]:
    """Leave out what did not fail, and clusters that were not asked for; return the cluster of each attempt that failed."""
    failed = {
        key for key, rollout in batch.rollouts.items() if has_failed(rollout.status, figures[key].verdict.kind, rewards[key], choice.below)
    }
    batch.keep(failed, "not_failed")
    clusters = await _clusters(store, batch, figures, on_read)
    if choice.clusters:
        batch.keep({key for key, name in clusters.items() if any(text in name for text in choice.clusters)}, "other_cluster")
    return clusters


async def _clusters(store: Store, batch: _Batch, figures: Mapping[AttemptKey, AttemptFigures], on_read: OnRead) -> dict[AttemptKey, str]:
    """Return the cluster of each attempt that is left."""
    failures: dict[AttemptKey, str] = {}
    for start in range(0, len(batch.keys), READ):
        page = batch.keys[start : start + READ]
        spans = by_attempt(await store.spans([rollout_id for rollout_id, _ in page]))
        for key in page:
            failures[key] = what_failed(spans.get(key, []), batch.rollouts[key].attempt, figures[key].verdict.kind)
        on_read(len(failures), len(batch.keys))
    return named(failures)


def _near_duplicates(batch: _Batch, tasks: Mapping[AttemptKey, str], least: float) -> list[AttemptKey]:
    """Return the attempts at tasks that are near-duplicates of one that was enqueued before."""
    texts: dict[str, str] = {}
    for key in sorted(batch.keys, key=lambda each: (batch.rollouts[each].start_time, each)):
        texts.setdefault(tasks[key], task_text(batch.rollouts[key]))
    order = list(texts)
    first = leaders([shingles(texts[task]) for task in order], least)
    copies = {task for place, task in enumerate(order) if first[place] != place}
    return [key for key in batch.keys if tasks[key] in copies]
