"""SFT and GRPO as programs use them: Trainer.fit with a function agent, and training on offline rollouts.

The store has a proxy and a model server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.propagate import inject

import agl_otel as agl
from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.store import LightningStore
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.types import Span
from agl_otel_hook import conventions
from tests.system.test_model_server import Server, server

__all__ = ["server"]  # the fixture
pytestmark = pytest.mark.full
SMALL: dict[str, Any] = {"epochs": 1, "top_fraction": 0.5}


@pytest.fixture(scope="module")
def store() -> Iterator[LightningStore]:
    made = LightningStore(source=EmbeddedStack(services=("queue", "collector", "proxy")))
    yield made
    asyncio.run(made.close())


async def answer(task: int, llm: agl.LLM) -> float:
    """A system of two agents: `solver` answers and is graded, `chatter` adds an ungraded call."""
    said: dict[str, str] = {}
    async with aiohttp.ClientSession() as session:
        for agent, number in (("solver", task), ("chatter", task + 1)):
            with trace.get_tracer("system").start_as_current_span(agent, attributes={"gen_ai.agent.name": agent}):
                body = {"model": llm.model, "messages": [{"role": "user", "content": tiny.question(number)}]}
                headers: dict[str, str] = {}
                inject(headers)
                async with session.post(f"{llm.endpoint.rstrip('/')}/chat/completions", json=body, headers=headers) as reply:
                    said[agent] = (await reply.json())["choices"][0]["message"]["content"]
    return float(said["solver"] == str(tiny.BEHAVIOURS[1](task % 10)))


def test_a_trainer_tunes_one_agent_of_a_system_by_sft(server: Server, store: LightningStore, tmp_path: Path) -> None:
    sft = SFT(
        model_dir=server.folder, model_server_url=server.url, run_dir=tmp_path / "run", prompts_per_step=4, group_size=4, max_steps=1,
        agent_match="^solver$", metrics=["tensorboard"], **SMALL,
    )  # fmt: skip
    agl.Trainer(algorithm=sft, store=store, strategy="shm", n_runners=2, tracer=agl.OtelTracer()).fit(answer, list(tiny.TRAIN_NUMBERS[:6]))
    (report,) = sft.reports
    assert (report.rollouts, report.model_calls, report.kept, report.trajectories) == (16, 32, 8, 8)
    assert report.refused == {"other_agent": 16, "not_in_top": 8}
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))

    async def steps() -> list[agl.TrainingStep]:
        (run,) = [run for run in await store.training_runs() if run.algorithm == "sft"]
        return await store.training_steps(run.run_id, version=report.next_version)

    (step,) = asyncio.run(steps())
    assert (step.version_before, step.version_after, step.attempts) == ("1", "2", report.attempts)


def test_a_trainer_trains_one_agent_of_a_system_by_grpo(server: Server, store: LightningStore, tmp_path: Path) -> None:
    grpo = GRPO.from_options(
        model_dir=server.folder, model_server_url=server.url, weights_dir=tmp_path / "weights", run_dir=tmp_path / "run", max_steps=1,
        prompts_per_step=4, group_size=4, agent_match="^solver$", metrics=[], probe_tolerance=1e-3,
    )  # fmt: skip
    agl.Trainer(algorithm=grpo, store=store, strategy="shm", n_runners=2, tracer=agl.OtelTracer()).fit(answer, list(tiny.TRAIN_NUMBERS[:6]))
    (report,) = grpo.reports
    assert (report.rollouts, report.model_calls, report.trajectories, report.refused) == (16, 32, 16, {"other_agent": 16})
    assert (report.next_version, report.off_policy, report.max_ratio_error < 1e-4) == ("2", 0, True)


async def observed(store: LightningStore, reward: float) -> str:
    """Store a rollout as adoption creates it: without a runner, and with no count of its spans."""
    begun = await store.start_rollout(437, mode="production")
    ids: dict[str, Any] = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}
    call = {
        conventions.LLM_CALL: 1,
        conventions.LLM_CHOICE: 0,
        conventions.LLM_PROMPT_TOKEN_IDS: [9, 10, 11],
        conventions.LLM_RESPONSE_TOKEN_IDS: [12, 13],
        conventions.LLM_RESPONSE_LOGPROBS: [-0.5, -0.25],
    }
    graded = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): reward}
    await store.add_many_spans(
        [
            Span.from_attributes(**ids, sequence_id=1, name=conventions.SPAN_LLM, attributes=call),
            Span.from_attributes(**ids, sequence_id=2, name=conventions.SPAN_ANNOTATION, attributes=graded),
        ]
    )
    await store.update_attempt(*ids.values(), status="succeeded")
    return begun.rollout_id


async def test_offline_rollouts_are_trained_on_once_and_nothing_is_enqueued(server: Server, store: LightningStore, tmp_path: Path) -> None:
    good, bad = [await observed(store, 1.0) for _ in range(3)], [await observed(store, 0.0) for _ in range(3)]
    before = (await store.statistics()).get("total_rollouts")
    given: dict[str, Any] = {"model_dir": server.folder, "model_server_url": server.url, "run_dir": tmp_path / "run", **SMALL}
    reports = await SFT(**given, offline_mode="production", max_steps=4).train(store, [])
    assert [(report.rollouts, report.kept) for report in reports] == [(6, 3)], "one round: then there is nothing new"
    assert sorted(rollout_id for rollout_id, _ in reports[0].attempts) == sorted(good)
    assert set(reports[0].rollout_ids) == {*good, *bad}
    more = [await observed(store, reward) for reward in (0.0, 1.0)]
    again = await SFT(**given, offline_mode="production", max_steps=4).train(store, [])
    assert [report.step for report in again] == [1, 2], "the run goes on"
    assert set(again[1].rollout_ids) == set(more) and again[1].kept == 1
    assert (await store.statistics()).get("total_rollouts") == (before or 0) + 2
