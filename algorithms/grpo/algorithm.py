"""GRPO over a store: enqueue groups of rollouts, read what their agents did, update the weights, publish them, repeat.

The agents are somebody else's and run anywhere; all this sees of them are their traces. `GRPO.step` is the whole idea. What a step
may train on is decided by the adapter (adapters/trajectories.py), how by objective.py; this module only connects them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray

from agl_otel.adapters.lengths import pick, readable
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.grpo.checkpoint import Checkpoints, State, as_random_state
from agl_otel.algorithms.grpo.groups import Group, InFlight, TaskOrder, grouped
from agl_otel.algorithms.grpo.learner import NO_UPDATE, Learner, Update
from agl_otel.algorithms.grpo.lora import require_lora, with_lora
from agl_otel.algorithms.grpo.objective import Average, Objective, group_advantages
from agl_otel.algorithms.grpo.policy import load_policy, save_weights
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.grpo.serving import RolloutStore, Serving, offline_rollouts
from agl_otel.algorithms.metric_sinks import check_metrics
from agl_otel.algorithms.report import Clock, singleton_words
from agl_otel.algorithms.run_folder import RunFolder, course_of, kept
from agl_otel.algorithms.run_log import RunLog, log_of, step_of
from agl_otel.algorithms.utils import agent_match_of, items, sampling_seed, survives_its_runner, why_not
from agl_otel.errors import DataError, UsageError
from agl_otel.types import (
    AttemptedRollout,
    Dataset,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    TrainingStep,
)
from agl_otel.types.columns import Traces
from agl_otel.types.sampling import all_parameters

_NO_COURSE: Final = frozenset(
    {
        *("model_dir", "model_server_url", "max_steps", "target_score", "score_window", "device", "threads", "on_step", "seed"),
        *(
            "step_timeout_seconds",
            "weights_dir",
            "run_dir",
            "probe_tolerance",
            "checkpoint_every_steps",
            "keep_checkpoints",
            "metrics",
            "reports",
        ),
    }
)
"""Fields that may be others when a run is gone on with: where things are, and when it ends."""
_logger = logging.getLogger(__name__)
KEPT_WEIGHTS: Final = 2  # the server reads the newest while it is pushed; the one before is for a person to look at


@dataclass(kw_only=True, eq=False)
class GRPO(Algorithm):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300) of the model in `model_dir`, from traces."""

    model_dir: str | Path
    """Model and tokenizer in transformers' format; what the model server was started with."""
    model_server_url: str
    """http://host:port of a server with POST /weights (server.py); it must see the files of this machine."""
    prompts_per_step: int = 16
    group_size: int = 8
    """Rollouts of each task in a step."""
    resample_rounds: int = 0
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): so often a step's groups whose rewards are all equal are replaced by other tasks'.
    What is still flat then is left out of the update. Costs rollouts, and keeps the batch full of groups that teach."""
    groups_in_flight: int | None = None
    """Asynchronous mode: so many groups run at a time, more than prompts_per_step; a step takes the first that are whole and carries the
    others over (AReaL, arXiv:2505.24298, §4). Use importance_cap with it. None: every step waits for all of its own."""
    max_staleness: int = 2
    """In asynchronous mode: a group that was enqueued so many steps ago is waited for."""
    updates_per_step: int = 3
    """Optimizer steps on each batch (mu in the paper's algorithm 1): rollouts are dearer than updates."""
    learning_rate: float = 1e-3
    lora_rank: int | None = None
    """Train an adapter of this rank beside each linear layer instead of the weights: LoRA (arXiv:2106.09685), extra [lora]. Servers get
    weights with the adapter merged in. It usually wants a higher learning rate. None: all weights are trained."""
    clip: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    sequence_ratio: bool = False
    average: Average = "token"
    constant_tokens: int = 0
    importance_cap: float | None = None
    kl: float = 0.0
    """These eight are objective.Objective's, which says what they do and where they come from."""
    scale_advantages: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO's (objective.group_advantages)."""
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    """Agents are asked to sample at this; the trainer divides its logits by it."""
    max_tokens: int = 64
    """The longest reply that agents are asked to allow."""
    max_steps: int = 200
    target_score: float | None = None
    """Stop when the mean reward of the last `score_window` steps has reached this."""
    score_window: int = 5
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    """Of torch on the CPU: more are slower for small models on busy cores."""
    on_step: Callable[[StepReport], object] | None = None
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random among a step's rollouts, so nothing can be learnt."""
    fill_reward: float | None = None
    """The reward of an attempt that has none; None refuses it."""
    agent_match: str | None = None
    """Train only on the calls of agents whose name matches this regular expression."""
    rollout_config: RolloutConfig | None = None
    """None: survives_its_runner() where the run is kept."""
    seed_sampling: bool = True
    """Give every rollout a seed of its own, which the proxy hands on with each of its calls: with a model server that honours it, as ours
    for tiny models does bit for bit, a run can be repeated. False leaves sampling to the server."""
    probe_tolerance: float | None = None
    """After each push the server is asked for a few tokens, and their log-probs are held against the trainer's: a ratio further than this
    from 1 ends the run. 1e-3 will do in float32, 0.1 where the server is in bfloat16. None: not asked."""
    step_timeout_seconds: float = 600.0
    """Rollouts that have not finished by then are left out of their step, and counted."""
    offline_mode: RolloutMode | None = None
    """Train on offline rollouts, which others ran: a step takes all of this mode that have succeeded since the last one, and the run ends
    when there is nothing new. Equal tasks are a group; tasks that came once are one group. Which weights sampled them is unknown:
    importance_cap bounds the effect."""
    weights_dir: str | Path | None = None
    """Where weights are written for the server; default: `weights` in `model_dir`."""
    run_dir: str | Path | RunFolder | None = None
    """Where the run is kept; a run that is there already is gone on with at its last checkpoint, and no rollout is paid for twice. None: in
    memory."""
    checkpoint_every_steps: int = 1
    """Steps after the last checkpoint are done again from the rollouts that the store still has."""
    keep_checkpoints: int = 2
    metrics: Sequence[Any] | None = None
    """Where else figures are shown: "tensorboard", "wandb", "plots", or a metrics.MetricSink. None: TensorBoard's files and a picture in
    the run's folder, where it is kept and their packages are installed."""
    reports: list[StepReport] = field(default_factory=list[StepReport], init=False)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UsageError(f"group_size is {self.group_size}: a group of one has no other to be better than; use at least 2")
        for name in ("resample_rounds", "max_staleness"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}: it must not be negative")
        for name in ("checkpoint_every_steps", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.groups_in_flight is not None and self.groups_in_flight <= self.prompts_per_step:
            raise UsageError(
                f"groups_in_flight is {self.groups_in_flight}: it must be more than prompts_per_step ({self.prompts_per_step}), "
                "or nothing is left to carry over"
            )
        if self.offline_mode is not None and (self.groups_in_flight is not None or self.resample_rounds):
            raise UsageError("offline_mode enqueues nothing: leave out groups_in_flight and resample_rounds")
        if self.lora_rank is not None:
            if self.lora_rank < 1:
                raise UsageError(f"lora_rank is {self.lora_rank}: it must be at least 1")
            require_lora()
        check_metrics(self.metrics)
        self._objective = Objective(**{each.name: getattr(self, each.name) for each in fields(Objective)})
        self._weights_dir = Path(self.weights_dir or Path(self.model_dir) / "weights").absolute()
        self._shuffle = random.Random(f"{self.seed}/shuffle")
        self._run: RunFolder | None = None
        self._offline: list[Group] = []

    def take_adapter(self, adapter: Any) -> None:
        """Take its `agent_match`. Raises UsageError for anything else that an adapter may do."""
        self.agent_match = agent_match_of("GRPO", adapter, self.agent_match)

    def course(self, tasks: Sequence[Any]) -> dict[str, Any]:
        """What decides the course of a run beside its seed, as JSON: the options of its run.json."""
        return course_of(self, tasks, without=_NO_COURSE)

    def last_weights(self, run: RunFolder) -> tuple[Path | None, int]:
        """The weights that a model server begins with when `run` goes on, None for the model's own, and their version.

        Rollouts that wait since the run was stopped must not be sampled by others. Raises what Checkpoints.state raises.
        """
        checkpoints = Checkpoints(run.folder, keep=self.keep_checkpoints)
        place = checkpoints.latest()
        return (place, checkpoints.state(place, run.run_id).version) if place is not None else (None, 1)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """What Trainer.fit calls: `train` on the data. Raises what `train` raises."""
        await self.train(cast("RolloutStore", self.get_store()), items(train_dataset))

    async def train(self, store: RolloutStore, tasks: Sequence[Any]) -> list[StepReport]:
        """Train until `max_steps` or `target_score`; returns the reports. The server ends up with the last weights.

        Raises:
            UsageError: no tasks, `model_dir` holds no model, or `run_dir` holds a run of other options, another model or another store.
            InUseError: another process works on the run.
            DataError: a step had nothing to train on, or the last checkpoint is damaged.
            ModelServerError: the model server did not take the weights, or samples with others (probe_tolerance).
        """
        if not tasks and self.offline_mode is None:
            raise UsageError("GRPO needs at least one task to train on")
        order = TaskOrder(len(tasks), random.Random(self.seed))
        with (
            kept(self.run_dir, algorithm="grpo", options=lambda: self.course(tasks), seed=self.seed) as self._run,
            ThreadPoolExecutor(1, thread_name_prefix="learner", initializer=torch.set_num_threads, initargs=(self.threads,)) as worker,
        ):
            async with aiohttp.ClientSession() as session, self._logged(store) as self._log:
                self._worker = worker
                self._in_flight = InFlight(store)
                sampling = all_parameters(self.temperature, self.max_tokens)
                self._serving = Serving(store, session, url=self.model_server_url, sampling=sampling, run_id=self._log.run_id)
                await self._serving.begin(self._run)
                await self._in_worker(self._load)
                await self._go_on(order)
                await self._publish_weights()
                await self._log.begin([self._told(report) for report in self.reports])
                while len(self.reports) < self.max_steps and not self._reached_target() and await self._has_more(store):
                    report = await self.step(store, (tasks[place] for place in order))
                    self.reports.append(report)
                    await self._keep(report, order)
                    await self._log.note(self._told(report), report.figures)
                    if self.on_step is not None:
                        self.on_step(report)
                await self._in_flight.cancel()
        return self.reports

    # --- a run that is kept

    def _logged(self, store: RolloutStore) -> RunLog:
        return log_of(store, "grpo", self._run, self.metrics)

    async def _go_on(self, order: TaskOrder) -> None:
        """Take the run up where its last checkpoint left it."""
        if self._run is None:
            return
        self._checkpoints = Checkpoints(self._run.folder, keep=self.keep_checkpoints)
        place = self._checkpoints.latest()
        if place is None:
            self._run.metrics(0)
            return
        state: State = await self._in_worker(self._checkpoints.load, place, self._run.run_id, self.policy.model, self._learner.optimizer)
        self._serving.go_on(state.version, self._run.folder)
        self.reports += [StepReport(**row) for row in self._run.metrics(state.step)]
        order.restore(state.tasks)
        self._shuffle.setstate(as_random_state(state.shuffle))
        await self._in_flight.restore(state.next_group, state.groups)
        _logger.info("run %s goes on after step %d", self._run.run_id, state.step)

    async def _keep(self, report: StepReport, order: TaskOrder) -> None:
        """Have the step on disk: its line, then its checkpoint. A line without its checkpoint is cut off when the run goes on."""
        if self._run is None:
            return
        self._run.metric(asdict(report))
        if report.step % self.checkpoint_every_steps and report.step < self.max_steps and not self._reached_target():
            return
        groups = [{"number": group.number, "step": group.step, "rollout_ids": list(group.rollout_ids)} for group in self._in_flight.groups]
        state = State(
            run_id=self._run.run_id,
            step=report.step,
            resources_id=self._serving.published.resources_id,
            version=self._serving.published.version,
            tasks=order.state,
            next_group=self._in_flight.count,
            shuffle=list(self._shuffle.getstate()),
            groups=groups,
        )
        await self._in_worker(self._checkpoints.save, state, self.policy.model, self._learner.optimizer)

    def _told(self, report: StepReport) -> TrainingStep:
        return step_of(report, self._log, resources_id=self._serving.published.resources_id)

    async def step(self, store: RolloutStore, tasks: Iterator[Any]) -> StepReport:
        """One step. README.md shows these four lines, and a test holds the two together."""
        groups, read = await self._informative_groups(store, tasks)  # enqueue, wait, read; groups whose rewards are all equal are replaced
        update = await self._learn(read)  # compare the rewards of each group, follow the gradient of the sampled tokens
        await self._publish(update)  # new weights under a new version, which the next rollouts use
        return self._report(groups, read, update)

    # --- the parts, in the order of the loop

    @property
    def _number(self) -> int:
        """Of the step at work: 1, 2, …"""
        return len(self.reports) + 1

    async def _informative_groups(self, store: RolloutStore, tasks: Iterator[Any]) -> tuple[list[Group], _Read]:
        """A step's groups and what was read of them. For `resample_rounds`, zero-variance groups are replaced by groups of other tasks."""
        clock = Clock()
        groups: list[Group] = []
        traces: Traces | None = None
        resampled, rounds_left = 0, self.resample_rounds
        while True:
            new = await self._next_groups(store, self.prompts_per_step - len(groups), tasks)
            groups = [*groups, *new]
            clock.lap("rollout")
            found = await store.traces(_finished(new))
            traces = found if traces is None else Traces.joined(traces, found)
            read = self._read(traces, groups, clock)
            clock.lap("read")
            if len(read.informative) == len(groups) or not rounds_left:
                return groups, replace(read, resampled=resampled, sampled_by=str(self._serving.published.version))
            rounds_left -= 1
            resampled += len(groups) - len(read.informative)
            groups = read.informative

    async def _next_groups(self, store: RolloutStore, count: int, tasks: Iterator[Any]) -> list[Group]:
        """Enqueue what is missing, and take `count` groups; with `offline_mode` those that `_has_more` found."""
        if self.offline_mode is not None:
            return self._offline
        new = count if self.groups_in_flight is None else max(0, self.groups_in_flight - len(self._in_flight.groups))
        first = self._in_flight.count
        await self._in_flight.enqueue([self._requests(next(tasks), place, first + place) for place in range(new)], step=self._number)
        oldest = self._number - self.max_staleness if self.groups_in_flight is not None else self._number
        return await self._in_flight.take(count, oldest_step=oldest, timeout_seconds=self.step_timeout_seconds)

    async def _has_more(self, store: RolloutStore) -> bool:
        """Whether there is something to train on: with `offline_mode`, rollouts that no step has taken yet."""
        if self.offline_mode is not None:
            taken = {rollout_id for report in self.reports for rollout_id in report.rollout_ids}
            found = await offline_rollouts(store, self.offline_mode, taken)
            self._offline = grouped(found, first=self._in_flight.count, step=self._number)
            return bool(self._offline)
        return True

    def _requests(self, task: Any, place: int, number: int) -> list[EnqueueRolloutRequest]:
        """The rollouts of one group, pinned to the published resources. `number`: of the group in the run.

        In a run that is kept they have ids made of run, group and place: enqueued again they are what is there already.
        """
        metadata = {"step": self._number, "group": place}
        config = self.rollout_config if self.rollout_config is not None or self._run is None else survives_its_runner()
        return [
            EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=self._serving.published.resources_id,
                config=config,
                rollout_id=f"ro-{self._run.run_id}-{number:06d}-{member:03d}" if self._run is not None else None,
                metadata=metadata | ({"sampling_seed": sampling_seed(self.seed, number, member)} if self.seed_sampling else {}),
            )
            for member in range(self.group_size)
        ]

    def _read(self, traces: Traces, groups: Sequence[Group], clock: Clock) -> _Read:
        """Trajectories of these groups and their advantages. What is refused of groups that were replaced is counted, too."""
        batch = to_trajectories(traces, fill_reward=self.fill_reward, agent_match=self.agent_match)
        batch = readable(batch, vocabulary=self.policy.vocabulary, context_tokens=self.policy.context_tokens)
        late = sum(len(group.rollout_ids) for group in groups) - len(_finished(groups))
        batch.refused.update({"not_finished": late} if late else {})
        ids = {rollout_id for group in groups for rollout_id in group.rollout_ids}
        own = np.flatnonzero([rollout_id in ids for rollout_id in batch.rollout_id])
        return self._score(traces, pick(batch, own) if len(own) < len(batch) else batch, groups, clock)

    def _score(self, traces: Traces, batch: TrajectoryBatch, groups: Sequence[Group], clock: Clock) -> _Read:
        """Advantages of each trajectory: computed once for each rollout within its group, shared by its trajectories."""
        group_of = {rollout_id: place for place, group in enumerate(groups) for rollout_id in group.rollout_ids}
        if not len(batch):
            raise DataError(
                f"step {self._number} has nothing to train on: of {len(group_of)} rollouts, refused {dict(batch.refused)}. "
                "The reasons are explained in agl_otel.adapters: trajectories (ATTEMPT_REFUSALS, CALL_REFUSALS), lengths (LENGTH_REFUSALS)"
                + (f". What failed: {failed}" if (failed := why_not(traces.rollouts)) else "")
            )
        place = {rollout_id: number for number, rollout_id in enumerate(group_of)}
        places = np.array([place[rollout_id] for rollout_id in batch.rollout_id])
        batch, places = pick(batch, np.argsort(places, kind="stable")), np.sort(places)
        _, first, back = np.unique(places, return_index=True, return_inverse=True)
        rewards = batch.reward[first]
        learnt = rewards[self._shuffle.sample(range(len(rewards)), len(rewards))] if self.shuffle_rewards else rewards
        of_group = np.array([group_of[batch.rollout_id[row]] for row in first])
        dense = np.unique(of_group, return_inverse=True)[1]
        advantages = group_advantages(torch.from_numpy(learnt), torch.from_numpy(dense), scaled=self.scale_advantages).numpy()
        informative = set(of_group[advantages != 0].tolist())
        rows = np.array([group_of[rollout_id] in informative for rollout_id in batch.rollout_id])
        sizes = np.bincount(dense)
        if singletons := [batch.rollout_id[row] for row in first[sizes[dense] == 1]]:
            _logger.warning("%s", singleton_words(self._number, singletons, len(sizes)))
        return _Read(
            traces,
            batch,
            advantages[back],
            [group for number, group in enumerate(groups) if number in informative],
            rows,
            clock,
            zero_variance_groups=len(sizes) - len(informative),
            singleton_groups=len(singletons),
        )

    async def _learn(self, read: _Read) -> Update:
        """Update the weights on what was read; NO_UPDATE where the rewards are equal within each group."""
        batch, advantages = self._trained_on(read)
        if not advantages.any():
            _logger.warning("step %d teaches nothing: the rewards are equal in each of its groups", self._number)
            return NO_UPDATE
        return await self._in_worker(self._learner.update, batch, advantages)

    def _trained_on(self, read: _Read) -> tuple[TrajectoryBatch, NDArray[np.float32]]:
        """Trajectories and their advantages; with dynamic sampling without zero-variance groups, which would only fill the mean."""
        if not self.resample_rounds or read.of_informative.all() or not read.of_informative.any():
            return read.batch, read.advantages
        index = np.flatnonzero(read.of_informative)
        return pick(read.batch, index), read.advantages[index]

    async def _publish(self, update: Update) -> None:
        """Publish the weights as a new version of the resources, unless the update changed nothing."""
        if update is not NO_UPDATE:
            await self._publish_weights()

    async def _publish_weights(self) -> None:
        """Publish the next version of the resources, and push the weights of that version to the server."""
        version = await self._serving.next_version()
        await self._serving.push(await self._in_worker(save_weights, self.policy.model, self._weights_dir / str(version)))
        await self._in_worker(self._forget_weights, version)
        if self.probe_tolerance is not None:
            await self._serving.probe(partial(self._in_worker, self._learner.drift), self.probe_tolerance)

    def _load(self) -> None:
        """Read the model and set up the learner, in the worker's thread."""
        torch.manual_seed(self.seed)
        self.policy = load_policy(self.model_dir, device=self.device)
        if self.lora_rank is not None:
            self.policy = replace(self.policy, model=with_lora(self.policy.model, self.lora_rank))
        self._learner = Learner(
            self.policy.model,
            learning_rate=self.learning_rate,
            objective=self._objective,
            max_grad_norm=self.max_grad_norm,
            temperature=self.temperature,
            updates=self.updates_per_step,
        )

    def _forget_weights(self, version: int) -> None:
        if version > KEPT_WEIGHTS:
            shutil.rmtree(self._weights_dir / str(version - KEPT_WEIGHTS), ignore_errors=True)

    async def _in_worker(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Torch runs in one thread of its own, so that the event loop goes on answering."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    def _reached_target(self) -> bool:
        last = [report.reward_mean for report in self.reports[-self.score_window :]]
        return self.target_score is not None and len(last) == self.score_window and sum(last) / len(last) >= self.target_score

    def _report(self, groups: Sequence[Group], read: _Read, update: Update) -> StepReport:
        read.clock.lap("update")
        return StepReport.of(
            self._number,
            (read.sampled_by, str(self._serving.published.version)),
            [rollout_id for group in groups for rollout_id in group.rollout_ids],
            read.traces,
            read.batch,
            self._trained_on(read)[0],
            read.clock,
            temperature=self.temperature,
            tokens=update.tokens,
            loss=update.loss,
            gradient_norm=update.gradient_norm,
            max_ratio_error=update.max_ratio_error,
            kl=update.kl if self.kl else None,
            zero_variance_groups=read.zero_variance_groups,
            singleton_groups=read.singleton_groups,
            resampled=read.resampled,
            carried=len(self._in_flight.groups),
            oldest=max(self._number - group.step for group in groups),
        )


def _finished(groups: Sequence[Group]) -> list[Rollout | AttemptedRollout]:
    return [group.finished[rollout_id] for group in groups for rollout_id in group.rollout_ids if rollout_id in group.finished]


@dataclass(frozen=True)
class _Read:
    """Trajectories and advantages of a step's groups."""

    traces: Traces
    batch: TrajectoryBatch
    advantages: NDArray[np.float32]
    """Of each trajectory."""
    informative: list[Group]
    """The groups whose rewards differ."""
    of_informative: NDArray[np.bool_]
    """Of each trajectory: whether its group is one of them."""
    clock: Clock
    zero_variance_groups: int
    singleton_groups: int
    """Of the zero-variance ones: those of which one rollout is left."""
    resampled: int = 0
    """Zero-variance groups that were replaced."""
    sampled_by: str = ""
    """The weights' version that sampled them."""
