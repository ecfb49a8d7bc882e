"""A job file, and the training run that it describes: what `agl-otel train JOB.toml` does.

A job file says which agent, which tasks, which policy and which algorithm. A Training run holds the model server and the
runner processes for as long as it lasts; the stack is somebody else's (`agl-otel up`, or the command that started one).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, get_type_hints

import aiohttp
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator
from transformers.utils import logging as transformers_logging

from agl_otel.algorithms.grpo.algorithm import GRPO, MODEL_NAME, RESOURCE_NAME, StepReport
from agl_otel.algorithms.grpo.tiny import make_policy
from agl_otel.errors import AgentError, ModelServerError, SettingsError, UnavailableError
from agl_otel.processes import Process
from agl_otel.runner.agents import load_function
from agl_otel.settings import free_port
from agl_otel.store import Store
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, RolloutMode

MODEL_SERVER_START_SECONDS: Final = 120.0  # importing torch on a busy machine takes most of it
NOTICE_SECONDS: Final = 5.0  # until the end of a process is noticed, on a busy machine
RUNNER_STOP_SECONDS: Final = 10.0
_SET_BY_TRAINING: Final = frozenset({"model_dir", "model_server_url", "on_step", "reports", "weights_dir", "rollout_config"})
T = TypeVar("T")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentSpec(_Strict):
    """[agent]: what runs, and who grades it. Paths are relative to the job file."""

    function: str | None = None
    """`file.py:name` or `package.module:name`: many rollouts share a process."""
    command: list[str] | None = None
    """Program and arguments, `{field}` standing for a field of the task: a process for each rollout."""
    grader: str | None = None
    """`file.py:name`, called with (task, answer); returns the reward."""
    runners: int = Field(default=1, ge=1)
    """Processes."""
    concurrency: int = Field(default=32, ge=1)
    """Rollouts at a time in each."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Of one attempt."""

    @model_validator(mode="after")
    def _one_way_to_run(self) -> AgentSpec:
        if not (self.function or self.command):
            raise ValueError("give `function` or `command`")
        return self


class DataSpec(_Strict):
    """[data]: tasks, as a .jsonl file or as `file.py:name`, a function that takes `options` and returns a list."""

    train: str
    val: str
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class PolicySpec(_Strict):
    """[policy]: the model that is trained. `tiny` is made on the spot; anything else is a folder in transformers' format."""

    model: str = "tiny"
    seed: int = 0


def _options_model() -> type[_Strict]:
    hints = get_type_hints(GRPO)
    options: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(GRPO) if f.name not in _SET_BY_TRAINING}
    return create_model("AlgorithmOptions", __base__=_Strict, name=(Literal["grpo"], "grpo"), **options)


AlgorithmSpec: Final = _options_model()
"""[algorithm]: its name and its options, which are the algorithm's own keyword arguments."""


