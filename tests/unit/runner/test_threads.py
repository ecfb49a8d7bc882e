from __future__ import annotations

import asyncio
import contextvars
import sys
import threading

import pytest

from agl_otel.errors import AgentError
from agl_otel.runner.threads import call, is_async

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_a_sync_function_runs_in_a_thread_with_the_callers_context() -> None:
    variable.set("mine")
    name, value = await call(lambda: (threading.current_thread().name, variable.get()))
    assert (name, value) == ("agl-agent", "mine")


async def test_asyncio_run_works_inside_a_sync_function() -> None:
    async def inner() -> int:
        await asyncio.sleep(0)
        return 7

    assert await call(lambda: asyncio.run(inner())) == 7


async def test_async_functions_and_objects_and_returned_coroutines_are_awaited() -> None:
    async def agent(task: int) -> int:
        return task + 1

    class Agent:
        async def __call__(self, task: int) -> int:
            return task + 1

    assert is_async(agent)
    assert is_async(Agent())
    assert await call(agent, 1) == await call(Agent(), 1) == await call(lambda task: agent(task), 1) == 2


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(3), RuntimeError("x")])
async def test_exceptions_of_the_function_propagate(error: Exception) -> None:
    def agent() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await call(agent)


async def test_sys_exit_in_an_agent_becomes_an_agent_error() -> None:
    async def agent() -> None:
        sys.exit(3)

    for function in (lambda: sys.exit(3), agent):
        with pytest.raises(AgentError, match="SystemExit"):
            await call(function)


async def test_a_cancelled_call_abandons_its_thread_and_discards_its_result() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def agent() -> int:
        go_on.wait(300)
        ended.set()
        return 1

    task = asyncio.create_task(call(agent))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)


def test_a_call_that_outlives_its_loop_ends_quietly() -> None:
    go_on = threading.Event()

    async def abandon() -> None:
        task = asyncio.create_task(call(go_on.wait, 10))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(abandon())
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "agl-agent":
            thread.join(300)
