"""Services in one process: what happens to one when another fails."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings, free_port
from agl_otel.stack import together

PART = """
import asyncio, contextlib, pathlib
from agl_otel.service.main import Serving

FOLDER = pathlib.Path(__file__).parent

@contextlib.asynccontextmanager
async def serving(settings):
    if (FOLDER / "refuses").exists():
        raise LookupError("no such disk")
    (FOLDER / "runs").touch()
    async def until_told():
        while not (FOLDER / "fails").exists():
            await asyncio.sleep(0.01)
        (FOLDER / "fails").unlink()
        raise LookupError("no such page")
    try:
        yield Serving("the part runs", asyncio.ensure_future(until_told()))
    finally:
        (FOLDER / "runs").unlink()
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "flaky.py").write_text(PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flaky", raising=False)
    port = free_port("127.0.0.1")
    return Settings.private(data_dir=tmp_path / "data", queue_port=port, store=f"127.0.0.1:{port}")


async def until_down(queue: QueueClient, why: str) -> None:
    """Wait until the part is reported down for this reason; empty: until it is no longer."""
    async with asyncio.timeout(60):
        while bool(said := (await queue.describe()).down.get("flaky", "")) != bool(why) or why not in said:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.01)


async def test_a_part_that_fails_is_reported_and_started_again_while_the_first_goes_on(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with together.serving(["agl_otel.queue", "flaky"], settings) as held, QueueClient(settings.store) as queue:
        assert "the queue serves" in held.line and held.line.endswith("; the part runs")
        (tmp_path / "refuses").touch()  # it does not come up again at once
        (tmp_path / "fails").touch()
        await until_down(queue, "no such disk")
        (tmp_path / "refuses").unlink()
        await until_down(queue, "")
        assert (tmp_path / "runs").exists()
    assert "flaky has failed (LookupError: no such page)" in caplog.text and "flaky is up again" in caplog.text
    assert not (tmp_path / "runs").exists(), "it is stopped before the queue"


async def test_a_part_that_cannot_start_ends_all(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "refuses").touch()
    with pytest.raises(LookupError, match="no such disk"):
        async with together.serving(["agl_otel.queue", "flaky"], settings):
            raise AssertionError("it has started")
    (tmp_path / "refuses").unlink()
    async with together.serving(["agl_otel.queue", "flaky"], settings):
        assert (tmp_path / "runs").exists(), "the queue's port is free again"
