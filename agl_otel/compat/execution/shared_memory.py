"""Run algorithm and runners in threads of this process, so that breakpoints work and agents need no pickling. Services stay processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from agl_otel.compat.execution.events import ExecutionEvent, ThreadingEvent
from agl_otel.compat.execution.strategy import AlgorithmBundle, ExecutionStrategy, RunnerBundle, resolve_managed_store_flag
from agl_otel.compat.stores import LightningStore
from agl_otel.errors import UsageError

_log = logging.getLogger(__name__)


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Runs algorithm and runners in threads, each with its own event loop.

    Args:
        n_runners: number of threads that run agents.
        main_thread: `runner` (with n_runners=1) runs the runner in the calling thread, `algorithm` the algorithm.
        join_timeout: seconds for a cancelled thread to end; then it is abandoned, with an error in the log.
        graceful_delay: seconds for a runner to finish its work after the stop event.
        poll_interval: seconds between checks of the event.
        managed_store: ignored: the store is thread-safe.
    """

    alias = "shm"
    runs_both = True

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["runner", "algorithm"] = "runner",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        if n_runners < 1:
            raise UsageError(f"n_runners is {n_runners}: at least one is needed")
        if main_thread == "runner" and n_runners != 1:
            raise UsageError('main_thread="runner" goes with n_runners=1: use main_thread="algorithm"')
        self.n_runners = n_runners
        self.main_thread = main_thread
        self.join_timeout = join_timeout
        self.graceful_delay = graceful_delay
        self.poll_interval = poll_interval
        self.managed_store = resolve_managed_store_flag(managed_store)

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run both until the algorithm ends. Raises the first error of either; Ctrl+C stops them gracefully."""
        store.serve("localhost", 0)  # the store's own stack, on free ports
        stop = ThreadingEvent()
        errors: list[BaseException] = []

        async def algorithm_then_stop() -> None:
            try:
                await algorithm(store, stop)
            finally:
                stop.set()

        def runner_work(number: int) -> Callable[[], Awaitable[None]]:
            return lambda: runner(store, number, stop)

        runners = [runner_work(number) for number in range(self.n_runners)]
        main, others = (runners[0], [algorithm_then_stop]) if self.main_thread == "runner" else (algorithm_then_stop, runners)
        threads = [self._thread(f"agl-{self.main_thread}-{n}", work, stop, errors) for n, work in enumerate(others)]
        try:
            asyncio.run(self._supervised(main, stop))
        except KeyboardInterrupt:
            _log.warning("interrupted: stopping")
        finally:
            stop.set()
            self._join(threads)
        if errors:
            raise errors[0]

    def _thread(
        self, name: str, work: Callable[[], Awaitable[None]], stop: ExecutionEvent, errors: list[BaseException]
    ) -> threading.Thread:
        def run() -> None:
            try:
                asyncio.run(self._supervised(work, stop))
            except BaseException as error:  # noqa: BLE001 - the end of a thread: re-raised in the calling one
                errors.append(error)
                stop.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    async def _supervised(self, work: Callable[[], Awaitable[None]], stop: ExecutionEvent) -> None:
        """Run the work; after the stop event, cancel it once the graceful delay is over."""
        task = asyncio.ensure_future(work())
        try:
            while not task.done() and not stop.is_set():
                await asyncio.wait({task}, timeout=self.poll_interval)
            await asyncio.wait({task}, timeout=self.graceful_delay)
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if not task.cancelled():
            task.result()

    def _join(self, threads: list[threading.Thread]) -> None:
        deadline = time.monotonic() + self.graceful_delay + self.join_timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.error("thread %s has not ended and is abandoned: it ends with this process", thread.name)
