"""The history of a run of `improve` in REST and in headless Chromium: from a version of the set down to the attempts, and back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from agl_otel.adapters.gates import REFUSALS
from agl_otel.store import Store
from agl_otel.types import LLM, NamedResources, TrainingStage, TrainingStep
from agl_otel.types.selections import Selected
from tests.contract.web.browser import built, look
from tests.contract.web.conftest import Web
from tests.contract.web.reviewed import Made, make

RUN: Final = "improve-page"
SET: Final = "production-page"
TRAINED: Final = "grpo-page"
WINDOW: Final = 60
HOSTILE: Final = "<img src=x onerror='window.hacked=1'>\u202egnp"
GATE: Final = {"held_out_before": 0.25, "held_out_after": 0.5, "held_out_gain_low": 0.125, "held_out_gain_high": 0.375, "drift": 0.042}
GAINS: Final = {"backtest_gain": 0.08, "backtest_verdict": "better", "trusted_gain": -0.25, "trusted_verdict": "worse"}
CANARY: Final = {"canary_share": 0.1, "canary_begun": 40, "canary_rated": 34, "canary_mean": 0.625, "canary_promoted_mean": 0.5}
CYCLES: Final[list[tuple[str, str, dict[str, Any], bool]]] = [
    ("promoted", "", {**GATE, **GAINS, **CANARY}, True),
    ("refused", f"trusted_falls, drift, {HOSTILE}", {**GATE, **GAINS}, False),
    ("rolled_back", "canary_worse", {**GATE, **CANARY, "canary_mean": 0.125}, True),
]
"""(verdict, why, further metrics, whether there was a canary)."""


UNDER_WAY: Final = 4


def stage(number: int, name: str, start: float, **metrics: Any) -> TrainingStage:
    """A stage of a cycle that took a second."""
    about: dict[str, Any] = {"run_id": RUN, "algorithm": "improve", "step": number, "name": name, "resources_id": SET}
    return TrainingStage(**about, start_time=start, end_time=start + 1, metrics=metrics)


class Improved(NamedTuple):
    """What is stored."""

    made: list[Made]
    versions: list[tuple[str, str]]
    """Of the set before and after each cycle."""


async def improve(store: Store, made: list[Made]) -> list[tuple[str, str]]:
    """Publish, select and record as the loop does."""

    async def publish(slot: str, canary: str = "") -> str:
        llms: NamedResources = {"promoted": LLM(endpoint=f"http://{slot}/v1", model="policy")}
        if canary:
            llms[canary] = LLM(endpoint="http://canary/v1", model="policy", share=0.1)
        return str((await store.publish(llms, resources_id=SET, aside=True)).version)

    slot, now = "a", time.time() - 60  # the list of runs begins with the latest, and its store has those of other files
    before = await publish(slot)
    versions: list[tuple[str, str]] = []
    for number, (verdict, why, found, canary) in enumerate(CYCLES, 1):
        window = made[: WINDOW - number]
        kept = await store.put_selection(
            RUN, [Selected(rollout_id=each.rollout_id, attempt_id=each.attempt_id) for each in window], {"cycle": number}
        )
        if canary:
            await publish(slot, f"canary-{number:04d}")
        slot = f"b{number}" if verdict == "promoted" else slot
        after = await publish(slot) if canary else before
        metrics = {"verdict": verdict, "why": why, "selection": kept.selection, "training_run": f"{TRAINED}-{number}", **found}
        named: dict[str, Any] = {"run_id": RUN, "algorithm": "improve", "step": number, "resources_id": SET, "metrics": metrics}
        times: dict[str, Any] = {"start_time": now + 10 * number, "end_time": now + 10 * number + 6}
        attempts = [(each.rollout_id, "") for each in window]
        await store.record_step(TrainingStep(**named, **times, version_before=before, version_after=after, attempts=attempts))
        await store.record_stage(stage(number, "window", now))
        trained = TrainingStep(run_id=f"{TRAINED}-{number}", algorithm="grpo", step=1, **times, metrics={"reward_mean": 0.5})
        await store.record_step(trained)
        versions.append((before, after))
        before = after
    for each in (
        stage(UNDER_WAY, "window", now + 50, attempts=WINDOW, selection=f"{RUN}@3", version=before),
        stage(UNDER_WAY, "update", now + 51, training_run=f"{TRAINED}-3"),
        stage(UNDER_WAY, "gate", now + 52, why="", **GATE),
        stage(UNDER_WAY, "canary 1", now + 53, **CANARY),
    ):
        await store.record_stage(each)
    return versions


@pytest.fixture(scope="module")
def improved(web: Web) -> Improved:
    """Store rated attempts, and three cycles that learnt from them."""
    made = make(web, "product-page", [(f"What is {n} + 1?", f"It is {n + 1}.", [-0.1]) for n in range(WINDOW)])
    for each in made:
        assert web.rest("POST", "/feedback", {**each.named(), "source": "users", "value": 1.0, "text": "well said"}).status == 201

    async def record() -> list[tuple[str, str]]:
        async with await Store.connect(web.rest("GET", "/describe").json["queue"]) as store:
            return await improve(store, made)

    return Improved(made, asyncio.run(record()))


def test_a_run_of_improve_has_its_cycles_with_their_evidence(web: Web, improved: Improved) -> None:
    first, second, third, last = web.rest("GET", "/runs/cycles", {"run": RUN}).json
    assert {name: first[name] for name in (*GATE, *GAINS, *CANARY)} == {**GATE, **GAINS, **CANARY}
    assert (first["verdict"], first["reasons"], first["selection"]) == ("promoted", [], f"{RUN}@1")
    assert (first["training_run"], first["attempts"], first["resources_id"]) == (f"{TRAINED}-1", WINDOW - 1, SET)
    assert [(reason["key"], reason["text"], reason["alarm"]) for reason in second["reasons"]] == [
        ("trusted_falls", REFUSALS["trusted_falls"], True),
        ("drift", REFUSALS["drift"], False),
        (HOSTILE, HOSTILE, False),
    ]
    assert (second["canary_share"], third["canary_mean"], third["verdict"]) == (None, 0.125, "rolled_back")
    found = [(each["version_before"], each["version_after"]) for each in (first, second, third)]
    assert found == improved.versions and found[1][0] == found[1][1]
    assert (last["cycle"], last["verdict"], last["stage"], last["attempts"]) == (UNDER_WAY, "", "canary", WINDOW)
    assert {name: last[name] for name in (*GATE, *CANARY)} == {**GATE, **CANARY}
    assert (last["version_before"], last["version_after"]) == (found[2][1], found[2][1])
    assert web.rest("GET", "/runs/cycles", {"run": f"{TRAINED}-1"}).json == web.rest("GET", "/runs/cycles", {"run": "none"}).json == []
    [training] = web.rest("GET", "/runs/training", {"run": RUN}).json
    assert (training["algorithm"], training["steps"], training["promoted"]) == ("improve", 3, 1)


def test_the_span_of_a_cycle_is_found_by_its_ids(web: Web, improved: Improved) -> None:
    cycle = web.rest("GET", "/runs/cycles", {"run": RUN}).json[0]
    query = f"SELECT SpanName FROM otel_traces WHERE TraceId = '{cycle['trace_id']}' AND '{cycle['span_id']}' IN (SpanId, ParentSpanId)"
    rows = web.rest("POST", "/sql", {"query": f"{query} ORDER BY SpanName"}).json["rows"]
    assert rows == [["agentlightning.train.stage window"], ["agentlightning.train.step"]]


def test_a_step_leads_to_its_attempts_page_by_page(web: Web, improved: Improved) -> None:
    def page(**asked: Any) -> Any:
        return web.rest("GET", "/runs/steps/attempts", {"run": RUN, "step": 2, **asked})

    whole = page().json
    assert [each["rollout_id"] for each in whole["items"]] and whole["total"] == WINDOW - 2
    assert {(each["rollout_id"], each["attempt_id"]) for each in whole["items"]} == set(improved.made[: WINDOW - 2])
    assert page(limit=10, offset=50).json["items"] == whole["items"][50:]
    assert page(limit=1001).status == 400
    missing = page(step=9)
    assert missing.status == 404 and f"step 9 of run '{RUN}'" in missing.json["detail"]


def test_a_version_of_a_set_leads_to_the_cycle_that_published_it(web: Web, improved: Improved) -> None:
    found = web.rest("GET", "/runs/steps/publishing", {"resources_id": SET}).json
    assert [(each["run_id"], each["step"], each["verdict"]) for each in found] == [(RUN, 3, "rolled_back"), (RUN, 1, "promoted")]
    assert [(each["version_before"], each["version_after"]) for each in found] == [improved.versions[2], improved.versions[0]]
    assert web.rest("GET", "/runs/steps/publishing", {"resources_id": "none"}).json == []


@pytest.mark.full
def test_the_history_is_read_by_keyboard_and_leads_both_ways(web: Web, improved: Improved, tmp_path: Path) -> None:
    built()
    given: dict[str, Any] = {"url": web.url, "run": RUN, "set": SET, "trained": TRAINED, "versions": improved.versions, "window": WINDOW}
    given |= {"reasons": REFUSALS, "first": improved.made[0].rollout_id, "shots": str(tmp_path)}
    look("look_improve.py", given, seconds=300)
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"improve-light", "improve-dark", "improve-narrow", "version-light"}
