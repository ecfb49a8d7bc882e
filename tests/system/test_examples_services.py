"""The examples whose models are trained elsewhere, or by the example itself: against small services that really learn."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.system.examples import EXAMPLES, Stage, finished, serving, stage

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("stack")) as running:
        yield running


async def test_azure_tunes_deploys_prunes_and_validates_in_a_loop_and_the_score_rises(on: Stage) -> None:
    folder = EXAMPLES / "azure"
    async with (
        serving(sys.executable, folder / "service.py", "--port", "0") as service,
        on.runner(folder, "--function", "agent.py:answer", "--grader", "grade.py:grade"),
    ):
        where = ("--base-url", f"{service}/openai/v1", "--deployments", f"{service}/account", "--poll-seconds", "0.05")
        output = await finished(sys.executable, folder / "finetune.py", "--store", on.address, *where, cwd=folder)
        async with aiohttp.ClientSession() as session, session.get(f"{service}/account/deployments") as answer:
            deployed = [each["name"] for each in (await answer.json())["value"]]
    *steps, last = map(json.loads, output.splitlines())
    assert [step["rows"] for step in steps] == [24, 24], "half of four rollouts of 12 tasks"
    assert len(last["scores"]) == 3 and last["scores"][-1] > max(0.5, last["scores"][0] + 0.2), output
    assert deployed == ["gpt-4.1-mini", "gpt-4.1-mini-v2"] and steps[-1]["deployed"] == ["gpt-4.1-mini-v2"]
