"""The common part of all runs of job files: runner processes for the agent, its scores, and a future that fails when a process ends.

The stack is not started here (but by `agl-otel up`, or by the command).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pydantic import SecretStr

from agl_otel.algorithms.outcome import outcome_recorded
from agl_otel.algorithms.report import final_rewards
from agl_otel.algorithms.run_folder import NEW_RUN, SOURCES, Sources, run_id_of
from agl_otel.algorithms.utils import check_disk, failure_summary, failures_in, is_retryable, sampling_seed, summarise
from agl_otel.errors import AgentError, AglError, ModelServerError, SettingsError, UnavailableError
from agl_otel.jobs.job import Job
from agl_otel.jobs.sources import sources_of
from agl_otel.service.processes import Process
from agl_otel.settings import Settings
from agl_otel.store import Store
from agl_otel.types import RUN_LABEL, EnqueueRolloutRequest, RolloutMode
from agl_otel.types.scores import Score
from agl_otel_hook import conventions

_log: Final = logging.getLogger(__name__)
NOTICE_SECONDS: Final = 5.0  # within which the end of a process is detected, on a busy machine
RUNNER_STOP_SECONDS: Final = 10.0
T = TypeVar("T")


@dataclass(frozen=True)
class TaskResults:
    """The agent's results on a list of tasks, from the stored traces."""

    rollout_ids: list[str]
    rewards: list[float | None]
    """In the order of the tasks; None if the rollout has no reward or did not succeed."""
    verdicts: Counter[str]
    spans: int
    seconds: float
    alarms: int = 0
    """Attempts that are unproven although their agents ran under the hook."""

    @property
    def scored(self) -> Score:
        """The score of all rollouts that were asked for."""
        return Score.of(self.rewards)

    @property
    def score(self) -> float:
        """The mean reward; a rollout without one counts as 0."""
        return self.scored.mean


