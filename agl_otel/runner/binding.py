"""Bind a user's function to an attempt by the names of its parameters. Pure.

    def agent(task): …                      the task
    def agent(question, llm): …             task["question"], the LLM behind the attempt's own address
    def agent(task, prompt_template): …     the first prompt template among the resources
    async def agent(task, resources, rollout): …

Reserved names (RESERVED) come first, then the keys of a dict task, then defaults. A single remaining parameter gets the task.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from agl_otel.errors import UsageError

RESERVED: Final = ("task", "llm", "prompt_template", "resources", "rollout")
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Binding:
    """The parameters of `function`, inspected once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a builtin without a signature
            parameters = [inspect.Parameter("task", inspect.Parameter.POSITIONAL_ONLY)]
        self._parameters = [p for p in parameters if p.kind not in _VARIADIC]
        self._variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)

    def arguments(self, reserved: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Build the positional and keyword arguments of one call.

        `reserved` holds a value for each name of RESERVED. Raises UsageError, naming the parameters that nothing fills.
        """
        task = reserved["task"]
        offered = {**({str(k): v for k, v in task.items()} if isinstance(task, Mapping) else {}), **reserved}
        unnamed = [p.name for p in self._parameters if p.name not in offered and p.default is inspect.Parameter.empty]
        if len(unnamed) == 1 and all(p.name != "task" for p in self._parameters):
            offered[unnamed[0]] = task
        elif unnamed:
            keys = f" and the task's keys {', '.join(map(str, task))}" if isinstance(task, Mapping) else ""
            raise UsageError(f"{self.name} takes {', '.join(unnamed)}, which nothing fills: there are {', '.join(RESERVED)}{keys}")
        if not self._parameters and self._variadic:
            return [task], {}
        positional = [offered[p.name] for p in self._parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.name in offered]
        by_name = {
            p.name: offered[p.name] for p in self._parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY and p.name in offered
        }
        return positional, by_name
