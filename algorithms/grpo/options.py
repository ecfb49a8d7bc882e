"""GRPO's options, in groups: rollouts of a step, sampling, weight updates, length of the run.

The options of the loss are in objective.Objective. Names are unique over all groups, because job files give an option without its group.
A run that was begun without an option of today cannot be resumed: run.json has no value for it (run_folder.py).
Each group raises UsageError for invalid numbers and for combinations that exclude each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from agl_otel.algorithms.grpo.lora import require_lora
from agl_otel.errors import UsageError
from agl_otel.types import RolloutConfig, RolloutMode

Dtype = Literal["auto", "float32", "bfloat16"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]


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
    """Rollouts that have not finished by then are left out of their step, and counted."""
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
    minibatches: int = 1
    """Parts into which each batch is split at random, with an optimizer step for each (PPO, arXiv:1707.06347, algorithm 1)."""
    micro_batch_tokens: int = 16384
    """The most tokens of one forward pass, padding included. Gradients are accumulated, so it bounds memory and changes no result."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input, and compute its activations again in the backward pass: less memory, a third more time."""
    dtype: Dtype = "auto"
    """Of the computation: "float32", or "bfloat16", where weights and optimizer stay float32 (mixed precision) and servers get files in
    bfloat16; with LoRA the frozen weights are bfloat16. "auto": float32 on the CPU, else bfloat16."""
    attention: str | None = None
    """transformers' attn_implementation, as "sdpa" or "flash_attention_2"; None: its choice for the model."""
    learning_rate: float = 1e-3
    """For the tiny model; a real one needs 1e-6 to 1e-5, with LoRA about ten times as much."""
    learning_rate_schedule: LearningRateSchedule = "constant"
    """After the warm-up: "constant", or "linear" or "cosine" decay to 0 after max_steps."""
    warmup_steps: int = 0
    """Steps in which the learning rate grows linearly to its value."""
    max_grad_norm: float = 1.0
    lora_rank: int | None = None
    """Train LoRA adapters of this rank (arXiv:2106.09685, extra [lora]) instead of all weights. Servers get weights with the adapter merged
    in. LoRA usually needs a higher learning rate. None: all weights are trained."""
    lora_alpha: float | None = None
    """The adapter's output is scaled by lora_alpha / lora_rank. None: twice the rank."""
    lora_targets: tuple[str, ...] | str = "all-linear"
    """The ends of the names of layers that get an adapter, as ["q_proj", "v_proj"]; "all-linear": all but the head."""
    device: str = "cpu"
    threads: int = 1
    """Threads of torch on the CPU; more are slower for small models on busy cores."""
    probe_tolerance: float | None = None
    """After each push the server samples a few tokens, and their log-probs are compared with the trainer's: a probability ratio that
    differs from 1 by more than this ends the run. 1e-3 suits float32, 0.1 a server in bfloat16. None: no check."""
    ratio_error_limit: float | None = 0.1
    """Before a step's first update, the trainer's probability of each token is compared with the one captured during sampling. The run
    ends, and changes nothing, where the ratio of the worst hundredth of the tokens differs from 1 by more than this on average: sampling,
    weights or tokenizer differ. Tokens of earlier weights are left out. None: no limit."""

    def __post_init__(self) -> None:
        _require(self, 1, "minibatches", "micro_batch_tokens")
        _require(self, 0, "warmup_steps")
        if self.lora_rank is not None:
            _require(self, 1, "lora_rank")
            require_lora()

    @property
    def in_bfloat16(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.dtype == "bfloat16" or (self.dtype == "auto" and not self.device.startswith("cpu"))

    def learning_rate_at(self, step: int, max_steps: int) -> float:
        """Return the learning rate of a step (1, 2, …) of a run of `max_steps`."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        done = (step - 1 - self.warmup_steps) / max(1, max_steps - self.warmup_steps)
        left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}
        return self.learning_rate * left[self.learning_rate_schedule]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a run, and its checkpoints."""

    max_steps: int = 200
    target_score: float | None = None
    """Stop when the mean reward of the last `score_window` steps has reached this."""
    score_window: int = 5
    seed: int = 0
    checkpoint_every_steps: int = 1
    """Steps after the last checkpoint are repeated from the stored rollouts when the run is resumed."""
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _require(self, 1, "checkpoint_every_steps", "keep_checkpoints")


def _require(group: Any, least: int, *names: str) -> None:
    for name in names:
        if (value := getattr(group, name)) < least:
            raise UsageError(f"{name} is {value}: it must be at least {least}" if least else f"{name} is {value}: it must not be negative")
