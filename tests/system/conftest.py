"""Fixtures shared by several system tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_server import ModelServer, in_a_thread
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import Agent


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    with in_a_thread(ModelServer()) as running:
        yield running


@pytest.fixture
def agent(receiver: OtlpReceiver, tmp_path: Path) -> Agent:
    return Agent(receiver, tmp_path)