class JobRun:
    """The processes of one run of a job over a store. Use `async with`.

    Args:
        job: what to run.
        store: a connected store; `self.store` is a copy that labels the run's rollouts, which only the run's runners take, and those that
            are started by hand.
        folder: the run's folder.
        stack_failed: a future that fails when the stack ends; the run then ends with its error.
        settings: the stack's, for runner processes; None: as this process loads them.
        force: resume a run that was begun with another agent, grader or custom algorithm (sources.py); run.json records it.
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        folder: Path,
        *,
        stack_failed: asyncio.Future[None] | None = None,
        settings: Settings | None = None,
        force: bool = False,
    ) -> None:
        self.job = job
        self.force = force
        self.store = store
        self.folder = folder
        self.settings = settings or Settings.load()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a process of the run ends by itself."""
        if stack_failed is not None:
            stack_failed.add_done_callback(self._on_stack_failed)
        self.resources_id: str | None = None
        """The resources for rollouts of `evaluate`; None: the latest."""
        self._algorithm: str = job.algorithm.get("name", "grpo").rpartition(":")[2]
        self.run_id = ""
        """Known in the `async with` block."""
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        sources = Sources(sources_of(self.job), self.force)
        sources.check(self.folder)  # before a runner takes what waits in the store
        SOURCES.set(sources)
        self._exit.callback(SOURCES.set, None)
        self.run_id = run_id_of(self.folder, self._algorithm)
        NEW_RUN.set((self.folder.absolute(), self.run_id))
        self._exit.callback(NEW_RUN.set, None)
        try:
            self.store = self.store.labelled({RUN_LABEL: self.run_id})
            self._exit.push_async_callback(self.store.close)
            await self._start()
            await self.store.open()
            await self._exit.enter_async_context(outcome_recorded(self.store, self.run_id, self._algorithm))
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def _start(self) -> None:
        """Start what the run needs besides runners."""

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.failed.done():
            self.failed.exception()
        else:
            self.failed.cancel()
        await self._exit.__aexit__(kind, error, trace)

    def _on_stack_failed(self, stack: asyncio.Future[None]) -> None:
        if not stack.cancelled() and (error := stack.exception()) and not self.failed.done():
            self.failed.set_exception(error)

    async def _run(self, process: Process, *, grace_seconds: float) -> None:
        """Start a process that ends with this run; if it ends earlier, `failed` fails."""
        await process.start()
        watcher = asyncio.create_task(self._watch(process))
        self._exit.push_async_callback(process.stop, grace_seconds=grace_seconds)
        self._exit.callback(watcher.cancel)

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        if not self.failed.done():
            self.failed.set_exception(
                self._ended(process)(f"the {process.name} ended with exit code {code}; its log is {process.log}. {process.log_end()}")
            )

    def runners(self, *, command: bool = False, mode: RolloutMode | None = None) -> Runners:
        """Return runner processes for the job's function agent or command; they run during the `async with` block."""
        return Runners(self, command=command, mode=mode)

    async def evaluate(
        self,
        tasks: Sequence[Any],
        *,
        mode: RolloutMode = "val",
        run_id: str | None = None,
        name: str | None = None,
        seed: int = 0,
        step: int | None = None,
        retry: bool = True,
    ) -> TaskResults:
        """Run the agent once on each task and read the rewards back from the traces.

        With a `run_id` the rollouts are listed under that run, and under its `step` if there is one. With a `name` in addition, an earlier
        evaluation of the run under that name is read again, and rollout ids derive from the run. Sampling seeds derive from `seed` alone,
        so that evaluations under several names differ by the weights only. With `retry`, rollouts of that earlier evaluation that failed
        or were cancelled run again. Raises ConflictError if other tasks were evaluated under that name.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        config = self.job.agent.rollout_config
        run: dict[str, Any] = {name: value for name, value in (("run", run_id), ("step", step)) if value is not None}
        key = f"{run_id}/{name}" if name is not None else None
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode=mode,
                resources_id=self.resources_id,
                config=config,
                rollout_id=f"ro-{run_id}-{name}-{place:04d}" if name is not None else None,
                metadata={**run, "evaluation": name, "sampling_seed": sampling_seed(seed, mode, place)}
                if name is not None
                else run or None,
            )
            for place, task in enumerate(tasks)
        ]
        rollouts = await self.store.enqueue(requests, idempotency_key=key)
        if retry:
            await self.store.set_status([rollout.rollout_id for rollout in rollouts if is_retryable(rollout)], "requeuing")
        finished = await self.until_done([rollout.rollout_id for rollout in rollouts])
        check_disk(finished)
        traces = await self.store.traces(finished)
        rewards = final_rewards(traces)
        values = [rewards.get(r.rollout_id) if r.status == "succeeded" else None for r in finished]
        if all(value is None for value in values):
            why = summarise(failures_in(traces)) or "agents and graders gave none"
            raise AgentError(f"none of the {len(values)} {mode} rollouts has a reward: {why}")
        if failures := failure_summary(finished):
            missing = values.count(None)
            _log.warning(
                "%s", f"{missing} of {len(values)} {mode} rollouts got no reward, which counts as 0; of those that failed: {failures}"
            )
        if traces.call_errors:
            _log.warning("model calls of the %s rollouts had no reply: %s", mode, summarise(traces.call_errors))
        verdicts = Counter(str(verdict.kind) for verdict in traces.verdicts.values())
        return TaskResults([r.rollout_id for r in finished], values, verdicts, traces.spans, clock() - started, len(traces.alarms))

    async def until_done(self, rollout_ids: Sequence[str]) -> list[Any]:
        """Wait for the rollouts; raise early if a process of the run ends."""
        return await unless_failed(self.failed, self.store.wait(rollout_ids))

    def _ended(self, process: Process) -> type[AglError]:
        """Return the type of error for the end of this process."""
        return UnavailableError


class Runners:
    """The runner processes of one run, for an `async with` block."""

    def __init__(self, training: JobRun, *, command: bool, mode: RolloutMode | None) -> None:
        agent = training.job.agent
        if command and not agent.command:
            raise SettingsError("the job has no [agent] command")
        arguments = ["--store", f"{training.store.description.queue}", "--concurrency", str(2 if command else agent.concurrency)]
        arguments += ["--grader", agent.grader] if agent.grader else []
        arguments += ["--mode", mode] if mode else []
        arguments += [option for name, value in training.store.labels.items() for option in ("--label", f"{name}={value}")]
        use_command = command or not agent.function
        arguments += ["--", *(agent.command or [])] if use_command else ["--function", agent.function or ""]
        self._training = training
        # `python` in a job's command means the training's interpreter
        store = {"store": training.store.description.queue, "token": SecretStr(training.store.token)}
        settings = training.settings.model_copy(update={**store, "runner_metrics_port": 0})  # they are many
        environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
        switches = (conventions.ENV_HOOK, conventions.ENV_HOOK_SKIP)  # no settings, which a child does not inherit
        environment |= {name: os.environ[name] for name in switches if name in os.environ}
        self._processes = [
            Process.python_module(
                f"runner {number}",
                "agl_otel.runner",
                *arguments,
                log=training.folder / "logs" / f"runner-{number}.log",
                settings=settings,
                env=environment,
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
            watcher = asyncio.create_task(self._training._watch(process))  # pyright: ignore[reportPrivateUsage]  # one unit with JobRun
            self._exit.callback(watcher.cancel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._exit.aclose()


async def unless_failed(failure: asyncio.Future[None], work: Awaitable[T]) -> T:
    """Return the result of `work`, but if `failure` fails first, cancel `work` and raise that.

    A dying process closes its port before its end is detected, so an error about a service first waits a moment for `failure`.
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
