"""GRPO's options, in groups: rollouts of a step, sampling, weight updates, length of the run, loss, advantages.

Names are unique over all groups, because job files give an option without its group. A run that was begun without an option of today
cannot be resumed: run.json has no value for it (run_folder.py). Each group raises UsageError for values out of their bounds
(algorithms/options.py) and for combinations that exclude each other. Torch is not imported, so that jobs are checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field

from agl_otel.adapters.credit import Compare, Function, Rule
from agl_otel.algorithms.grpo.optimizers import OptimizerName, require_optimizer
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.metric_sinks import check_metrics
from agl_otel.algorithms.offline import check_offline
from agl_otel.algorithms.options import (
    AgentMatch,
    Clip,
    Credit,
    Device,
    Discount,
    FillReward,
    KlCoefficient,
    LearningRate,
    MaxGradNorm,
    MaxSteps,
    MaxTokens,
    ProbeTolerance,
    PromptsPerStep,
    RatioErrorLimit,
    RewardSources,
    RewardWaitSeconds,
    SamplingTemperature,
    Seed,
    SelectionName,
    StateWeight,
    StepTimeout,
    TargetScore,
    Threads,
    ValEvery,
    ZeroOr,
    check_rollouts,
    checked,
)
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.errors import SettingsError, UsageError
from agl_otel.service.loading import load_function
from agl_otel.types import RolloutConfig, RolloutMode
from agl_otel.types.resources import Bridging, StrictTools


def require_lora(what: str = "lora_rank") -> None:
    """Raise SettingsError where peft is missing, which names the extra that is needed for `what`."""
    if find_spec("peft") is None:
        raise SettingsError(f"{what} needs the [lora] extra (peft is missing): pip install 'agl-otel[lora]'")


def _needs_gpu(attention: str) -> bool:
    """Whether an implementation of attention computes no gradients on the CPU; of a name that transformers does not know, not."""
    return attention.startswith(("flex_attention", "flash_attention"))


def _ends(targets: Sequence[str] | str) -> Sequence[str] | str:
    """Accept lora_targets. Raises ValueError for a text other than ALL_LINEAR, which peft would read as a regular expression."""
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ValueError(f'it must be a list of ends of layers\' names, as ["q_proj", "v_proj"], or "{ALL_LINEAR}"')
    return targets


ALL_LINEAR: Final = "all-linear"
ON_CPU: Final = ("eager", "sdpa")
"""Implementations of attention that compute gradients on the CPU; flex_attention samples there, and fails at the first update."""
Dtype = Literal["auto", "float32", "bfloat16"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]
Average = Literal["token", "sequence", "rollout", "constant"]
_OF_SURROGATE: Final = frozenset({"clip", "clip_high", "dual_clip", "sequence_ratio"})


@checked
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step, and which of their calls are trained on."""

    prompts_per_step: PromptsPerStep = 16
    """Tasks of a step; each has a group of rollouts."""
    group_size: Annotated[int, Field(ge=2, le=10_000, description="rewards are compared within a group")] = 8
    """Rollouts of each task in a step."""
    resample_rounds: Annotated[int, Field(ge=0, le=1000, description="each round costs rollouts")] = 0
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): how often a step's zero-variance groups, whose rewards are all equal, are replaced
    by groups of other tasks. Groups that still have no variance are then left out of the update. Costs rollouts."""
    groups_in_flight: Annotated[int | None, Field(ge=2, le=100_000, description="more groups run than a step takes")] = None
    """Asynchronous mode: this many groups run at a time, more than prompts_per_step; a step takes the first that are finished and carries
    the others over (AReaL, arXiv:2505.24298, §4). Use importance_cap with it. None: every step waits for all of its groups."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000, description="it counts steps")] = 2
    """In asynchronous mode: groups that were enqueued this many steps ago are waited for."""
    step_timeout_seconds: StepTimeout = 600.0
    """Rollouts that have not finished by then are cancelled and left out of their step, and counted (`not_finished`). Groups that are
    carried over run on."""
    rollout_config: RolloutConfig | None = None
    """Retries and time limits of rollouts. None: retry_lost_runner() with a `run_dir`."""
    offline_mode: RolloutMode | None = None
    """Train on offline rollouts, which this run did not enqueue: a step takes all of this mode that have succeeded since the last one, and
    the run ends when there are no new ones. Equal tasks form a group; tasks with a single rollout form one group together. The weights
    that sampled them are unknown: importance_cap bounds the effect."""
    selection: SelectionName | None = None
    """Train on the attempts of this selection (docs/selection.md), NAME or NAME@VERSION, instead: those that have succeeded, each once. A
    resumed run goes on with the version that it was begun with."""
    agent_match: AgentMatch | None = None
    """Train only on the calls of agents whose name matches this regular expression."""
    fill_reward: FillReward | None = None
    """The reward of attempts without one; None refuses such attempts."""
    reward_sources: RewardSources | None = None
    """Whose rewards count (docs/late-rewards.md): "runner", "agent", and sources of feedback, as ["runner", "ann"]. None: everybody's."""
    reward_wait_seconds: RewardWaitSeconds = 0.0
    """How long a rollout that has succeeded waits for a reward, at most step_timeout_seconds. With groups_in_flight steps go on with other
    groups meanwhile; a group that is max_staleness steps old is trained on with the rewards that it has."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are permuted at random among a step's rollouts, so that nothing can be learnt."""

    def __post_init__(self) -> None:
        check_rollouts(max(self.prompts_per_step, self.groups_in_flight or 0), self.group_size)
        if self.groups_in_flight is not None and self.groups_in_flight <= self.prompts_per_step:
            raise UsageError(
                f"groups_in_flight = {self.groups_in_flight}: it must be greater than prompts_per_step ({self.prompts_per_step}), "
                "because a step carries the others over; give such a value, or leave it out"
            )
        if self.groups_in_flight is None and self.max_staleness != Rollouts.max_staleness:
            raise UsageError(
                f"max_staleness = {self.max_staleness} has no effect without groups_in_flight, because every step waits for its own "
                "groups: give groups_in_flight, or leave it out"
            )
        check_offline(self.offline_mode, self.selection)
        if self.is_offline and (self.groups_in_flight is not None or self.resample_rounds):
            raise UsageError(f"{self.offline} enqueues nothing: leave out groups_in_flight and resample_rounds")

    @property
    def is_offline(self) -> bool:
        """Whether it enqueues nothing, and trains on rollouts that there are."""
        return self.offline_mode is not None or self.selection is not None

    @property
    def offline(self) -> str:
        """The option that says what the offline rollouts are, as it is written in a job."""
        return f'offline_mode = "{self.offline_mode}"' if self.selection is None else f'selection = "{self.selection}"'


