"""Statistics that decide whether new weights or prompts may answer users: held-out gains, drift, alarms, and the watch over a canary. Pure.

A gate never says that they are good; it says what speaks against them. Each reason is a key of REFUSALS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.offpolicy import Estimate, Interval
from agl_otel.errors import DataError

ONE_SIDED: Final = 1.645
"""Quantile of the normal distribution for one side at 95 %."""
ERROR: Final = 0.05
"""The chance that the bounds of an equal canary ever roll it back."""
LEAST_RATED: Final = 8
"""Attempts with trusted rewards without which nothing is said of them; and conversations of the promoted weights, beside a canary."""
LEAST_TASKS: Final = 5
"""Held-out tasks without which paired_gain is never more than chance."""
UNSOUND: Final = frozenset({"small_sample", "heavy_tail", "missing_mass"})
"""Doubts (offpolicy.CANNOT_TELL) by which an interval need not have the truth in it."""
REFUSALS: Final = {
    "update_failed": "the update failed: its error is in the cycle",
    "no_new_weights": "the update changed nothing",
    "held_out_falls": "the held-out score fell by more than chance",
    "held_out_no_gain": "the held-out score did not rise by more than chance",
    "backtest_worse": "on the logged attempts it would have earned less",
    "backtest_not_better": "it is not shown that it would have earned more on the logged attempts",
    "drift_unknown": "no logged reply says how far it is from the weights that answered, and max_drift asks for that",
    "drift": "its replies are further from those of the weights that answered than max_drift allows",
    "trusted_falls": "alarm: by the trusted rewards of the logged attempts it would have earned less",
    "trusted_stays": "alarm: it would have earned more of the rewards that are trained on, and no more of the trusted ones",
    "trusted_unsure": "the trusted rewards do not show that it would have earned no less: more of them, or a smaller step, may",
    "trusted_lags": "alarm: the rewards that are trained on have risen, and the trusted ones have not followed as they used to",
    "canary_worse": "the canary earned less than the promoted weights by more than chance",
    "canary_no_gain": "the canary's mean reward is lower than the promoted weights' by more than max_drop",
    "canary_down": "the canary's model server ended, or did not answer",
    "canary_unrated": "too few conversations of the canary, or of the promoted weights in the same time, got rewards to judge it",
}
"""{why weights or prompts are not promoted: its text}."""
ALARMS: Final = frozenset({"trusted_falls", "trusted_stays", "trusted_lags"})
"""The reasons that speak of a reward that is exploited."""
Array = NDArray[np.float64]
Asked = Literal["off", "not_worse", "better"]


def paired_gain(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the mean gain over the same tasks, with its interval at 95 %.

    It is Student's interval of the gains and of two more, the greatest one up and down, as Agresti & Min add to paired proportions ("Simple
    improved confidence intervals for comparing matched proportions", Statistics in Medicine 24, 2005): tasks that rarely differ would else
    seem to agree. Where gains are symmetric, it calls equal policies better, or worse, in at most 3 % of runs of 8 to 200 tasks; a
    bootstrap of the gains alone did in 10 %, where one task in twenty differed. Fewer than LEAST_TASKS never differ by more than chance;
    rare gains that are much greater than all others need more tasks.

    Raises DataError without tasks, or where they are not the same.
    """
    if not before or len(before) != len(after):
        raise DataError(f"a gain is of the same tasks before and after: these are {len(before)} and {len(after)}")
    gains = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    value, most = float(gains.mean()), float(np.abs(gains).max())
    if len(gains) < 2:
        return Interval(value, -math.inf, math.inf)
    added = np.append(gains, [most, -most])
    width = _student_quantile(len(added) - 1) * math.sqrt(_squared_error(added))
    return Interval(value, float(added.mean()) - width, float(added.mean()) + width)


