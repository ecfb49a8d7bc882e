"""Tools of an agent that are answered from a stored attempt (replay.py), so that the agent's own code runs again and calls none of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from agl_otel.adapters.replay import Recorded


def replayed(tool: Any, recorded: Recorded) -> Any:
    """Return a tool with the same name and schema that is answered from `recorded`; the given one is never called.

    A call that was not recorded is answered by a text that says so, as a tool that fails would, and counted in `recorded.misses`.

    Args:
        tool: a FunctionTool of OpenAI's Agents SDK, a tool of LangChain, or a function, whose name is the tool's; also an async one.
        recorded: what the attempt's tools returned; one for all tools of an agent, and a new one for each run of it.
    """
    if dataclasses.is_dataclass(tool) and hasattr(tool, "on_invoke_tool"):
        return _of_openai_agents(tool, recorded)
    if any(base.__module__.startswith("langchain_core.") for base in type(tool).__mro__):
        return _of_langchain(tool, recorded)
    return _of_function(tool, recorded)


def _of_openai_agents(tool: Any, recorded: Recorded) -> Any:
    async def answer(_: Any, arguments: str) -> str:
        return str(recorded.answer(tool.name, arguments))

    return dataclasses.replace(tool, on_invoke_tool=answer)


def _of_langchain(tool: Any, recorded: Recorded) -> Any:
    """Return a tool whose schema is plain JSON, with which LangChain passes the model's arguments on as they are, without defaults."""

    def answer(**arguments: Any) -> str:
        return str(recorded.answer(tool.name, arguments))

    async def answer_async(**arguments: Any) -> str:
        return answer(**arguments)

    schema = tool.tool_call_schema
    return importlib.import_module("langchain_core.tools").StructuredTool(
        name=tool.name,
        description=tool.description,
        args_schema=schema if isinstance(schema, dict) else schema.model_json_schema(),
        func=answer,
        coroutine=answer_async,
        return_direct=tool.return_direct,
    )


def _of_function(tool: Any, recorded: Recorded) -> Callable[..., Any]:
    signature = inspect.signature(tool)

    @functools.wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> str:
        arguments = signature.bind(*args, **kwargs).arguments
        others = [name for name in arguments if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD]
        for name in others:
            arguments |= arguments.pop(name)
        return str(recorded.answer(tool.__name__, arguments))

    @functools.wraps(tool)
    async def answer_async(*args: Any, **kwargs: Any) -> str:
        return answer(*args, **kwargs)

    return answer_async if inspect.iscoroutinefunction(tool) else answer
