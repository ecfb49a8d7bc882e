"""VERL: train with verl's PPO trainer on Ray, on rollouts of agents that run anywhere.

This process does not import verl. It writes the run's config, starts `python -m agl_otel.algorithms.verl`, follows its metrics, and
converts a failure to one of this package's errors.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from agl_otel import errors
from agl_otel.adapters.credit import group_advantages
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.checked_files import digest_of, write_json
from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.metric_sinks import check_metrics, sinks_of
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.algorithms.options import (
    AgentMatch,
    Credit,
    Discount,
    FillReward,
    RatioErrorLimit,
    RewardSources,
    RewardWaitSeconds,
    Seed,
    StateWeight,
    StepTimeout,
    checked,
)
from agl_otel.algorithms.outcome import OutcomeStore
from agl_otel.algorithms.run_folder import RunFolder, forced_in
from agl_otel.algorithms.run_log import RunLog
from agl_otel.algorithms.utils import agent_match_of, items, retry_lost_runner
from agl_otel.algorithms.verl.bounds import check_values
from agl_otel.algorithms.verl.checkpoints import last_step, note_checkpoint
from agl_otel.algorithms.verl.compose import compose_config
from agl_otel.algorithms.verl.credit import credit_config
from agl_otel.algorithms.verl.defaults import LOOP_FILE, OF_A_NEW_CLUSTER, environment, fixed, on_cpu, with_defaults
from agl_otel.algorithms.verl.figures import line_of
from agl_otel.algorithms.verl.keys import Tree, get, has, merged, translate
from agl_otel.algorithms.verl.samples import Rules
from agl_otel.algorithms.verl.singletons import needs_more_rollouts
from agl_otel.algorithms.verl.spec import ROLLOUT_SECONDS, Spec, sink_step
from agl_otel.errors import AglError, DataError, SettingsError, UsageError
from agl_otel.service.processes import Process
from agl_otel.types import RUN_LABEL, Dataset, RolloutConfig, TrainingStep
from agl_otel.types.resources import Bridging, StrictTools

POLL_SECONDS: Final = 0.5  # between two reads of the metrics
STOP_SECONDS: Final = 30.0  # for Ray to end its processes
NEEDED: Final = ("verl", "ray", "transfer_queue", "torch")
FOLDER: Final = "verl"
TRAINER_MODES: Final = ("sync", "colocate_async", "separate_async")
SEEDS: Final = ("data.seed", "actor_rollout_ref.rollout.seed")
"""Keys of verl's config that `seed` sets, where they are not given."""
VALIDATES: Final = ("trainer.val_before_train", "trainer.test_freq", "trainer.val_only")
"""Keys by which verl is asked to validate."""
_NOT_COMPARED: Final = ("trainer", "ray_kwargs", "global_profiler", "transfer_queue", "skip")
"""Sections of the config that may change when a run is resumed."""


def require_extra() -> None:
    """Raise SettingsError, which names the extra to install, where a package of [verl] is missing."""
    if missing := _missing():
        raise SettingsError(f"verl needs the [verl] extra ({', '.join(missing)} is missing): pip install 'agl-otel[verl]'")


def _missing() -> list[str]:
    """Return the packages of [verl] that are missing."""
    return [name for name in NEEDED if find_spec(name) is None]


