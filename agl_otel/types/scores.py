"""The score of rollouts: the one place that decides what a missing reward counts as."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

SCORED_MODES: Final = frozenset({"train", "val", "test"})
"""Modes of rollouts that an algorithm asks for, whose scores are means over all of them. Rollouts of other modes, such as `production`, may
rightly have no reward: their mean is over those that have one."""

HELD_OUT: Final = frozenset({"val", "test"})
"""Modes of rollouts that nothing should be trained on: the score of their tasks would be of what was learnt by heart."""

MAX_REWARD: Final = 1e9
"""A greater one, of either sign, is as wrong as one that is not finite: beside it, other rewards are equal in float32."""


RUNNER: Final = "runner"
"""The source of rewards that the runner gives, by its grader or from the agent's result."""
AGENT: Final = "agent"
"""The source of all other rewards that came as telemetry: those that an agent emits, and evaluators' records."""


def is_usable(reward: float) -> bool:
    """Return whether a reward counts: it is finite, and at most MAX_REWARD. Others count as none, in scores and in training alike."""
    return abs(reward) <= MAX_REWARD


def asked_of(mode: str, *, ended: int, rewarded: int) -> int:
    """Return over how many rollouts of a mode the score is taken, of which so many have ended and so many have a reward."""
    return ended if mode in SCORED_MODES else rewarded


def counted(rewards: Iterable[float | None]) -> list[float]:
    """Return rewards as scores count them: a missing one is 0."""
    return [0.0 if reward is None else reward for reward in rewards]


class Score(NamedTuple):
    """The mean reward of some rollouts, in which a missing reward counts as 0.

    The reward of a rollout that did not succeed counts as missing.
    """

    total: float
    """Sum of the rewards."""
    asked: int
    """Number of rollouts, with and without a reward."""
    missing: int
    """Number of rollouts without a reward."""

    @classmethod
    def of(cls, rewards: Iterable[float | None]) -> Score:
        """Compute the score of rollouts with these rewards; None: it has none."""
        values = list(rewards)
        return cls(sum(counted(values)), len(values), values.count(None))

    @classmethod
    def joined(cls, scores: Iterable[Score]) -> Score:
        """Compute the score of the rollouts of several scores together."""
        found = list(scores)
        return cls(sum(each.total for each in found), sum(each.asked for each in found), sum(each.missing for each in found))

    @property
    def mean(self) -> float:
        """The score; 0 where there are no rollouts."""
        return self.total / self.asked if self.asked else 0.0

    def described(self) -> str:
        """Return the score, and how many rollouts it counts as 0 because they have no reward."""
        without = f" ({self.missing} without a reward count{'' if self.missing > 1 else 's'} as 0)" if self.missing else ""
        return f"{self.mean:.3f} on {self.asked} tasks{without}"
