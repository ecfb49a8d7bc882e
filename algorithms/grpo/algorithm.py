"""GRPO over a store: enqueue groups of rollouts, read what their agents did, update the weights, publish them, repeat.

The agents are somebody else's and run anywhere; all this sees of them are their traces. `GRPO.step` is the whole idea. What a step
may train on is decided by the adapter (adapters/trajectories.py), how by objective.py; this module only connects them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray

from agl_otel.adapters.lengths import pick
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.algorithms.grpo.groups import Group, GroupStore, UnderWay
from agl_otel.algorithms.grpo.learner import NO_UPDATE, Learner, Update
from agl_otel.algorithms.grpo.objective import Average, Objective, group_advantages
from agl_otel.algorithms.grpo.policy import load_policy, push_weights, save_weights
from agl_otel.columns import Traces
from agl_otel.errors import AglError, DataError, UsageError
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, NamedResources, ResourcesUpdate, Rollout, RolloutConfig

RESOURCE_NAME: Final = "main_llm"
MODEL_NAME: Final = "policy"
_logger = logging.getLogger(__name__)
KEPT_WEIGHTS: Final = 2  # the server reads the newest while it is pushed; the one before is for a person to look at


class RolloutStore(GroupStore, Protocol):
    """What GRPO needs of a store; `agl_otel.store.Store` is one."""

    async def publish(self, resources: NamedResources, *, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish resources as the next version of `resources_id`."""
        ...

    async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str]) -> Traces:
        """All that was observed of them."""
        ...

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Show them in the stack's metrics."""
        ...