@checked
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of agents' calls, and which of the calls that an agent sampled otherwise are trained on."""

    temperature: SamplingTemperature = 1.0
    """The trainer divides its logits by it as well."""
    sampling_policy: Literal["refuse", "correct", "enforce", "enforce_all", "any"] = "correct"
    """What becomes of parameters that an agent sets itself. `refuse`: its calls with another distribution are context, and counted as
    `sampling_differs`. `correct`: so are they, but for another temperature, at which the trainer then scores their tokens. `enforce`: the
    run's parameters replace the agent's in training, but for a temperature of 0, a grammar or a tool choice; `enforce_all`: of 0 as well.
    `any`: all calls are trained on, and the gradient may be biased."""
    mix_temperatures: bool = False
    """With `correct`: train on calls of several temperatures in one step; otherwise on those of the run's, or the most frequent one."""
    max_tokens: MaxTokens = 64
    """The longest reply."""
    bridge: Bridging = "off"
    """How conversations go on after a reply. `off`: the chat template writes the reply again. `keep`: by its sampled tokens, thinking
    included, so that a conversation stays one sample. `drop`: so too, but where the template leaves out thinking (docs/bridging.md)."""
    strict_tools: StrictTools = "keep"
    """`drop`: the proxy sends an agent's tools without `strict`, by which some model servers hold a call's arguments to their schemas: such
    tokens are not drawn from the model's own distribution, and not trained on (docs/training.md). Validation has the same."""
    seed_sampling: bool = True
    """Give every rollout a seed, which the proxy adds to each of its calls. With a model server that honours it (grpo/server.py does so
    bit for bit), a run is reproducible. False leaves sampling to the server."""


