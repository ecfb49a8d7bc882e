"""GRPO on offline rollouts: adopted traces of a product, and rollouts that another program enqueued."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_otel.algorithms.checked_files import with_checksum
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.groups import group_rollouts
from agl_otel.algorithms.grpo.objective import token_logprobs
from agl_otel.algorithms.grpo.policy import load_policy, load_weights
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.cli import main
from agl_otel.errors import DataError, UsageError
from agl_otel.store import LightningStore
from agl_otel.types import TRIAL, AttemptedRollout, AttemptStatus, Rollout, RolloutMode, RolloutQuery
from agl_otel.types.sampling import Contract, all_parameters
from agl_otel.types.selections import Selected, Selection
from agl_otel_hook import conventions
from tests.contract.algorithms.test_bad_input import make_policy, serving
from tests.contract.store.test_export import reward_of, span_of

PROMPT, GOOD, BAD = [9, 10, 11], [12, 13], [14, 15]


def logprobs(model: Any, response: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1]
    return token_logprobs(logits, torch.tensor(response)).tolist()


async def observed(
    store: LightningStore,
    model: Any,
    task: Any,
    response: list[int],
    mode: RolloutMode,
    *,
    trial: bool = False,
    status: AttemptStatus = "succeeded",
    rewarded: bool = True,
    prompt: list[int] = PROMPT,
) -> str:
    """Create a finished offline rollout; the response GOOD is rewarded, all others too, with 0, unless it is not `rewarded`."""
    begun = await store.start_rollout(task, mode=mode, metadata={TRIAL: "run"} if trial else None)
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    call: dict[str, Any] = {
        conventions.LLM_CALL: 1,
        conventions.LLM_CHOICE: 0,
        conventions.LLM_PROMPT_TOKEN_IDS: prompt,
        conventions.LLM_RESPONSE_TOKEN_IDS: response,
        conventions.LLM_RESPONSE_LOGPROBS: logprobs(model, response),
    }
    if mode != "production":  # adopted traces have no contract
        call[conventions.LLM_SAMPLING] = Contract.of({}, all_parameters(1.0, 64)).dumps()
    reward = [reward_of(*ids, 2, float(response == GOOD))] if rewarded else []
    await store.add_many_spans([span_of(*ids, 1, conventions.SPAN_LLM, call), *reward])
    await store.update_attempt(*ids, status=status)
    return begun.rollout_id


async def rate(store: LightningStore, by_task: Sequence[Sequence[str]], stepped: asyncio.Event) -> None:
    """Reward the opposite of what the agent did, of the second task after the first step."""
    for number, (good, bad) in enumerate(by_task):
        if number:
            await stepped.wait()
        await store.add_reward(0, rollout_id=good, source="bob")
        await store.add_reward(0, rollout_id=good, source="ann")
        await store.add_reward(1, rollout_id=bad, source="ann")


@pytest.mark.parametrize("mode", [pytest.param("production", id="adopted", marks=pytest.mark.full), pytest.param("test", id="injected")])
async def test_grpo_trains_on_offline_rollouts_once_and_enqueues_none(store: LightningStore, tmp_path: Path, mode: RolloutMode) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    model = load_policy(folder).model
    before = [sum(logprobs(model, response)) for response in (GOOD, BAD)]
    same = [await observed(store, model, "task", response, mode) for response in (GOOD, BAD, GOOD)]
    alone = [await observed(store, model, f"task {number}", response, mode) for number, response in enumerate((GOOD, BAD))]
    other = await observed(store, model, "task", BAD, "val")
    await observed(store, model, "task", BAD, mode, trial=True)
    paid = (await store.statistics()).get("total_rollouts")

    async def run() -> list[Any]:
        async with serving(folder) as url:
            grpo = GRPO.from_options(
                model_dir=folder, model_server_url=url, run_dir=tmp_path / "run", offline_mode=mode, max_steps=4, importance_cap=2.0,
                updates_per_step=1, metrics=[], sampling_policy="any" if mode == "production" else "refuse",
            )  # fmt: skip
            return await grpo.train(store, [])

    (report,) = await run()
    assert sorted(report.rollout_ids) == sorted([*same, *alone])
    assert other not in report.rollout_ids
    assert (report.trajectories, report.zero_variance_groups, report.refused, report.next_version) == (5, 0, {}, "2")
    assert report.max_ratio_error < 1e-4
    assert (await store.statistics()).get("total_rollouts") == paid
    load_weights(model, tmp_path / "run" / "checkpoints" / "step-000001")
    after = [sum(logprobs(model, response)) for response in (GOOD, BAD)]
    assert after[0] > before[0] and after[1] < before[1], "what was rewarded became likelier"

    more = [await observed(store, model, "another", response, mode) for response in (GOOD, BAD)]
    reports = await run()
    assert [each.step for each in reports] == [1, 2], "the run goes on with what is new"
    assert sorted(reports[1].rollout_ids) == sorted(more)


async def test_grpo_waits_for_the_rewards_that_it_trusts_and_takes_each_rollout_once(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    model = load_policy(folder).model
    before = sum(logprobs(model, BAD))
    by_task = [[await observed(store, model, task, response, "test") for response in (GOOD, BAD)] for task in ("one", "two")]

    stepped = asyncio.Event()

    async def run() -> list[Any]:
        async with serving(folder) as url:
            grpo = GRPO.from_options(
                model_dir=folder, model_server_url=url, run_dir=tmp_path / "run", offline_mode="test", max_steps=2, importance_cap=2.0,
                updates_per_step=1, metrics=[], reward_sources=["ann"], reward_wait_seconds=3600.0,
            )  # fmt: skip
            grpo.on_step = lambda _: stepped.set()
            return await grpo.train(store, [])

    reports, _ = await asyncio.gather(run(), rate(store, by_task, stepped))
    assert [sorted(report.rollout_ids) for report in reports] == [sorted(both) for both in by_task]
    assert [report.refused for report in reports] == [{}, {}]
    load_weights(model, tmp_path / "run" / "checkpoints" / "step-000002")
    assert sum(logprobs(model, BAD)) > before, "what ann rewarded became likelier"


@pytest.mark.full
async def test_sft_waits_for_the_rewards_that_it_trusts_and_takes_each_rollout_once(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    model = load_policy(folder).model
    before = sum(logprobs(model, BAD))
    by_task = [[await observed(store, model, task, response, "train") for response in (GOOD, BAD)] for task in ("one", "two")]
    stepped = asyncio.Event()

    async def run() -> list[Any]:
        async with serving(folder) as url:
            sft = SFT(
                model_dir=folder, model_server_url=url, run_dir=tmp_path / "run", offline_mode="train", max_steps=2, min_reward=0.5,
                top_fraction=None, metrics=[], reward_sources=["ann"], reward_wait_seconds=3600.0, credit="to_go",
            )  # fmt: skip
            sft.on_step = lambda _: stepped.set()
            return await sft.train(store, [])

    reports, _ = await asyncio.gather(run(), rate(store, by_task, stepped))
    assert [sorted(report.rollout_ids) for report in reports] == [sorted(both) for both in by_task]
    load_weights(model, tmp_path / "run" / "weights" / "2")
    assert sum(logprobs(model, BAD)) > before, "what ann rewarded became likelier"


async def test_sft_learns_what_feedback_corrects(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    policy = load_policy(folder)
    text = "7<|end|>"
    wanted = [*policy.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"], min(policy.stop_ids)]
    assert not set(wanted[:-1]) & policy.stop_ids, "what people write ends no turn"
    before = sum(logprobs(policy.model, wanted))
    corrected, distrusted, rewarded = [await observed(store, policy.model, "task", response, "test") for response in (BAD, BAD, GOOD)]
    tried = await store.rollouts(RolloutQuery(rollout_id_in=[corrected, distrusted, rewarded]))
    chosen = [
        Selected(rollout_id=each.rollout_id, attempt_id=each.attempt.attempt_id) for each in tried if isinstance(each, AttemptedRollout)
    ]
    await store.put_selection("corrected", chosen, {})
    await store.add_reward(rollout_id=corrected, source="ann", correction=text)
    await store.add_reward(rollout_id=distrusted, source="bob", correction="8")
    async with serving(folder) as url:
        sft = SFT(
            model_dir=folder, model_server_url=url, run_dir=tmp_path / "run", selection="corrected", max_steps=1, min_reward=0.5,
            top_fraction=None, metrics=[], corrections=True, reward_sources=["agent", "ann"],
        )  # fmt: skip
        (report,) = await sft.train(store, [])
    assert (report.kept, report.corrected, report.trajectories) == (1, 1, 2)
    assert [rollout_id for rollout_id, _ in report.attempts] == [rewarded, corrected]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds" / "1" / "rows.jsonl").read_text().splitlines()]
    assert [(row["rollout_id"], row["input_ids"]) for row in rows] == [(rewarded, PROMPT + GOOD), (corrected, PROMPT + wanted)]
    assert rows[1]["labels"] == [-100] * len(PROMPT) + wanted
    load_weights(policy.model, tmp_path / "run" / "weights" / "1")
    assert sum(logprobs(policy.model, wanted)) > before, "the correction became likelier"


async def test_sft_learns_from_corrections_alone_and_refuses_what_the_model_cannot_read(store: LightningStore, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    model = load_policy(folder).model
    good, strange = [await observed(store, model, "task", BAD, "test", rewarded=False, prompt=ids) for ids in (PROMPT, [9, 10, 5000])]
    tried = await store.rollouts(RolloutQuery(rollout_id_in=[good, strange]))
    chosen = [
        Selected(rollout_id=each.rollout_id, attempt_id=each.attempt.attempt_id) for each in tried if isinstance(each, AttemptedRollout)
    ]
    await store.put_selection("unrewarded", chosen, {})
    for rollout_id in (good, strange):
        await store.add_reward(rollout_id=rollout_id, source="ann", correction="7")
    async with serving(folder) as url:
        options: dict[str, Any] = {"selection": "unrewarded", "max_steps": 1, "min_reward": 0.5, "top_fraction": None, "metrics": []}
        (report,) = await SFT(
            model_dir=folder, model_server_url=url, run_dir=tmp_path / "run", corrections=True, **options
        ).train(store, [])  # fmt: skip
        assert (report.kept, report.corrected, [rollout_id for rollout_id, _ in report.attempts]) == (0, 1, [good])
        assert report.refused == {"no_reward": 2, "correction_without_prompt": 1} and report.next_version != report.weights_version
        with pytest.raises(DataError, match="nothing to choose from"):
            await SFT(model_dir=folder, model_server_url=url, run_dir=tmp_path / "without", **options).train(store, [])


@pytest.mark.parametrize("kind", [pytest.param(GRPO, id="grpo", marks=pytest.mark.full), pytest.param(SFT, id="sft")])
async def test_a_run_is_trained_on_a_selection_and_resumed_with_the_same_version(
    kind: type[GRPO | SFT], store: LightningStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    model = load_policy(folder).model
    name = f"trained-{kind.__name__}"
    observations: list[tuple[list[int], RolloutMode]] = [(GOOD, "train"), (BAD, "val"), (GOOD, "test")]
    picked = [await observed(store, model, "task", *each) for each in observations]
    failed = await observed(store, model, "task", GOOD, "train", status="failed")
    gone = await observed(store, model, "task", BAD, "train")
    await observed(store, model, "task", BAD, "train")

    async def select(ids: Sequence[str]) -> Selection:
        found = {each.rollout_id: each for each in await store.rollouts(RolloutQuery(rollout_id_in=list(ids)))}
        attempts = [each for rollout_id in ids if isinstance(each := found[rollout_id], AttemptedRollout)]
        rows = [Selected(rollout_id=each.rollout_id, attempt_id=each.attempt.attempt_id) for each in attempts]
        return await store.put_selection(name, rows, {})

    async def run(**more: Any) -> list[Any]:
        options: dict[str, Any] = {"selection": name, "run_dir": tmp_path / "run", "max_steps": 3, "metrics": [], **more}
        async with serving(folder) as url:
            if kind is GRPO:
                made = GRPO.from_options(model_dir=folder, model_server_url=url, importance_cap=2.0, updates_per_step=1, **options)
            else:
                made = SFT(model_dir=folder, model_server_url=url, min_reward=0.5, top_fraction=None, **options)
            reports = await made.train(store, [])
            assert made.stopped_because == f"there are no new rollouts in the selection {name}@1"
            return reports

    chosen = await select([*picked, failed, gone])
    await store.queue.delete([gone])
    (report,) = await run()
    assert sorted(report.rollout_ids) == sorted(picked), "and of any mode"
    assert f"1 of 5 attempts of {name}@1 are left out: {gone} (deleted)" in caplog.text
    assert f"1 of 5 attempts of {name}@1 did not succeed" in caplog.text
    pinned = json.loads((tmp_path / "run" / "selection.json").read_text())
    assert (pinned["selection"], pinned["digest"]) == (f"{name}@1", chosen.digest)
    later = await observed(store, model, "task", GOOD, "train")
    await select([*picked, later])
    assert [each.step for each in await run()] == [1], "it is resumed with version 1, which has nothing new"
    with pytest.raises(UsageError, match=f'selection .*"{name}" in run.json, "{name}@2" now'):
        await run(selection=f"{name}@2")
    (tmp_path / "run" / "selection.json").write_text(json.dumps(with_checksum({"selection": f"{name}@2", "digest": chosen.digest})))
    with pytest.raises(UsageError, match=r"was begun with a selection .* resume it on its own store"):
        await run()


def test_a_back_test_is_of_the_attempts_of_a_selection(store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    model = load_policy(folder).model

    async def fill() -> tuple[str, Selection]:
        ids = [await observed(store, model, "task", response, "train") for response in (GOOD, BAD, GOOD, BAD)]
        attempts = {each.rollout_id: each.attempt_id for each in await store.attempts(ids)}
        chosen = await store.put_selection("tested", [Selected(rollout_id=each, attempt_id=attempts[each]) for each in ids[:3]], {})
        await store.queue.delete([ids[0]])
        return ids[0], chosen

    deleted, chosen = asyncio.run(fill())
    address = store._source.address()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(SystemExit) as ended:
        main(["backtest", "--policy", str(folder), "--selection", "tested", "--json", "--store", address])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 4 and report["attempts"] == 2, "two attempts tell nothing"
    assert report["selection"] == {"selection": "tested@1", "digest": chosen.digest, "attempts": 3, "gone": {deleted: "deleted"}}


def test_tasks_with_one_rollout_form_one_group() -> None:
    rollouts = [Rollout(rollout_id=f"ro-{place}", input=task, start_time=1) for place, task in enumerate("abacd")]
    groups = group_rollouts(rollouts, first=3, step=2)
    assert [(group.number, group.step, list(group.rollout_ids)) for group in groups] == [
        (3, 2, ["ro-0", "ro-2"]),
        (4, 2, ["ro-1", "ro-3", "ro-4"]),
    ]
    assert all(group.whole for group in groups)
    assert group_rollouts([], first=0, step=1) == []


def test_options_that_conflict_with_offline_rollouts_are_named() -> None:
    with pytest.raises(UsageError, match='offline_mode = "production" enqueues nothing'):
        GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", offline_mode="production", resample_rounds=1)
