"""Run runners as processes, with the algorithm on the same or another machine and a served store between them.

On one machine (role `both`) the runners are forks of this process, made before it opens connections, so that agents may be closures or
defined in `__main__`. With AGL_CURRENT_ROLE the same script is the algorithm on one machine and a runner on others: AGL_SERVER_HOST and
AGL_SERVER_PORT name the address at which the algorithm's machine serves the store; AGL_TLS_CA (or AGL_TLS_CERT) selects TLS. Those
runners keep running when the algorithm ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from typing import Final, Literal

from agl_otel.compat.env_var import LightningEnvVar, resolve_int_env_var, resolve_str_env_var
from agl_otel.compat.execution.events import ExecutionEvent, MultiprocessingEvent
from agl_otel.compat.execution.strategy import AlgorithmBundle, ExecutionStrategy, RunnerBundle, resolve_managed_store_flag
from agl_otel.compat.stores import LightningStore
from agl_otel.compat.tracer.process import shut_down
from agl_otel.errors import AgentError, SettingsError, UsageError
from agl_otel.net.tls import ambient

Role = Literal["algorithm", "runner", "both"]
ROLES: Final = ("algorithm", "runner", "both")
GRPC_THREAD: Final = "_poll_wrapper"
"""Part of the thread name of an open gRPC connection."""
KILL_SECONDS: Final = 60.0  # a killed process needs CPU time to end, which may take long on a busy machine
_log = logging.getLogger(__name__)


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runs algorithm and runners in separate processes.

    Args:
        role: role of this process; None: AGL_CURRENT_ROLE, else both.
        server_host: host of the served store; None: AGL_SERVER_HOST, else localhost.
        server_port: port of the served store; None: AGL_SERVER_PORT, else 4747 (with role both, a free one if that is in use).
        n_runners: number of runner processes.
        graceful_timeout: seconds for runners to finish their work after the stop event.
        terminate_timeout: seconds after SIGINT, and again after SIGTERM, before they are killed.
        main_process: `runner` runs the one runner in this process (for a debugger) and the algorithm in another.
        managed_store: False: the store is served already, use it as it is; None: AGL_MANAGED_STORE, else True.
        allowed_exit_codes: exit codes of runner processes that are no error.
    """

    alias = "cs"

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: Iterable[int] = (0, -15),
    ) -> None:
        self.role = resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE, override=role, fallback="both")
        if self.role not in ROLES:
            raise SettingsError(f"role (AGL_CURRENT_ROLE) is {self.role!r}: use {', '.join(ROLES)}")
        self.server_host = resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, override=server_host, fallback="localhost")
        self.server_port = resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, override=server_port)
        """None: 4747, or with role both a free port if that is in use."""
        self.runs_both = self.role == "both"
        if n_runners < 1:
            raise UsageError(f"n_runners is {n_runners}: at least one is needed")
        if main_process == "runner" and (self.role != "both" or n_runners != 1):
            raise UsageError('main_process="runner" goes with role "both" and n_runners=1')
        self.n_runners = n_runners
        self.graceful_timeout = graceful_timeout
        self.terminate_timeout = terminate_timeout
        self.main_process = main_process
        self.managed_store = resolve_managed_store_flag(managed_store)
        self.allowed_exit_codes = frozenset(allowed_exit_codes)

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run the parts of this process's role to their end. Raises the algorithm's errors, AgentError if a runner process failed."""
        stop = MultiprocessingEvent()
        if self.role == "runner":
            return self._only_runners(runner, self._client(store), stop)
        served = self._served(store)
        if self.role == "algorithm":
            return _run(algorithm(served, stop))
        if self.main_process == "runner":
            return self._runner_here(algorithm, runner, served, stop)
        processes = [_fork(f"runner-{n}", _runner_process, runner, served, n, stop, self.graceful_timeout) for n in range(self.n_runners)]
        try:
            _run(_run_beside_runners(algorithm(served, stop), processes, self.allowed_exit_codes))
        finally:
            self._stop(processes, stop)
        self._check(processes)
        return None

    # --- the served store

    def _served(self, store: LightningStore) -> LightningStore:
        """Serve the store, and return one with the address for other processes and machines."""
        if not self.managed_store:
            return store
        return store.at(store.serve(self.server_host, self.server_port, strict=self.role == "algorithm"))

    def _client(self, store: LightningStore) -> LightningStore:
        if not self.managed_store:
            return store
        port = 4747 if self.server_port is None else self.server_port
        scheme = "https" if ambient().by_default else "http"
        return store.at(f"{scheme}://{self.server_host}:{port}")

    # --- roles

    def _only_runners(self, runner: RunnerBundle, store: LightningStore, stop: ExecutionEvent) -> None:
        """Run runners until they end, or until Ctrl+C, the regular way to stop runners on another machine."""
        if self.n_runners == 1:
            try:
                return _run(runner(store, 0, stop))
            except KeyboardInterrupt:
                return _log.warning("interrupted: stopped")
        processes = [_fork(f"runner-{n}", _runner_process, runner, store, n, stop, self.graceful_timeout) for n in range(self.n_runners)]
        try:
            running = {process.sentinel for process in processes}
            while running:  # an interrupt during join() would lose the exit code of the process that it reaps
                running -= {*multiprocessing.connection.wait(running)}
        except KeyboardInterrupt:
            _log.warning("interrupted: stopping")
        finally:
            self._stop(processes, stop)
        return self._check(processes)

    def _runner_here(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, stop: ExecutionEvent) -> None:
        process = _fork("algorithm", _algorithm_process, algorithm, store, stop, self.graceful_timeout)
        try:
            _run(runner(store, 0, stop))
        finally:
            self._stop([process], stop)
        self._check([process])

    # --- stopping

    def _stop(self, processes: list[BaseProcess], stop: ExecutionEvent) -> None:
        """Stop processes by the stop event, then SIGINT, then SIGTERM, then SIGKILL."""
        stop.set()
        for seconds, number in (
            (self.graceful_timeout, signal.SIGINT),
            (self.terminate_timeout, signal.SIGTERM),
            (self.terminate_timeout, signal.SIGKILL),
            (KILL_SECONDS, None),
        ):
            left = _wait(processes, seconds)
            if not left or number is None:
                return
            for process in left:
                _log.warning("%s (process %s) has not ended within %.1f s: %s", process.name, process.pid, seconds, number.name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, number)

    def _check(self, processes: list[BaseProcess]) -> None:
        bad = {p.name: p.exitcode for p in processes if p.exitcode not in self.allowed_exit_codes}
        if bad:
            raise AgentError(f"processes ended in an error: {', '.join(f'{name} with exit code {code}' for name, code in bad.items())}")


def _run(work: object) -> None:
    asyncio.run(work)  # pyright: ignore[reportArgumentType]  # a coroutine


async def _run_beside_runners(work: object, processes: list[BaseProcess], allowed: frozenset[int]) -> None:
    """Run the work; raise AgentError as soon as every runner process has failed, because no rollout would be run any more."""
    task = asyncio.ensure_future(work)  # pyright: ignore[reportArgumentType, reportCallIssue]  # a coroutine
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()

    def ended(process: BaseProcess) -> None:
        loop.remove_reader(process.sentinel)
        process.join()  # its sentinel is readable, so its exit code follows at once
        codes = [process.exitcode for process in processes]
        if all(code is not None and code not in allowed for code in codes) and not gone.done():
            gone.set_exception(AgentError(f"every runner process has ended in an error (exit codes {codes}): see their output"))

    for process in processes:
        loop.add_reader(process.sentinel, ended, process)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            gone.result()
        await task
    finally:
        for process in processes:
            loop.remove_reader(process.sentinel)
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def _fork(name: str, target: object, *args: object) -> BaseProcess:
    """Fork a process that runs `target`. Raises UsageError if this process has open gRPC connections, which do not survive a fork."""
    if any(GRPC_THREAD in thread.name for thread in threading.enumerate()):
        raise UsageError(
            "runner processes are forks, and this process has connections of a store open: close it before fit "
            '(`await store.close()`, or let its asyncio.run end), or use Trainer(strategy="shm")'
        )
    process = multiprocessing.get_context("fork").Process(target=target, args=args, name=name)  # pyright: ignore[reportArgumentType]  # a function
    process.start()
    return process


def _runner_process(runner: RunnerBundle, store: LightningStore, worker_id: int, stop: ExecutionEvent, grace_seconds: float) -> None:
    _end_with_parent(stop, grace_seconds)
    with contextlib.suppress(KeyboardInterrupt):
        _run(runner(store, worker_id, stop))
    shut_down()


def _algorithm_process(algorithm: AlgorithmBundle, store: LightningStore, stop: ExecutionEvent, grace_seconds: float) -> None:
    _end_with_parent(stop, grace_seconds)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _run(algorithm(store, stop))
    finally:
        stop.set()
        shut_down()


def _end_with_parent(stop: ExecutionEvent, grace_seconds: float) -> None:
    """In a fork: accept SIGINT; when the parent has ended, set the stop event, and exit after the grace period."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a fork"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it in background processes, but `_stop` sends it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        stop.set()
        threading.Timer(grace_seconds, os._exit, (1,)).start()

    threading.Thread(target=watch, name="agl-parent", daemon=True).start()


def _wait(processes: list[BaseProcess], seconds: float) -> list[BaseProcess]:
    """Join processes for so many seconds; return those that still run."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.001, deadline - time.monotonic()))  # 0 would not wait for a process that is just ending
    return [process for process in processes if process.is_alive()]
