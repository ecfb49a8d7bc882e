"""Fixtures shared by several system tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import Agent


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    """In its own thread, because these tests wait for commands."""
    running = ModelServer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(running.start(), loop).result(300)
    yield running
    asyncio.run_coroutine_threadsafe(running.stop(), loop).result(300)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def agent(receiver: OtlpReceiver, tmp_path: Path) -> Agent:
    return Agent(receiver, tmp_path)
