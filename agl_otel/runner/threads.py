"""Await a user's function, sync or async; a sync one runs in its own daemon thread.

A thread pool would not do: a function that never returns would occupy a worker forever, and the interpreter waits for a pool's
threads at exit. A daemon thread that is abandoned (it cannot be killed) costs only itself until the function returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn

from agl_otel.errors import AgentError

_log = logging.getLogger(__name__)
_inside: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar("agl_otel_agent", default=False)
"""Whether the code that runs is a user's function, or what it has started."""


class ExitedError(BaseException):
    """A user's function called os._exit."""


def keep_process() -> None:
    """Have os._exit end only the call of the user's function that it comes from, in this process; in forks it ends them as before."""
    exit_now, process = os._exit, os.getpid()  # pyright: ignore[reportPrivateUsage]  # a public function of os, despite its name

    @functools.wraps(exit_now)
    def exit_function(status: int) -> NoReturn:
        if os.getpid() == process and _inside.get():
            raise ExitedError(f"os._exit({status})")
        exit_now(status)

    os._exit = exit_function


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in the caller's context and return its result; sync functions run in a thread and may use `asyncio.run`.

    Cancelling this abandons the thread and discards its result. Raises what the function raises; the end of the process becomes AgentError.
    """
    token = _inside.set(True)
    try:
        return await _call(function, *args, **kwargs)
    finally:
        _inside.reset(token)


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not is_async(function):
        result = await in_thread(lambda: function(*args, **kwargs))
        return await result if inspect.isawaitable(result) else result
    try:
        return await function(*args, **kwargs)
    except (SystemExit, ExitedError) as error:
        raise _ended(error) from error


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling `function` gives a coroutine."""
    method: Any = vars(type(function)).get("__call__")  # an object with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a daemon thread in the caller's context and await its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return  # cancelled: abandoned
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except StopIteration as raised:  # futures refuse StopIteration
            error = RuntimeError(f"the function raised StopIteration({raised.value!r})")
        except Exception as raised:  # noqa: BLE001 - user code: raised in the awaiting task
            error = raised
        except BaseException as raised:  # noqa: BLE001 - user code: SystemExit in a task would end the runner
            error = _ended(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="agl-agent", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        _log.warning("a cancelled sync function cannot be stopped: its thread keeps running, and its result is discarded")
        raise


def _ended(error: BaseException) -> AgentError:
    if isinstance(error, ExitedError):
        return AgentError(f"the function called {error}, which would end the runner with all its attempts: return, or raise an exception")
    return AgentError(f"the function raised {type(error).__name__}({error})")
