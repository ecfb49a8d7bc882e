"""Credit by calls learns toy worlds, whose best steps are known, from at most half the rollouts of rollout-level GRPO.

A policy of one layer acts; traces, trajectories, advantages and updates are the package's. How good a policy is, is computed from its
probabilities, not from rollouts. A seed is of the weights, the actions and the permutations; what it gives depends on the machine, as
float32 sums that differ in their last bit let other actions be drawn. So few runs are compared by their median, and ten, which
`CREDIT_SEEDS=10` plays, by their sum, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.groups import Group
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.report import Clock
from agl_otel.types.columns import Reward, SpanColumns, Traces
from tests.unit.adapters.conftest import CallRow, TracesBuilder

pytestmark = pytest.mark.full

SEEDS: Final = range(int(os.environ.get("CREDIT_SEEDS", "3")))
ACTIONS: Final = 4
"""The whole vocabulary: two of these tokens name a state."""
GROUP_SIZE: Final = 64
LEARNING_RATE: Final = 2e-3
TARGET: Final = 0.9
"""Of the probability of the best action, in the mean over the states."""
Actor = Callable[[Sequence[Sequence[int]]], tuple[list[int], list[float]]]
"""Samples an action for each prompt: (tokens, log-probs)."""


@dataclass
class Step:
    """A call: its agent, prompt, action and log-prob, and the reward after it (None: none)."""

    agent: str
    prompt: list[int]
    action: int
    logprob: float
    reward: float | None = None


@dataclass
class Attempt:
    """One rollout: its calls, and the reward at its end (None: none)."""

    steps: list[Step] = field(default_factory=list[Step])
    final: float | None = None
    agents: dict[str, float] = field(default_factory=dict[str, float])
    """{agent: the reward of its span}."""


@dataclass(frozen=True)
class World:
    """States by their prompts, each with its best action, and how attempts go."""

    best: dict[tuple[int, ...], int]
    roll: Callable[[World, Actor], list[Attempt]]

    def score(self, model: Any) -> float:
        """Return the mean probability of the best actions."""
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(list(self.best))).logits[:, -1]
        chances = torch.softmax(logits, -1)
        return float(np.mean([chances[row, action].item() for row, action in enumerate(self.best.values())]))


def luck(size: float) -> float:
    """Draw what no action changes."""
    return size * float(torch.randn(()))


def stepwise(world: World, act: Actor) -> list[Attempt]:
    """Five steps, whatever is done; the right action of each gives a reward at once, and so does luck."""
    attempts = [Attempt() for _ in range(GROUP_SIZE)]
    for prompt, best in world.best.items():
        actions, logprobs = act([prompt] * GROUP_SIZE)
        for attempt, action, logprob in zip(attempts, actions, logprobs, strict=True):
            attempt.steps.append(Step("", list(prompt), action, logprob, float(action == best) + luck(3.0)))
    return attempts


def walking(world: World, act: Actor) -> list[Attempt]:
    """Five states in a row: the right action goes on, any other stays. The end within sixteen steps is the only reward."""
    states = [list(prompt) for prompt in world.best]
    attempts = [Attempt(final=0.0) for _ in range(GROUP_SIZE)]
    at = [0] * GROUP_SIZE
    for _ in range(16):
        left = [place for place, state in enumerate(at) if state < len(states)]
        if not left:
            break
        actions, logprobs = act([states[at[place]] for place in left])
        for place, action, logprob in zip(left, actions, logprobs, strict=True):
            state = states[at[place]]
            attempts[place].steps.append(Step("", state, action, logprob))
            at[place] += action == world.best[tuple(state)]
            attempts[place].final = float(at[place] == len(states))
    return attempts


def together(world: World, act: Actor) -> list[Attempt]:
    """Two agents beside each other, two calls each in turn, the worker first. Each one's span has its right actions as reward, the worker's
    ten times, and with luck in it."""
    attempts = [Attempt(agents={"planner": 0.0, "worker": 0.0}) for _ in range(GROUP_SIZE)]
    for prompt, best in world.best.items():
        agent = "worker" if prompt[0] % 2 == 0 else "planner"
        actions, logprobs = act([prompt] * GROUP_SIZE)
        for attempt, action, logprob in zip(attempts, actions, logprobs, strict=True):
            attempt.steps.append(Step(agent, list(prompt), action, logprob))
            attempt.agents[agent] += float(action == best) if agent == "planner" else 10.0 * ((action == best) + luck(1.0))
    return attempts


FIVE: Final = {(place % ACTIONS, place // ACTIONS): (place * 3 + 1) % ACTIONS for place in range(5)}
CHAIN: Final = World(FIVE, stepwise)
WALK: Final = World(FIVE, walking)
AGENTS: Final = World({(place, place % 2): (place * 3 + 1) % ACTIONS for place in range(4)}, together)


def traces_of(attempts: Sequence[Attempt], *, by_step: bool) -> Traces:
    """Write the attempts as traces: rewards of steps emitted in the spans of their agents, or one reward at the end."""
    rows: list[CallRow] = []
    rewards: dict[tuple[str, str], list[Reward]] = {}
    spans: list[tuple[str, str, str, str, int]] = []
    number = 0
    for place, attempt in enumerate(attempts):
        rollout = f"r{place:02d}"  # in the order in which columns have them
        own = rewards.setdefault((rollout, "at-1"), [])
        for call, step in enumerate(attempt.steps, 1):
            number += 1
            rows.append(
                CallRow(rollout=rollout, call=call, prompt=step.prompt, response=[step.action], logprobs=[step.logprob], agent=step.agent)
            )
            spans.append((rollout, f"s{number - 1}", step.agent, "llm", number))
            if by_step and step.reward is not None:
                spans.append((rollout, f"note{number}", f"s{number - 1}", "agentlightning.annotation", number + 1))
                own.append(Reward(number + 1, f"note{number}", 0, "primary", step.reward))
        total = sum(step.reward or 0.0 for step in attempt.steps) + sum(attempt.agents.values()) + (attempt.final or 0.0)
        if by_step:
            own += [Reward(10_000, agent, 0, "primary", value) for agent, value in attempt.agents.items()]
        if not own:
            own.append(Reward(number + 1, "", 0, "primary", total))
        spans += [(rollout, agent, "", agent, 10_000) for agent in sorted({step.agent for step in attempt.steps} - {""})]
    traces = TracesBuilder(rewards=rewards).build(*rows)
    ids, names, parents, kinds, numbers = zip(*spans, strict=True)
    tree = SpanColumns(list(ids), ["at-1"] * len(ids), list(names), list(parents), list(kinds), np.array(numbers, np.uint64))
    return replace(traces, tree=tree)


def samples_needed(world: World, seed: int, *, by_step: bool, most_steps: int, **options: Any) -> int | None:
    """Return the number of rollouts until the policy is as good as TARGET; None if it is not within so many steps."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 16,
        "initializer_range": 0.2,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=ACTIONS, max_position_embeddings=8, **shape)).eval()
    torch.nn.init.zeros_(model.lm_head.weight)  # every action is as probable as any other
    grpo: Any = GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", seed=seed, **options)
    learner = Learner(model, learning_rate=LEARNING_RATE, objective=grpo.objective)

    def act(prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[float]]:
        with torch.no_grad():
            chances = torch.log_softmax(model(input_ids=torch.tensor(prompts)).logits[:, -1], -1)
        actions = torch.multinomial(chances.exp(), 1)
        return actions[:, 0].tolist(), chances.gather(-1, actions)[:, 0].tolist()

    for step in range(1, most_steps + 1):
        traces = traces_of(world.roll(world, act), by_step=by_step)
        group = Group(0, 1, [rollout.rollout_id for rollout in traces.rollouts])
        read = grpo._score(traces, to_trajectories(traces), [group], Clock())
        learner.update(read.batch, read.scored.advantages)
        if world.score(model) >= TARGET:
            return step * GROUP_SIZE
    return None


