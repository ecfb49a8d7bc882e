from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl_otel.store import InMemoryLightningStore, LightningStore

EXAMPLE = Path(__file__).parents[3] / "examples" / "apo"


def example(name: str) -> ModuleType:
    """Import a module of the example under a unique name; its siblings can be imported while it loads."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        spec = importlib.util.spec_from_file_location(f"example_apo_{name}", EXAMPLE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLE))
        for beside in ("words", "tasks", "server", "agent"):
            sys.modules.pop(beside, None)


class Models:
    """The example's models and editor, served over HTTP from a thread."""

    def __init__(self) -> None:
        module = example("server")
        self.words: Any = module.Model()
        self.server: Any = module.Server()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner, self.url = self._do(module.serve(self.server))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def as_editor(self, habit: str, *, seed: int = 0, shut: bool = False) -> Any:
        """Return a client of the editor with this behaviour, and reset the count of its calls."""
        from openai import AsyncOpenAI

        self.server.habit, self.server.seed, self.server.shut, self.server.calls = habit, seed, shut, 0
        # each client is used in a short-lived event loop and must not keep connections
        return AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, default_headers={"Connection": "close"})

    def close(self) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def models() -> Iterator[Models]:
    made = Models()
    yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> Iterator[LightningStore]:
    made = InMemoryLightningStore()
    yield made
    asyncio.run(made.close())
