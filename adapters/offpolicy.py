"""Estimates what attempts would have earned under another policy, from attempts that were sampled under known ones. Pure.

An attempt weighs as many times as the new policy would have made its replies more often than the one that made them: the product of the
ratios of its calls, for what agents and tools do in between is as probable under both. The estimate is per decision, self-normalised and
doubly robust (weighted doubly robust: Thomas & Brunskill, arXiv:1604.00923, §4, after Jiang & Li, arXiv:1511.03722), with a baseline for
each step and task that does not know the attempt itself. Its interval is a bootstrap-t over rollouts (Efron & Tibshirani, "An Introduction
to the Bootstrap", 1993, §12.5) of the estimate's influence values.

Few large weights make any such interval wrong, and nothing in it shows. So the estimate says that it cannot tell, and why, where the
effective sample is a small share of the attempts, where weights or influences have a tail too heavy for a mean (the shape of a generalised
Pareto distribution: Vehtari et al., arXiv:1507.02646), and where the new policy has much of its mass on replies that were never logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.ragged import concatenate, take
from agl_otel.types.columns import Ragged

DRAWS: Final = 2000
LEAST_SHARE: Final = 0.6
LEAST_ATTEMPTS: Final = 50
HEAVIEST_TAIL: Final = 0.4
MOST_MISSING: Final = 3.0
SHRINKAGE: Final = 2.0
CANNOT_TELL: Final = {
    "few_attempts": f"fewer than {LEAST_ATTEMPTS} attempts count",
    "small_sample": f"the effective sample is less than {LEAST_SHARE:.0%} of the attempts: the new policy is too far from the logged one",
    "heavy_tail": "a few attempts decide the estimate, by their weights or their rewards",
    "missing_mass": "the new policy would often write what was never logged",
    "overlap": "the interval has the logged score in it",
}
"""{reason for which nothing is told: its text}."""
Array = NDArray[np.float64]
Verdict = Literal["better", "worse", "cannot_tell"]


class Logged(NamedTuple):
    """Attempts as their estimate needs them."""

    log_ratios: Ragged
    """float64, of each call of each attempt, in order: the log-prob of its reply under the new policy less that under the logged one."""
    rewards: Ragged
    """float64, as long: what was earned after each call and before the next. The score of an attempt is their sum."""
    task: NDArray[np.int64]
    """[attempts]: which have the same task, 0 … tasks - 1."""

    def picked(self, attempts: NDArray[np.int64]) -> Logged:
        """Return these attempts alone."""
        return Logged(take(self.log_ratios, attempts), take(self.rewards, attempts), self.task[attempts])


def joined(parts: Sequence[Logged]) -> Logged:
    """Return the attempts of several parts. Tasks are told apart by part, too: one in two of them has two baselines."""
    ratios, rewards, tasks, begun = Ragged.from_rows([], np.float64), Ragged.from_rows([], np.float64), np.zeros(0, np.int64), 0
    for part in parts:
        ratios, rewards = concatenate(ratios, part.log_ratios), concatenate(rewards, part.rewards)
        tasks, begun = np.concatenate([tasks, part.task + begun]), begun + int(part.task.max(initial=-1)) + 1
    return Logged(ratios, rewards, tasks)


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """What attempts would have earned under the new policy."""

    score: Interval
    """The mean score of the new policy."""
    gain: Interval
    """It less the mean score of the logged attempts."""
    logged: float
    """Their mean score."""
    attempts: int
    effective: float
    """Effective sample size: (sum of weights)² / sum of their squares (Kish, "Survey Sampling", 1965)."""
    mass: float
    """The mean weight: 1 but for chance, unless the new policy writes what was never logged."""
    tail: float
    """Shape of the tail of weights and influences, the heavier of both: from 0.5 on they have no variance."""
    clipped: int = 0
    """Number of attempts whose weight was clipped."""
    clip_bias: float = 0.0
    """Bound of the bias that clipping causes: the mean of what it took from the weights, times the range of the scores."""
    doubts: tuple[str, ...] = ()
    """Keys of CANNOT_TELL."""

    @property
    def verdict(self) -> Verdict:
        """Whether the new policy is better or worse than what was logged."""
        if self.doubts:
            return "cannot_tell"
        return "better" if self.gain.low > self.clip_bias else "worse"


def estimate(logged: Logged, *, clip: float | None = None, level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Estimate the new policy's mean score.

    Args:
        logged: at least two attempts, each with at least one call.
        clip: the greatest weight, at any step; None: weights are not clipped.
        level: of the intervals.
        draws: of the bootstrap.
        seed: of its random numbers, so that the same attempts have the same interval.
    """
    rewards, alive = _dense(logged.rewards)
    exact = np.exp(np.minimum(np.cumsum(_dense(logged.log_ratios)[0], 1), 700.0))  # finite
    weights = exact if clip is None else np.minimum(exact, clip)
    scores = rewards.sum(1)
    if not weights.mean(0).all():  # of none of these replies is the new policy's probability a number above 0
        mean = float(scores.mean())
        score, gain = (Interval(value, -math.inf, math.inf) for value in (mean, 0.0))
        return Estimate(score, gain, mean, len(weights), effective=0.0, mass=0.0, tail=math.inf, doubts=("small_sample", "missing_mass"))
    value, influence = _doubly_robust(weights, rewards, _baselines(rewards, alive, logged.task))
    last = weights[:, -1]
    rng = np.random.default_rng(seed)
    score = bootstrap_interval(value, influence, level, draws, rng)
    gain = bootstrap_interval(value - float(scores.mean()), influence - (scores - scores.mean()), level, draws, rng)
    effective = float(last.sum() ** 2 / np.square(last).sum())
    mass, spread = float(exact[:, -1].mean()), float(exact[:, -1].std() / math.sqrt(len(last)))
    tail = max(tail_shape(last), tail_shape(np.abs(influence)))
    lost = 0.0 if clip is None else float((exact[:, -1] - last).mean() * np.ptp(scores))
    found = {
        "few_attempts": len(last) < LEAST_ATTEMPTS,
        "small_sample": effective < LEAST_SHARE * len(last),
        "heavy_tail": tail > HEAVIEST_TAIL,
        "missing_mass": 1 - mass > MOST_MISSING * spread + 1e-3,
        "overlap": gain.low <= lost and gain.high >= -lost,
    }
    doubts = tuple(reason for reason, is_so in found.items() if is_so)
    clipped = 0 if clip is None else int(np.count_nonzero((exact > clip).any(1)))
    return Estimate(score, gain, float(scores.mean()), len(last), effective, mass, tail, clipped, lost, doubts)


