"""A runner that finds no stack."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agl_otel.runner.agents import CommandAgent
from agl_otel.runner.process import run_runner
from agl_otel.settings import free_port


async def test_a_runner_without_a_stack_names_what_it_waits_for_and_ends_at_the_first_stop(caplog: pytest.LogCaptureFixture) -> None:
    address, stop = f"127.0.0.1:{free_port()}", asyncio.Event()
    before: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if address in record.getMessage():
                stop.set()
            elif not stop.is_set():
                before.append(record.getMessage())

    process = logging.getLogger("agl_otel")
    process.addHandler(handler := Seen(logging.INFO))
    caplog.set_level(logging.INFO, "agl_otel")
    try:
        assert not await run_runner(CommandAgent(["true"]), store=address, stop=stop)
    finally:
        process.removeHandler(handler)
    assert before == [], "it is the first line"
