"""The decorator `algo` turns a function into an algorithm, with arguments bound to its parameter names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from agl_otel.algorithms.base import Algorithm
from agl_otel.types import Dataset

Function = Callable[..., Any]
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DATASETS: Final = ("train_dataset", "val_dataset")
_ARGUMENTS: Final[dict[str, Callable[[Algorithm], Any]]] = {
    "store": lambda algorithm: algorithm.get_store(),
    "adapter": lambda algorithm: algorithm.get_adapter(),
    "llm_proxy": lambda algorithm: algorithm.get_llm_proxy(),
    "initial_resources": lambda algorithm: algorithm.get_initial_resources(),
    "run_folder": lambda algorithm: algorithm.get_run_folder(),
}


class FunctionalAlgorithm(Algorithm):
    """An algorithm that calls a function; calling the object calls the function directly.

    Parameters are bound by name: store, adapter, llm_proxy, initial_resources, run_folder, train_dataset, val_dataset.
    """

    def __init__(self, function: Function) -> None:
        super().__init__()
        functools.update_wrapper(self, function)
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._names = [p.name for p in parameters if p.kind not in _VARIADIC]
        self.name: str = getattr(function, "__name__", repr(function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function."""
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        """Return whether the function is async."""
        return inspect.iscoroutinefunction(self._function)

    def takes(self, name: str) -> bool:
        """Return whether the function has a parameter of that name."""
        return name in self._names

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Call the function with the arguments that it names. Raises TypeError for a data set that it does not take."""
        given: dict[str, Any] = {name: give(self) for name, give in _ARGUMENTS.items() if self.takes(name)}
        for name, data in zip(_DATASETS, (train_dataset, val_dataset), strict=True):
            if self.takes(name):
                given[name] = data
            elif data is not None:
                raise TypeError(f"{name} was given, and algorithm {self.name} has no parameter of that name: add it, or leave the data out")
        return self._function(**given)


def algo(func: Function) -> FunctionalAlgorithm:
    """Turn a function, sync or async, into an algorithm."""
    return FunctionalAlgorithm(func)
