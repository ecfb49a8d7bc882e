"""The framework matrix (`make matrix`) with the framework that the tests have installed, and proof that its check can fail."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from agl_otel.types import RolloutQuery
from tests.matrix import play as matrix
from tests.matrix.check import result
from tests.matrix.environments import CannotInstallError, Environment, environment
from tests.matrix.frameworks import BY_NAME, FRAMEWORKS, Play
from tests.matrix.harnesses import HARNESSES
from tests.matrix.page import PAGE, kept_results, page

pytestmark = pytest.mark.full


async def test_an_sdk_agent_is_trained_on_as_sampled_and_differences_are_reported(tmp_path: Path) -> None:
    framework = BY_NAME["openai"]
    plays = [play for play in framework.plays if play.mode in ("chat-async-stream", "chat-edited", "responses")]
    installed = Environment((sys.executable, str(framework.folder / framework.program)), "")
    async with matrix.ground(tmp_path, rollouts=1) as on:
        found = await matrix.played(on, framework, plays, installed)
        assert [each.problems for each in found] == [[], [], []]
        assert all(each.exact == 3 and each.joined == {"traceparent": 3} and each.own_spans >= 3 for each in found)
        await _check_differences_are_reported(on, plays[-1])


async def _check_differences_are_reported(on: matrix.Ground, play: Play) -> None:
    """Check again against copies of the model's record that each differ in one place: each time the check must fail."""
    rollouts = await on.store.rollouts(RolloutQuery())
    rollout = next(each for each in rollouts.items if isinstance(each.input, dict) and each.input["mode"] == play.mode)
    traces, spans = await on.store.traces([rollout]), await on.store.spans(rollout.rollout_id)
    served = [answer for answer in on.model.served if answer.protocol == play.protocol]
    cities = served[0].cities
    assert cities is not None
    asked = {rollout.rollout_id: cities}
    assert result(play, asked, traces, spans, served).problems == []
    for change, words in (
        ({"prompt_ids": served[1].sampled.prompt_ids[1:]}, "not trained on as sampled"),
        ({"response_ids": [*served[1].sampled.response_ids, 5]}, "not what its calls sampled"),
        ({"logprobs": served[1].sampled.logprobs[::-1]}, "not trained on as sampled"),
    ):
        other = dataclasses.replace(served[1], sampled=dataclasses.replace(served[1].sampled, **change))
        assert words in " ".join(result(play, asked, traces, spans, [served[0], other, served[2]]).problems)
    elsewhere = [dataclasses.replace(answer, cities=("A1", "B1")) for answer in served]
    assert "not trained on as sampled" in " ".join(result(play, asked, traces, spans, elsewhere).problems)
    refusing = dataclasses.replace(play, untrainable=("strict_tools",))
    assert "training takes 3 calls, refused by {}" in " ".join(result(refusing, asked, traces, spans, served).problems)
    lost = [span.model_copy(update={"rollout_id": "", "attempt_id": ""}) for span in spans]
    assert "under no rollout" in " ".join(result(play, asked, traces, lost, served).problems)


@pytest.mark.skipif(not shutil.which("npm"), reason="Node.js is not installed")
async def test_a_command_line_agent_as_published_is_trained_on_as_sampled(tmp_path: Path) -> None:
    """One of many: `make matrix` plays all."""
    harness = next(each for each in HARNESSES if each.name == "claude_code")
    plays = [play for play in harness.plays if play.mode in ("compaction", "sub_agent")]
    try:
        installed = await asyncio.to_thread(environment, harness)
    except CannotInstallError as error:
        pytest.skip(str(error))
    async with matrix.ground(tmp_path, rollouts=1) as on:
        found = await matrix.played(on, harness, plays, installed)
    assert [each.problems for each in found] == [[], []]
    assert [each.trainable for each in found] == [5, 7]


def test_the_page_agrees_with_the_results_and_has_every_framework() -> None:
    assert PAGE.read_text() == page(kept_results()), "run `make matrix` for what has changed"
    assert set(kept_results()) <= {framework.name for framework in (*FRAMEWORKS, *HARNESSES)}
    for framework in (*FRAMEWORKS, *HARNESSES):
        assert framework.title in PAGE.read_text()
        assert (framework.folder / framework.program).exists()