@checked
class VERL(Algorithm):
    """Trains weights with verl 0.9.1 on Ray, on GPUs, or on the CPU for small models.

    The agents' model is the resource `main_llm`: verl's rollout servers behind the stack's proxy.

    Args:
        config: verl's config, nested or with dotted keys; keys of verl 0.5, as used with Agent Lightning 0.3, are translated. Defaults are
            those of defaults.py, then verl's. `trainer.device: cpu` trains without a GPU.
        trainer_cls, daemon_cls: arguments of 0.3, which are refused.
        model_dir: the model, unless the config has `actor_rollout_ref.model.path`.
        run_dir: folder of the run: verl's checkpoints, metrics, logs. An existing run is resumed from its last checkpoint, and succeeded
            rollouts are not repeated. None: a temporary folder.
        seed: seed of the rollouts' sampling, verl's data loader and its model server. None: random.
        agent_match: train only on the calls of agents whose name matches this regular expression.
        fill_reward: reward of attempts without one; None refuses such attempts.
        reward_name: dimension of the reward; None: the primary one.
        by_call: make each model call a separate sample, instead of merging calls that continue each other.
        credit, discount, state_weight, agent_baselines: what each call has of the rewards of its attempt, and what that is compared with
            (docs/credit.md), as in GRPO; the advantages are computed from the traces, and verl's own estimator is not used.
        bridge: "keep" and "drop" continue conversations by their sampled tokens, so that they stay one sample (docs/bridging.md).
        strict_tools: "drop" sends agents' tools without `strict`, so that no model server constrains their arguments.
        rollout_config: retries and time limits of rollouts; None: 1200 seconds, and a retry where the runner was lost.
        step_timeout_seconds: rollouts of a step that have not finished by then are cancelled, left out and counted.
        reward_sources: whose rewards count (docs/late-rewards.md): "runner", "agent", and sources of feedback. None: everybody's.
        reward_wait_seconds: how long a rollout that has succeeded waits for a reward, at most `step_timeout_seconds`; those of a validation
            do not wait.
        ratio_error_limit: verl's probability of each token before a step's update is compared with the one captured during sampling. The
            run ends, and changes nothing, where the ratio of the worst hundredth of the tokens differs from 1 by more than this on average:
            sampling, weights or tokenizer differ. Tokens of earlier weights are left out; with `algorithm.rollout_correction.bypass_mode`
            verl computes no such probability, so nothing is compared. None: no limit.
        on_step: called with each line of metrics.jsonl.
        metrics: metric sinks: "tensorboard", "wandb", "plots", or MetricSink objects. None: TensorBoard files and a picture in the run's
            folder, if there is one and their packages are installed.

    Raises UsageError that names a key of the config which is not supported.
    """

    name = "verl"

    def __init__(
        self,
        config: Annotated[Mapping[str, Any], Field(description="it is verl's own config, at least {}")],
        trainer_cls: Any = None,
        daemon_cls: Any = None,
        *,
        model_dir: str | Path | None = None,
        run_dir: str | Path | RunFolder | None = None,
        seed: Seed | None = None,
        agent_match: AgentMatch | None = None,
        fill_reward: FillReward | None = None,
        reward_name: Annotated[str | None, Field(min_length=1, description="rewards are found by their dimension's name")] = None,
        by_call: bool | None = None,
        credit: Credit = Advantages.credit,
        discount: Discount = Advantages.discount,
        state_weight: StateWeight = Advantages.state_weight,
        agent_baselines: bool = Advantages.agent_baselines,
        bridge: Bridging = "off",
        strict_tools: StrictTools = "keep",
        rollout_config: RolloutConfig | None = None,
        step_timeout_seconds: StepTimeout | None = None,
        reward_sources: RewardSources | None = None,
        reward_wait_seconds: RewardWaitSeconds = 0.0,
        ratio_error_limit: RatioErrorLimit | None = 0.1,
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
        translated = translate(config)
        self._given = translated.config
        check_values(translated.config)
        self.config = with_defaults(translated.config, model_dir=str(model_dir) if model_dir is not None else None)
        """The keys of verl's config that the user or this package sets."""
        self.trainer_mode = str(get(self.config, "trainer.v1.trainer_mode", "sync"))
        if self.trainer_mode not in TRAINER_MODES:
            raise UsageError(f"trainer.v1.trainer_mode is {self.trainer_mode!r}: use one of {', '.join(TRAINER_MODES)}")
        self.run_dir = run_dir
        self.seed = seed
        self.bridge: Bridging = bridge
        self.strict_tools: StrictTools = strict_tools
        self.rollout_config = rollout_config if rollout_config is not None else retry_lost_runner(ROLLOUT_SECONDS)
        self.step_timeout_seconds = step_timeout_seconds
        self.reward_sources = [*reward_sources] if reward_sources is not None else None
        self.reward_wait_seconds = reward_wait_seconds
        self.ratio_error_limit = ratio_error_limit
        self.on_step = on_step
        self.rules = Rules(
            fill_reward=fill_reward,
            agent_match=agent_match,
            reward_name=reward_name,
            by_call=translated.options.get("by_call", False) if by_call is None else by_call,
            advantages=Advantages(credit=credit, discount=discount, state_weight=state_weight, agent_baselines=agent_baselines),
        )
        self.config = merged(self.config, credit_config(self.rules.advantages, self._given, by_call=self.rules.by_call))
        self.credit_reference = credit
        """Where a function is that `credit` names; a file's name is relative to the working directory."""
        self._lines_read = 0
        self.metrics: list[dict[str, Any]] = []
        """The lines of metrics.jsonl: {"step", this package's metrics, verl's metrics}."""

    def take_adapter(self, adapter: Any) -> None:
        """Use the adapter's `agent_match`. Raises UsageError for its other options."""
        self.rules = replace(self.rules, agent_match=agent_match_of("VERL", adapter, self.rules.agent_match))

    def run_fingerprint(self, train: Sequence[Any], val: Sequence[Any]) -> dict[str, Any]:
        """Return the run's fingerprint, as JSON: the options in its run.json."""
        compared = {section: keys for section, keys in self.config.items() if section not in _NOT_COMPARED}
        model = str(get(self.config, "actor_rollout_ref.model.path", ""))
        of_model = {"model": model_fingerprint(model)} if (Path(model) / "config.json").exists() else {}
        return {
            "config": compared,
            **of_model,
            "rules": asdict(self.rules),
            "reward_sources": self.reward_sources,
            "reward_wait_seconds": self.reward_wait_seconds,
            "bridge": self.bridge,
            "strict_tools": self.strict_tools,
            "train": digest_of(list(train)),
            "val": digest_of(list(val)),
        }

    def check(self) -> None:
        """Raise UsageError for a key that verl does not have, if the extra [verl] is here, and for one rollout in a group to compare."""
        if not _missing():
            compose_config(self.config)
        self._advantages.rule(group_advantages)
        estimator, rollouts = get(self.config, "algorithm.adv_estimator"), get(self.config, "actor_rollout_ref.rollout.n", 1)
        if isinstance(rollouts, int) and (problem := needs_more_rollouts(str(estimator), rollouts)):
            raise UsageError(problem)
        given = (f"ray_kwargs.ray_init.{name}" for name in OF_A_NEW_CLUSTER)
        if "RAY_ADDRESS" in os.environ and (key := next((key for key in given if has(self._given, key)), None)):
            raise UsageError(f"{key} is given, and RAY_ADDRESS names a cluster, which has its own: leave one of them out")

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Train until verl has completed its steps.

        Raises:
            SettingsError: the extra [verl] is missing.
            UsageError: the config has a key that verl does not have, there are no tasks, `check` fails, the stack has no proxy, or the
                folder is of another run.
            InUseError: another process works in the folder.
            DataError: all rollouts of a step or of a validation were refused, `ratio_error_limit` is exceeded, NOT_FINITE_STEPS steps were
                not finite, or verl failed; the message has the end of its log.
            AgentError: the function that `credit` names failed.
        """
        train, val = items(train_dataset), items(val_dataset)
        if not val and (key := next((key for key in VALIDATES if get(self._given, key, -1) > 0), None)):
            raise UsageError(f"{key} = {get(self._given, key)!r}, and there are no tasks to validate on: give some, or leave it out")
        require_extra()
        self.check()
        if not train:
            raise UsageError("VERL needs at least one task to train on")
        if isinstance(self.run_dir, RunFolder):
            return await self._run(self.run_dir, train, val)
        folder = Path(self.run_dir) if self.run_dir is not None else Path(tempfile.mkdtemp(prefix="agl-otel-verl-"))
        run = RunFolder(folder.absolute(), algorithm=self.name, options=self.run_fingerprint(train, val), seed=self.seed)
        try:
            await self._run(run, train, val)
        finally:
            run.close()
            if self.run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, run: RunFolder, train: Sequence[Any], val: Sequence[Any]) -> None:
        place = run.folder / FOLDER
        place.mkdir(exist_ok=True)
        start = len(list(place.glob("start-*"))) + 1
        files = place / f"start-{start}"
        files.mkdir()
        where = (await self.get_store().open()).description
        if where.proxy is None:
            raise UsageError(
                "VERL reads what the proxy captures, and this stack has none: give the store of one that `agl-otel up` started"
            )
        label, forced = self.get_store().labels.get(RUN_LABEL, ""), forced_in(run.folder)
        spec = self.spec(store=where.queue, run_id=run.run_id, start=start, run_label=label, forced=forced)
        self._write(spec, place, files, train, val)
        sinks = sinks_of(self._sinks, has_folder=self.run_dir is not None)
        async with RunLog(_OutcomesOnly(self.get_store()), run_id=run.run_id, algorithm=self.name, folder=run.folder, sinks=sinks) as log:
            await self._train(run, place, files, start, log)

    async def _train(self, run: RunFolder, place: Path, files: Path, start: int, log: RunLog) -> None:
        """Run verl and follow its metrics."""
        self._lines_read = 0
        last = await asyncio.to_thread(last_step, place)
        self.metrics = _metrics(run, last)
        await log.begin([sink_step(run.run_id, line, time.time()) for line in self.metrics])
        process = Process.python_module(
            "verl",
            "agl_otel.algorithms.verl",
            str(files / "run.json"),
            log=run.folder / "logs" / f"verl-{start}.log",
            env=environment(self.config, files / "metrics.jsonl", module=self._module),
        )
        process.cwd = place
        await process.start()
        ending = asyncio.ensure_future(process.wait())
        noting: asyncio.Future[None] = asyncio.ensure_future(asyncio.to_thread(note_checkpoint, place))
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=POLL_SECONDS)
                await self._take_lines(files / "metrics.jsonl", run, log)
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

    def spec(self, *, store: str, run_id: str, start: int, run_label: str = "", forced: Sequence[dict[str, Any]] = ()) -> Spec:
        """Return the parameters of one start of a run, as verl's processes read them."""
        return Spec(
            store=store,
            run_id=run_id,
            start=start,
            trainer_mode=self.trainer_mode,
            reports_version=on_cpu(self.config),
            seed=self.seed,
            bridge=self.bridge,
            strict_tools=self.strict_tools,
            rollout_config=self.rollout_config.model_dump(),
            step_seconds=self.step_timeout_seconds,
            reward_sources=self.reward_sources,
            reward_wait_seconds=self.reward_wait_seconds,
            ratio_error_limit=self.ratio_error_limit,
            rules=asdict(replace(self.rules, advantages=self._advantages)),
            run_label=run_label,
            forced=[*forced],
        )

    @property
    def _advantages(self) -> Advantages:
        """The options of credit, by which each process finds a function."""
        where, _, name = self.credit_reference.rpartition(":")
        found = f"{Path(where).expanduser().absolute()}:{name}" if where.endswith(".py") else self.credit_reference
        return replace(self.rules.advantages, credit=found)

    @property
    def _module(self) -> bool:
        """Whether a function is that of a module, which is found in the working directory, too."""
        return self.rules.advantages.reference is not None and not self.credit_reference.rpartition(":")[0].endswith(".py")

    def config_of(self, place: Path, spec: Spec, *, validate: bool) -> Tree:
        """Return the keys of verl's config that a start sets: the user's over the defaults, and the fixed ones over these."""
        config = merged(self.config, fixed(place, asdict(spec), self.config, validate=validate))
        return config if self.seed is None else merged(dict.fromkeys(SEEDS, self.seed), config)

    def _write(self, spec: Spec, place: Path, files: Path, train: Sequence[Any], val: Sequence[Any]) -> None:
        for name, tasks in (("train", train), ("val", val or train[:1])):
            (place / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        # JSON is YAML; each of verl's workers loads the agent loop that this file names
        (place / LOOP_FILE).write_text(json.dumps([{"name": "agl_otel", "_target_": "agl_otel.algorithms.verl.loop.TracedAgentLoop"}]))
        write_json(files / "run.json", {"config": self.config_of(place, spec, validate=bool(val)), "tasks": len(train)})

    # --- metrics
    async def _take_lines(self, path: Path, run: RunFolder, log: RunLog) -> None:
        """Record the lines that verl has written since the last call."""
        for line in written(path)[self._lines_read :]:
            run.metric(line)
            self.metrics.append(line)
            self._lines_read += 1
            await log.note(sink_step(run.run_id, line, time.time()), {})
            if self.on_step is not None:
                self.on_step(line)


class _OutcomesOnly:
    """A StepStore that discards steps: verl's process, which knows their attempts, records them in the store (trainer.py)."""

    def __init__(self, store: OutcomeStore) -> None:
        self.record_outcome = store.record_outcome

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Discard figures."""

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        """Discard steps."""
        return 0


def summary_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise a run's metrics: `score_before` and `score_after` (None without a validation), `steps`, `samples`."""
    validated = [line["val_reward"] for line in lines if "val_reward" in line]
    return {
        "score_before": validated[0] if validated else None,
        "score_after": validated[-1] if validated else None,
        "steps": max((line["step"] for line in lines), default=0),
        "samples": sum(int(line.get("samples", 0)) for line in lines),
    }


def written(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of verl's metrics file, in the format of metrics.jsonl.

    verl's file logger writes numbers that are not finite as null; they are NaN again.
    """
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [line_of(row["step"], {name: math.nan if value is None else value for name, value in row["data"].items()}) for row in rows]


def _metrics(run: RunFolder, last: int) -> list[dict[str, Any]]:
    """Return the metrics up to step `last`, and truncate the file after them."""
    done = [row for row in run.metrics(None if last else 0) if row["step"] <= last]
    return run.metrics(len(done))


def _failure(outcome: Path, code: int, process: Process) -> AglError:
    if outcome.exists():
        result = json.loads(outcome.read_text())
        if result["error"]:
            return getattr(errors, result["error"], DataError)(result["message"])
    return DataError(f"verl ended with exit code {code}; its log is {process.log}. {process.log_end()}")
