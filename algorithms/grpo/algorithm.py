"""GRPO over a store: enqueue groups of rollouts, read their traces, update the weights, publish them, repeat.

Agents run anywhere and are known only by their traces. `GRPO.step` is the core loop. The adapter (adapters/trajectories.py) decides what
is trained on, objective.py computes the loss; this module connects them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray

from agl_otel.adapters.lengths import pick, readable
from agl_otel.adapters.ragged import take
from agl_otel.adapters.sampling import Assumed, token_temperatures
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.grpo.advantages import Scored, compared, scored
from agl_otel.algorithms.grpo.checkpoint import last_checkpoint
from agl_otel.algorithms.grpo.groups import REWARD_SECONDS, Group, InFlight, RewardWait, Take, TaskOrder, as_take, group_rollouts
from agl_otel.algorithms.grpo.learner import NO_UPDATE, Learner, Update
from agl_otel.algorithms.grpo.lora import with_lora
from agl_otel.algorithms.grpo.options import GRPOOptions
from agl_otel.algorithms.grpo.policy import checkpoint_activations, load_policy, release_memory
from agl_otel.algorithms.grpo.progress import Progress
from agl_otel.algorithms.grpo.push import Pushes, dtype_of_model, place_for_weights, weights_to_serve
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.grpo.serving import RolloutStore, Serving
from agl_otel.algorithms.hub import model_folder, origin_of
from agl_otel.algorithms.offline import Offline
from agl_otel.algorithms.report import NOT_FINITE_STEPS, Clock, singleton_warning, without_samples
from agl_otel.algorithms.run_folder import WEIGHTS, RunFolder, folder_of, only_writer, open_run, run_fingerprint
from agl_otel.algorithms.run_log import open_log, training_step
from agl_otel.algorithms.utils import agent_match_of, check_disk, failures_in, items, retry_lost_runner, sampling_seed
from agl_otel.errors import DataError, UsageError
from agl_otel.types import (
    AttemptedRollout,
    Dataset,
    EnqueueRolloutRequest,
    Rollout,
    TrainingStep,
)
from agl_otel.types.columns import Ragged, Traces
from agl_otel.types.sampling import POLICY, all_parameters

_NOT_COMPARED: Final = frozenset(
    {
        *("max_steps", "target_score", "score_window", "device", "threads", "seed", "step_timeout_seconds"),
        *("probe_tolerance", "ratio_error_limit", "val_every", "micro_batch_tokens", "gradient_checkpointing"),
        *("checkpoint_every_minutes", "checkpoint_every_steps", "keep_checkpoints"),
    }
)
"""Options that may change when a run is resumed: where it computes, and when it ends."""
_logger = logging.getLogger(__name__)


class GRPO(GRPOOptions, Algorithm):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300) of the model in `model_dir`, from traces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reports: list[StepReport] = []
        self._shuffle = random.Random(f"{self.schedule.seed}/shuffle")
        self._run: RunFolder | None = None
        self._offline: Offline | None = None
        self._found: list[Group] = []
        compare = partial(compared, scaled=self.objective.scale_advantages)
        self._rule = self.advantages.rule(compare, self.credit_function) if self.advantages.of_calls else None

    @property
    def sampling_parameters(self) -> dict[str, Any]:
        """All sampling parameters of the published resources."""
        return all_parameters(self.sampling.temperature, self.sampling.max_tokens)

    @property
    def _enforced(self) -> dict[str, str]:
        """Metadata of the rollouts that are trained on, by which proxies enforce the run's parameters."""
        policy = self.sampling.sampling_policy
        return {POLICY: policy} if policy in ("enforce", "enforce_all") else {}

    @property
    def _assumed(self) -> Assumed:
        """The distribution of which a call's tokens must be samples."""
        policy, temperature = self.sampling.sampling_policy, self.sampling.temperature
        if policy == "any":
            return Assumed(temperature, others=None)
        if policy != "correct":
            return Assumed(temperature)
        return Assumed(temperature, temperatures="any" if self.sampling.mix_temperatures else "one")

    def take_adapter(self, adapter: Any) -> None:
        """Use the adapter's `agent_match`. Raises UsageError for its other options."""
        self.rollouts = replace(self.rollouts, agent_match=agent_match_of("GRPO", adapter, self.rollouts.agent_match))

    def run_fingerprint(self, tasks: Sequence[Any]) -> dict[str, Any]:
        """Return the run's fingerprint, as JSON: the options in its run.json."""
        decays = self.updates.learning_rate_schedule != "constant"  # to 0 at max_steps
        without = _NOT_COMPARED - {"max_steps"} if decays else _NOT_COMPARED
        options = {**self.options, "dtype": self.updates.computed_in}  # "auto" depends on the device
        return run_fingerprint(options, tasks, model_dir=self.model_dir, without=without)

    def last_weights(self, run: RunFolder) -> tuple[Path | None, int]:
        """Return folder (None: `model_dir`) and version of the weights that `run` goes on with. Raises what `last_checkpoint` raises."""
        place, state = last_checkpoint(run)
        return place, state.version if state is not None else 1

    def weights_to_serve(self, run: RunFolder, *, adapter_rank: int = 0) -> tuple[Path | None, int]:
        """Return the folder (None: `model_dir`) and version of the weights with which a model server must start when `run` is resumed.

        Rollouts that were enqueued before the stop must be sampled by these. `adapter_rank`: the greatest rank of a LoRA adapter that the
        server takes; 0: it gets weights with the adapter merged in. Raises what push.weights_to_serve raises.
        """
        return weights_to_serve(self.updates, run, model_dir=Path(self.model_dir), adapter_rank=adapter_rank)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train on the data; called by Trainer.fit. Raises what `train` raises."""
        await self.train(cast("RolloutStore", self.get_store()), items(train_dataset))

    async def train(self, store: RolloutStore, tasks: Sequence[Any]) -> list[StepReport]:
        """Train until `max_steps` or `target_score` and return the reports. The server then has the last weights.

        Raises:
            UsageError: no tasks, `model_dir` holds no model, or `run_dir` holds a run of other options, another model or another store.
            UnavailableError: the model is one of the hub, which cannot be reached.
            InUseError: another process works on the run, or writes its weights to `weights_dir`.
            SampledOtherwiseError: the tokens of a step were not sampled as the trainer assumes (ratio_error_limit).
            DataError: a step had nothing to train on, NOT_FINITE_STEPS steps were not finite, or the last checkpoint is damaged.
            ModelServerError: the model server can only be sampled, refused the weights, or does not sample with them (probe_tolerance).
        """
        if not tasks and not self.rollouts.is_offline:
            raise UsageError("GRPO needs at least one task to train on")
        order = TaskOrder(len(tasks), random.Random(self.schedule.seed))
        self.model_dir = await asyncio.to_thread(model_folder, self.model_dir, run=folder_of(self.run_dir))
        weights_dir = place_for_weights(Path(self.model_dir), self.weights_dir, folder_of(self.run_dir))
        with (
            open_run(
                self.run_dir,
                algorithm="grpo",
                options=lambda: self.run_fingerprint(tasks),
                seed=self.schedule.seed,
                model=origin_of(self.model_dir),
            ) as self._run,
            only_writer(weights_dir, self._run),
            ThreadPoolExecutor(1, "checkpoints") as self._writer,
            ThreadPoolExecutor(1, "learner", torch.set_num_threads, (self.updates.threads,)) as worker,
        ):
            async with aiohttp.ClientSession() as session, open_log(store, "grpo", self._run, self.metrics) as self._log:
                self._worker = worker
                self._in_flight = InFlight(store, self._reward_wait(store))
                self._serving = Serving(
                    store,
                    session,
                    url=self.model_server_url,
                    sampling=self.sampling_parameters,
                    run_id=self._log.run_id,
                    bridge=self.sampling.bridge,
                    strict_tools=self.sampling.strict_tools,
                )
                self._offline = await Offline.open(store, self.rollouts.offline_mode, self.rollouts.selection, self._run)
                await self._serving.begin(self._run)
                await self._in_worker(self._load)
                own = self._run is not None and weights_dir == self._run.folder.absolute() / WEIGHTS
                self._pushes = Pushes(weights_dir, self.updates, self._serving.server.adapter_rank, of_run_alone=own)
                self._progress = self._begun(order)
                await self._publish_weights(origin=await self._progress.resume())
                await self._log.begin([self._training_step(report) for report in self.reports])
                await self._validate()
                while len(self.reports) < self.schedule.max_steps and not self._reached_target() and await self._has_more(store):
                    report = await self.step(store, (tasks[place] for place in order))
                    self.reports.append(report)
                    await self._progress.keep(report, is_last=report.step >= self.schedule.max_steps or self._reached_target())
                    await self._log.note(self._training_step(report), report.figures)
                    if self.on_step is not None:
                        self.on_step(report)
                    await self._check_finite()
                    await self._validate()
                await self._progress.keep_last()
                await self._in_flight.cancel()
                await self._validate(last=True)
        return self.reports

    async def step(self, store: RolloutStore, tasks: Iterator[Any]) -> StepReport:
        """Do one training step. README.md quotes these four lines; a test keeps both equal."""
        groups, read = await self._informative_groups(store, tasks)  # enqueue, wait, read; groups whose rewards are all equal are replaced
        update = await self._learn(read)  # compare the rewards of each group, follow the gradient of the sampled tokens
        await self._publish(update)  # new weights under a new version, which the next rollouts use
        return self._report(groups, read, update)

    # --- the parts, in the order of the loop

    @property
    def _number(self) -> int:
        """Number of the current step: 1, 2, …"""
        return len(self.reports) + 1

    async def _informative_groups(self, store: RolloutStore, tasks: Iterator[Any]) -> tuple[list[Group], _StepData]:
        """Return a step's groups and their trajectories; zero-variance groups are replaced up to `resample_rounds` times."""
        clock = Clock()
        groups: list[Group] = []
        takes: list[Take] = []
        traces: Traces | None = None
        resampled, rounds_left = 0, self.rollouts.resample_rounds
        while True:
            new = await self._next_groups(store, self.rollouts.prompts_per_step - len(groups), tasks)
            groups = [*groups, *new]
            check_disk(_finished(new))
            takes.append(as_take(new))
            if not self.rollouts.is_offline:
                await self._serving.check_server()
            clock.lap("rollout")
            found = await store.traces(_finished(new), tree=self._rule is not None)
            found = found.trusting(self.rollouts.reward_sources)
            traces = found if traces is None else Traces.joined(traces, found)
            read = self._read(traces, groups, clock)
            clock.lap("read")
            if len(read.informative) == len(groups) or not rounds_left:
                self._progress.note_taken(self._number, takes)
                return groups, replace(read, resampled=resampled, sampled_by=str(self._serving.published.version))
            rounds_left -= 1
            resampled += len(groups) - len(read.informative)
            groups = read.informative

    async def _next_groups(self, store: RolloutStore, count: int, tasks: Iterator[Any]) -> list[Group]:
        """Enqueue missing groups and take `count`; of offline rollouts, return those that `_has_more` found."""
        if self.rollouts.is_offline:
            return self._found
        new = count if self.rollouts.groups_in_flight is None else max(0, self.rollouts.groups_in_flight - len(self._in_flight.groups))
        first = self._in_flight.count
        await self._in_flight.enqueue([self._requests(next(tasks), place, first + place) for place in range(new)], step=self._number)
        alone = self.rollouts.groups_in_flight is None  # then a step takes its own groups, which wait for rewards
        oldest = self._number - (self.rollouts.max_staleness if not alone else 1 if self.rollouts.reward_wait_seconds else 0)
        return await self._in_flight.take(count, step=self._number, oldest_step=oldest, timeout_seconds=self.rollouts.step_timeout_seconds)

    async def _has_more(self, store: RolloutStore) -> bool:
        """Return whether there is more to train on: of offline ones, rollouts of no step yet, of tasks that wait for no reward."""
        if self._offline is None:
            return True
        taken = {rollout_id for report in self.reports for rollout_id in report.rollout_ids}
        wait = self._reward_wait(store)
        while found := await self._offline.rollouts(taken):
            if ready := await wait.ready(found) if wait is not None else found:
                self._found = group_rollouts(ready, first=self._in_flight.count, step=self._number)
                return True
            await asyncio.sleep(REWARD_SECONDS)
        return False

    def _reward_wait(self, store: RolloutStore) -> RewardWait | None:
        if not self.rollouts.reward_wait_seconds:
            return None
        return RewardWait(self.rollouts.reward_wait_seconds, partial(store.rewarded, sources=self.rollouts.reward_sources))

    def _requests(self, task: Any, place: int, number: int) -> list[EnqueueRolloutRequest]:
        """Build the requests of one group, pinned to the published resources. `number`: of the group in the run.

        In a run with a folder, ids are made of run, group and index, so that enqueuing them again has no effect.
        """
        config = self.rollouts.rollout_config
        if config is None and self._run is not None:
            config = retry_lost_runner()
        requests: list[EnqueueRolloutRequest] = []
        for member in range(self.rollouts.group_size):
            seed = {"sampling_seed": sampling_seed(self.schedule.seed, number, member)} if self.sampling.seed_sampling else {}
            request = EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=self._serving.published.resources_id,
                config=config,
                rollout_id=f"ro-{self._run.run_id}-{number:06d}-{member:03d}" if self._run is not None else None,
                metadata={"step": self._number, "group": place, **seed, **self._enforced},
            )
            requests.append(request)
        return requests

    def _read(self, traces: Traces, groups: Sequence[Group], clock: Clock) -> _StepData:
        """Compute the trajectories of these groups and their advantages; refusals in replaced groups are counted as well."""
        batch = to_trajectories(
            traces, fill_reward=self.rollouts.fill_reward, agent_match=self.rollouts.agent_match, sampling=self._assumed
        )
        batch = readable(batch, vocabulary=self.policy.vocabulary, context_tokens=self.policy.context_tokens)
        batch = self._of_this_run(batch, groups)
        late = sum(len(group.rollout_ids) for group in groups) - len(_finished(groups))
        batch.refused.update({"not_finished": late} if late else {})
        ids = {rollout_id for group in groups for rollout_id in group.rollout_ids}
        rows = np.flatnonzero([rollout_id in ids for rollout_id in batch.rollout_id])
        return self._score(traces, pick(batch, rows) if len(rows) < len(batch) else batch, groups, clock)

    def _of_this_run(self, batch: TrajectoryBatch, groups: Sequence[Group]) -> TrajectoryBatch:
        """Return the trajectories of weights that the run had pushed when they were sampled; `refused` counts others as `other_weights`.

        These were replaced before the rollout was enqueued, or are not the run's: the server did not load what it was given.
        """
        if self.rollouts.is_offline:
            return batch
        first = {rollout_id: self._version_at(group.step) for group in groups for rollout_id in group.rollout_ids}
        last = self._serving.published.version
        own = [
            not version or (version.isdecimal() and first.get(rollout_id, 0) <= int(version) <= last)
            for rollout_id, version in zip(batch.rollout_id, batch.model_version, strict=True)
        ]
        if all(own):
            return batch
        refused = batch.refused + Counter({"other_weights": len(own) - sum(own)})
        return pick(replace(batch, refused=refused), np.flatnonzero(own))

    def _version_at(self, step: int) -> int:
        """Return the version of the weights that were published last when a step began."""
        return int(self.reports[step - 2].next_version) if 2 <= step <= self._number else 1

    def _score(self, traces: Traces, batch: TrajectoryBatch, groups: Sequence[Group], clock: Clock) -> _StepData:
        """Compute the advantage of each rollout within its group, which all its trajectories share."""
        group_of = {rollout_id: place for place, group in enumerate(groups) for rollout_id in group.rollout_ids}
        if not len(batch):
            what, failed = f"step {self._number} has nothing to train on", failures_in(traces)
            raise DataError(without_samples(what, len(group_of), batch.refused, batch.differing, failed))
        place = {rollout_id: number for number, rollout_id in enumerate(group_of)}
        places = np.array([place[rollout_id] for rollout_id in batch.rollout_id])
        batch, places = pick(batch, np.argsort(places, kind="stable")), np.sort(places)
        _, first, back = np.unique(places, return_index=True, return_inverse=True)
        of_group = np.array([group_of[batch.rollout_id[row]] for row in first])
        dense = np.unique(of_group, return_inverse=True)[1]  # groups numbered 0, 1, … without those that gave no trajectory
        permuted = self._permuted if self.rollouts.shuffle_rewards else None
        scaled, agents = self.objective.scale_advantages, self.rollouts.agent_match
        found = scored(traces, batch, back, dense, self._rule, scaled=scaled, agent_match=agents, permuted=permuted)
        informative = {group_of[batch.rollout_id[row]] for row in np.flatnonzero(found.learns).tolist()}
        rows = np.array([group_of[rollout_id] in informative for rollout_id in batch.rollout_id])
        sizes = np.bincount(dense)
        if singletons := [batch.rollout_id[row] for row in first[sizes[dense] == 1]]:
            _logger.warning("%s", singleton_warning(self._number, singletons, len(sizes)))
        return _StepData(
            traces,
            batch,
            found,
            [group for number, group in enumerate(groups) if number in informative],
            rows,
            clock,
            zero_variance_groups=len(sizes) - len(informative),
            singleton_groups=len(singletons),
        )

    def _permuted(self, values: Any) -> Any:
        """Return the values in random order."""
        return np.asarray(values)[self._shuffle.sample(range(len(values)), len(values))]

    async def _learn(self, read: _StepData) -> Update:
        """Update the weights; NO_UPDATE where the rewards are equal within each group and no KL term pulls the weights back."""
        batch, advantages = self._trained_on(read)
        if not read.scored.learns.any() and not self.objective.needs_no_advantages:  # spares the passes of which no gradient comes
            _logger.warning("step %d changes no weights: the rewards are equal in each of its groups", self._number)
            return NO_UPDATE
        temperatures = token_temperatures(read.traces.calls, batch.rows, default=self.sampling.temperature)
        current = np.array([version in ("", read.sampled_by) and not self.rollouts.is_offline for version in batch.model_version])
        async with self._serving.asleep(partial(self._in_worker, release_memory)):
            update: Update = await self._in_worker(
                partial(
                    self._learner.update,
                    batch,
                    advantages,
                    temperatures=temperatures,
                    current=current,
                    learning_rate=self.updates.learning_rate_at(self._number, self.schedule.max_steps),
                )
            )
        if update.not_finite:
            _logger.warning("step %d: %s; optimizer steps: %d of %d", self._number, update.not_finite, update.made, self._learner.updates)
        return update

    async def _check_finite(self) -> None:
        """Save the weights and raise DataError where the last NOT_FINITE_STEPS steps were not finite."""
        last = [report.not_finite for report in self.reports[-NOT_FINITE_STEPS:]]
        if len(last) == NOT_FINITE_STEPS and all(last):
            good = await self._progress.keep_last()
            raise DataError(
                f"{NOT_FINITE_STEPS} steps in a row were not finite (the last: {last[-1]}), so the run ends: lower learning_rate, and look "
                f"at the rewards and at kl. No such update was applied; the weights are finite{f', saved in {good}' if good else ''}"
            )

    def _trained_on(self, read: _StepData) -> tuple[TrajectoryBatch, NDArray[np.float32] | Ragged]:
        """Return trajectories and advantages; with dynamic sampling without zero-variance groups, which would only dilute the mean."""
        if not self.rollouts.resample_rounds or read.of_informative.all() or not read.of_informative.any():
            return read.batch, read.scored.advantages
        index = np.flatnonzero(read.of_informative)
        own = read.scored.advantages
        return pick(read.batch, index), take(own, index) if isinstance(own, Ragged) else own[index]

    async def _publish(self, update: Update) -> None:
        """Publish the weights as a new version of the resources, unless the update changed nothing."""
        if update.made:
            await self._publish_weights()

    async def _publish_weights(self, *, origin: Path | None = None) -> None:
        """Publish the next version of the resources and push its weights to the server, unless it has read them from `origin`."""
        version = await self._serving.next_version()
        if origin is None or not await self._serving.push_origin(origin):
            await self._serving.push(await self._in_worker(self._pushes.write, self.policy.model, version))
        await self._in_worker(self._pushes.forget, version)
        if self.updates.probe_tolerance is not None:
            await self._serving.probe(partial(self._in_worker, self._learner.drift), self.updates.probe_tolerance)

    def _begun(self, order: TaskOrder) -> Progress:
        """Gather what changes from step to step."""
        return Progress(
            run=self._run,
            model_dir=Path(self.model_dir),
            model=self.policy.model,
            optimizer=self._learner.optimizer,
            pushes=self._pushes,
            serving=self._serving,
            reports=self.reports,
            order=order,
            shuffle=self._shuffle,
            in_flight=self._in_flight,
            schedule=self.schedule,
            validator=self.validator,
            writer=self._writer,
            in_worker=self._in_worker,
        )

    def _load(self) -> None:
        """Load the model and create the learner; runs in the worker thread."""
        torch.manual_seed(self.schedule.seed)
        updates = self.updates
        self.policy = load_policy(self.model_dir, device=updates.device, dtype=dtype_of_model(updates), attention=updates.attention)
        if updates.lora_rank is not None:
            model = with_lora(self.policy.model, updates.lora_rank, alpha=updates.lora_alpha, targets=updates.lora_targets)
            self.policy = replace(self.policy, model=model)
        if updates.gradient_checkpointing:
            checkpoint_activations(self.policy.model)
        self._learner = Learner(
            self.policy.model,
            learning_rate=updates.learning_rate,
            objective=self.objective,
            max_grad_norm=updates.max_grad_norm,
            temperature=self.sampling.temperature,
            updates=updates.updates_per_step,
            minibatches=updates.minibatches,
            micro_batch_tokens=updates.micro_batch_tokens,
            compute_dtype=torch.bfloat16 if updates.in_bfloat16 and updates.lora_rank is None else torch.float32,
            ratio_error_limit=updates.ratio_error_limit,
            optimizer_name=updates.optimizer,
        )

    async def _in_worker(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run torch in its own thread, so that the event loop stays responsive."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    @property
    def stopped_because(self) -> str:
        """Why `train` ended."""
        if self._reached_target():
            return "the target score is reached"
        if len(self.reports) >= self.schedule.max_steps:
            return "max_steps are done"
        return f"there are no new rollouts {self._offline}"

    def _reached_target(self) -> bool:
        target, window = self.schedule.target_score, self.schedule.score_window
        last = [report.reward_mean for report in self.reports[-window:]]
        return target is not None and len(last) == window and sum(last) / window >= target

    def _report(self, groups: Sequence[Group], read: _StepData, update: Update) -> StepReport:
        read.clock.lap("update")
        return StepReport.of(
            self._number,
            (read.sampled_by, str(self._serving.published.version)),
            [group.rollout_ids for group in groups],
            read.traces,
            read.batch,
            self._trained_on(read)[0],
            read.clock,
            temperature=self.sampling.temperature,
            earlier=self.reports,
            asked=not self.rollouts.is_offline,
            tokens=update.tokens,
            loss=update.loss,
            gradient_norm=update.gradient_norm,
            max_ratio_error=update.max_ratio_error,
            worst_ratio_error=update.worst_ratio_error,
            not_finite=update.not_finite,
            kl=update.kl if self.objective.kl else None,
            learning_rate=update.learning_rate,
            zero_variance_groups=read.zero_variance_groups,
            singleton_groups=read.singleton_groups,
            matched_states=read.scored.matched_states,
            resampled=read.resampled,
            carried=len(self._in_flight.groups),
            oldest=max(self._number - group.step for group in groups),
        )

    async def _validate(self, *, last: bool = False) -> None:
        """Have the weights of the last step validated where that is due; `last`: the training ends."""
        if await self._progress.validate(last=last):
            await self._log.note_validations()

    def _training_step(self, report: StepReport) -> TrainingStep:
        return training_step(report, self._log, resources_id=self._serving.published.resources_id)


def _finished(groups: Sequence[Group]) -> list[Rollout | AttemptedRollout]:
    return [group.finished[rollout_id] for group in groups for rollout_id in group.rollout_ids if rollout_id in group.finished]


@dataclass(frozen=True)
class _StepData:
    """Trajectories and advantages of a step's groups."""

    traces: Traces
    batch: TrajectoryBatch
    scored: Scored
    informative: list[Group]
    """The groups whose rewards differ."""
    of_informative: NDArray[np.bool_]
    """For each trajectory, whether its group is one of them."""
    clock: Clock
    zero_variance_groups: int
    singleton_groups: int
    """Zero-variance groups with one usable rollout."""
    resampled: int = 0
    """Zero-variance groups that were replaced."""
    sampled_by: str = ""
    """The version of the weights that sampled them."""
