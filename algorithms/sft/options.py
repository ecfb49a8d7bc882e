"""SFT's options. Each raises UsageError for a value out of its bounds (algorithms/options.py), and some exclude each other.

Torch is not imported, so that jobs are checked without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from agl_otel.algorithms.grpo.optimizers import OptimizerName, require_optimizer
from agl_otel.algorithms.metric_sinks import check_metrics
from agl_otel.algorithms.offline import check_offline
from agl_otel.algorithms.options import (
    AgentMatch,
    Device,
    Discount,
    FillReward,
    LearningRate,
    MaxGradNorm,
    MaxSteps,
    MaxTokens,
    ProbeTolerance,
    PromptsPerStep,
    RewardSources,
    RewardWaitSeconds,
    Seed,
    SelectionName,
    StepTimeout,
    TargetScore,
    Temperature,
    Threads,
    ValEvery,
    check_rollouts,
    checked,
)
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.errors import UsageError
from agl_otel.types import RolloutConfig, RolloutMode
from agl_otel.types.scores import MAX_REWARD


@checked
@dataclass(kw_only=True, eq=False)
class SFTOptions:
    """The arguments of `SFT` (algorithm.py)."""

    model_dir: str | Path
    """Model and tokenizer in transformers' format, or a model of the hub (hub.py); the model server must be started with the same."""
    model_server_url: str
    """http://host:port of a server with POST /weights (grpo/server.py); it must have access to this machine's files."""
    prompts_per_step: PromptsPerStep = 32
    """Tasks of a round."""
    group_size: Annotated[int, Field(ge=1, le=10_000, description="each task is tried at least once")] = 8
    """Rollouts of each task in a round."""
    top_fraction: Annotated[float | None, Field(ge=1e-4, le=1, description="it is a share of the attempts, and almost 0 leaves none")] = (
        0.25
    )
    """Train on this share of the attempts that `min_reward` and `best_of_group` leave, those with the highest rewards. None: on all."""
    min_reward: Annotated[float | None, Field(ge=-MAX_REWARD, le=MAX_REWARD, description="rewards are compared with it")] = None
    """Leave out attempts with a lower reward."""
    best_of_group: Annotated[int | None, Field(ge=1, le=10_000, description="it counts attempts of a task")] = None
    """Train on this many attempts of each task, those with the highest rewards. One of these three must be given."""
    by_call: bool = False
    """Train on each call separately, with its whole prompt, instead of on conversations."""
    credit: Literal["final", "to_go"] = "final"
    """What the tokens of a call weigh in the loss. "final": all the same. "to_go": the call's return, what it receives of the rewards along
    the span tree (docs/credit.md), as in reward-weighted regression (Peters & Schaal, ICML 2007); a call whose return is 0, or less, is
    not learnt from."""
    discount: Discount = 1.0
    """Of `to_go`: a factor on a reward for each later call that receives it, too."""
    epochs: Annotated[int, Field(ge=1, le=10_000, description="a round without a pass trains nothing")] = 4
    """Passes over the selected attempts."""
    batch_rows: Annotated[int, Field(ge=1, le=100_000, description="a batch has at least one row")] = 16
    """Rows of an optimizer step."""
    optimizer: OptimizerName = "adamw"
    """`adamw`; `adamw_8bit`, whose states take 2 bytes instead of 8 for each weight; or, on a GPU, `paged_adamw_8bit` (extra
    [bitsandbytes])."""
    learning_rate: LearningRate = 1e-3
    """For the tiny model; a real one needs 1e-6 to 1e-5. 0 learns nothing, as a control."""
    max_grad_norm: MaxGradNorm = 1.0
    """Gradients of a greater norm are scaled down to it."""
    from_start: bool = False
    """Each round starts from the initial weights instead of the last ones (as in STaR), which reduces drift."""
    temperature: Temperature = 1.0
    """Sampling temperature for agents; 0 (greedy) only with group_size = 1."""
    max_tokens: MaxTokens = 64
    """Longest reply for agents, in tokens."""
    max_steps: MaxSteps = 5
    """Rounds."""
    target_score: TargetScore | None = None
    """Stop when the mean reward of a round has reached this."""
    seed: Seed = 0
    """Of the order of tasks and rows, and of the sampling."""
    device: Device = "cpu"
    """Where the trainer computes, as torch names it: "cpu", "cuda", "cuda:1"."""
    threads: Threads = 1
    """Of torch on the CPU."""
    on_step: Callable[[RoundReport], object] | None = None
    """Called with the report of each round."""
    val_every: ValEvery | None = None
    """In a job: validate after every so many rounds, and keep the weights with the best score. None or 0: only before and after it."""
    validator: Callable[[int, Path], Awaitable[object]] | None = None
    """Called with the number and weights of the last round, and of each that `val_every` names, before the next one; again when the run is
    resumed. The metric sinks get what it adds to the run's validation.json."""
    shuffle_rewards: bool = False
    """A control experiment: rewards are permuted at random among a round's attempts, so that nothing can be learnt."""
    reward_sources: RewardSources | None = None
    """Whose rewards count (docs/late-rewards.md): "runner", "agent", and sources of feedback, as ["runner", "ann"]. None: everybody's."""
    reward_wait_seconds: RewardWaitSeconds = 0.0
    """How long a rollout that has succeeded waits for a reward, at most step_timeout_seconds; offline ones wait for a later round."""
    corrections: bool = False
    """Train also on what feedback says should have been answered (docs/late-rewards.md), after the prompt that was answered: of all
    attempts of a round, selected or not, from `reward_sources` alone. Not with prompts or replies that were not captured as token ids."""
    fill_reward: FillReward | None = None
    """The reward of attempts without one; None refuses such attempts."""
    agent_match: AgentMatch | None = None
    """Train only on the calls of agents whose name matches this regular expression."""
    rollout_config: RolloutConfig | None = None
    """Retries and time limits of rollouts. None: retry_lost_runner() with a `run_dir`."""
    step_timeout_seconds: StepTimeout = 600.0
    """Rollouts that have not finished by then are cancelled and left out of their round, and counted (`not_finished`)."""
    probe_tolerance: ProbeTolerance | None = None
    """After each push the server samples a few tokens, and their log-probs are compared with those of the pushed weights, which are loaded
    on the CPU for this: probability ratios that differ from 1 by more than this on average end the run. 1e-3 suits float32, 0.1 a server in
    bfloat16. None: no check."""
    offline_mode: RolloutMode | None = None
    """Train on offline rollouts, which this run did not enqueue: all of this mode that have succeeded, each once. `production` are those
    adopted from a product's traces. A round takes those that ended since the last one; the run ends when there are no new ones. Tasks are
    not used, and nothing is enqueued."""
    selection: SelectionName | None = None
    """Train on the attempts of this selection (docs/selection.md), NAME or NAME@VERSION, instead: those that have succeeded, each once. A
    resumed run goes on with the version that it was begun with."""
    run_dir: str | Path | RunFolder | None = None
    """Folder of the run: rounds (rows, specs, logs), weights, a line for each round. An existing run is resumed after its last complete
    round, and no rollout is run twice. None: `sft` in `model_dir`, and the run cannot be resumed."""
    metrics: Sequence[Any] | None = None
    """Metric sinks: "tensorboard", "wandb", "plots", or MetricSink objects. None: TensorBoard files and a picture in the run's folder, if
    there is one and their packages are installed."""

    def __post_init__(self) -> None:
        require_optimizer(self.optimizer, self.device)
        check_offline(self.offline_mode, self.selection)
        check_rollouts(self.prompts_per_step, self.group_size)
        if (self.top_fraction, self.min_reward, self.best_of_group) == (None, None, None):
            raise UsageError("SFT would train on all that its own model wrote: give top_fraction, min_reward or best_of_group")
        if not self.is_offline and self.best_of_group is not None and self.best_of_group > self.group_size:
            raise UsageError(
                f"best_of_group = {self.best_of_group}: it must be at most group_size ({self.group_size}), the attempts of a task; "
                "give such a value, or leave it out"
            )
        if self.credit == "final" and self.discount != 1:
            raise UsageError(f'discount = {self.discount}: it is of returns; set credit = "to_go", or leave it out')
        if not self.is_offline and self.temperature == 0 and self.group_size > 1:
            raise UsageError(
                f"temperature = 0: it must be greater than 0, because the {self.group_size} replies to a task would be equal (greedy); "
                "give such a value, or group_size = 1"
            )
        check_metrics(self.metrics)

    @property
    def is_offline(self) -> bool:
        """Whether it enqueues nothing, and trains on rollouts that there are."""
        return self.offline_mode is not None or self.selection is not None