@dataclass(frozen=True)
class StepReport:
    """What happened in one step."""

    step: int
    """1, 2, …"""
    weights_version: str
    """The version that sampled this step."""
    reward_mean: float
    """Over the rollouts trained on, before any shuffling."""
    rollouts: int
    model_calls: int
    """(call, choice) rows read."""
    spans: int
    verdicts: dict[str, int]
    alarms: int
    """Attempts that are unproven though their agents ran under the hook."""
    refused: dict[str, int]
    """Keys of adapters' ATTEMPT_REFUSALS and CALL_REFUSALS, and `not_finished`."""
    breaks: dict[str, int]
    """Keys of adapters' BREAKS."""
    trajectories: int
    tokens: int
    """Model-written tokens trained on."""
    off_policy: int
    """Trajectories that other weights than `weights_version` sampled, by what the model server said."""
    flat_groups: int
    """Groups whose rewards were all equal: they teach nothing."""
    resampled: int
    """Groups that were replaced because they were flat (resample_rounds)."""
    carried: int
    """Groups left running for the next step (groups_under_way)."""
    oldest: int
    """How many steps ago the oldest group trained on was enqueued."""
    loss: float
    gradient_norm: float
    max_ratio_error: float
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| before the first update; rounding only, if all is right."""
    rollout_seconds: float
    read_seconds: float
    update_seconds: float
    """With the push of the new weights."""
    rollout_ids: list[str]
    """All that were enqueued for the step, group after group."""
    digest: str
    """columns.Traces.digest of what was read."""

    @property
    def figures(self) -> dict[str, float]:
        """What tells of silent bias: drift of log-probs, and shares of stale, refused and broken-off trajectories."""
        made = max(1, self.trajectories)
        return {
            "step": self.step,
            "reward_mean": self.reward_mean,
            "logprob_drift": self.max_ratio_error,
            "stale_share": self.off_policy / made,
            "break_share": sum(self.breaks.values()) / made,
            "refused": sum(self.refused.values()),
            "alarms": self.alarms,
        }


@dataclass(kw_only=True)
class GRPO:
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
    groups_under_way: int | None = None
    """Asynchronous mode: so many groups run at a time, more than prompts_per_step; a step takes the first that are whole and carries the
    others over (AReaL, arXiv:2505.24298, §4). Use importance_cap with it. None: every step waits for all of its own."""
    max_staleness: int = 2
    """In asynchronous mode: a group that was enqueued so many steps ago is waited for."""
    updates_per_step: int = 3
    """Optimizer steps on each batch (mu in the paper's algorithm 1): rollouts are dearer than updates."""
    learning_rate: float = 1e-3
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
    step_timeout_seconds: float = 600.0
    """Rollouts that have not finished by then are left out of their step, and counted."""
    weights_dir: str | Path | None = None
    """Where weights are written for the server; default: `weights` in `model_dir`."""
    reports: list[StepReport] = field(default_factory=list[StepReport], init=False)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UsageError(f"group_size is {self.group_size}: a group of one has no other to be better than; use at least 2")
        for name in ("resample_rounds", "max_staleness"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.groups_under_way is not None and self.groups_under_way <= self.prompts_per_step:
            raise UsageError(
                f"groups_under_way is {self.groups_under_way}: it must be more than prompts_per_step ({self.prompts_per_step}), "
                "or nothing is left to carry over"
            )
        self._objective = Objective(**{each.name: getattr(self, each.name) for each in fields(Objective)})
        self._weights_dir = Path(self.weights_dir or Path(self.model_dir) / "weights").absolute()
        self._random = random.Random(self.seed)
        self._resources: ResourcesUpdate | None = None

    async def run(self, store: RolloutStore, tasks: Sequence[Any]) -> list[StepReport]:
        """Train until `max_steps` or `target_score`; returns the reports. The server ends up with the last weights.

        Raises:
            UsageError: no tasks, or `model_dir` holds no model.
            DataError: a step had nothing to train on.
            ModelServerError: the model server did not take the weights.
        """
        if not tasks:
            raise UsageError("GRPO needs at least one task to train on")
        order = (tasks[place] for place in task_order(len(tasks), self._random))
        with ThreadPoolExecutor(1, thread_name_prefix="learner", initializer=torch.set_num_threads, initargs=(self.threads,)) as worker:
            async with aiohttp.ClientSession() as session:
                self._worker, self._session = worker, session
                self._under_way = UnderWay(store)
                await self._in_worker(self._load)
                await self._publish(store)
                while len(self.reports) < self.max_steps and not self._reached_target():
                    report = await self.step(store, order)
                    self.reports.append(report)
                    await self._record(store, report)
                    if self.on_step is not None:
                        self.on_step(report)
                await self._under_way.cancel()
        return self.reports

    async def _record(self, store: RolloutStore, report: StepReport) -> None:
        """Have the alarms of the step in the stack's metrics; a run does not end because nobody takes them."""
        try:
            await store.record_figures(report.figures, algorithm="grpo")
        except AglError as error:
            _logger.warning("the figures of step %d are in no metrics: %s", report.step, error)

    async def step(self, store: RolloutStore, tasks: Iterator[Any]) -> StepReport:
        """The loop: enqueue, wait, adapt, learn, publish."""
        clock = _Clock()
        groups: list[Group] = []
        resampled = 0
        for rounds_left in range(self.resample_rounds, -1, -1):
            groups += await self._next_groups(self.prompts_per_step - len(groups), tasks)
            clock.lap("rollout")
            read = await self._read(store, groups)
            clock.lap("read")
            if len(read.telling) == len(groups) or not rounds_left:
                break
            resampled += len(groups) - len(read.telling)
            groups = read.telling
        batch, advantages = read.trained_on(only_telling=self.resample_rounds > 0)
        sampled_by = str(self._published.version)
        if advantages.any():
            update = await self._in_worker(self._learner.update, batch, advantages)
            await self._publish(store)
        else:
            _logger.warning("step %d teaches nothing: the rewards are equal in each of its %d groups", self._number, len(groups))
            update = NO_UPDATE
        clock.lap("update")
        return self._report(sampled_by, groups, read, batch, update, clock.seconds, resampled)

    # --- the parts, in the order of the loop

    @property
    def _number(self) -> int:
        """Of the step at work: 1, 2, …"""
        return len(self.reports) + 1

    async def _next_groups(self, count: int, tasks: Iterator[Any]) -> list[Group]:
        """Enqueue what is missing, and take `count` groups."""
        new = count if self.groups_under_way is None else max(0, self.groups_under_way - len(self._under_way.groups))
        await self._under_way.enqueue([self._requests(next(tasks), place) for place in range(new)], step=self._number)
        oldest = self._number - self.max_staleness if self.groups_under_way is not None else self._number
        return await self._under_way.take(count, oldest_step=oldest, timeout_seconds=self.step_timeout_seconds)

    def _requests(self, task: Any, place: int) -> list[EnqueueRolloutRequest]:
        """The rollouts of one group, pinned to the published resources."""
        metadata = {"step": self._number, "group": place}
        request = EnqueueRolloutRequest(
            input=task, mode="train", resources_id=self._published.resources_id, config=self.rollout_config, metadata=metadata
        )
        return [request] * self.group_size

    async def _read(self, store: RolloutStore, groups: Sequence[Group]) -> _Read:
        """What was observed of these groups, and what it is worth."""
        finished = [group.finished[rollout_id] for group in groups for rollout_id in group.rollout_ids if rollout_id in group.finished]
        traces = await store.traces(finished)
        batch = to_trajectories(traces, fill_reward=self.fill_reward, agent_match=self.agent_match)
        count = sum(len(group.rollout_ids) for group in groups)
        batch.refused.update({"not_finished": count - len(finished)} if len(finished) < count else {})
        return self._score(traces, batch, groups)

    def _score(self, traces: Traces, batch: TrajectoryBatch, groups: Sequence[Group]) -> _Read:
        """Advantages of each trajectory: computed once for each rollout within its group, shared by its trajectories."""
        group_of = {rollout_id: place for place, group in enumerate(groups) for rollout_id in group.rollout_ids}
        if not len(batch):
            raise DataError(
                f"step {self._number} has nothing to train on: of {len(group_of)} rollouts, refused {dict(batch.refused)}. "
                "The reasons are explained in agl_otel.adapters.trajectories (ATTEMPT_REFUSALS, CALL_REFUSALS)"
            )
        place = {rollout_id: number for number, rollout_id in enumerate(group_of)}
        places = np.array([place[rollout_id] for rollout_id in batch.rollout_id])
        _, first, back = np.unique(places, return_index=True, return_inverse=True)
        rewards = batch.reward[first]
        learnt = rewards[self._random.sample(range(len(rewards)), len(rewards))] if self.shuffle_rewards else rewards
        of_group = np.array([group_of[batch.rollout_id[row]] for row in first])
        dense = np.unique(of_group, return_inverse=True)[1]
        advantages = group_advantages(torch.from_numpy(learnt), torch.from_numpy(dense), scaled=self.scale_advantages).numpy()
        telling = set(of_group[advantages != 0].tolist())
        rows = np.array([group_of[rollout_id] in telling for rollout_id in batch.rollout_id])
        chosen = [group for number, group in enumerate(groups) if number in telling]
        flat = len(np.unique(of_group)) - len(telling)
        return _Read(traces, batch, advantages[back], chosen, rows, float(rewards.mean()), flat)

    async def _publish(self, store: RolloutStore) -> None:
        """A new version of the resources, and the weights of that version on the server: what the next rollouts use."""
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        llm = LLM(endpoint=f"{self.model_server_url.rstrip('/')}/v1", model=MODEL_NAME, sampling_parameters=sampling)
        current = self._resources
        self._resources = await store.publish({RESOURCE_NAME: llm}, resources_id=current.resources_id if current else None)
        version = str(self._resources.version)
        folder = await self._in_worker(save_weights, self.policy.model, self._weights_dir / version)
        await push_weights(self._session, self.model_server_url, folder, version)
        await self._in_worker(self._forget_weights, self._resources.version)

    @property
    def _published(self) -> ResourcesUpdate:
        if self._resources is None:
            raise UsageError("GRPO.step works within GRPO.run, which publishes the first weights")
        return self._resources

    def _load(self) -> None:
        """Read the model and set up the learner, in the worker's thread."""
        torch.manual_seed(self.seed)
        self.policy = load_policy(self.model_dir, device=self.device)
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

    def _report(
        self,
        version: str,
        groups: Sequence[Group],
        read: _Read,
        batch: TrajectoryBatch,
        update: Update,
        seconds: dict[str, float],
        resampled: int,
    ) -> StepReport:
        rollout_ids = [rollout_id for group in groups for rollout_id in group.rollout_ids]
        return StepReport(
            step=self._number,
            weights_version=version,
            reward_mean=read.reward_mean,
            rollouts=len(rollout_ids),
            model_calls=len(read.traces.calls),
            spans=read.traces.spans,
            verdicts=dict(Counter(verdict.kind for verdict in read.traces.verdicts.values())),
            alarms=len(read.traces.alarms),
            refused=dict(batch.refused),
            breaks=dict(batch.breaks),
            trajectories=len(batch),
            tokens=update.tokens,
            off_policy=sum(sampled_by != version for sampled_by in batch.model_version),
            flat_groups=read.flat_groups,
            resampled=resampled,
            carried=len(self._under_way.groups),
            oldest=max(self._number - group.step for group in groups),
            loss=update.loss,
            gradient_norm=update.gradient_norm,
            max_ratio_error=update.max_ratio_error,
            rollout_seconds=seconds["rollout"],
            read_seconds=seconds["read"],
            update_seconds=seconds["update"],
            rollout_ids=rollout_ids,
            digest=read.traces.digest,
        )


@dataclass(frozen=True)
class _Read:
    """What a step's groups were read as."""

    traces: Traces
    batch: TrajectoryBatch
    advantages: NDArray[np.float32]
    """Of each trajectory."""
    telling: list[Group]
    """Those whose rewards differ."""
    of_telling: NDArray[np.bool_]
    """Of each trajectory: whether its group is one of them."""
    reward_mean: float
    flat_groups: int

    def trained_on(self, *, only_telling: bool) -> tuple[TrajectoryBatch, NDArray[np.float32]]:
        """The trajectories and their advantages; those of flat groups are left out where they would only fill the mean."""
        if not only_telling or self.of_telling.all() or not self.of_telling.any():
            return self.batch, self.advantages
        index = np.flatnonzero(self.of_telling)
        return pick(self.batch, index), self.advantages[index]


class _Clock:
    """Seconds of each kind of lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = self.seconds.get(name, 0.0) + now - self._last, now


def task_order(tasks: int, source: random.Random) -> Iterator[int]:
    """Task numbers without end: every task once, shuffled, before any comes again."""
    while True:
        yield from source.sample(range(tasks), tasks)
