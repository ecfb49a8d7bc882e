from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agl_otel.errors import ModelServerError
from agl_otel.service.main import STOP_SIGNALS, Serving, on_stop_signals, until_stopped

MODULES = ("queue", "collector", "collector.sql", "proxy", "web", "maintain")


@pytest.fixture(autouse=True)
def no_signals_after() -> Iterator[None]:
    """Restore the signal handlers after the test."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Recorded:
    """A service that records its states, and sends this process signals while it starts or serves."""

    def __init__(self, *, at_start: bool = False, at_line: signal.Signals | None = None) -> None:
        self.events: list[str] = []
        self._at_start, self._at_line = at_start, at_line

    @asynccontextmanager
    async def serving(self, ended: Callable[[], asyncio.Future[None]] | None = None) -> AsyncGenerator[Serving]:
        """The service."""
        self.events.append("starts")
        try:
            if self._at_start:
                passed = asyncio.Event()
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, passed.set)
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGUSR2)  # arrives after it
                await passed.wait()
            yield Serving("it serves", ended() if ended else None)
        finally:
            self.events.append("stops")

    def ready(self, line: str) -> None:
        """Called with the line."""
        self.events.append(line)
        if self._at_line is not None:
            signal.raise_signal(self._at_line)


@pytest.mark.parametrize("number", STOP_SIGNALS)
async def test_a_signal_stops_a_service_gracefully(number: signal.Signals) -> None:
    service = Recorded(at_line=number)
    await until_stopped(service.serving(), service.ready)
    assert service.events == ["starts", "it serves", "stops"]


async def test_a_signal_during_the_start_takes_effect_after_it() -> None:
    service = Recorded(at_start=True)
    await until_stopped(service.serving(), service.ready)
    assert service.events == ["starts", "it serves", "stops"]


async def test_a_signal_cancels_a_start_that_may_be_cancelled() -> None:
    service = Recorded(at_start=True)
    await until_stopped(service.serving(), service.ready, cancel_start=True)
    assert service.events == ["starts", "stops"]


async def test_an_error_that_ends_a_service_is_raised_after_a_graceful_stop() -> None:
    def ended() -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(ModelServerError("it ended"))
        return future

    service = Recorded()
    with pytest.raises(ModelServerError, match="it ended"):
        await until_stopped(service.serving(ended), service.ready)
    assert service.events == ["starts", "it serves", "stops"]


async def test_cancellation_is_not_a_graceful_stop() -> None:
    service = Recorded()

    def ready(line: str) -> None:
        service.ready(line)
        task.cancel()

    task = asyncio.create_task(until_stopped(service.serving(), ready))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.events == ["starts", "it serves", "stops"]


def test_a_service_stuck_while_stopping_exits_its_process() -> None:
    code = """
import asyncio, signal
from contextlib import asynccontextmanager
from agl_otel.service.main import Serving, until_stopped

@asynccontextmanager
async def stuck():
    try:
        yield Serving("")
    finally:
        await asyncio.Event().wait()

asyncio.run(until_stopped(stuck(), lambda _: signal.raise_signal(signal.SIGTERM), stop_seconds=0))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, "did not stop within 0 s" in ended.stderr) == (1, True)


def test_every_service_names_a_wrong_setting_in_one_line(tmp_path: Path) -> None:
    started = {
        module: subprocess.Popen(
            [sys.executable, "-m", f"agl_otel.{module}"],
            env={**os.environ, "AGL_DATA_DIR": str(tmp_path), "AGL_WEB_PORT": "many"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for module in MODULES
    }
    for module, process in started.items():
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert errors.startswith(f"agl-otel {module.rpartition('.')[2]}: ")
        assert "AGL_WEB_PORT" in errors and "Traceback" not in errors


async def signals_received(*numbers: signal.Signals, same_seconds: float) -> list[str]:
    """What is called when these signals reach this process, one by one."""
    called: list[str] = []

    def record(kind: str, number: signal.Signals) -> None:
        called.append(f"{kind} {number.name}")

    loop = asyncio.get_running_loop()
    on_stop_signals(lambda number: record("first", number), lambda number: record("again", number), same_seconds=same_seconds)
    passed = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR2, passed.set)
    try:
        for number in numbers:
            passed.clear()
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGUSR2)  # arrives after it
            await passed.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.remove_signal_handler(number)
    return called


async def test_simultaneous_signals_count_as_one() -> None:
    assert await signals_received(*[signal.SIGTERM] * 5, same_seconds=3600) == ["first SIGTERM"]


async def test_a_second_ctrl_c_always_counts() -> None:
    assert await signals_received(signal.SIGINT, signal.SIGTERM, signal.SIGINT, same_seconds=3600) == ["first SIGINT", "again SIGINT"]


async def test_a_later_signal_counts_as_a_second_one() -> None:
    assert await signals_received(signal.SIGINT, signal.SIGTERM, same_seconds=0) == ["first SIGINT", "again SIGTERM"]
