"""Prometheus metrics that reveal silent bias: refused attempts by task and reward, trajectory splits, and the trainers' own figures.

A scrape, but at most one every REFRESH_SECONDS, reads the rollouts that ended since the last one and classifies each once, as training
would (adapters/bias.py). Counters restart with the service. Figures that only a trainer can measure (log-prob drift between sampler and
trainer, stale weights, truncated samples) are gauges that trainers record; the latest value of each is shown.

While the collector or ClickHouse is down, the figures of the last reading are served, with their age.
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
SETTLE_SECONDS: Final = 5.0  # after a rollout's end, because its last spans may still be in flight
PAGE: Final = 500  # rollouts per query
PAGES: Final = 10  # queries per reading: ended rollouts older than the newest 5,000 are not counted
REMEMBERED: Final = 50_000  # ids of counted rollouts
TASKS: Final = 20  # labels for the tasks with the most refusals; all others share the label `other`
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
    counts: Counter[tuple[str, str]] = Counter()
    for (task, reason), count in refused.items():
        counts[task if task in shown else "other", reason] += count
    return _pairs(counts, "task", "reason")


METRICS: Final[tuple[tuple[str, str, Callable[[Bias], Iterable[Sample]]], ...]] = (
    ("attempts", "Latest attempts of ended rollouts, by outcome in training.", lambda b: _pairs(b.attempts, "mode", "outcome")),
    ("attempts_by_reward", "Latest attempts of ended rollouts, by reward.", lambda b: _pairs(b.rewards, "reward", "outcome")),
    ("attempts_refused_by_task", "Refused attempts of the tasks with the most refusals.", _refused_by_task),
    ("verdicts", "Verdicts of these attempts.", lambda b: _labelled("verdict", b.verdicts)),
    ("verdict_alarms", "Unproven attempts whose agents ran under the hook.", lambda b: [({}, b.alarms)]),
    ("calls", "Model calls of accepted attempts.", lambda b: _labelled("outcome", b.calls)),
    ("trajectories", "Training samples made from accepted attempts.", lambda b: [({}, b.trajectories)]),
    ("trajectory_breaks", "Trajectories split off from an earlier one, by reason.", lambda b: _labelled("reason", b.split_reasons)),
    (
        "attempts_by_ending",
        "Accepted attempts, by whether a reply was cut at its length limit.",
        lambda b: _pairs(b.endings, "reward", "replies"),
    ),
    ("attempts_by_weights", "Attempts served by one version of the weights, or by several.", lambda b: _labelled("versions", b.versions)),
)
"""(name, description, samples of a Bias); each name gets the prefix `agl.` and the suffix `.total`."""


class Alarms:
    """Counts the outcomes of ended rollouts. Not thread-safe: use it in one event loop."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = asyncio.Lock()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._training: list[dict[str, Any]] = []
        self._read_at = 0.0
        self.bias = Bias()

    async def families(self) -> list[Family]:
        """Return the metrics, at most REFRESH_SECONDS old unless the stack is down."""
        async with self._lock:
            if self._clock() - self._read_at >= REFRESH_SECONDS:
                try:
                    await self._refresh()
                    self._read_at = self._clock()
                except AglError as error:
                    _log.warning("attempts refused for training cannot be counted now: %s", error)
        figures: dict[str, list[Sample]] = {}
        for row in self._training:
            figures.setdefault("agl.training." + row["name"].removeprefix(PREFIX), []).append(
                ({"algorithm": row["algorithm"]}, row["value"])
            )
        age = self._clock() - self._read_at if self._read_at else float("nan")
        return [
            *(Family(f"agl.{name}.total", "counter", about, list(read(self.bias))) for name, about, read in METRICS),
            *(Family(name, "gauge", "The last value recorded by the trainer.", samples) for name, samples in figures.items()),
            Family("agl.alarms_age_seconds", "gauge", "Age of these figures.", [({}, round(age, 3))]),
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