class Job(_Strict):
    """One job file."""

    agent: AgentSpec
    data: DataSpec
    policy: PolicySpec = PolicySpec()
    algorithm: dict[str, Any] = Field(default_factory=dict[str, Any])
    """[algorithm]: `name`, and options that are the algorithm's own keyword arguments."""
    folder: Path = Field(default=Path(), exclude=True)
    """Where the file lies; set by `load`."""

    @field_validator("algorithm")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        return AlgorithmSpec.model_validate(options).model_dump(exclude={"name"}, exclude_unset=True)

    @classmethod
    def load(cls, path: Path, *, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Job:
        """Read a job file; `overrides` ({table: {key: value}}) win over it.

        Raises SettingsError that names the file and each wrong or unknown key.
        """
        try:
            content = tomllib.loads(path.read_text())
        except OSError as error:
            raise SettingsError(f"job file {path} cannot be read: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"job file {path} is not TOML: {error}") from error
        for table, values in (overrides or {}).items():
            content[table] = _merged(content.get(table, {}), values)
        try:
            job = cls.model_validate(content)
        except ValidationError as error:
            raise SettingsError(f"job file {path}: {'; '.join(_words(e) for e in error.errors())}") from None
        return job.model_copy(update={"folder": path.absolute().parent})

    def tasks(self, which: Literal["train", "val"]) -> list[Any]:
        """The tasks of one split. Raises SettingsError where there are none."""
        source: str = getattr(self.data, which)
        if ":" in source:
            tasks = list(load_function(self.located(source))(**self.data.options))
        else:
            try:
                tasks = [json.loads(line) for line in (self.folder / source).read_text().splitlines() if line.strip()]
            except (OSError, ValueError) as error:
                raise SettingsError(f"[data] {which} = {source!r} cannot be read: {error}") from error
        if not tasks:
            raise SettingsError(f"[data] {which} = {source!r} holds no task")
        return tasks

    def located(self, reference: str) -> str:
        """`file.py:name` with the file's path made absolute; `package.module:name` as it is."""
        where, _, name = reference.rpartition(":")
        return f"{self.folder / where}:{name}" if where.endswith(".py") else reference


def _merged(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(table)
    for key, value in values.items():
        result[key] = _merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result


def _words(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}"
    return f"{where}: {error['msg']}"


@dataclass(frozen=True)
class Evaluation:
    """How the agent did on a list of tasks, from what was stored."""

    score: float
    """Mean reward; an attempt that did not succeed counts 0."""
    rollout_ids: list[str]
    rewards: list[float | None]
    """In the order of the tasks; None where the rollout has no reward."""
    verdicts: Counter[str]
    spans: int
    seconds: float
    alarms: int = 0
    """Attempts that are unproven though their agents ran under the hook."""


@dataclass
class Report:
    """What a training run adds up to."""

    steps: list[StepReport] = field(default_factory=list[StepReport])
    stopped_because: str = ""


class Training:
    """The processes of one training run over a store. Use `async with`.

    Args:
        job: what to train.
        store: a connected store.
        folder: where the run is kept: policy, checkpoints, the model server's record, logs, metrics.jsonl.
        stack_failed: fails when the stack is gone; the run then ends with that error.
    """

    def __init__(self, job: Job, store: Store, folder: Path, *, stack_failed: asyncio.Future[None] | None = None) -> None:
        self.job = job
        self.store = store
        self.folder = folder
        self.record = folder / "model_server.jsonl"
        """The model server's own record of what it sampled, one line for each choice."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the model server or a runner ends by itself."""
        if stack_failed is not None:
            stack_failed.add_done_callback(self._stack_is_gone)
        self._exit = AsyncExitStack()
        self._server: Process | None = None
        self.server_url = ""

    async def __aenter__(self) -> Training:
        transformers_logging.disable_progress_bar()
        try:
            await self._start_model_server()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._close()

    async def _close(self) -> None:
        if self.failed.done():
            self.failed.exception()
        else:
            self.failed.cancel()
        await self._exit.aclose()

    def _stack_is_gone(self, stack: asyncio.Future[None]) -> None:
        if not stack.cancelled() and (error := stack.exception()) and not self.failed.done():
            self.failed.set_exception(error)

    async def _start_model_server(self) -> None:
        spec = self.job.policy
        model = self.folder / "policy" if spec.model == "tiny" else self.job.folder / spec.model
        if spec.model == "tiny":
            await asyncio.to_thread(_make_tiny, model, spec.seed)
        if not (model / "config.json").exists():
            raise SettingsError(f"[policy] model = {spec.model!r}: {model} holds no config.json of a transformers model")
        self.model_dir = model
        port = free_port()
        self.server_url = f"http://127.0.0.1:{port}"
        arguments = ("--model", str(model), "--port", str(port), "--record", str(self.record), "--seed", str(spec.seed))
        self._server = Process.python_module(
            "model server", "agl_otel.algorithms.grpo.server", *arguments, log=self.folder / "logs" / "model_server.log"
        )
        await self._run(self._server, grace_seconds=5.0)
        await self._server.ready(self._server_is_well, timeout_seconds=MODEL_SERVER_START_SECONDS)

    async def _server_is_well(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
                session.get(f"{self.server_url}/health") as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _run(self, process: Process, *, grace_seconds: float) -> None:
        """Start a process that ends with this run; `failed` learns when it ends before."""
        await process.start()
        watcher = asyncio.create_task(self._watch(process))
        self._exit.push_async_callback(process.stop, grace_seconds=grace_seconds)
        self._exit.callback(watcher.cancel)

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        if not self.failed.done():
            kind = ModelServerError if process is self._server else UnavailableError
            self.failed.set_exception(
                kind(f"the {process.name} ended with exit code {code}; its log is {process.log}. {process.last_words()}")
            )

    def runners(self, *, command: bool = False, mode: RolloutMode | None = None) -> Runners:
        """Runner processes for the job's function agent, or its command; they live as long as the `async with` block."""
        return Runners(self, command=command, mode=mode)

    async def evaluate(self, tasks: Sequence[Any], *, mode: RolloutMode = "val") -> Evaluation:
        """Run the agent once on each task and read the rewards back from the traces."""
        clock = asyncio.get_running_loop().time
        started = clock()
        config = RolloutConfig(timeout_seconds=self.job.agent.timeout_seconds)
        rollouts = await self.store.enqueue([EnqueueRolloutRequest(input=task, mode=mode, config=config) for task in tasks])
        finished = await self.until_done([rollout.rollout_id for rollout in rollouts])
        traces = await self.store.traces(finished)
        rewards = {rollout_id: found[-1] for (rollout_id, _), found in traces.rewards.items() if found}
        values = [rewards[r.rollout_id].value if r.status == "succeeded" and r.rollout_id in rewards else None for r in finished]
        if all(value is None for value in values):
            raise AgentError(f"none of the {len(values)} {mode} rollouts has a reward: {_why(finished)}")
        verdicts = Counter(str(verdict.kind) for verdict in traces.verdicts.values())
        score = sum(value or 0.0 for value in values) / len(values)
        return Evaluation(score, [r.rollout_id for r in finished], values, verdicts, traces.spans, clock() - started, len(traces.alarms))

    async def until_done(self, rollout_ids: Sequence[str]) -> list[Any]:
        """Wait for the rollouts; ends early with the error of a process that is gone."""
        return await unless(self.failed, self.store.wait(rollout_ids))

    async def fit(self, tasks: Sequence[Any], *, on_step: Callable[[StepReport], None] | None = None) -> Report:
        """Train until the algorithm is content; every step is also written to metrics.jsonl."""
        report = Report()
        metrics = (self.folder / "metrics.jsonl").open("a")

        def note(step: StepReport) -> None:
            report.steps.append(step)
            metrics.write(json.dumps(asdict(step)) + "\n")
            metrics.flush()
            if on_step:
                on_step(step)

        algorithm = self.algorithm(on_step=note)
        with metrics:
            await unless(self.failed, algorithm.run(self.store, tasks))
        report.stopped_because = "the target score is reached" if len(report.steps) < algorithm.max_steps else "max_steps are done"
        return report

    async def publish_policy(self) -> None:
        """Publish where the policy is served, for rollouts before the training; the algorithm publishes its own versions."""
        algorithm = self.algorithm()
        sampling = {"temperature": algorithm.temperature, "max_tokens": algorithm.max_tokens}
        await self.store.publish({RESOURCE_NAME: LLM(endpoint=f"{self.server_url}/v1", model=MODEL_NAME, sampling_parameters=sampling)})

    def algorithm(self, *, on_step: Callable[[StepReport], None] | None = None) -> GRPO:
        """The job's algorithm over this run's policy and model server."""
        options: dict[str, Any] = {"seed": self.job.policy.seed, **self.job.algorithm}
        config = RolloutConfig(timeout_seconds=self.job.agent.timeout_seconds)
        weights = self.folder / "weights"
        return GRPO(
            model_dir=self.model_dir,
            model_server_url=self.server_url,
            weights_dir=weights,
            rollout_config=config,
            on_step=on_step,
            **options,
        )


class Runners:
    """Runner processes of one training run, for an `async with` block."""

    def __init__(self, training: Training, *, command: bool, mode: RolloutMode | None) -> None:
        agent = training.job.agent
        if command and not agent.command:
            raise SettingsError("the job has no [agent] command")
        arguments = ["--store", f"{training.store.description.queue}", "--concurrency", str(2 if command else agent.concurrency)]
        arguments += ["--grader", agent.grader] if agent.grader else []
        arguments += ["--mode", mode] if mode else []
        use_command = command or not agent.function
        arguments += ["--", *(agent.command or [])] if use_command else ["--function", agent.function or ""]
        self._training = training
        # `python` in a job's command means the interpreter that trains
        environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
        self._processes = [
            Process.python_module(
                f"runner {number}", "agl_otel.runner", *arguments, log=training.folder / "logs" / f"runner-{number}.log", env=environment
            )
            for number in range(1 if command else agent.runners)
        ]
        for process in self._processes:
            process.cwd = training.job.folder

    async def __aenter__(self) -> Runners:
        self._exit = AsyncExitStack()
        for process in self._processes:
            await process.start()
            self._exit.push_async_callback(process.stop, grace_seconds=RUNNER_STOP_SECONDS)
            watcher = asyncio.create_task(self._training._watch(process))  # pyright: ignore[reportPrivateUsage]  # one unit with Training
            self._exit.callback(watcher.cancel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._exit.aclose()


def _make_tiny(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)  # for so small a model a second thread costs ten times what it does
    make_policy(folder, seed=seed)


async def unless(failure: asyncio.Future[None], work: Awaitable[T]) -> T:
    """The result of `work`, unless `failure` fails first: then `work` is cancelled and the failure raised.

    A process that dies closes its port before its end is noticed: an error about a service waits a moment for the better reason.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            failure.result()
        try:
            return await task
        except (ModelServerError, UnavailableError):
            await asyncio.wait({failure}, timeout=NOTICE_SECONDS)
            if failure.done():
                failure.result()
            raise
    finally:
        task.cancel()


def _why(rollouts: Sequence[Any]) -> str:
    errors = Counter(r.attempt.error or r.status for r in rollouts if isinstance(r, AttemptedRollout))
    return "; ".join(f"{count} × {text}" for text, count in errors.most_common(3)) or "no attempt was made"
