"""A temporary stack of the data directory ends with the last command that uses it. Real stacks, of the queue alone."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from agl_otel.errors import InUseError
from agl_otel.settings import Settings
from agl_otel.stack import sharing
from agl_otel.stack.sharing import store_for
from agl_otel.stack.supervisor import running_address


async def test_the_command_that_started_the_stack_ends_after_the_one_that_joined_it(tmp_path: Path) -> None:
    settings = Settings.private(data_dir=tmp_path)
    first_may_end, first_waits = asyncio.Event(), asyncio.Event()

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "another command uses the stack" in record.getMessage():
                first_waits.set()

    logging.getLogger("agl_otel").addHandler(handler := Waits())
    started = asyncio.Event()

    async def first() -> None:
        async with store_for(settings, only=("queue",)):
            started.set()
            await first_may_end.wait()
            raise RuntimeError("the first command fails")

    running = asyncio.create_task(first())
    try:
        await started.wait()
        address = running_address(settings)
        async with store_for(settings, only=("queue",)) as (store, _):
            assert store.description.queue == address
            first_may_end.set()
            await asyncio.wait({running, asyncio.ensure_future(first_waits.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not running.done()
            assert (await store.queue.describe()).queue == address, "the stack serves the command that joined it"
        with pytest.raises(RuntimeError, match="the first command fails"):
            await running
    finally:
        logging.getLogger("agl_otel").removeHandler(handler)
    assert running_address(settings) == ""
    async with store_for(settings, only=("queue",)) as (store, _):
        assert (await store.queue.describe()).queue == running_address(settings) != address


async def test_a_stack_with_too_few_services_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.private(data_dir=tmp_path)
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.0)
    async with store_for(settings, only=("queue",)):
        told = r"has no collector and no proxy: process \d+ started it for itself. .* `agl-otel up`"
        with pytest.raises(InUseError, match=told):
            async with store_for(settings):
                pass
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 300.0)

    async def needs_proxy() -> None:
        async with store_for(settings, only=("queue", "proxy")) as (store, _):
            assert store.description.proxy

    async with store_for(settings, only=("queue",)):
        waiting = asyncio.create_task(needs_proxy())
        await asyncio.sleep(0)
    await waiting


async def test_a_command_that_was_held_up_looks_again_before_it_says_that_the_stack_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(sharing, "WATCH_SECONDS", 0.0)
    settings = Settings.private(data_dir=tmp_path)
    async with store_for(settings, only=("queue",)), store_for(settings, only=("queue",)) as (_, ended):
        for _ in range(3):
            await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - as a long import does, or a machine that is too busy
        await asyncio.sleep(0.05)
        assert not ended.done()
