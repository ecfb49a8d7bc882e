"""SFT over a store: enqueue rollouts, select the attempts with the highest rewards, train on their replies, publish, repeat.

Expert iteration (arXiv:1705.08439), as rejection-sampling fine-tuning of language models (STaR, arXiv:2203.14465; RAFT,
arXiv:2304.06767). `SFT.step` is the loop, adapters/selection.py selects the attempts, and train.py trains in a separate process. The
model server must already run: `python -m agl_otel.algorithms.grpo.server --model DIR`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import numpy as np
import torch

from agl_otel.adapters.credit import call_returns
from agl_otel.adapters.lengths import pick, readable
from agl_otel.adapters.records import IGNORED
from agl_otel.adapters.selection import left_out, task_key
from agl_otel.adapters.token_columns import spread
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.checked_files import changed_files, remove_whole
from agl_otel.algorithms.grpo.groups import REWARD_SECONDS, RewardWait, TaskOrder, cancel_all, requeue_failed
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE, load_policy, load_weights, save_weights
from agl_otel.algorithms.grpo.serving import RolloutStore, Serving
from agl_otel.algorithms.hub import model_folder, origin_of
from agl_otel.algorithms.model_files import keep_small_files
from agl_otel.algorithms.offline import Offline
from agl_otel.algorithms.report import Clock, mean_reward, without_samples
from agl_otel.algorithms.run_folder import WEIGHTS, RunFolder, folder_of, only_writer, open_run, run_fingerprint
from agl_otel.algorithms.run_log import open_log, training_step
from agl_otel.algorithms.sft import train
from agl_otel.algorithms.sft.corrections import corrected_rows
from agl_otel.algorithms.sft.options import SFTOptions
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.algorithms.sft.train import NOT_TRAINED, ROWS, SPEC, TRAINED, Row, Spec, Trained
from agl_otel.algorithms.utils import agent_match_of, check_disk, failures_in, items, retry_lost_runner, sampling_seed
from agl_otel.algorithms.validation import best_weights
from agl_otel.errors import DataError, TrainingError, UsageError, writing
from agl_otel.service.forkserver import ForkServer
from agl_otel.types import (
    AttemptedRollout,
    Dataset,
    EnqueueRolloutRequest,
    Rollout,
    TrainingStep,
)
from agl_otel.types.columns import AttemptKey, Ragged, Traces
from agl_otel.types.sampling import all_parameters

_NOT_COMPARED: Final = frozenset(
    {
        *("model_dir", "model_server_url", "max_steps", "target_score", "device", "threads", "on_step", "seed"),
        *("step_timeout_seconds", "run_dir", "probe_tolerance", "metrics", "val_every", "validator"),
    }
)
"""Fields that may change when a run is resumed: where things are, and when it ends."""
_OF_SPEC: Final = ("optimizer", "learning_rate", "epochs", "batch_rows", "max_grad_norm", "device", "threads")
KEPT_WEIGHTS: Final = 2  # the newest, which the server reads during a push, and the previous one
STOP_SECONDS: Final = 5.0
_logger = logging.getLogger(__name__)


class SFT(SFTOptions, Algorithm):
    """Supervised fine-tuning of the model in `model_dir` on its own best rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reports: list[RoundReport] = []
        self._run: RunFolder | None = None
        self._offline: Offline | None = None

    @property
    def sampling_parameters(self) -> dict[str, Any]:
        """All sampling parameters of the published resources."""
        return all_parameters(self.temperature, self.max_tokens)

    def take_adapter(self, adapter: Any) -> None:
        """Use the adapter's `agent_match`. Raises UsageError for its other options."""
        self.agent_match = agent_match_of("SFT", adapter, self.agent_match)

    def run_fingerprint(self, tasks: Sequence[Any]) -> dict[str, Any]:
        """Return the run's fingerprint, as JSON: the options in its run.json."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        return run_fingerprint(options, tasks, model_dir=self.model_dir, without=_NOT_COMPARED)

    def last_weights(self, run: RunFolder) -> tuple[Path | None, int]:
        """Return the folder (None: `model_dir`) and version of the weights with which a model server must start when `run` is resumed.

        Rollouts that were enqueued before the stop must be sampled by these. Raises DataError where they are missing.
        """
        rows = run.metrics(None)
        return (_weights_after(run.folder, rows), int(rows[-1]["next_version"])) if rows else (None, 1)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train on the data; called by Trainer.fit. Raises what `train` raises."""
        await self.train(cast("RolloutStore", self.get_store()), items(train_dataset))

    async def train(self, store: RolloutStore, tasks: Sequence[Any]) -> list[RoundReport]:
        """Train until `max_steps` or `target_score` and return the reports. The server then has the last weights.

        Raises:
            UsageError: no tasks, `model_dir` holds no model, or `run_dir` holds a run of other options, another model or another store.
            InUseError: another process works on the run, or without a `run_dir` on one of this model.
            DataError: a round had nothing to select from, or files that the run needs to resume are damaged.
            ModelServerError: the model server refused the weights, or does not sample with them (probe_tolerance).
            TrainingError: the training process failed; the message has the end of its log.
        """
        if not tasks and not self.is_offline:
            raise UsageError("SFT needs at least one task to train on")
        order = TaskOrder(len(tasks), random.Random(self.seed))
        self.model_dir = await asyncio.to_thread(model_folder, self.model_dir, run=folder_of(self.run_dir))
        model = origin_of(self.model_dir)
        if model is not None and self.run_dir is None:
            raise UsageError("a model of the hub lies in a cache, which is no place for a run's weights: give run_dir")
        with open_run(self.run_dir, algorithm="sft", options=lambda: self.run_fingerprint(tasks), seed=self.seed, model=model) as self._run:
            self._folder = self._run.folder if self._run is not None else self._own_folder
            async with AsyncExitStack() as opened:
                opened.enter_context(only_writer(self._folder / "weights", self._run))
                self._forks = ForkServer([train.__name__], log=self._folder / "train.log")  # imports torch once for all rounds
                opened.push_async_callback(self._forks.close)
                session = await opened.enter_async_context(aiohttp.ClientSession())
                self._log = await opened.enter_async_context(open_log(store, "sft", self._run, self.metrics))
                server, sampling = self.model_server_url, self.sampling_parameters
                self._serving = Serving(store, session, url=server, sampling=sampling, run_id=self._log.run_id)
                self._offline = await Offline.open(store, self.offline_mode, self.selection, self._run)
                await self._serving.begin(self._run)
                await self._begin(order)
                await self._validate()
                while len(self.reports) < self.max_steps and not self._reached_target():
                    report = await self.step(store, (tasks[place] for place in order))
                    if not report.rollouts:
                        break
                    self.reports.append(report)
                    if self._run is not None:
                        self._run.metric(report.row)
                    await self._log.note(self._training_step(report), report.figures)
                    if self.on_step is not None:
                        self.on_step(report)
                    await self._validate()
                await self._validate(last=True)
        return self.reports

    async def _validate(self, *, last: bool = False) -> None:
        """Have the weights of the last round validated where that is due; `last`: the training ends, so it is due unless it was done."""
        step = len(self.reports)
        if self.validator is not None and step and last != (bool(self.val_every) and step % (self.val_every or 1) == 0):
            await self.validator(step, self._weights)
            await self._log.note_validations()

    # --- the run's folder

    @property
    def _own_folder(self) -> Path:
        return Path(self.model_dir).absolute() / "sft"

    async def _begin(self, order: TaskOrder) -> None:
        """Publish and push the weights for the first round: the initial ones, or those of the last complete round."""
        rows = self._run.metrics(None) if self._run is not None else []
        if self._run is not None:
            await asyncio.to_thread(keep_small_files, Path(self.model_dir), self._run.folder)
            await asyncio.to_thread(_forget_weights_beyond, self._run.folder, len(rows))
        self.reports += [RoundReport.of_row(row) for row in rows]
        for _ in range(len(rows) * self.prompts_per_step if self._offline is None else 0):
            next(order)
        self._first = self._weights = await asyncio.to_thread(self._save_initial)
        if rows:
            self._serving.resume(int(rows[-1]["next_version"]), self._folder)
            self._weights = _weights_after(self._folder, rows) or self._first
            _logger.info("run %s resumes after round %d", self._log.run_id, len(rows))
        await self._publish()
        await self._log.begin([self._training_step(report) for report in self.reports])

    def _training_step(self, report: RoundReport) -> TrainingStep:
        return training_step(report, self._log, resources_id=self._serving.published.resources_id)

    async def step(self, store: RolloutStore, tasks: Iterator[Any]) -> RoundReport:
        """The loop: enqueue, wait, choose, train, publish."""
        clock = Clock()
        if self._offline is None:
            ids, finished = await self._roll_out(store, list(islice(tasks, self.prompts_per_step)))
            check_disk(finished)
            await self._serving.check_server()
        else:
            ids, finished = await self._take_offline(store, self._offline)
        clock.lap("rollout")
        traces = (await store.traces(finished, tree=self.credit == "to_go")).trusting(self.reward_sources)
        batch = to_trajectories(traces, fill_reward=self.fill_reward, agent_match=self.agent_match, by_call=self.by_call)
        batch = readable(batch, **self._limits)
        batch.refused.update({"not_finished": len(ids) - len(finished)} if len(finished) < len(ids) else {})
        corrected = await self._corrected(store, traces, batch.refused) if self.corrections else []
        chosen = self._select(traces, batch, is_alone=not corrected) if finished or self._offline is None else batch
        clock.lap("read")
        version = str(self._serving.published.version)
        rows = self._rows(traces, chosen) + [row for _, row in corrected]
        async with self._serving.asleep(partial(asyncio.sleep, 0)):  # the training process has freed its memory by its end
            trained = await self._train(rows) if rows else NOT_TRAINED
        if trained.updates:
            await self._publish()
        clock.lap("update")
        versions = version, str(self._serving.published.version)
        report = RoundReport.of(
            self._number, versions, self._groups(ids), traces, batch, chosen, clock,
            temperature=self.temperature if self._offline is None else None,
            earlier=self.reports,
            asked=self._offline is None,
            kept=len(set(chosen.rollout_id)),
            kept_reward_mean=mean_reward(chosen),
            corrected=len(corrected),
            tokens=trained.tokens,
            loss_before=trained.loss_before,
            logprob_drift=trained.logprob_drift,
            loss=trained.loss,
            not_finite=trained.not_finite,
        )  # fmt: skip
        attempts = list(dict.fromkeys([*report.attempts, *(key for key, _ in corrected)]))
        return replace(report, trajectories=report.trajectories + len(corrected), attempts=attempts)

    # --- the parts, in the order of the loop

    @property
    def _number(self) -> int:
        """Number of the current round: 1, 2, …"""
        return len(self.reports) + 1

    async def _roll_out(self, store: RolloutStore, tasks: Sequence[Any]) -> tuple[list[str], list[Rollout | AttemptedRollout]]:
        """Run the round's rollouts; return their ids and those that finished in time, in the order of the ids.

        In a run with a folder their ids are made of run, round and index, so that enqueueing them again finds the existing rollouts.
        """
        config = self.rollout_config if self.rollout_config is not None or self._run is None else retry_lost_runner()
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=self._serving.published.resources_id,
                config=config,
                rollout_id=f"ro-{self._run.run_id}-{self._number:06d}-{place:04d}-{number:03d}" if self._run is not None else None,
                metadata={"step": self._number, "group": place, "sampling_seed": sampling_seed(self.seed, self._number, place, number)},
            )
            for place, task in enumerate(tasks)
            for number in range(self.group_size)
        ]
        enqueued = await store.enqueue(requests)
        await requeue_failed(store, enqueued)
        ids = [rollout.rollout_id for rollout in enqueued]
        finished = {rollout.rollout_id: rollout async for rollout in store.watch(ids, timeout_seconds=self.step_timeout_seconds)}
        await cancel_all(store, [rollout_id for rollout_id in ids if rollout_id not in finished])
        if (wait := self._reward_wait(store)) is not None:
            await wait.until_over(list(finished.values()), self.step_timeout_seconds)
        return ids, [finished[rollout_id] for rollout_id in ids if rollout_id in finished]

    def _reward_wait(self, store: RolloutStore) -> RewardWait | None:
        if not self.reward_wait_seconds:
            return None
        return RewardWait(self.reward_wait_seconds, partial(store.rewarded, sources=self.reward_sources))

    def _groups(self, ids: Sequence[str]) -> list[Sequence[str]]:
        """Return the ids of a round by task; offline rollouts are one group."""
        size = self.group_size if self._offline is None else max(1, len(ids))
        return [ids[start : start + size] for start in range(0, len(ids), size)]

    async def _take_offline(self, store: RolloutStore, offline: Offline) -> tuple[list[str], list[Rollout | AttemptedRollout]]:
        """Return the offline rollouts that no round has taken, and that wait for no reward: their ids, and the rollouts."""
        taken = {rollout_id for report in self.reports for rollout_id in report.rollout_ids}
        wait = self._reward_wait(store)
        while found := await offline.rollouts(taken):
            if ready := await wait.ready(found) if wait is not None else found:
                return [rollout.rollout_id for rollout in ready], ready
            await asyncio.sleep(REWARD_SECONDS)
        return [], []

    def _select(self, traces: Traces, batch: TrajectoryBatch, *, is_alone: bool) -> TrajectoryBatch:
        """Select the trajectories to train on, none where all rewards are equal; the others are counted as refused.

        Raises DataError where there is none to select from, if they are all that the round has (`is_alone`).
        """
        if not len(batch):
            if not is_alone:
                return batch
            what, failed = f"round {self._number} has nothing to choose from", failures_in(traces)
            raise DataError(without_samples(what, len(traces.rollouts), batch.refused, batch.differing, failed))
        keys: list[AttemptKey] = list(zip(batch.rollout_id, batch.attempt_id, strict=True))
        rewards = dict(zip(keys, batch.reward.tolist(), strict=True))
        if self.shuffle_rewards:
            source = random.Random(f"{self.seed}/shuffle/{self._number}")
            rewards = dict(zip(rewards, source.sample(list(rewards.values()), len(rewards)), strict=True))
        tasks = {rollout.rollout_id: task_key(rollout) for rollout in traces.rollouts}
        out = left_out(rewards, tasks, min_reward=self.min_reward, top_fraction=self.top_fraction, best_of_group=self.best_of_group)
        flat = self.min_reward is None and len(set(rewards.values())) == 1
        if flat or len(out) == len(rewards):
            why = "the rewards are all equal" if flat else f"none reaches {self.min_reward}"
            _logger.warning("round %d %s: %s", self._number, "changes no weights" if is_alone else "learns from corrections alone", why)
            out = dict.fromkeys(rewards, "flat_rewards" if flat else "low_reward")
        batch.refused.update(out[key] for key in keys if key in out)
        return pick(batch, np.array([place for place, key in enumerate(keys) if key not in out], np.int64))

    def _rows(self, traces: Traces, chosen: TrajectoryBatch) -> list[Row]:
        """Return the rows to train on; none if no call has a return above 0."""
        if self.credit == "final" or not len(chosen):
            return rows_of(chosen)
        source = random.Random(f"{self.seed}/shuffle/{self._number}/calls")
        permuted = (lambda values: source.sample(values, len(values))) if self.shuffle_rewards else None
        returns = np.maximum(call_returns(traces, chosen, self.discount, agent_match=self.agent_match, permuted=permuted), 0.0)
        if not returns.any():
            _logger.warning('round %d changes no weights: no call has a return above 0 (credit = "to_go")', self._number)
            return []
        return rows_of(chosen, spread(traces.calls, chosen.rows, returns))

    async def _corrected(self, store: RolloutStore, traces: Traces, refused: Counter[str]) -> list[tuple[AttemptKey, Row]]:
        """Return the rows of corrections, each with its attempt; count those that become none."""
        spans = await store.spans([rollout.rollout_id for rollout in traces.rollouts])
        return await asyncio.to_thread(
            corrected_rows,
            traces,
            spans,
            partial(self._tokenizer, add_special_tokens=False, split_special_tokens=True),  # what people write begins no other turn
            self._stop_ids,
            refused,
            sources=self.reward_sources,
            agent_match=self.agent_match,
            **self._limits,
        )

    async def _train(self, rows: Sequence[Row]) -> Trained:
        """Train in a separate process and set `_weights` to the folder of the new weights."""
        folder = self._folder / "rounds" / str(self._number)
        spec = self._spec()
        await asyncio.to_thread(write_round, folder, spec, rows)
        process = self._forks.process(f"training of round {self._number}", train.__name__, str(folder), log=folder / "train.log")
        await process.start()
        try:
            code = await process.wait()
        finally:
            await process.stop(grace_seconds=STOP_SECONDS)
        if code:
            raise TrainingError(f"the {process.name} ended with exit code {code}; its log is {process.log}. {process.log_end()}")
        self._weights = Path(spec.out)
        self._forget_weights()
        return Trained(**json.loads((folder / TRAINED).read_text()))

    def _forget_weights(self) -> None:
        """Remove older weights, except the initial ones and those with the best validation."""
        best = best_weights(self._folder)
        for old in (self._folder / "weights").iterdir():
            if old.name.startswith(".") and old.is_dir():
                shutil.rmtree(old)  # of a killed process
            elif old.name.isdigit() and 0 < int(old.name) <= self._number - KEPT_WEIGHTS and old != best:
                remove_whole(old)

    def _spec(self) -> Spec:
        begun_with = self._first if self.from_start else self._weights
        return Spec(
            model_dir=str(Path(self.model_dir).absolute()),
            weights=str(begun_with),
            temperature=self.temperature if self._offline is None and begun_with == self._weights else None,
            out=str(self._folder / "weights" / str(self._number)),
            seed=self.seed + self._number,
            **{name: getattr(self, name) for name in _OF_SPEC},
        )

    async def _publish(self) -> None:
        """Publish a new version of the resources and push its weights to the server, for the next rollouts."""
        await self._serving.next_version()
        if self._weights != self._first or not await self._serving.push_origin(Path(self.model_dir)):
            await self._serving.push(self._weights)
        if self.probe_tolerance is not None:
            await self._serving.probe(partial(asyncio.to_thread, self._drift), self.probe_tolerance)

    def _drift(self, prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float]) -> float:
        """Compute Learner.drift under the pushed weights, which are loaded on the CPU for this."""
        torch.set_num_threads(self.threads)
        model = load_policy(self.model_dir).model
        load_weights(model, self._weights)
        return Learner(model, learning_rate=0.0, temperature=self.temperature).drift(prompt, reply, logprobs)

    def _save_initial(self) -> Path:
        """Save the initial weights to a folder that the server can read."""
        policy = load_policy(self.model_dir)
        self._limits = {"vocabulary": policy.vocabulary, "context_tokens": policy.context_tokens}
        self._tokenizer, self._stop_ids = policy.tokenizer, policy.stop_ids
        if self.corrections and not self._stop_ids:
            raise UsageError(
                f"corrections = true: {self.model_dir} names no token that ends a reply; add eos_token_id to its configuration"
            )
        return save_weights(policy.model, self._folder / "weights" / "0")

    @property
    def stopped_because(self) -> str:
        """Why `train` ended."""
        if self._reached_target():
            return "the target score is reached"
        return "max_steps are done" if len(self.reports) >= self.max_steps else f"there are no new rollouts {self._offline}"

    def _reached_target(self) -> bool:
        return self.target_score is not None and bool(self.reports) and self.reports[-1].reward_mean >= self.target_score


