"""A crashing service is restarted with growing back-off; the others keep running, and health, metrics and `top` name it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.errors import UnavailableError
from agl_otel.queue.client import QueueClient
from agl_otel.service.ports import is_free
from agl_otel.settings import PORTS, Settings
from agl_otel.stack import supervisor as supervision
from agl_otel.stack.supervisor import LONGEST_PAUSE_SECONDS, STACK_FILE, Stack, restart_pause

CRASHES = 8
LAST = 3600.0
"""The back-off that the test itself ends."""


def pid_of(stack: Stack, service: str) -> int:
    return json.loads((stack.data_dir / STACK_FILE).read_text())[service]["pid"]


async def until(condition: Any, seconds: float = 300.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - the condition is in other processes
            await asyncio.sleep(0.02)


def test_the_first_restart_is_at_once_and_no_pause_is_longer_than_a_minute() -> None:
    assert [restart_pause(failures) for failures in range(1, 10)] == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    assert restart_pause(100_000) == LONGEST_PAUSE_SECONDS == 60


async def test_a_crashing_service_is_restarted_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    come_back = asyncio.Event()
    pauses = iter([0.0] * (CRASHES - 1))

    async def sleep(seconds: float, real: Any = asyncio.sleep) -> None:
        await (come_back.wait() if seconds == LAST else real(seconds))

    monkeypatch.setattr(supervision, "restart_pause", lambda _: next(pauses, LAST))
    monkeypatch.setattr(supervision.asyncio, "sleep", sleep)
    settings = Settings.load(data_dir=tmp_path / "data", **dict.fromkeys(PORTS, 0))
    async with (
        Stack(settings, only=("queue", "collector", "proxy", "web")) as stack,
        QueueClient(stack.address) as queue,
        aiohttp.ClientSession() as session,
    ):
        others = {name: pid_of(stack, name) for name in ("queue", "collector", "web")}
        killed = 0
        for _ in range(CRASHES):

            async def started_again(before: int = killed) -> bool:
                return pid_of(stack, "proxy") != before

            await until(started_again)
            killed = pid_of(stack, "proxy")
            os.kill(killed, signal.SIGKILL)

        async def is_reported_down() -> bool:
            return f"({CRASHES} times in a row)" in (await queue.describe()).down.get("proxy", "")

        async def is_up_again() -> bool:
            return "proxy" not in (await queue.describe()).down

        async def health() -> Any:
            async with session.get(f"http://{stack.addresses()['web'].rpartition('://')[2]}/health") as answer:
                return answer.status, await answer.json()

        await until(is_reported_down)
        down = (await queue.describe()).down
        assert list(down) == ["proxy"] and "proxy.log" in down["proxy"]
        assert await health() == (200, {"status": "degraded", "down": ["proxy"]})
        command = [sys.executable, "-m", "agl_otel", "top", "--once", "--every", "0.2", "--json", "--store", stack.address]
        shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert json.loads(shown.stdout)["down"] == down
        assert f"proxy was killed by SIGKILL (out of memory?) ({CRASHES} times in a row); it is restarted in" in caplog.text
        come_back.set()
        await until(is_up_again)
        assert await health() == (200, {"status": "ok"})
        assert {name: pid_of(stack, name) for name in others} == others and not stack.failed.done()
    assert "proxy is up again" in caplog.text


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_stack_ends_when_its_data_directory_is_gone(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    async with Stack(Settings.load(data_dir=data, **dict.fromkeys(PORTS, 0)), only=("queue",)) as stack:
        if how == "deleted":
            shutil.rmtree(data)
        else:
            data.rename(tmp_path / "moved")
            shutil.copytree(tmp_path / "moved", data)
        async with asyncio.timeout(60):
            with pytest.raises(UnavailableError, match=r"data directory .*data was deleted or replaced while its stack ran"):
                await stack.failed


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('no disk')", "web ended with exit code 1: no disk"),
        ("import signal; signal.pause()", "web did not answer within 5 s"),
    ],
)
async def test_a_service_that_never_comes_up_aborts_the_start_of_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    """A stack gives up only during its start; a service that was up once is restarted for ever."""

    def start(settings: Settings, data_dir: Path) -> tuple[list[str], dict[str, str]]:
        if "pause" in code:  # true once the queue is up
            monkeypatch.setattr(supervision, "START_TIMEOUT_SECONDS", 5.0)
        return [sys.executable, "-c", code], {}

    settings = Settings.load(data_dir=tmp_path / "data", **dict.fromkeys(PORTS, 0))
    stack = Stack(settings, only=("queue", "web"))
    queue, web = stack.services
    stack.services = [queue, replace(web, start=start, within="")]
    with pytest.raises(UnavailableError, match=says):
        await stack.start()
    assert not (tmp_path / "data" / STACK_FILE).exists()
    await stack.stop()
    assert all(is_free("127.0.0.1", getattr(stack.settings, port)) for port in queue.ports)
    monkeypatch.undo()
    async with Stack(settings, only=("queue", "web")) as again:
        assert pid_of(again, "web"), "the folder is free, and nothing is left in it that would be in the way"
