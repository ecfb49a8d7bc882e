"""Functions as agents; the names of their parameters select their arguments.

@rollout
def agent(task, llm): …                       the first LLM resource, behind the attempt's own address
@rollout
async def agent(task, prompt_template): …     the first PromptTemplate
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, overload

from agl_otel.compat.litagent.agent import LitAgent
from agl_otel.errors import UsageError
from agl_otel.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Rollout, RolloutRawResult
from agl_otel.types.resources import is_canary

T = TypeVar("T")
Function = Callable[..., Any]
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_log = logging.getLogger(__name__)


class FunctionalLitAgent(LitAgent[T]):
    """A function as an agent; calling it calls the function.

    Args:
        function: sync or async.
        strip_proxy: False passes a ProxyLLM unchanged.
    """

    def __init__(self, function: Function, *, strip_proxy: bool = True) -> None:
        super().__init__()
        functools.update_wrapper(self, function)
        self.name: str = getattr(function, "__name__", repr(function))
        self._function = function
        self._strip_proxy = strip_proxy
        parameters = inspect.signature(function).parameters.values()
        self._names = [p.name for p in parameters if p.kind not in _VARIADIC]
        self._required = [p.name for p in parameters if p.kind not in _VARIADIC and p.default is inspect.Parameter.empty]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self._function.__module__, self._function.__qualname__, self._strip_proxy)

    def is_async(self) -> bool:
        """Return whether the function is async."""
        return inspect.iscoroutinefunction(self._function)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Call the function. Raises ValueError if a resource that it names is missing."""
        return self._function(**self._arguments(task, resources, rollout))

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Call the function. Raises ValueError if a resource that it names is missing."""
        return await self._function(**self._arguments(task, resources, rollout))

    def _arguments(self, task: T, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name in self._names:
            if name == "task":
                given[name] = task
            elif name == "rollout":
                given[name] = rollout
            elif name == "resources":
                given[name] = resources
            elif name == "llm" and ("llm" in self._required or _has(resources, LLM)):
                given[name] = self._llm(resources, rollout)
            elif name == "prompt_template" and (name in self._required or _has(resources, PromptTemplate)):
                given[name] = _first(resources, PromptTemplate, self.name)
            elif name in resources:
                given[name] = resources[name]
            elif isinstance(task, Mapping) and "task" not in self._names and name in task:
                given[name] = task[name]
        unnamed = [name for name in self._required if name not in given]
        if len(unnamed) == 1 and "task" not in self._names:
            given[unnamed[0]] = task
        elif unnamed:
            offered = ", ".join(["task", "rollout", "resources", "llm", "prompt_template", *resources])
            raise UsageError(f"agent {self.name} takes {', '.join(unnamed)}, for which there is no argument: available are {offered}")
        return given

    def _llm(self, resources: NamedResources, rollout: Rollout) -> LLM:
        found = _first(resources, LLM, self.name)
        if self._strip_proxy and isinstance(found, ProxyLLM) and isinstance(rollout, AttemptedRollout):
            return found.with_attempted_rollout(rollout)
        return found


def _has(resources: NamedResources, kind: type[Any]) -> bool:
    return any(isinstance(resource, kind) for resource in resources.values())


def _first(resources: NamedResources, kind: type[Any], agent: str) -> Any:
    found = {name: resource for name, resource in resources.items() if isinstance(resource, kind) and not is_canary(resource)}
    if not found:
        raise ValueError(
            f"agent {agent} needs a resource of type {kind.__name__}, and its rollout's resources are {', '.join(resources) or 'none'}: "
            f"add one with store.add_resources, or give Trainer(initial_resources=…)"
        )
    if len(found) > 1:
        _log.warning("there are %d resources of type %s (%s); the agent gets the first", len(found), kind.__name__, ", ".join(found))
    return next(iter(found.values()))


def _by_name(module: str, qualified_name: str, strip_proxy: bool) -> Any:
    """Load the agent that a pickle names by its function, decorated or not."""
    import importlib

    found: Any = importlib.import_module(module)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found if isinstance(found, LitAgent) else FunctionalLitAgent(found, strip_proxy=strip_proxy)


def _checked(function: Function, resource: str) -> Function:
    names = list(inspect.signature(function).parameters)
    if len(names) < 2 or names[0] != "task" or resource not in names:
        raise ValueError(
            f"{getattr(function, '__name__', function)!r} takes {names}: an agent's parameters begin with task and name {resource}"
        )
    return function


@overload
def llm_rollout(func: Function) -> FunctionalLitAgent[Any]: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[Function], FunctionalLitAgent[Any]]: ...
def llm_rollout(func: Function | None = None, *, strip_proxy: bool = True) -> Any:
    """Make an agent from a function of `task` and `llm` (and optionally `rollout`). Raises ValueError for other parameters.

    The LLM's endpoint is the attempt's own address at the proxy, unless `strip_proxy` is False.
    """
    if func is None:
        return lambda function: llm_rollout(function) if strip_proxy else _unstripped(function)  # pyright: ignore[reportUnknownLambdaType]  # a decorator
    return FunctionalLitAgent(_checked(func, "llm"))


def _unstripped(function: Function) -> FunctionalLitAgent[Any]:
    return FunctionalLitAgent(_checked(function, "llm"), strip_proxy=False)


@overload
def prompt_rollout(func: Function) -> FunctionalLitAgent[Any]: ...
@overload
def prompt_rollout(func: None = None) -> Callable[[Function], FunctionalLitAgent[Any]]: ...
def prompt_rollout(func: Function | None = None) -> Any:
    """Make an agent from a function of `task` and `prompt_template` (and optionally `rollout`). Raises ValueError for other parameters."""
    if func is None:
        return prompt_rollout
    return FunctionalLitAgent(_checked(func, "prompt_template"))


def rollout(func: Function) -> FunctionalLitAgent[Any]:
    """Make an agent from a function of `task` and `llm` or `prompt_template`. Raises NotImplementedError if it has neither parameter."""
    names = inspect.signature(func).parameters
    for resource, make in (("llm", llm_rollout), ("prompt_template", prompt_rollout)):
        if resource in names:
            return make(func)
    raise NotImplementedError(
        f"{getattr(func, '__name__', func)!r} takes {list(names)}: name the parameter llm or prompt_template, "
        "or give the undecorated function to the runner or trainer"
    )


def as_agent(agent: Any) -> LitAgent[Any]:
    """Return `agent` if it is a LitAgent, else the function as one. Raises UsageError for anything else."""
    if isinstance(agent, LitAgent):
        return agent  # pyright: ignore[reportUnknownVariableType]  # its task type is unknown
    if isinstance(agent, type) and issubclass(agent, LitAgent):
        raise UsageError(f"{agent.__name__} is a class: give an agent, {agent.__name__}()")
    if not callable(agent):
        raise UsageError(f"{agent!r} is not an agent: give a LitAgent, or a function of task and llm, prompt_template or resources")
    return FunctionalLitAgent(agent)