def _forget_weights_beyond(run: Path, rounds: int) -> None:
    """Remove weights of rounds that the run has not done, which a killed process left: the run may never repeat them."""
    for left in (run / WEIGHTS).glob("*"):
        if left.name.isdigit() and int(left.name) > rounds:
            remove_whole(left)


def _weights_after(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the folder of the weights after these rounds, None for the initial ones. Raises DataError where missing or damaged."""
    trained = [row["step"] for row in rows if row["tokens"]]
    if not trained:
        return None
    found = folder / "weights" / str(trained[-1])
    if not (found / WEIGHTS_FILE).exists():
        raise DataError(f"the weights of round {trained[-1]} are not in {found}: restore them, or choose a new folder for the run")
    if changed := changed_files(found):
        raise DataError(
            f"the weights of round {trained[-1]} are damaged ({found / changed[0]} has changed since it was written): restore them, or "
            "choose a new folder for the run"
        )
    return found


def rows_of(batch: TrajectoryBatch, weights: Ragged | None = None) -> list[Row]:
    """Convert trajectories to rows with a loss on the tokens that the model wrote, which have these weights (None: all are 1)."""
    rows: list[Row] = []
    tokens = zip(batch.prompt, batch.response, batch.response_mask, batch.logprobs, strict=True)
    weighed: Iterable[Any] = weights if weights is not None else repeat(np.zeros(0), len(batch))
    for (prompt, response, mask, logprobs), own, rollout_id, reward in zip(
        tokens, weighed, batch.rollout_id, batch.reward.tolist(), strict=True
    ):
        captured = logprobs[mask == 1].tolist()
        labels = [IGNORED] * len(prompt) + np.where(mask == 1, response, IGNORED).tolist()
        ids = prompt.tolist() + response.tolist()
        rows.append(Row(input_ids=ids, labels=labels, logprobs=captured, weights=own.tolist(), rollout_id=rollout_id, reward=reward))
    return rows


def write_round(folder: Path, spec: Spec, rows: Sequence[Row]) -> None:
    """Write what the training process of a round reads. Raises SettingsError where it cannot be written."""
    with writing(f"the rows in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ROWS).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        (folder / SPEC).write_text(json.dumps(asdict(spec), indent=1))
