"""Alarms for silent bias as Prometheus metrics: which attempts are refused and why, by task and reward; breaks; what trainers found.

The web service reads verdicts, so it counts: at a scrape, and at most every REFRESH_SECONDS, the newest rollouts that ended are read and
judged as training would (adapters/bias.py), each once. Counters start anew with the service. What only a trainer knows (log-probs that
drift between sampler and trainer, stale weights, cut samples) trainers record themselves: the latest of each is shown.

A stack whose collector or ClickHouse is away shows the figures of the last reading, and how old they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from agl_otel.adapters.bias import TAKEN, Bias, bias_of
from agl_otel.errors import AglError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.store import Store
from agl_otel.store.figures import PREFIX
from agl_otel.telemetry.meters import Family, Sample

REFRESH_SECONDS: Final = 15.0
SETTLE_SECONDS: Final = 5.0  # after the end of a rollout; its last spans may be on their way
PAGE: Final = 500  # rollouts read at a time
PAGES: Final = 10  # what a reading looks through at most: ended rollouts behind the newest 5,000 are not counted
REMEMBERED: Final = 50_000
TASKS: Final = 20  # with most refusals; the others are `other`
TRAINING: Final = f"""
SELECT MetricName AS name, Attributes['algorithm'] AS algorithm, argMax(Value, TimeUnix) AS value FROM otel_metrics_gauge
WHERE startsWith(MetricName, '{PREFIX}') AND TimeUnix > now() - INTERVAL 1 DAY GROUP BY name, algorithm ORDER BY name, algorithm
"""
_log = logging.getLogger(__name__)


def _pairs(counts: Mapping[tuple[str, str], int], *names: str) -> Iterable[Sample]:
    return ((dict(zip(names, key, strict=True)), count) for key, count in sorted(counts.items()))


def _labelled(name: str, counts: Mapping[str, int]) -> Iterable[Sample]:
    return (({name: key}, count) for key, count in sorted(counts.items()))


def _refused_by_task(bias: Bias) -> Iterable[Sample]:
    refused = Counter({key: count for key, count in bias.tasks.items() if key[1] != TAKEN})
    by_task: Counter[str] = Counter()
    for (task, _), count in refused.items():
        by_task[task] += count
    shown = {task for task, _ in by_task.most_common(TASKS)}
    told: Counter[tuple[str, str]] = Counter()
    for (task, reason), count in refused.items():
        told[task if task in shown else "other", reason] += count
    return _pairs(told, "task", "reason")


METRICS: Final[tuple[tuple[str, str, Callable[[Bias], Iterable[Sample]]], ...]] = (
    ("attempts", "Latest attempts of ended rollouts, by what training makes of them.", lambda b: _pairs(b.attempts, "mode", "outcome")),
    ("attempts_by_reward", "The same, by their reward.", lambda b: _pairs(b.rewards, "reward", "outcome")),
    ("attempts_refused_by_task", "Those refused, of the tasks with most of them.", _refused_by_task),
    ("verdicts", "Verdicts of these attempts.", lambda b: _labelled("verdict", b.verdicts)),
    ("verdict_alarms", "Unproven attempts whose agents ran under the hook.", lambda b: [({}, b.alarms)]),
    ("calls", "Model calls of attempts that were taken.", lambda b: _labelled("outcome", b.calls)),
    ("trajectories", "Training samples that they make.", lambda b: [({}, b.trajectories)]),
    ("trajectory_breaks", "Trajectories that began because an earlier one broke off, by reason.", lambda b: _labelled("reason", b.breaks)),
    (
        "attempts_by_ending",
        "Attempts that were taken, by whether a reply ended at its length limit.",
        lambda b: _pairs(b.endings, "reward", "replies"),
    ),
    ("attempts_by_weights", "Attempts answered by one version of the weights, or by several.", lambda b: _labelled("versions", b.versions)),
)
"""(name, description, what to read); each gets the prefix `agl.` and the suffix `.total`."""


class Alarms:
    """What is counted. Use it in one event loop."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = asyncio.Lock()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._training: list[dict[str, Any]] = []
        self._read_at = 0.0
        self.bias = Bias()

    async def families(self) -> list[Family]:
        """The metrics, at most REFRESH_SECONDS old where the stack answers."""
        async with self._lock:
            if self._clock() - self._read_at >= REFRESH_SECONDS:
                try:
                    await self._refresh()
                    self._read_at = self._clock()
                except AglError as error:
                    _log.warning("what is refused for training cannot be counted now: %s", error)
        figures: dict[str, list[Sample]] = {}
        for row in self._training:
            figures.setdefault("agl.training." + row["name"].removeprefix(PREFIX), []).append(
                ({"algorithm": row["algorithm"]}, row["value"])
            )
        age = self._clock() - self._read_at if self._read_at else float("nan")
        return [
            *(Family(f"agl.{name}.total", "counter", about, list(read(self.bias))) for name, about, read in METRICS),
            *(Family(name, "gauge", "As the trainer recorded it last.", samples) for name, samples in figures.items()),
            Family("agl.alarms_age_seconds", "gauge", "How old these figures are.", [({}, round(age, 3))]),
        ]

    async def _refresh(self) -> None:
        await self._store.open()
        settled = self._clock() - SETTLE_SECONDS
        for number in range(PAGES):
            page = await self._store.queue.query_rollouts(status_in=sorted(FINISHED), sort_order="desc", limit=PAGE, offset=number * PAGE)
            ended = [each.rollout_id for each in page if (each.end_time or 0.0) <= settled and each.rollout_id not in self._seen]
            if ended:
                traces = await self._store.traces(ended, deadline_seconds=0)
                self.bias.add(await asyncio.to_thread(bias_of, traces))
                self._seen.update(dict.fromkeys(ended))
            if len(page) < PAGE or not ended:
                break
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self._training = await self._store.reader.query(TRAINING)