def _student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution; from 3 degrees on it is within 1 % (Abramowitz & Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def divergence(new: NDArray[np.floating[Any]], old: NDArray[np.floating[Any]]) -> float | None:
    """Return the mean KL divergence for each token, KL(old ‖ new) in nats, from the log-probs of tokens that the old policy sampled.
    Without tokens nothing is known of it.

    The estimator r - 1 - log r is unbiased and never negative (J. Schulman, "Approximating KL divergence", 2020).
    """
    logs = new.astype(np.float64) - old.astype(np.float64)
    return float(np.mean(np.expm1(logs) - logs)) if len(logs) else None


class Rated(NamedTuple):
    """Rewards of attempts that have both, [attempts] each."""

    trained: Array
    """Those that are trained on."""
    trusted: Array
    """Those of sources that the training does not see."""


def trusted_lags(then: Rated, now: Rated) -> bool:
    """Return whether the trained rewards have risen, and the trusted ones less than `then` would have it, each by more than chance.

    That is how an exploited reward looks before the true score falls: both rise at first, then one stays behind (Gao, Schulman & Hilton,
    "Scaling laws for reward model overoptimization", arXiv:2210.10760). What `then` would have is a line fitted to its attempts, so that
    trusted rewards may be noisy, or on another scale.
    """
    if min(len(then.trained), len(now.trained)) < LEAST_RATED:
        return False
    rise = float(now.trained.mean() - then.trained.mean())
    if rise <= ONE_SIDED * math.sqrt(_squared_error(then.trained) + _squared_error(now.trained)):
        return False
    squares = float(np.square(then.trained - then.trained.mean()).sum())
    slope = float(((then.trained - then.trained.mean()) * then.trusted).sum()) / squares if squares else 0.0
    line = then.trusted.mean() + slope * (now.trained - then.trained.mean())
    residual = then.trusted - then.trusted.mean() - slope * (then.trained - then.trained.mean())
    spread = float(np.square(residual).sum()) / (len(residual) - 2)
    fit = spread * (1 / len(residual) + (rise**2 / squares if squares else 0.0))  # variance of the line at the mean of `now`
    lag = line - now.trusted
    return float(lag.mean()) > max(ONE_SIDED * math.sqrt(_squared_error(lag) + fit), 1e-9)  # without noise only rounding is left


def _squared_error(values: Array) -> float:
    """Return the variance of their mean."""
    return float(values.var(ddof=1)) / len(values)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a gate asks for."""

    held_out: Asked = "not_worse"
    backtest: Asked = "not_worse"
    max_drift: float | None = None
    """The greatest drift; None: it is not asked, as of prompts."""
    max_trusted_drop: float | None = None
    """By how much trusted rewards may fall; None: nothing is trusted."""


def refusals(
    rules: Rules, *, held_out: Interval, backtest: Estimate | None, trusted: Estimate | None, lags: bool, drift: float | None
) -> tuple[str, ...]:
    """Return the reasons against weights or prompts, in the order of REFUSALS.

    Args:
        rules: what is asked for.
        held_out: the gain on held-out tasks.
        backtest: by the rewards that are trained on; None where too few attempts count.
        trusted: by the trusted rewards, at a level of 80 %; None where too few attempts count.
        lags: trusted_lags.
        drift: divergence; None: it is not known.
    """
    better = backtest is not None and backtest.verdict == "better"
    loses = not held_out.high >= 0  # also where it is not a number
    falls = trusted is not None and trusted.gain.high < 0
    more = backtest is not None and backtest.gain.low > 0  # also where the estimate is in doubt: an alarm is cheap
    stays = more and not falls and trusted is not None and trusted.gain.low < trusted.gain.value <= 0
    unsure = rules.max_trusted_drop is not None and not (trusted is not None and _speaks_for(trusted, rules.max_trusted_drop))
    found = {
        "held_out_falls": rules.held_out != "off" and loses,
        "held_out_no_gain": rules.held_out == "better" and not loses and not held_out.low > 0,
        "backtest_worse": rules.backtest != "off" and backtest is not None and backtest.verdict == "worse",
        "backtest_not_better": rules.backtest == "better" and not better and not (backtest is not None and backtest.verdict == "worse"),
        "drift_unknown": rules.max_drift is not None and drift is None,
        "drift": rules.max_drift is not None and drift is not None and not drift <= rules.max_drift,  # also where it is not a number
        "trusted_falls": falls,
        "trusted_stays": stays,
        "trusted_unsure": unsure and not falls and not stays,
        "trusted_lags": lags,
    }
    return tuple(reason for reason, is_so in found.items() if is_so)


def _speaks_for(trusted: Estimate, drop: float) -> bool:
    """Return whether trusted rewards show that weights fell by no more than `drop`. Equal ones show nothing: their interval is a point."""
    return trusted.gain.low >= -drop and trusted.gain.low < trusted.gain.high and not UNSOUND & set(trusted.doubts)


def difference_bounds(canary: Array, stable: Array, *, spread: float, planned: int, error: float = ERROR) -> Interval:
    """Return the difference of the mean rewards with bounds that hold at every look at once, however often one looks.

    Robbins' normal mixture for bounded values, for each mean at half of the `error` (Howard et al., arXiv:1810.08240, eq. 14), so that
    the canary may be looked at after every reward.

    Args:
        canary: rewards.
        stable: likewise, of the same time.
        spread: the range in which rewards lie.
        planned: the number of the canary's rewards for which the bounds are to be narrowest.
        error: the chance that the bounds are ever wrong.
    """
    if not len(canary) or not len(stable):
        return Interval(0.0, -math.inf, math.inf)
    value = float(canary.mean() - stable.mean())
    width = sum(_radius(len(rewards), spread / 2, planned, error / 2) for rewards in (canary, stable))
    return Interval(value, value - width, value + width)


def _radius(count: int, sigma: float, planned: int, error: float) -> float:
    evidence = 2 * math.log(1 / error)
    prior = planned / (evidence + math.log1p(evidence))
    return sigma * math.sqrt((count + prior) * math.log((count + prior) / (prior * error**2))) / count


def canary_verdict(
    canary: Array, stable: Array, *, over: bool, planned: int, spread: float, max_drop: float, steps: int = 1
) -> tuple[Literal["wait", "pass", "roll_back"], str]:
    """Decide about a step of a canary: (verdict, key of REFUSALS or empty). One that passes its last step is promoted.

    Args:
        canary: rewards of its conversations in this step.
        stable: those of the promoted weights at the same time.
        over: whether it has taken as many conversations as it may, and no more rewards are waited for.
        planned: rewards after which it passes, if nothing speaks against it, and the promoted weights have got LEAST_RATED by then.
        spread: the range of rewards.
        max_drop: by how much its mean may be lower; chance alone makes half of equal canaries lower.
        steps: how many the canary has. The chance that it is wrongly found worse is for all of them together, and each has its part.
    """
    bounds = difference_bounds(canary, stable, spread=spread, planned=planned, error=ERROR / steps)
    if bounds.high < 0:
        return "roll_back", "canary_worse"
    if len(canary) >= planned and len(stable) >= min(planned, LEAST_RATED):
        return ("pass", "") if bounds.value >= -max_drop else ("roll_back", "canary_no_gain")
    return ("roll_back", "canary_unrated") if over else ("wait", "")