@checked
@dataclass(frozen=True, kw_only=True)
class Updates:
    """How the weights are updated, apart from the loss."""

    updates_per_step: Annotated[int, Field(ge=1, le=1000, description="a step without an update trains nothing")] = 3
    """Passes over each batch (mu in algorithm 1 of DeepSeekMath), with an optimizer step for each of its `minibatches`: rollouts cost more
    than updates."""
    minibatches: Annotated[
        int, Field(ge=1, le=1000, description="each is an optimizer step on its part of the batch, and a part has at least one sample")
    ] = 1
    """Parts into which each batch is split at random, with an optimizer step for each (PPO, arXiv:1707.06347, algorithm 1)."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=100_000_000, description="a forward pass has at least one token")] = 16384
    """The most tokens of one forward pass; a longer trajectory has its own. Trajectories are laid end to end without padding, except with
    models and attention that cannot keep them apart. Gradients are accumulated, so it bounds memory and changes no result."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input, and compute its activations again in the backward pass: less memory, a third more time."""
    dtype: Dtype = "auto"
    """Of the computation: "float32", or "bfloat16", where weights and optimizer stay float32 (mixed precision) and servers get files in
    bfloat16; with LoRA the frozen weights are bfloat16. "auto": float32 on the CPU, else bfloat16."""
    attention: Annotated[str | None, Field(min_length=1, pattern=r"\S", description="transformers knows it by its name")] = None
    """transformers' attn_implementation, as "sdpa" or "flash_attention_2"; None: its choice for the model."""
    optimizer: OptimizerName = "adamw"
    """"adamw"; "adamw_8bit", whose states take 2 bytes instead of 8 for each trained weight (extra [bitsandbytes]); or, on a GPU,
    "paged_adamw_8bit", which moves them to the host where the GPU's memory is full."""
    learning_rate: LearningRate = 1e-3
    """For the tiny model; a real one needs 1e-6 to 1e-5, with LoRA about ten times as much. 0 learns nothing, as a control."""
    learning_rate_schedule: LearningRateSchedule = "constant"
    """After the warm-up: "constant", or "linear" or "cosine" decay to 0 after max_steps."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000, description="it counts steps")] = 0
    """Steps in which the learning rate grows linearly to its value."""
    max_grad_norm: MaxGradNorm = 1.0
    """Gradients of a greater norm are scaled down to it; 1e9 never clips."""
    lora_rank: Annotated[int | None, Field(ge=1, le=65_536, description="it is the inner dimension of the adapters")] = None
    """Train LoRA adapters of this rank (arXiv:2106.09685, extra [lora]) instead of all weights. vLLM loads the adapter alone, other servers
    weights with it merged in. LoRA usually needs a higher learning rate. None: all weights are trained."""
    lora_alpha: Annotated[
        float | None,
        Field(ge=0.01, le=1e6, description="the adapter's output is multiplied by it: almost 0 trains nothing, and a huge one diverges"),
    ] = None
    """The adapter's output is scaled by lora_alpha / lora_rank. None: twice the rank."""
    lora_targets: Annotated[
        Sequence[str] | str, Field(min_length=1, description="without a target nothing is trained"), AfterValidator(_ends)
    ] = ALL_LINEAR
    """The ends of the names of layers that get an adapter, as ["q_proj", "v_proj"]; "all-linear": all but the head."""
    device: Device = "cpu"
    """Where the trainer computes, as torch names it: "cpu", "cuda", "cuda:1"."""
    threads: Threads = 1
    """Threads of torch on the CPU; more are slower for small models on busy cores."""
    probe_tolerance: ProbeTolerance | None = None
    """After each push the server samples a few tokens, and their log-probs are compared with the trainer's: probability ratios
    that differ from 1 by more than this on average end the run. 1e-3 suits float32, 0.1 a server in bfloat16. None: no check."""
    ratio_error_limit: RatioErrorLimit | None = 0.1
    """Before a step's first update, the trainer's probability of each token is compared with the one captured during sampling. The run
    ends, and changes nothing, where the ratio of the worst hundredth of the tokens differs from 1 by more than this on average: sampling,
    weights or tokenizer differ. Tokens of earlier weights are left out. None: no limit."""

    def __post_init__(self) -> None:
        if self.lora_rank is not None:
            require_lora()
        elif self.lora_alpha is not None or self.lora_targets != ALL_LINEAR:
            raise UsageError(
                "lora_alpha and lora_targets are of an adapter, and without lora_rank there is none: give it, or leave them out"
            )
        require_optimizer(self.optimizer, self.device)
        if self.attention is not None and self.attention.startswith("paged|"):
            raise UsageError(
                f'attention = "{self.attention}": it must not be paged, because that is for servers, which compute no gradients; give '
                f'"{self.attention.removeprefix("paged|")}", or leave it out'
            )
        if self.device.startswith("cpu") and self.attention is not None and _needs_gpu(self.attention):
            raise UsageError(
                f'attention = "{self.attention}": it must be one of {", ".join(ON_CPU)} with device = "{self.device}", because it has no '
                "gradients on the CPU; give one of these, or leave it out"
            )

    @property
    def computed_in(self) -> Literal["float32", "bfloat16"]:
        """What `dtype` comes to on the device."""
        return "bfloat16" if self.in_bfloat16 else "float32"

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