CASES: Final[dict[str, tuple[World, int, dict[str, Any]]]] = {
    "chain": (CHAIN, 120, {"by_step": True, "credit": "to_go", "discount": 0.0}),
    "agents": (AGENTS, 80, {"by_step": True, "credit": "to_go"}),
    "walk": (WALK, 80, {"by_step": False, "credit": "states", "discount": 0.9}),
}
"""{name: (world, most steps, options of credit)}. A walk has no step rewards: its states repeat instead. A run that has not reached the
target after the most steps counts as if it had then."""


@pytest.mark.parametrize("name", CASES)
def test_credit_needs_at_most_half_the_rollouts_of_grpo(name: str) -> None:
    world, most, options = CASES[name]
    cap = most * GROUP_SIZE
    ours = [samples_needed(world, seed, most_steps=most, **options) or cap for seed in SEEDS]
    theirs = [samples_needed(world, seed, by_step=False, most_steps=most) or cap for seed in SEEDS]
    print(f"\n{name}: {ours}, rollout-level {theirs}")
    assert 2 * median(ours) <= median(theirs)
    assert len(SEEDS) < 10 or 2 * sum(ours) <= sum(theirs)


@pytest.mark.parametrize("name", ["chain", "agents"])
def test_with_permuted_step_rewards_no_seed_reaches_the_target(name: str) -> None:
    world, most, options = CASES[name]
    assert [samples_needed(world, seed, most_steps=most, shuffle_rewards=True, **options) for seed in SEEDS] == [None] * len(SEEDS)
