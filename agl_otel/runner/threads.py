"""A user's function, sync or async, awaited; a sync one runs in a thread of its own.

Not a pool: a function that never returns would hold a place in it for ever, and the interpreter waits for a pool's threads at exit.
These are daemons: one that is abandoned (a sync function cannot be killed) costs a thread until it returns, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from agl_otel.errors import AgentError

_log = logging.getLogger(__name__)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the caller's context: awaited where it is async, else in a thread; `asyncio.run` works in it.

    Cancelling this abandons a thread: what it still does and returns is discarded. `sys.exit` in it is an AgentError.
    """
    if not is_async(function):
        result = await in_thread(lambda: function(*args, **kwargs))
        return await result if inspect.isawaitable(result) else result
    try:
        return await function(*args, **kwargs)
    except SystemExit as error:
        raise _ended(error) from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine."""
    method: Any = vars(type(function)).get("__call__")  # an object with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a daemon thread with the caller's context and wait for it."""
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
        except StopIteration as raised:  # a future takes none
            error = RuntimeError(f"the function raised StopIteration({raised.value!r})")
        except Exception as raised:  # noqa: BLE001 - user code: carried over to the awaiting task
            error = raised
        except BaseException as raised:  # noqa: BLE001 - user code: SystemExit in a task would end the runner
            error = _ended(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="agl-agent", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        _log.warning("a sync function was told to end and cannot be: its thread goes on, and what it returns is dropped")
        raise


def _ended(error: BaseException) -> AgentError:
    return AgentError(f"the function raised {type(error).__name__}({error})")
