"""The base class of algorithms. A Trainer gives an algorithm a store, an adapter and data; the algorithm publishes better resources."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from agl_otel.types import Dataset, NamedResources

if TYPE_CHECKING:
    from agl_otel.algorithms.run_folder import RunFolder
    from agl_otel.store import Store


class Algorithm:
    """Base class of algorithms: override `run`, sync or async."""

    def __init__(self) -> None:
        self._prepare()

    def _prepare(self) -> None:
        """Set the defaults; called by __new__, because a subclass need not call __init__."""
        self._trainer: Callable[[], Any] = lambda: None
        self._adapter: Callable[[], Any] = lambda: None
        self._llm_proxy: Callable[[], Any] = lambda: None
        self._store: Store | None = None
        self._initial_resources: NamedResources | None = None
        self._run_folder: RunFolder | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an algorithm with all attributes at their defaults."""
        algorithm = super().__new__(cls)
        algorithm._prepare()
        return algorithm

    def is_async(self) -> bool:
        """Return whether `run` is async."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Any) -> None:
        """Set the trainer that runs it; a weak reference is held."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer. Raises ValueError where there is none."""
        return _required(self._trainer(), "trainer", "it is run by Trainer.fit")

    def set_store(self, store: Store) -> None:
        """Set the store."""
        self._store = store

    def get_store(self) -> Store:
        """Return the store. Raises ValueError where there is none."""
        return _required(self._store, "store", "call set_store, or run it with Trainer.fit")

    def set_adapter(self, adapter: Any) -> None:
        """Set the adapter; a weak reference is held."""
        self._adapter = weakref.ref(adapter)

    def get_adapter(self) -> Any:
        """Return the adapter. Raises ValueError where there is none."""
        return _required(self._adapter(), "adapter", "call set_adapter (and keep it), or give Trainer(adapter=…)")

    def take_adapter(self, adapter: Any) -> None:
        """Take over the options of an adapter that the user chose; called before the run. Raises UsageError for unsupported ones."""

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        """Set the proxy, or None; a weak reference is held."""
        self._llm_proxy = weakref.ref(llm_proxy) if llm_proxy is not None else lambda: None

    def get_llm_proxy(self) -> Any:
        """Return the proxy; None where there is none."""
        return self._llm_proxy()

    def set_initial_resources(self, resources: NamedResources) -> None:
        """Set the resources to start with."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """Return the resources to start with; None where none were set."""
        return self._initial_resources

    def set_run_folder(self, run: RunFolder | None) -> None:
        """Set the folder of the current run."""
        self._run_folder = run

    def get_run_folder(self) -> RunFolder | None:
        """Return the run's id, seed and metrics.jsonl (run_folder.py); None for a run in memory, or where the algorithm opens its own."""
        return self._run_folder

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Awaitable[None] | None:
        """Do the work; the runners stop when this returns."""
        raise NotImplementedError(f"{type(self).__name__} has no run: override it")

    def get_client(self) -> Any:
        """Raise NotImplementedError: the client of Agent Lightning 0.1 was removed."""
        raise NotImplementedError("get_client() was removed: use get_store()")


def _required(value: Any, what: str, remedy: str) -> Any:
    if value is None:
        raise ValueError(f"the algorithm has no {what}: {remedy}")
    return value
