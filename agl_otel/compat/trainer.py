"""Trainer: build an agent, an algorithm, a store and runners, and run them by an execution strategy."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from agl_otel.adapters import TraceAdapter, TracerTraceToTriplet
from agl_otel.algorithms import Algorithm, Baseline, FastAlgorithm
from agl_otel.algorithms.outcome import outcome_recorded
from agl_otel.algorithms.run_folder import NEW_RUN, RUN_DIR, folder_of, name_of, run_folder_for, run_id_of
from agl_otel.compat.execution import ClientServerExecutionStrategy, ExecutionEvent, ExecutionStrategy
from agl_otel.compat.litagent import LitAgent, as_agent
from agl_otel.compat.llm_proxy import LLMProxy
from agl_otel.compat.registry import build_component
from agl_otel.compat.runner import LitAgentRunner, Runner
from agl_otel.compat.stores import InMemoryLightningStore, LightningStore
from agl_otel.compat.tracer import AgentOpsTracer, Tracer
from agl_otel.errors import UsageError
from agl_otel.runner.threads import call
from agl_otel.store import Store
from agl_otel.types import RUN_LABEL, Dataset, Hook, NamedResources

__all__ = ["Trainer", "build_component"]
STRATEGIES: Final = {
    "cs": "agl_otel.compat.execution.ClientServerExecutionStrategy",
    "shm": "agl_otel.compat.execution.SharedMemoryExecutionStrategy",
}
ALGORITHMS: Final = {
    "apo": "agl_otel.algorithms.APO",
    "gepa": "agl_otel.algorithms.GEPA",
    "random_search": "agl_otel.algorithms.RandomSearch",
    "baseline": "agl_otel.algorithms.Baseline",
    "sft": "agl_otel.algorithms.sft.algorithm.SFT",
    "verl": "agl_otel.algorithms.VERL",
}
EVENT_POLL_SECONDS: Final = 0.1
_OLD: Final = {"n_workers": "n_runners", "max_tasks": "max_rollouts", "triplet_exporter": "adapter"}
_log = logging.getLogger(__name__)


class Trainer:
    """Trains an agent: runners run it, and the algorithm learns from its traces, over one store.

    A component is an instance, a class or factory, an import path, or a dict with `type` and arguments.

    Args:
        n_runners: number of runners, each with one rollout at a time.
        max_rollouts: limit for each runner; None: no limit.
        initial_resources: resources that the algorithm starts from.
        tracer: default AgentOpsTracer().
        adapter: default TracerTraceToTriplet(); a dict needs no `type`.
        store: default a stack of the trainer's own, in a temporary folder.
        runner: default LitAgentRunner.
        strategy: "cs" (processes, default), "shm" (threads), or any ExecutionStrategy.
        port: port on which the trainer serves its store; overrides the strategy's.
        algorithm: also by name: "apo", "gepa", "random_search", "baseline", "sft", "verl". None: runners process what others enqueue,
            until interrupted.
        llm_proxy: passed to the algorithm.
        hooks: one, or several.
        run_dir: the run's folder (algorithms/run_folder.py), unless the algorithm has its own `run_dir`. None: the algorithm's default.
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        hooks: Hook | Sequence[Hook] | None = None,
        run_dir: str | Path | None = None,
        daemon: bool = True,
        **old: Any,
    ) -> None:
        given = _renamed(old, n_runners=n_runners, max_rollouts=max_rollouts, adapter=adapter)
        if dev:
            warnings.warn("Trainer(dev=True) is deprecated: call trainer.dev(…)", DeprecationWarning, stacklevel=2)
        self._dev = dev
        self._n_requested: int = given["n_runners"] or 1
        self.max_rollouts: int | None = given["max_rollouts"]
        self.initial_resources = initial_resources
        self.port = port
        self.hooks: list[Hook] = [] if hooks is None else [hooks] if isinstance(hooks, Hook) else list(hooks)
        self.tracer: Tracer = _made(tracer, Tracer, "tracer", default=AgentOpsTracer)
        self.adapter: TraceAdapter[Any] = _made(
            given["adapter"], TraceAdapter, "adapter", default=TracerTraceToTriplet, dict_default_cls=TracerTraceToTriplet
        )
        self.algorithm: Algorithm | None = build_component(
            algorithm, expected_type=Algorithm, spec_name="algorithm", allow_none=True, registry=ALGORITHMS
        )
        if self.algorithm is not None and given["adapter"] is not None:
            self.algorithm.take_adapter(self.adapter)
        self.run_dir = run_dir
        self.llm_proxy: LLMProxy | None = build_component(
            llm_proxy, expected_type=LLMProxy, spec_name="llm_proxy", allow_none=True, dict_default_cls=LLMProxy
        )
        self.strategy: ExecutionStrategy = self._strategy(strategy)
        self.n_runners: int = getattr(self.strategy, "n_runners", self._n_requested)
        self.store = LightningStore.over(_made(store, Store, "store", default=InMemoryLightningStore))
        self._runner_spec = runner

    def _strategy(self, spec: Any) -> ExecutionStrategy:
        defaults: dict[str, Any] = {"n_runners": lambda: self._n_requested}
        if self._n_requested > 1:
            defaults["main_thread"] = lambda: "algorithm"
        made = _made(spec or ClientServerExecutionStrategy, ExecutionStrategy, "strategy", registry=STRATEGIES, optional_defaults=defaults)
        if self.port is not None and hasattr(made, "server_port"):
            made.server_port = self.port
        return made

    # --- the public methods

    def fit(self, agent: Any, train_dataset: Dataset[Any] | None = None, *, val_dataset: Dataset[Any] | None = None) -> None:
        """Run the algorithm on the data, and the agent on the rollouts that it enqueues; return when the algorithm has ended.

        `agent` is a LitAgent or a function of a task. Raises the errors of algorithm and strategy.
        """
        if self._dev:
            return self.dev(agent, train_dataset, val_dataset=val_dataset)
        return self._execute(agent, self.algorithm, train_dataset, val_dataset)

    def dev(
        self,
        agent: Any,
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
        dev_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Run `fit` with a fast algorithm (Baseline, unless another was given), to test an agent.

        Baseline logs what came of each rollout, which `agl_otel.setup_logging()` shows.

        Raises TypeError if the trainer's algorithm is not a FastAlgorithm.
        """
        algorithm = self.algorithm if self.algorithm is not None else Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(f"dev() takes a FastAlgorithm, not {type(algorithm).__name__}: leave algorithm out, or call fit()")
        return self._execute(agent, algorithm, dev_dataset if train_dataset is None else train_dataset, val_dataset)

    # --- the two halves that a strategy runs

    def _execute(self, agent: Any, algorithm: Algorithm | None, train: Dataset[Any] | None, val: Dataset[Any] | None) -> None:
        made = as_agent(agent)
        made.set_trainer(self)
        folder = folder_of(getattr(algorithm, RUN_DIR, None) or self.run_dir)
        run_id = run_id_of(folder, name_of(algorithm)) if algorithm is not None else None

        async def algorithm_bundle(store: LightningStore, event: ExecutionEvent) -> None:
            if run_id is not None:
                NEW_RUN.set((folder.absolute(), run_id) if folder is not None else None)
                store = store.labelled({RUN_LABEL: run_id})
            await self._run_algorithm(algorithm, store, event, train, val)

        async def runner_bundle(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
            if run_id is not None and self.strategy.runs_both:
                store = store.labelled({RUN_LABEL: run_id})
            await self._run_runner(made, store, worker_id, event)

        self.strategy.execute(algorithm_bundle, runner_bundle, self.store)

    async def _run_algorithm(
        self,
        algorithm: Algorithm | None,
        store: LightningStore,
        event: ExecutionEvent,
        train: Dataset[Any] | None,
        val: Dataset[Any] | None,
    ) -> None:
        if algorithm is None:
            if self.initial_resources is not None:
                await store.add_resources(self.initial_resources)
            while not event.is_set():  # noqa: ASYNC110 - set in another thread or process
                await asyncio.sleep(EVENT_POLL_SECONDS)
            return
        algorithm.set_trainer(self)
        algorithm.set_store(store)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)
        if self.llm_proxy is not None:
            self.llm_proxy.set_store(store)
            algorithm.set_llm_proxy(self.llm_proxy)
        with run_folder_for(algorithm, self.run_dir, train=train, val=val, resources=self.initial_resources):
            run = algorithm.get_run_folder()
            async with outcome_recorded(store, run.run_id, name_of(algorithm)) if run is not None else nullcontext():
                if algorithm.is_async():
                    await algorithm.run(train, val)  # pyright: ignore[reportGeneralTypeIssues]  # is_async() was true
                else:
                    await call(algorithm.run, train, val)

    async def _run_runner(self, agent: LitAgent[Any], store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        runner = self._runner()
        runner.init(agent, hooks=self.hooks)
        try:
            runner.init_worker(worker_id, store)
            try:
                await runner.iter(event=event)
            finally:
                runner.teardown_worker(worker_id)
        finally:
            runner.teardown()

    def _runner(self) -> Runner[Any]:
        defaults = {"tracer": lambda: self.tracer, "max_rollouts": lambda: self.max_rollouts}
        return _made(self._runner_spec or LitAgentRunner, Runner, "runner", optional_defaults=defaults, dict_default_cls=LitAgentRunner)


def _made(spec: Any, kind: Any, name: str, *, default: Any = None, **options: Any) -> Any:
    return build_component(spec, expected_type=kind, spec_name=name, default_factory=default, **options)


def _renamed(old: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Map arguments with deprecated names to their current ones. Raises UsageError for an unknown name."""
    for name, value in old.items():
        if name not in _OLD:
            raise UsageError(f"Trainer takes no argument {name!r}")
        warnings.warn(f"Trainer({name}=…) is an older name of {_OLD[name]}", DeprecationWarning, stacklevel=3)
        if given[_OLD[name]] is None:
            given[_OLD[name]] = value
    return given
