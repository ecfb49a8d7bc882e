"""VERL: verl's own PPO trainer on Ray, fed by rollouts of agents that run anywhere.

This process never imports verl. It writes down what a run needs, starts `python -m agl_otel.algorithms.verl` for it, follows its metrics,
and turns its end into an error of ours.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agl_otel import errors
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.metric_sinks import check_metrics, sinks_of
from agl_otel.algorithms.run_folder import RunFolder, digest_of, model_fingerprint, write_json
from agl_otel.algorithms.run_log import RunLog
from agl_otel.algorithms.utils import agent_match_of, items, retry_lost_runner
from agl_otel.algorithms.verl.checkpoints import last_step, note_checkpoint
from agl_otel.algorithms.verl.defaults import LOOP_FILE, environment, fixed, on_cpu, with_defaults
from agl_otel.algorithms.verl.keys import get, merged, translate
from agl_otel.algorithms.verl.samples import Rules
from agl_otel.algorithms.verl.singletons import needs_more_rollouts
from agl_otel.algorithms.verl.spec import ROLLOUT_SECONDS, Spec, sink_step
from agl_otel.errors import AglError, DataError, SettingsError, UsageError
from agl_otel.service.processes import Process
from agl_otel.types import Dataset, RolloutConfig, TrainingStep

POLL_SECONDS: Final = 0.5  # between two looks at the metrics
STOP_SECONDS: Final = 30.0  # Ray ends its processes
NEEDED: Final = ("verl", "ray", "transfer_queue", "torch")
FOLDER: Final = "verl"
TRAINER_MODES: Final = ("sync", "colocate_async", "separate_async")
_NOT_COMPARED: Final = ("trainer", "ray_kwargs", "global_profiler", "transfer_queue", "skip")
"""Sections of the config that may be others when a run is gone on with."""


def require_extra() -> None:
    """Raise SettingsError that says what to install where something of the extra [verl] is missing."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SettingsError(f"verl needs the [verl] extra ({', '.join(missing)} is missing): pip install 'agl-otel[verl]'")