@checked
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a run, and its checkpoints."""

    max_steps: MaxSteps = 200
    """The run ends after so many steps."""
    target_score: TargetScore | None = None
    """Stop when the mean reward of the last `score_window` steps has reached this."""
    score_window: Annotated[int, Field(ge=1, le=100_000, description="a mean is of at least one step")] = 5
    """The steps whose mean reward `target_score` is compared with."""
    val_every: ValEvery | None = None
    """In a job: validate after every so many steps, and keep the checkpoint with the best score. None or 0: only before and after it."""
    seed: Seed = 0
    """Of the order of tasks, of the sampling and of minibatches."""
    checkpoint_every_minutes: Annotated[
        float, AfterValidator(ZeroOr(0.01)), Field(le=10_000, description="it is a time in minutes, and 0 means after each step")
    ] = 10.0
    """A checkpoint is written after the step in which so much time has passed since the last one (0: after each step), beside the next
    steps; also after the last step and after validated ones. Steps after the last checkpoint are repeated from the stored rollouts when the
    run is resumed."""
    checkpoint_every_steps: Annotated[int | None, Field(ge=1, le=1_000_000, description="it counts steps")] = None
    """Write them after every so many steps instead. None: by time."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=10_000, description="a run resumes from its last checkpoint")] = 2
    """So many of the last ones stay on the disk, beside the best one."""

    def __post_init__(self) -> None:
        if self.checkpoint_every_steps is not None and self.checkpoint_every_minutes != Schedule.checkpoint_every_minutes:
            raise UsageError(
                f"checkpoint_every_minutes = {self.checkpoint_every_minutes:g} has no effect with checkpoint_every_steps, which counts "
                "steps instead: leave out one of both"
            )


