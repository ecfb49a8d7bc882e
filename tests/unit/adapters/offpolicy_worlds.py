"""Worlds whose value under any policy is known by enumeration: tasks, steps, actions, and rewards of several kinds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.offpolicy import Logged
from agl_otel.types.columns import Ragged

PARETO: Final = 1.2
"""The shape of the tail of `wild` rewards, whose variance is infinite."""


@dataclass(frozen=True)
class World:
    """Attempts of up to `steps` calls, each an action of a softmax policy; the logits of the new one are `shift` away."""

    shift: float
    attempts: int = 500
    steps: int = 3
    actions: int = 4
    tasks: int = 20
    rewards: Literal["binary", "normal", "heavy", "wild", "steps"] = "binary"
    """At the end: 0 or 1, with normal noise, with that of Student's t of 3 degrees or of a Pareto distribution; or 0 or 1 at each step."""
    unlogged: float = 0.0
    """The new policy's probability of an action that the logged one takes once in ten million."""
    sharp: float = 1.0
    """Standard deviation of the logged logits."""
    ends_early: bool = False
    """Whether the last action ends the attempt."""
    tables: tuple[NDArray[np.float64], ...] = field(init=False, compare=False)
    """Probabilities [tasks, steps, actions] of the logged and of the new policy, and logits of rewards by action and by task."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        shape = (self.tasks, self.steps, self.actions)
        logits = rng.normal(0, self.sharp, shape)
        old, new = _softmax(logits), _softmax(logits + self.shift * rng.normal(size=shape))
        if self.unlogged:
            old[:, 0, 0] = 1e-7
            old /= old.sum(-1, keepdims=True)
            new[:, 0] *= (1 - self.unlogged) / new[:, 0, 1:].sum(-1, keepdims=True)
            new[:, 0, 0] = self.unlogged
        object.__setattr__(self, "tables", (old, new, rng.normal(size=shape), rng.normal(size=self.tasks)))

    def value(self) -> float:
        """Return the mean score of the new policy."""
        _, new, effect, base = self.tables
        total = 0.0
        for task in range(self.tasks):
            for actions in itertools.product(range(self.actions), repeat=self.steps):
                chance, logit, earned, goes_on = 1.0, base[task], 0.0, True
                for step, action in enumerate(actions):
                    chance *= new[task, step, action] if goes_on else 1 / self.actions
                    if goes_on:
                        logit += effect[task, step, action]
                        earned += _sigmoid(effect[task, step, action] + base[task])
                        goes_on = not (self.ends_early and action == self.actions - 1)
                total += chance * (earned if self.rewards == "steps" else _sigmoid(logit) if self.rewards == "binary" else logit)
        return total / self.tasks

    def log(self, rng: np.random.Generator) -> Logged:
        """Draw attempts of the logged policy."""
        old, new, effect, base = self.tables
        task = rng.integers(0, self.tasks, self.attempts)
        logit, goes_on = base[task].copy(), np.ones(self.attempts, np.bool_)
        ratios, rewards = np.zeros((self.attempts, self.steps)), np.zeros((self.attempts, self.steps))
        taken = np.zeros((self.attempts, self.steps), np.bool_)
        for step in range(self.steps):
            action = (rng.random(self.attempts)[:, None] > old[task, step].cumsum(-1)).sum(-1).clip(0, self.actions - 1)
            taken[:, step] = goes_on
            ratios[:, step] = np.log(new[task, step, action] / old[task, step, action])
            logit += goes_on * effect[task, step, action]
            if self.rewards == "steps":
                rewards[:, step] = rng.random(self.attempts) < _sigmoid(effect[task, step, action] + base[task])
            goes_on = goes_on & ~(self.ends_early & (action == self.actions - 1))
        if self.rewards != "steps":
            rewards[np.arange(self.attempts), taken.sum(1) - 1] = self._at_the_end(logit, rng)
        offsets = np.concatenate([[0], np.cumsum(taken.sum(1))])
        return Logged(Ragged(ratios[taken], offsets), Ragged(rewards[taken], offsets), task)

    def _at_the_end(self, logit: NDArray[np.float64], rng: np.random.Generator) -> NDArray[Any]:
        if self.rewards == "binary":
            return rng.random(len(logit)) < _sigmoid(logit)
        noise = {
            "normal": lambda: rng.normal(size=len(logit)),
            "heavy": lambda: rng.standard_t(3, len(logit)),
            "wild": lambda: rng.pareto(PARETO, len(logit)) - 1 / (PARETO - 1),
        }
        return logit + noise[self.rewards]()


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    found = np.exp(logits)
    return found / found.sum(-1, keepdims=True)


def _sigmoid(logit: Any) -> Any:
    return 1 / (1 + np.exp(-logit)) if isinstance(logit, np.ndarray) else 1 / (1 + math.exp(-logit))


WORLDS: Final = {
    "near": World(0.2),
    "near, 100 attempts": World(0.2, attempts=100),
    "near, 16 attempts": World(0.2, attempts=16),
    "middle": World(0.4),
    "middle, effective sample of 48": World(0.4, attempts=60),
    "middle, 2,000 attempts": World(0.4, attempts=2000),
    "wide": World(0.65),
    "wide, effective sample of 47": World(0.65, attempts=80),
    "far": World(1.2),
    "far, effective sample of 30": World(1.2, attempts=100),
    "far, effective sample of 11": World(1.2, attempts=30),
    "normal rewards": World(0.3, rewards="normal"),
    "heavy rewards": World(0.3, rewards="heavy"),
    "wild rewards": World(0.3, rewards="wild"),
    "rewards of steps": World(0.3, rewards="steps"),
    "rewards of steps, early ends": World(0.3, rewards="steps", ends_early=True),
    "early ends": World(0.4, ends_early=True),
    "six steps": World(0.2, steps=6, actions=3),
    "a fifth never logged": World(0.2, unlogged=0.2),
    "a twentieth never logged": World(0.2, unlogged=0.05),
    "a twentieth never logged, 3,000 attempts": World(0.2, unlogged=0.05, attempts=3000),
    "heavy weights": World(0.4, sharp=3),
    "tasks that do not repeat": World(0.4, tasks=200, attempts=150),
}
"""{name: world}. They were chosen before the limits of offpolicy.py were set, but for `near, 16 attempts`."""
