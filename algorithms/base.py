"""Algorithm: what a Trainer runs beside its runners. It gets a store, an adapter and the data, and hands back better resources."""

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
    """Base of algorithms: override `run`, sync or async."""

    def __init__(self) -> None:
        self._prepare()

    def _prepare(self) -> None:
        """Here, because a subclass need not call __init__."""
        self._trainer: Callable[[], Any] = lambda: None
        self._adapter: Callable[[], Any] = lambda: None
        self._llm_proxy: Callable[[], Any] = lambda: None
        self._store: Store | None = None
        self._initial_resources: NamedResources | None = None
        self._run_folder: RunFolder | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An algorithm that knows nothing yet."""
        made = super().__new__(cls)
        made._prepare()
        return made

    def is_async(self) -> bool:
        """Whether `run` is."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Any) -> None:
        """Tell it who runs it; a weak reference is kept."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """The trainer. Raises ValueError where there is none."""
        return _known(self._trainer(), "trainer", "it is run by Trainer.fit")

    def set_store(self, store: Store) -> None:
        """Give it the store."""
        self._store = store

    def get_store(self) -> Store:
        """The store. Raises ValueError where there is none."""
        return _known(self._store, "store", "call set_store, or run it with Trainer.fit")

    def set_adapter(self, adapter: Any) -> None:
        """Give it the adapter; a weak reference is kept."""
        self._adapter = weakref.ref(adapter)

    def get_adapter(self) -> Any:
        """The adapter. Raises ValueError where there is none."""
        return _known(self._adapter(), "adapter", "call set_adapter (and keep it), or give Trainer(adapter=…)")

    def take_adapter(self, adapter: Any) -> None:
        """Told, before the run, of an adapter that the user chose. Raises UsageError where the algorithm would not go by it."""

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        """Give it a proxy, or None; a weak reference is kept."""
        self._llm_proxy = weakref.ref(llm_proxy) if llm_proxy is not None else lambda: None

    def get_llm_proxy(self) -> Any:
        """The proxy; None where there is none."""
        return self._llm_proxy()

    def set_initial_resources(self, resources: NamedResources) -> None:
        """Give it what to begin with."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """What to begin with; None where nothing was given."""
        return self._initial_resources

    def set_run_folder(self, run: RunFolder | None) -> None:
        """Give it the folder of the run at work."""
        self._run_folder = run

    def get_run_folder(self) -> RunFolder | None:
        """The run's id, its seed, and lines for metrics.jsonl (run_folder.py); None where the run is not kept, or keeps itself."""
        return self._run_folder

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Awaitable[None] | None:
        """Do the work; the runners stop when this returns."""
        raise NotImplementedError(f"{type(self).__name__} has no run: override it")

    def get_client(self) -> Any:
        """0.1's client, which is gone. Raises NotImplementedError."""
        raise NotImplementedError("get_client() is gone: use get_store()")


def _known(found: Any, what: str, remedy: str) -> Any:
    if found is None:
        raise ValueError(f"the algorithm has no {what}: {remedy}")
    return found