@checked
@dataclass(frozen=True, kw_only=True)
class Objective:
    """The options of the loss. Raises UsageError for values out of their bounds and for invalid combinations."""

    clip: Clip = 0.2
    """Ratios are clipped at 1 - clip (PPO's epsilon)."""
    clip_high: Annotated[
        float | None, Field(ge=1e-5, le=100, description="ratios above 1 + clip_high are clipped, and none is a hundredfold")
    ] = None
    """Ratios are clipped at 1 + clip_high; None: `clip`. A greater value is DAPO's clip-higher (arXiv:2503.14476, §3.1), 0.28 there."""
    dual_clip: Annotated[
        float | None,
        Field(ge=1.01, le=1000, description="at 1 it would bound the loss of unchanged weights, and a huge one bounds nothing"),
    ] = None
    """Bounds the loss of a token with a negative advantage at this many times its advantage (arXiv:1912.09729, §3), 3.0 there."""
    weight_cap: Annotated[
        float | None, Field(ge=1.01, le=1000, description="it bounds ratios that have grown from 1, and a huge one bounds nothing")
    ] = None
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5) in place of the clipped surrogate: each token's term is its log-prob times its
    advantage, weighted by min(ratio, weight_cap), through which no gradient flows. So every token has a gradient, also the rare ones that
    change most within a step, as with many `updates_per_step`; as there, the weight has no lower bound. Excludes `clip`, `clip_high`,
    `dual_clip` and `sequence_ratio`. None: the clipped surrogate."""
    sequence_ratio: bool = False
    """One ratio per sequence, the geometric mean over its tokens: GSPO (arXiv:2507.18071, eq. 7), usually with clips of 3e-4."""
    average: Average = "token"
    """What has equal weight: "token" (DAPO §3.3); "sequence", each trajectory (DeepSeekMath, eq. 3); "rollout", each rollout whatever its
    number of trajectories; "constant", where each trajectory's sum is divided by `constant_tokens`, so that length has no influence (Dr.
    GRPO, arXiv:2503.20783, §3.2)."""
    constant_tokens: Annotated[int, Field(ge=0, le=100_000_000, description="it is the token budget of a trajectory")] = 0
    """For average="constant": the divisor, which is the token budget of a trajectory."""
    importance_cap: Annotated[
        float | None,
        Field(
            ge=0.1, le=1000, description="each token's term is multiplied by at most this: 0 trains nothing, and a huge one bounds nothing"
        ),
    ] = None
    """Truncated importance sampling of stale tokens (arXiv:2505.24298, eq. 5): the ratio is against the weights before the step's first
    update, and each token's term is multiplied by min(those weights' probability / the sampler's, cap); 2.0 is usual. None: the
    ratio is against the sampler itself."""
    kl: KlCoefficient = 0.0
    """Coefficient of the KL term to the run's initial weights (DeepSeekMath, eq. 4); 0 needs no second model."""
    scale_advantages: bool = True
    """Divide advantages by their group's standard deviation; False: as in Dr. GRPO (`group_advantages`)."""

    def __post_init__(self) -> None:
        if self.average == "constant" and self.constant_tokens < 1:
            raise UsageError(
                f'constant_tokens = {self.constant_tokens}: it must be at least 1, because average = "constant" divides by it; '
                "give the token budget of a trajectory"
            )
        if self.average != "constant" and self.constant_tokens:
            raise UsageError(
                f'constant_tokens = {self.constant_tokens} has no effect with average = "{self.average}": give average = "constant", '
                "or leave it out"
            )
        others = [each.name for each in fields(self) if each.name in _OF_SURROGATE and getattr(self, each.name) != each.default]
        if self.weight_cap is not None and others:
            raise UsageError(
                f"weight_cap = {self.weight_cap:g} and {others[0]} = {getattr(self, others[0])}: {others[0]} is of the clipped surrogate, "
                "in whose place weight_cap puts CISPO; leave out one of both"
            )

    @property
    def needs_no_advantages(self) -> bool:
        """Whether the loss has a gradient also where all advantages are 0; a term that is not multiplied by them belongs here."""
        return self.kl > 0


@checked
@dataclass(frozen=True, kw_only=True)
class Advantages:
    """What each call has of the rewards of its attempt, and what that is compared with (credit.md)."""

    credit: Credit = "final"
    """"final": every call has the reward of its attempt. "to_go": its return, what it receives of the rewards on all spans of the attempt,
    compared with those of the group's other attempts at the same call. "states": GiGPO (arXiv:2505.10978), where calls of a group with
    equal prompts, token for token, are compared, too. A function, as "file.py:name", that returns the return of each call of an attempt."""
    discount: Discount = 1.0
    """With "to_go" and "states": a factor on a reward for each later call that receives it, too."""
    state_weight: StateWeight = 1.0
    """With "states": the weight of the advantages by state (omega in GiGPO, eq. 8)."""
    agent_baselines: bool = False
    """In attempts of several agents: compare the calls of each agent with those of the same agent alone, so that advantages have the mean
    and standard deviation of each (Dr. MAS, arXiv:2602.08847)."""

    def __post_init__(self) -> None:
        if self.credit not in ("to_go", "states") and self.discount != Advantages.discount:
            raise UsageError(
                f'discount = {self.discount:g} has no effect with credit = "{self.credit}": give credit = "to_go" or "states", or leave '
                "it out"
            )
        if self.credit != "states" and self.state_weight != Advantages.state_weight:
            raise UsageError(
                f'state_weight = {self.state_weight:g} has no effect with credit = "{self.credit}": give credit = "states", or leave it out'
            )

    @property
    def of_calls(self) -> bool:
        """Whether calls have advantages of their own; else all calls of a rollout have one."""
        return self.credit != "final" or self.agent_baselines

    @property
    def reference(self) -> str | None:
        """The reference of the user's function; None without one."""
        return self.credit if ":" in self.credit else None

    def rule(self, compare: Compare, function: Function | None = None) -> Rule:
        """Return the rule by which calls have advantages of their own.

        `function`: the user's, already loaded. Raises UsageError where the function that `credit` names cannot be loaded.
        """
        if self.reference is not None:
            function = function or load_function(self.reference)
        return Rule(
            returns=function or ("final" if self.credit == "final" else "to_go"),
            discount=self.discount,
            states=self.credit == "states",
            state_weight=self.state_weight,
            by_agent=self.agent_baselines,
            compare=compare,
        )