class VERL(Algorithm):
    """Trains weights by verl 0.9.1 on Ray, on GPUs, or on the CPU for small models.

    The agents' model is the resource `main_llm`, which stands for verl's own rollout servers behind the stack's proxy.

    Args:
        config: verl's config, nested or with dotted keys; keys of verl 0.5, as Agent Lightning 0.3's users write them, are translated. What
            is not given is verl's default, or this package's (defaults.py). `trainer.device: cpu` trains without a GPU.
        trainer_cls, daemon_cls: 0.3's; they have no place here.
        model_dir: the model, where the config does not name one.
        run_dir: where the run is kept: verl's checkpoints, its metrics, logs. A run that is there already is gone on with at its last
            checkpoint, and what was run before is not run again. None: a temporary folder.
        seed: of what rollouts sample, and of verl's data loader and model server. None: drawn.
        agent_match: train only on the calls of agents whose name matches this regular expression.
        fill_reward: the reward of an attempt that has none; None refuses it.
        reward_name: the dimension that is the reward; None: the primary one.
        by_call: make every model call a sample of its own, instead of joining those that go on from each other.
        rollout_config: timeouts and retries of every rollout; None: 1200 seconds, and again where its runner was lost.
        step_timeout_seconds: rollouts of a step that have not finished by then are cancelled, left out and counted.
        on_step: called with each line of metrics.jsonl.
        metrics: where else figures are shown: "tensorboard", "wandb", "plots", or a metrics.MetricSink. None: TensorBoard's files and a
            picture in the run's folder, where it is kept and their packages are installed.

    Raises UsageError that names a key of the config without a place.
    """

    name = "verl"

    def __init__(
        self,
        config: Mapping[str, Any],
        trainer_cls: Any = None,
        daemon_cls: Any = None,
        *,
        model_dir: str | Path | None = None,
        run_dir: str | Path | RunFolder | None = None,
        seed: int | None = None,
        agent_match: str | None = None,
        fill_reward: float | None = None,
        reward_name: str | None = None,
        by_call: bool | None = None,
        rollout_config: RolloutConfig | None = None,
        step_timeout_seconds: float | None = None,
        on_step: Callable[[dict[str, Any]], object] | None = None,
        metrics: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        check_metrics(metrics)
        self._sinks = metrics
        for name, given in (("trainer_cls", trainer_cls), ("daemon_cls", daemon_cls)):
            if given is not None:
                raise UsageError(
                    f"VERL takes no {name}: verl's own trainers run, one of {', '.join(TRAINER_MODES)} by trainer.v1.trainer_mode, "
                    "and rollouts come from the queue. Leave it out"
                )
        told = translate(config)
        self.config = with_defaults(told.config, model_dir=str(model_dir) if model_dir is not None else None)
        """verl's config, as far as it is not verl's default."""
        self.trainer_mode = str(get(self.config, "trainer.v1.trainer_mode", "sync"))
        if self.trainer_mode not in TRAINER_MODES:
            raise UsageError(f"trainer.v1.trainer_mode is {self.trainer_mode!r}: use one of {', '.join(TRAINER_MODES)}")
        self.run_dir = run_dir
        self.seed = seed
        self.rollout_config = rollout_config if rollout_config is not None else retry_lost_runner(ROLLOUT_SECONDS)
        self.step_timeout_seconds = step_timeout_seconds
        self.on_step = on_step
        self.rules = Rules(
            fill_reward=fill_reward,
            agent_match=agent_match,
            reward_name=reward_name,
            by_call=told.options.get("by_call", False) if by_call is None else by_call,
            max_prompt_tokens=get(self.config, "data.max_prompt_length", 512),
            max_response_tokens=get(self.config, "data.max_response_length", 512),
            temperature=float(get(self.config, "actor_rollout_ref.rollout.temperature", 1.0)),
            top_p=float(get(self.config, "actor_rollout_ref.rollout.top_p", 1.0)),
        )
        self._taken = 0
        self.metrics: list[dict[str, Any]] = []
        """The lines of metrics.jsonl: {"step", …verl's metrics and ours (agl/…)}."""

    def take_adapter(self, adapter: Any) -> None:
        """Take its `agent_match`. Raises UsageError for anything else that an adapter may do."""
        self.rules = replace(self.rules, agent_match=agent_match_of("VERL", adapter, self.rules.agent_match))

    def run_fingerprint(self, train: Sequence[Any], val: Sequence[Any]) -> dict[str, Any]:
        """What decides the course of a run, as JSON: the options of its run.json."""
        held = {section: keys for section, keys in self.config.items() if section not in _NOT_COMPARED}
        model = str(get(self.config, "actor_rollout_ref.model.path", ""))
        of_model = {"model": model_fingerprint(model)} if (Path(model) / "config.json").exists() else {}
        return {"config": held, **of_model, "rules": asdict(self.rules), "train": digest_of(list(train)), "val": digest_of(list(val))}

    def check(self) -> None:
        """Raise UsageError where a task's single rollout would be compared with nothing."""
        estimator, rollouts = get(self.config, "algorithm.adv_estimator"), get(self.config, "actor_rollout_ref.rollout.n", 1)
        if why := needs_more_rollouts(str(estimator), int(rollouts)):
            raise UsageError(why)

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Train until verl has done its steps.

        Raises SettingsError where the extra is missing, UsageError for a key that verl does not know, no tasks, an estimator that compares
        groups where `rollout.n` is 1, or a folder of another run, InUseError where one works in it, DataError where all rollouts of a step
        or of a validation were refused, and where verl ended with an error: its last words, and where its log is.
        """
        require_extra()
        self.check()
        train, val = items(train_dataset), items(val_dataset)
        if not train:
            raise UsageError("VERL needs at least one task to train on")
        if isinstance(self.run_dir, RunFolder):
            return await self._run(self.run_dir, train, val)
        folder = Path(self.run_dir) if self.run_dir is not None else Path(tempfile.mkdtemp(prefix="agl-otel-verl-"))
        kept = RunFolder(folder.absolute(), algorithm=self.name, options=self.run_fingerprint(train, val), seed=self.seed)
        try:
            await self._run(kept, train, val)
        finally:
            kept.close()
            if self.run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, kept: RunFolder, train: Sequence[Any], val: Sequence[Any]) -> None:
        place = kept.folder / FOLDER
        place.mkdir(exist_ok=True)
        start = len(list(place.glob("start-*"))) + 1
        files = place / f"start-{start}"
        files.mkdir()
        where = (await self.get_store().open()).description
        if where.proxy is None:
            raise UsageError(
                "VERL reads what the proxy captures, and this stack has none: give the store of one that `agl-otel up` started"
            )
        self._write(where.queue, kept, place, files, start, train, val)
        sinks = sinks_of(self._sinks, has_folder=self.run_dir is not None)
        async with RunLog(_NO_STEP_STORE, run_id=kept.run_id, algorithm=self.name, folder=kept.folder, sinks=sinks) as log:
            await self._train(kept, place, files, start, log)

    async def _train(self, kept: RunFolder, place: Path, files: Path, start: int, log: RunLog) -> None:
        """Run verl, and follow its metrics."""
        self._taken = 0
        last = await asyncio.to_thread(last_step, place)
        self.metrics = _metrics(kept, last)
        await log.begin([sink_step(kept.run_id, line, time.time()) for line in self.metrics])
        process = Process.python_module(
            "verl",
            "agl_otel.algorithms.verl",
            str(files / "run.json"),
            log=kept.folder / "logs" / f"verl-{start}.log",
            env=environment(self.config, files / "metrics.jsonl"),
        )
        process.cwd = place
        await process.start()
        ending = asyncio.ensure_future(process.wait())
        noting: asyncio.Future[None] = asyncio.ensure_future(asyncio.to_thread(note_checkpoint, place))
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=POLL_SECONDS)
                await self._take_lines(files / "metrics.jsonl", kept, log)
                if noting.done():
                    noting.result()
                    noting = asyncio.ensure_future(asyncio.to_thread(note_checkpoint, place))
            code = ending.result()
            await noting
            await asyncio.to_thread(note_checkpoint, place)
        finally:
            ending.cancel()
            noting.cancel()
            await process.stop(grace_seconds=STOP_SECONDS)
        if code:
            raise _failure(files / "outcome.json", code, process)

    def _write(self, store: str, kept: RunFolder, place: Path, files: Path, start: int, train: Sequence[Any], val: Sequence[Any]) -> None:
        spec = Spec(
            store=store,
            run_id=kept.run_id,
            start=start,
            trainer_mode=self.trainer_mode,
            says_version=on_cpu(self.config),
            seed=self.seed,
            rollout_config=self.rollout_config.model_dump(),
            step_seconds=self.step_timeout_seconds,
            rules=asdict(self.rules),
        )
        for name, tasks in (("train", train), ("val", val or train[:1])):
            (place / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        # JSON is YAML: verl loads the agent loop by this file in each of its workers
        (place / LOOP_FILE).write_text(json.dumps([{"name": "agl_otel", "_target_": "agl_otel.algorithms.verl.loop.TracedAgentLoop"}]))
        config = merged(self.config, fixed(place, asdict(spec), self.config, validate=bool(val)))
        if self.seed is not None:
            config = merged({"data": {"seed": self.seed}, "actor_rollout_ref": {"rollout": {"seed": self.seed}}}, config)
        write_json(files / "run.json", {"config": config, "tasks": len(train)})

    # --- its metrics

    async def _take_lines(self, path: Path, kept: RunFolder, log: RunLog) -> None:
        """Take over what verl has written since the last look."""
        for told in _written(path)[self._taken :]:
            kept.metric(told)
            self.metrics.append(told)
            self._taken += 1
            await log.note(sink_step(kept.run_id, told, time.time()), {})
            if self.on_step is not None:
                self.on_step(told)


class _NoStepStore:
    """The store hears of steps from verl's own process (trainer.py), which knows their attempts."""

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """It has."""

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        """None is new to it."""
        return 0


_NO_STEP_STORE: Final = _NoStepStore()


def scores(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line of metrics says of rewards: `validation` (mean over its tasks) and `reward` (of what was trained on), where it does."""
    validation = [value for key, value in line.items() if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@")]
    told = {"validation": validation[0]} if validation else {}
    return {**told, **({"reward": line["agl/reward_mean"]} if "agl/reward_mean" in line else {})}


def outcome(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the lines of a run's metrics come to: `score_before` and `score_after` (None without a validation), `steps`, `samples`."""
    validated = [scores(line)["validation"] for line in lines if "validation" in scores(line)]
    return {
        "score_before": validated[0] if validated else None,
        "score_after": validated[-1] if validated else None,
        "steps": max((line["step"] for line in lines), default=0),
        "samples": sum(int(line.get("agl/samples", 0)) for line in lines),
    }


def _written(path: Path) -> list[dict[str, Any]]:
    """The whole lines of verl's own file of metrics, as ours."""
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [{"step": row["step"], **row["data"]} for row in rows]


def _metrics(kept: RunFolder, last: int) -> list[dict[str, Any]]:
    """The lines of the steps that stay done; the others are cut off."""
    stay = [row for row in kept.metrics(None if last else 0) if row["step"] <= last]
    return kept.metrics(len(stay))


def _failure(outcome: Path, code: int, process: Process) -> AglError:
    if outcome.exists():
        told = json.loads(outcome.read_text())
        if told["error"]:
            return getattr(errors, told["error"], DataError)(told["message"])
    return DataError(f"verl ended with exit code {code}; its log is {process.log}. {process.last_words()}")