def _dense(rows: Ragged) -> tuple[Array, NDArray[np.bool_]]:
    """Return the rows as a matrix [attempts, most calls] with zeros behind their ends, and which of its places are theirs."""
    alive = np.arange(rows.lengths.max()) < rows.lengths[:, None]
    found = np.zeros(alive.shape)
    found[alive] = rows.values
    return found, alive


def _baselines(rewards: Array, alive: NDArray[np.bool_], task: NDArray[np.int64]) -> Array:
    """Return what the other attempts earned from each step on, [attempts, steps]: those at the same task, drawn to the mean of all."""
    to_go = np.cumsum(rewards[:, ::-1], 1)[:, ::-1] * alive
    tasks = int(task.max()) + 1
    total, count = np.zeros((tasks, rewards.shape[1])), np.zeros((tasks, rewards.shape[1]))
    np.add.at(total, task, to_go)
    np.add.at(count, task, alive)
    others = (to_go.sum(0) - to_go) / np.maximum(alive.sum(0) - alive, 1)
    same = np.maximum(count[task] - alive, 0)
    return (total[task] - to_go + SHRINKAGE * others) / (same + SHRINKAGE) * alive


def _doubly_robust(weights: Array, rewards: Array, baselines: Array) -> tuple[float, Array]:
    """Return the estimate, and the influence of each attempt on it."""
    before = np.concatenate([np.ones((len(weights), 1)), weights[:, :-1]], 1)
    value, influence = 0.0, np.zeros(len(weights))
    for weight, term in ((weights, rewards - baselines), (before, baselines)):
        share = weight / weight.mean(0)
        means = (share * term).mean(0)
        value += float(means.sum())
        influence += (share * (term - means)).sum(1)
    return value, influence


def bootstrap_interval(value: float, influence: Array, level: float, draws: int, rng: np.random.Generator) -> Interval:
    """Return the bootstrap-t interval of an estimate from the influence of each of its independent observations."""
    count = len(influence)
    error = float(influence.std(ddof=1)) / math.sqrt(count)
    least = 1e-9 * float(np.abs(influence).max(initial=0.0))  # below it there is only rounding
    if not error > least:
        return Interval(value, value, value)
    found: list[Any] = []
    for start in range(0, draws, 100):
        drawn = influence[rng.integers(0, count, (min(100, draws - start), count))]
        deviation = drawn.std(1, ddof=1)
        varied = deviation > least
        found.append(drawn.mean(1)[varied] / (deviation[varied] / math.sqrt(count)))
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, value - float(high) * error, value - float(low) * error)


def tail_shape(values: Array) -> float:
    """Return the shape k of a generalised Pareto distribution fitted to the greatest values (Zhang & Stephens, Technometrics 2009, with the
    prior of Vehtari et al.); minus infinity where too few differ for a fit."""
    count = len(values)
    ordered = np.sort(values)
    most = int(min(0.2 * count, 3 * math.sqrt(count)))
    above = ordered[count - most :] - ordered[count - most - 1]
    above = above[above > 0]
    size = len(above)
    if size < 5:
        return -math.inf
    steps = np.arange(1, 31 + int(math.sqrt(size)))
    scale = 1 / above[-1] + (1 - np.sqrt(len(steps) / (steps - 0.5))) / (3 * above[int(size / 4 + 0.5) - 1])
    shapes = np.log1p(-scale[:, None] * above).mean(1)
    likelihood = size * (np.log(-scale / shapes) - shapes - 1)
    chance = 1 / np.exp(np.clip(likelihood - likelihood[:, None], -700, 700)).sum(1)
    shape = float(np.log1p(-float((scale * chance).sum()) * above).mean())
    return (shape * size + 5) / (size + 10)