OPTION_GROUPS: Final[dict[str, type[Any]]] = {
    "objective": Objective,
    "advantages": Advantages,
    "rollouts": Rollouts,
    "sampling": Sampling,
    "updates": Updates,
    "schedule": Schedule,
}


@dataclass(kw_only=True, eq=False)
class GRPOOptions:
    """The arguments of `GRPO` (algorithm.py). Raises UsageError for options of two groups that exclude each other."""

    model_dir: str | Path
    """Model and tokenizer in transformers' format, or a model of the hub (hub.py); the model server must be started with the same."""
    model_server_url: str
    """http://host:port of a server with POST /weights (server.py, vllm.py); it must have access to this machine's files."""
    objective: Objective = field(default_factory=Objective)
    """The loss."""
    advantages: Advantages = field(default_factory=Advantages)
    """What the tokens are weighted with in it."""
    credit_function: Callable[..., Sequence[float]] | None = None
    """The function that `credit` names; None: it is loaded by its name, relative to the working directory."""
    rollouts: Rollouts = field(default_factory=Rollouts)
    sampling: Sampling = field(default_factory=Sampling)
    updates: Updates = field(default_factory=Updates)
    schedule: Schedule = field(default_factory=Schedule)
    on_step: Callable[[StepReport], object] | None = None
    validator: Callable[[int, Path], Awaitable[object]] | None = None
    """Called with the number and checkpoint of the last step, and of each that `val_every` names, before the next step; again when the run
    is resumed. The metric sinks get what it adds to the run's validation.json."""
    weights_dir: str | Path | None = None
    """Where weights are written for the server; default: `weights` in the run's folder, without one in `model_dir`. One run at a
    time writes there."""
    run_dir: str | Path | RunFolder | None = None
    """Folder of the run; an existing run is resumed from its last checkpoint, and no rollout is run twice. None: in memory."""
    metrics: Sequence[Any] | None = None
    """Metric sinks: "tensorboard", "wandb", "plots", or MetricSink objects. None: TensorBoard files and a picture in the run's folder, if
    there is one and their packages are installed."""

    def __post_init__(self) -> None:
        check_metrics(self.metrics)
        if self.sampling.sampling_policy.startswith("enforce") and self.rollouts.agent_match is not None:
            raise UsageError(
                f'sampling_policy = "{self.sampling.sampling_policy}" goes for all calls of a rollout, because the proxy does not know '
                "which agent makes one: leave out agent_match, or use another policy"
            )
        if self.objective.sequence_ratio and self.advantages.credit != "final":
            raise UsageError(
                f'sequence_ratio and credit = "{self.advantages.credit}": one ratio of all tokens of a trajectory gives its calls the same '
                "credit; leave out one of both"
            )
        if self.updates.warmup_steps > self.schedule.max_steps:
            raise UsageError(
                f"warmup_steps = {self.updates.warmup_steps}: it must be at most max_steps ({self.schedule.max_steps}), because the run "
                "would end before the learning rate has its value; give such a value, or leave it out"
            )

    @classmethod
    def from_options(cls, *, model_dir: str | Path, model_server_url: str, **options: Any) -> Self:
        """Create from flat options, as in a job file: each goes to the group with a field of its name. Raises UsageError."""
        groups = {
            group: kind(**{each.name: options.pop(each.name) for each in fields(kind) if each.name in options})
            for group, kind in OPTION_GROUPS.items()
        }
        own = {each.name for each in fields(cls)} - set(groups)
        if unknown := sorted(set(options) - own):
            raise UsageError(f"GRPO has no option {unknown[0]}: its options are those of {', '.join(groups)} and {', '.join(sorted(own))}")
        return cls(model_dir=model_dir, model_server_url=model_server_url, **groups, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The options of all groups in one dict."""
        return {each.name: getattr(getattr(self, group), each.name) for group, kind in OPTION_GROUPS.items() for each in fields(kind)}
