"""SFT over a store: enqueue rollouts, keep the attempts with the highest rewards, train on what they wrote, publish, repeat.

Expert iteration (arXiv:1705.08439), as rejection-sampling fine-tuning of language models (STaR, arXiv:2203.14465; RAFT,
arXiv:2304.06767). `SFT.step` is the loop. Which attempts are kept is decided by adapters/selection.py; training is a process of its own
(train.py). The model server must already run: `python -m agl_otel.algorithms.grpo.server --model DIR`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import numpy as np

from agl_otel.adapters.lengths import pick
from agl_otel.adapters.records import IGNORED
from agl_otel.adapters.selection import check_selection, left_out, task_key
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.grpo.algorithm import MODEL_NAME, RESOURCE_NAME, RolloutStore
from agl_otel.algorithms.grpo.policy import load_policy, push_weights, save_weights
from agl_otel.algorithms.grpo.report import Clock
from agl_otel.algorithms.run_folder import new_run_id
from agl_otel.algorithms.run_log import RunLog, step_of
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.algorithms.sft.train import ROWS, SPEC, TRAINED, Row, Spec, Trained
from agl_otel.algorithms.utils import sampling_seed
from agl_otel.columns import AttemptKey, Traces
from agl_otel.errors import DataError, UnavailableError, UsageError
from agl_otel.processes import Process
from agl_otel.types import LLM, AttemptedRollout, Dataset, EnqueueRolloutRequest, ResourcesUpdate, Rollout, RolloutConfig

KEPT_WEIGHTS: Final = 2  # the server reads the newest while it is pushed; the next round begins with it
STOP_SECONDS: Final = 5.0
_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class SFT(Algorithm):
    """Supervised fine-tuning of the model in `model_dir` on its own best rollouts."""

    model_dir: str | Path
    """Model and tokenizer in transformers' format; what the model server was started with."""
    model_server_url: str
    """http://host:port of a server with POST /weights (grpo/server.py); it must see the files of this machine."""
    prompts_per_step: int = 32
    group_size: int = 8
    """Rollouts of each task in a round."""
    top_fraction: float | None = 0.25
    min_reward: float | None = None
    best_of_group: int | None = None
    """These three choose the attempts to train on: adapters/selection.py."""
    by_call: bool = False
    """Train on each call by itself, with its whole prompt, instead of on conversations."""
    epochs: int = 4
    """Passes over what was kept."""
    batch_rows: int = 16
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    from_start: bool = False
    """Each round trains the first weights anew instead of the last ones (as STaR does), which drifts less."""
    temperature: float = 1.0
    """Agents are asked to sample at this."""
    max_tokens: int = 64
    """The longest reply that agents are asked to allow."""
    max_steps: int = 5
    """Rounds."""
    target_score: float | None = None
    """Stop when the mean reward of a round has reached this."""
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    """Of torch on the CPU."""
    on_step: Callable[[RoundReport], object] | None = None
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random among a round's attempts, so nothing can be learnt."""
    fill_reward: float | None = None
    """The reward of an attempt that has none; None refuses it."""
    agent_match: str | None = None
    """Train only on the calls of agents whose name matches this regular expression."""
    rollout_config: RolloutConfig | None = None
    step_timeout_seconds: float = 600.0
    """Rollouts that have not finished by then are left out of their round, and counted."""
    run_dir: str | Path | None = None
    """Where rounds (rows, specs, logs) and weights are kept; default: `sft` in `model_dir`."""
    reports: list[RoundReport] = field(default_factory=list[RoundReport], init=False)

    def __post_init__(self) -> None:
        check_selection(self.top_fraction, self.best_of_group)
        if (self.top_fraction, self.min_reward, self.best_of_group) == (None, None, None):
            raise UsageError("SFT would train on all that its own model wrote: give top_fraction, min_reward or best_of_group")
        for name in ("prompts_per_step", "group_size", "epochs", "batch_rows"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be at least 1")
        self._folder = Path(self.run_dir or Path(self.model_dir) / "sft").absolute()
        self._random = random.Random(self.seed)
        self._resources: ResourcesUpdate | None = None

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """What Trainer.fit calls: `train` on the data. Raises what `train` raises."""
        data = train_dataset if train_dataset is not None else []
        await self.train(cast("RolloutStore", self.get_store()), [data[place] for place in range(len(data))])

    async def train(self, store: RolloutStore, tasks: Sequence[Any]) -> list[RoundReport]:
        """Train until `max_steps` or `target_score`; returns the reports. The server ends up with the last weights.

        Raises:
            UsageError: no tasks, or `model_dir` holds no model.
            DataError: a round had nothing to choose from.
            ModelServerError: the model server did not take the weights.
            UnavailableError: the process that trains ended badly; the message has the end of its log.
        """
        if not tasks:
            raise UsageError("SFT needs at least one task to train on")
        order = self._in_order(tasks)
        async with aiohttp.ClientSession() as session:
            self._session = session
            self._log = RunLog(store, run_id=new_run_id("sft"), algorithm="sft")
            self._first = self._weights = await asyncio.to_thread(self._copied)
            await self._publish(store)
            while len(self.reports) < self.max_steps and not self._reached_target():
                report = await self.step(store, order)
                self.reports.append(report)
                await self._log.note(step_of(report, self._log, resources_id=self._published.resources_id), report.figures)
                if self.on_step is not None:
                    self.on_step(report)
            await self._log.end()
        return self.reports

    async def step(self, store: RolloutStore, tasks: Iterator[Any]) -> RoundReport:
        """The loop: enqueue, wait, choose, train, publish."""
        clock = Clock()
        ids, finished = await self._rolled_out(store, list(islice(tasks, self.prompts_per_step)))
        clock.lap("rollout")
        traces = await store.traces(finished)
        batch = to_trajectories(traces, fill_reward=self.fill_reward, agent_match=self.agent_match, by_call=self.by_call)
        batch.refused.update({"not_finished": len(ids) - len(finished)} if len(finished) < len(ids) else {})
        chosen = self._chosen(traces, batch)
        clock.lap("read")
        version = str(self._published.version)
        trained = await self._train(chosen) if len(chosen) else None
        if trained is not None:
            await self._publish(store)
        clock.lap("update")
        versions = version, str(self._published.version)
        return RoundReport.of(self._number, versions, ids, traces, batch, chosen, trained, clock)

    # --- the parts, in the order of the loop

    @property
    def _number(self) -> int:
        """Of the round at work: 1, 2, …"""
        return len(self.reports) + 1

    def _in_order(self, tasks: Sequence[Any]) -> Iterator[Any]:
        """Without end: every task once, shuffled, before any comes again."""
        while True:
            yield from self._random.sample(tasks, len(tasks))

    async def _rolled_out(self, store: RolloutStore, tasks: Sequence[Any]) -> tuple[list[str], list[Rollout | AttemptedRollout]]:
        """The ids of the round's rollouts, and those that finished in time, in the order of the ids."""
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=self._published.resources_id,
                config=self.rollout_config,
                metadata={"step": self._number, "group": place, "sampling_seed": sampling_seed(self.seed, self._number, place, number)},
            )
            for place, task in enumerate(tasks)
            for number in range(self.group_size)
        ]
        ids = [rollout.rollout_id for rollout in await store.enqueue(requests)]
        finished = {rollout.rollout_id: rollout async for rollout in store.watch(ids, timeout_seconds=self.step_timeout_seconds)}
        return ids, [finished[rollout_id] for rollout_id in ids if rollout_id in finished]

    def _chosen(self, traces: Traces, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The trajectories of the attempts that are kept; none where their rewards are all equal. Counts the others."""
        if not len(batch):
            raise DataError(
                f"round {self._number} has nothing to choose from: refused {dict(batch.refused)}. "
                "The reasons are explained in agl_otel.adapters.trajectories (ATTEMPT_REFUSALS, CALL_REFUSALS)"
            )
        keys: list[AttemptKey] = list(zip(batch.rollout_id, batch.attempt_id, strict=True))
        rewards = dict(zip(keys, batch.reward.tolist(), strict=True))
        if self.shuffle_rewards:
            rewards = dict(zip(rewards, self._random.sample(list(rewards.values()), len(rewards)), strict=True))
        tasks = {rollout.rollout_id: task_key(rollout) for rollout in traces.rollouts}
        out = left_out(rewards, tasks, min_reward=self.min_reward, top_fraction=self.top_fraction, best_of_group=self.best_of_group)
        flat = self.min_reward is None and len(set(rewards.values())) == 1
        if flat or len(out) == len(rewards):
            _logger.warning(
                "round %d teaches nothing: %s", self._number, "the rewards are all equal" if flat else f"none reaches {self.min_reward}"
            )
            out = dict.fromkeys(rewards, "flat_rewards" if flat else "low_reward")
        batch.refused.update(out[key] for key in keys if key in out)
        return pick(batch, np.array([place for place, key in enumerate(keys) if key not in out], np.int64))

    async def _train(self, chosen: TrajectoryBatch) -> Trained:
        """Train in a process of its own; afterwards `_weights` is the folder of the new weights."""
        folder = self._folder / "rounds" / str(self._number)
        spec = self._spec()
        await asyncio.to_thread(_write, folder, spec, rows_of(chosen))
        process = Process.python_module(
            f"training of round {self._number}", "agl_otel.algorithms.sft.train", str(folder), log=folder / "train.log"
        )
        await process.start()
        try:
            code = await process.wait()
        finally:
            await process.stop(grace_seconds=STOP_SECONDS)
        if code:
            raise UnavailableError(f"the {process.name} ended with exit code {code}; its log is {process.log}. {process.last_words()}")
        self._weights = Path(spec.out)
        if self._number > KEPT_WEIGHTS:
            shutil.rmtree(self._folder / "weights" / str(self._number - KEPT_WEIGHTS), ignore_errors=True)
        return Trained(**json.loads((folder / TRAINED).read_text()))

    def _spec(self) -> Spec:
        return Spec(
            model_dir=str(Path(self.model_dir).absolute()),
            weights=str(self._first if self.from_start else self._weights),
            out=str(self._folder / "weights" / str(self._number)),
            seed=self.seed + self._number,
            **{name: getattr(self, name) for name in ("learning_rate", "epochs", "batch_rows", "max_grad_norm", "device", "threads")},
        )

    async def _publish(self, store: RolloutStore) -> None:
        """A new version of the resources, and the weights of that version on the server: what the next rollouts use."""
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        llm = LLM(endpoint=f"{self.model_server_url.rstrip('/')}/v1", model=MODEL_NAME, sampling_parameters=sampling)
        self._resources = await store.publish({RESOURCE_NAME: llm}, resources_id=self._log.run_id)
        await push_weights(self._session, self.model_server_url, self._weights, str(self._resources.version))

    @property
    def _published(self) -> ResourcesUpdate:
        if self._resources is None:
            raise UsageError("SFT.step works within SFT.train, which publishes the first weights")
        return self._resources

    def _copied(self) -> Path:
        """The first weights, in a folder as the server reads them."""
        return save_weights(load_policy(self.model_dir).model, self._folder / "weights" / "0")

    def _reached_target(self) -> bool:
        return self.target_score is not None and bool(self.reports) and self.reports[-1].reward_mean >= self.target_score


def rows_of(batch: TrajectoryBatch) -> list[Row]:
    """The trajectories as rows to train on: the loss is on what the model wrote."""
    rows: list[Row] = []
    for prompt, response, mask in zip(batch.prompt, batch.response, batch.response_mask, strict=True):
        labels = [IGNORED] * len(prompt) + np.where(mask == 1, response, IGNORED).tolist()
        rows.append(Row(input_ids=prompt.tolist() + response.tolist(), labels=labels))
    return rows


def _write(folder: Path, spec: Spec, rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (folder / SPEC).write_text(json.dumps(asdict(spec), indent=1))
