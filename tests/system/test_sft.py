"""SFT with its real parts: a model server and training processes; rollouts run when they are enqueued."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.errors import DataError, TrainingError, UnavailableError
from agl_otel.types import AttemptedRollout, Rollout
from agl_otel.types.columns import Traces
from agl_otel.types.sampling import NEUTRAL
from tests.system.test_model_server import CallingStore, Server, server

__all__ = ["server"]  # the fixture
pytestmark = pytest.mark.full


async def trained(server: Server, folder: Path, store: Callable[..., CallingStore] = CallingStore, **options: Any) -> list[RoundReport]:
    target = options.pop("target", 1)
    async with aiohttp.ClientSession() as session:
        algorithm = SFT(model_dir=server.folder, model_server_url=server.url, run_dir=folder, **options)
        return await algorithm.train(store(session, target=target), tiny.TRAIN_NUMBERS)


async def test_sft_learns_the_rewarded_behaviour_from_the_best_rollouts(server: Server, tmp_path: Path) -> None:
    """With another seed and another behaviour than test_sft_job.py."""
    reports = await trained(server, tmp_path, target=2, seed=1, prompts_per_step=48, max_steps=2, probe_tolerance=1e-3)
    first, second = reports
    assert first.reward_mean < 0.45
    assert second.reward_mean > first.reward_mean + 0.3
    assert all(report.kept == 96 and report.kept_reward_mean > 0.7 and report.refused == {"not_in_top": 288} for report in reports)
    assert all(report.loss < report.loss_before and report.off_policy == 0 for report in reports)
    assert [report.weights_version for report in reports] == ["1", "2"]


async def test_every_sampling_parameter_is_published_and_a_call_with_others_is_warned_of(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stores: list[CallingStore] = []

    def store(session: aiohttp.ClientSession, target: int) -> CallingStore:
        stores.append(CallingStore(session, target=target, own_temperature=0.5))
        return stores[-1]

    (report,) = await trained(server, tmp_path, store, prompts_per_step=4, group_size=4, max_steps=1, min_reward=0.0, top_fraction=None)
    published = [each["main_llm"].sampling_parameters for each in stores[0].published]  # type: ignore[union-attr]  # SFT publishes an LLM
    assert published == [{**NEUTRAL, "temperature": 1.0, "max_tokens": 64}] * 2, "for the first weights, and for those of the round"
    assert 0 < report.own_sampling < 16 == report.calls_trained
    (warning,) = [record.message for record in caplog.records if "of the agent's own" in record.message]
    share = f"{100 * report.own_sampling / 16:.0f} %"
    assert warning.startswith(f"step 1: {report.own_sampling} of 16 model calls read for training ({share}) were sampled with settings")


async def test_sft_learns_nothing_from_shuffled_rewards(server: Server, tmp_path: Path) -> None:
    first, second = await trained(server, tmp_path, target=2, seed=1, shuffle_rewards=True, prompts_per_step=48, max_steps=2)
    assert second.reward_mean < first.reward_mean + 0.2
    assert first.kept_reward_mean == pytest.approx(first.reward_mean, abs=0.2)


async def test_a_round_without_signal_does_not_change_the_weights(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Equal(CallingStore):
        async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str], *, tree: bool = False) -> Traces:
            traces = await super().traces(rollouts)
            return replace(traces, rewards={key: [replace(each, value=1.0) for each in found] for key, found in traces.rewards.items()})

    with caplog.at_level(logging.WARNING):
        reports = await trained(server, tmp_path, Equal, prompts_per_step=2, group_size=4, max_steps=2)
    assert [(report.kept, report.tokens, report.weights_version, report.refused) for report in reports] == [
        (0, 0, "1", {"flat_rewards": 8})
    ] * 2
    assert "the rewards are all equal" in caplog.text
    reports = await trained(server, tmp_path / "high", prompts_per_step=2, group_size=4, max_steps=1, min_reward=2.0)
    assert reports[0].refused == {"low_reward": 8}


async def test_a_round_without_candidates_is_an_error_with_the_counts(server: Server, tmp_path: Path) -> None:
    class Lost(CallingStore):
        async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str], *, tree: bool = False) -> Traces:
            return replace(await super().traces(rollouts), rewards={})

    with pytest.raises(DataError, match="round 1 has nothing to choose from: of 8 rollouts, refused no_reward 8\n"):
        await trained(server, tmp_path, Lost, prompts_per_step=2, group_size=4)


async def test_a_failing_training_process_is_an_error_with_its_last_output(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blocked(CallingStore):
        async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str], *, tree: bool = False) -> Traces:
            (tmp_path / "weights" / "1").write_text("a file where the weights' folder goes")
            return await super().traces(rollouts)

    with pytest.raises(TrainingError, match=r"(?s)training of round 1 ended with exit code 1; its log is .*NotADirectoryError"):
        await trained(server, tmp_path, Blocked, prompts_per_step=8)
    monkeypatch.setenv("PYTHONHASHSEED", "no number")  # with which no Python starts
    with pytest.raises(UnavailableError, match=r"(?s)ended with exit code 1; its log is .*PYTHONHASHSEED"):
        await trained(server, tmp_path / "never", prompts_per_step=8)
