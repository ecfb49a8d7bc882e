"""GRPO's options, in groups: rollouts of a step, sampling, weight updates, length of the run.

The options of the loss are in objective.Objective. Names are unique over all groups, because job files give an option without its group.
A run that was begun without an option of today cannot be resumed: run.json has no value for it (run_folder.py).
Each group raises UsageError for invalid numbers and for combinations that exclude each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agl_otel.algorithms.grpo.lora import require_lora
from agl_otel.errors import UsageError
from agl_otel.types import RolloutConfig, RolloutMode


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step, and which of their calls are trained on."""

    prompts_per_step: int = 16
    group_size: int = 8
    """Rollouts of each task in a step."""
    resample_rounds: int = 0
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): how often a step's zero-variance groups, whose rewards are all equal, are replaced
    by groups of other tasks. Groups that still have no variance are then left out of the update. Costs rollouts."""
    groups_in_flight: int | None = None
    """Asynchronous mode: this many groups run at a time, more than prompts_per_step; a step takes the first that are finished and carries
    the others over (AReaL, arXiv:2505.24298, §4). Use importance_cap with it. None: every step waits for all of its groups."""
    max_staleness: int = 2
    """In asynchronous mode: groups that were enqueued this many steps ago are waited for."""
    step_timeout_seconds: float = 600.0
    """Rollouts that have not finished by then are cancelled and left out of their step, and counted (`not_finished`). Groups that are
    carried over run on."""
    rollout_config: RolloutConfig | None = None
    """Retries and time limits of rollouts. None: retry_lost_runner() with a `run_dir`."""
    offline_mode: RolloutMode | None = None
    """Train on offline rollouts, which this run did not enqueue: a step takes all of this mode that have succeeded since the last one, and
    the run ends when there are no new ones. Equal tasks form a group; tasks with a single rollout form one group together. The weights
    that sampled them are unknown: importance_cap bounds the effect."""
    agent_match: str | None = None
    """Train only on the calls of agents whose name matches this regular expression."""
    fill_reward: float | None = None
    """The reward of attempts without one; None refuses such attempts."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are permuted at random among a step's rollouts, so that nothing can be learnt."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UsageError(f"group_size is {self.group_size}: rewards are compared within a group; use at least 2")
        _require(self, 0, "resample_rounds", "max_staleness")
        if self.groups_in_flight is not None and self.groups_in_flight <= self.prompts_per_step:
            raise UsageError(
                f"groups_in_flight is {self.groups_in_flight}: it must be more than prompts_per_step ({self.prompts_per_step}), "
                "or nothing is left to carry over"
            )
        if self.offline_mode is not None and (self.groups_in_flight is not None or self.resample_rounds):
            raise UsageError("offline_mode enqueues nothing: leave out groups_in_flight and resample_rounds")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of agents' calls, unless the agent sets its own."""

    temperature: float = 1.0
    """The trainer divides its logits by it as well."""
    max_tokens: int = 64
    """The longest reply."""
    seed_sampling: bool = True
    """Give every rollout a seed, which the proxy adds to each of its calls. With a model server that honours it (grpo/server.py does so
    bit for bit), a run is reproducible. False leaves sampling to the server."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How the weights are updated, apart from the loss."""

    updates_per_step: int = 3
    """Optimizer steps on each batch (mu in algorithm 1 of DeepSeekMath): rollouts cost more than updates."""
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    lora_rank: int | None = None
    """Train LoRA adapters of this rank (arXiv:2106.09685, extra [lora]) instead of all weights. Servers get weights with the adapter merged
    in. LoRA usually needs a higher learning rate. None: all weights are trained."""
    device: str = "cpu"
    threads: int = 1
    """Threads of torch on the CPU; more are slower for small models on busy cores."""
    probe_tolerance: float | None = None
    """After each push the server samples a few tokens, and their log-probs are compared with the trainer's: a probability ratio that
    differs from 1 by more than this ends the run. 1e-3 suits float32, 0.1 a server in bfloat16. None: no check."""

    def __post_init__(self) -> None:
        if self.lora_rank is not None:
            _require(self, 1, "lora_rank")
            require_lora()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a run, and its checkpoints."""

    max_steps: int = 200
    target_score: float | None = None
    """Stop when the mean reward of the last `score_window` steps has reached this."""
    score_window: int = 5
    val_every: int | None = None
    """In a job: validate after every so many steps, and keep the checkpoint with the best score. None: only before and after the run."""
    seed: int = 0
    checkpoint_every_steps: int = 1
    """Steps after the last checkpoint are repeated from the stored rollouts when the run is resumed."""
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _require(self, 1, "checkpoint_every_steps", "keep_checkpoints")
        _require(self, 0, *(["val_every"] if self.val_every is not None else []))


def _require(group: Any, least: int, *names: str) -> None:
    for name in names:
        if (value := getattr(group, name)) < least:
            raise UsageError(f"{name} is {value}: it must be at least {least}" if least else f"{name} is {value}: it must not be negative")
