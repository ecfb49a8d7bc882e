"""`agl-otel export` on a real stack: write, rebuild, read with other options, and detect later changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs] - as below
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs] - pyarrow ships no types
import pytest

from agl_otel.adapters.records import REASONS
from agl_otel.adapters.remedies import REFUSED, SPLIT
from agl_otel.adapters.split_reasons import SPLIT_REASONS
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.cli import main
from agl_otel.store import LightningStore
from agl_otel.types import TRIAL, AttemptedRollout, RolloutMode, Span
from agl_otel.types.sampling import Contract, all_parameters
from agl_otel_hook import conventions

ASKED: list[dict[str, Any]] = [{"type": "text", "content": "my number is 42"}]
FORMS = ("trajectories", "transitions", "sft", "dpo", "tinker", "messages", "triplets", "openai", "openai_dpo")
SOUND: list[dict[str, Any]] = [{"type": "text", "content": "?"}, {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}]
PICTURE: list[dict[str, Any]] = [{"type": "text", "content": "what is it?"}, {"type": "input_image", "file_id": "file-1"}]
LEFT_OUT: list[dict[str, Any]] = [{"type": "text", "content": "3 messages of 900 characters are left out"}]


async def fill(
    store: LightningStore,
    value: float,
    *,
    asked: list[dict[str, Any]] | None = ASKED,
    mode: RolloutMode | None = None,
    run: str | None = None,
    trial: bool = False,
    response: Sequence[int] = (3, 4),
) -> AttemptedRollout:
    """A rollout that succeeded after one model call of our proxy, with a reward; None: the call without its messages."""
    begun = await store.start_rollout(
        {"question": 1}, mode=mode, metadata=({"run": run} if run is not None else {}) | ({TRIAL: "run"} if trial else {})
    )
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.add_many_spans([call_of(*ids, 1, asked, response), reward_of(*ids, 2, value)])
    await store.update_attempt(*ids, status="succeeded")
    return begun


async def without_reward(store: LightningStore) -> AttemptedRollout:
    """A rollout that succeeded after one model call, without a reward."""
    begun = await store.start_rollout({})
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.add_many_spans([call_of(*ids, 1)])
    await store.update_attempt(*ids, status="succeeded")
    return begun


def call_of(
    rollout_id: str, attempt_id: str, sequence: int, asked: list[dict[str, Any]] | None = ASKED, response: Sequence[int] = (3, 4)
) -> Span:
    messages = {
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": asked}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "noted"}]}]),
    }
    attributes: dict[str, Any] = {
        conventions.LLM_CALL: sequence,
        conventions.LLM_CHOICE: 0,
        conventions.LLM_PROMPT_TOKEN_IDS: [1, 2],
        conventions.LLM_RESPONSE_TOKEN_IDS: [*response],
        conventions.LLM_RESPONSE_LOGPROBS: [-0.5, -0.25],
        conventions.LLM_SAMPLING: Contract.of({}, all_parameters(1.0, 64)).dumps(),
        **(messages if asked is not None else {}),
    }
    return span_of(rollout_id, attempt_id, sequence, conventions.SPAN_LLM, attributes)


def reward_of(rollout_id: str, attempt_id: str, sequence: int, value: float) -> Span:
    attributes = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): value}
    return span_of(rollout_id, attempt_id, sequence, conventions.SPAN_ANNOTATION, attributes)


def span_of(rollout_id: str, attempt_id: str, sequence: int, name: str, attributes: dict[str, Any]) -> Span:
    start = 1_750_000_000.0 + sequence
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence,
        name=name,
        start_time=start,
        end_time=start,
    )


class Cli:
    def __init__(self, store: LightningStore, capsys: pytest.CaptureFixture[str]) -> None:
        self._store, self._capsys = store, capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["export", *arguments, "--store", self._store._source.address()])  # pyright: ignore[reportPrivateUsage]
        captured = self._capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out if code == 0 else captured.err


def test_what_grpo_would_refuse_of_the_rows_is_told_beside_them(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row at temperature 0, one of which a call has a top_p, and one that the training takes whole."""

    async def sampled(*asked: dict[str, Any]) -> str:
        begun = await store.start_rollout({}, mode="train")
        ids = (begun.rollout_id, begun.attempt.attempt_id)
        for number, agent in enumerate(asked, 1):
            call = call_of(*ids, number)
            contract = Contract.of(agent, all_parameters(1.0, 64)).dumps()
            more = {conventions.LLM_SAMPLING: contract, conventions.LLM_PROMPT_TOKEN_IDS: [[1, 2], [1, 2, 3, 4, 5]][number - 1]}
            await store.add_many_spans([call.model_copy(update={"attributes": {**call.attributes, **more}})])
        await store.add_many_spans([reward_of(*ids, len(asked) + 1, 1.0)])
        await store.update_attempt(*ids, status="succeeded")
        return begun.rollout_id

    asked: list[list[dict[str, Any]]] = [[{"temperature": 0}], [{}, {"top_p": 0.5}], [{}]]
    which = [part for each in asked for part in ("--rollout", asyncio.run(sampled(*each)))]
    cli, number = Cli(store, capsys), iter(range(9))
    report = json.loads(cli.run(str(tmp_path / f"{next(number)}.jsonl"), *which, "--json"))
    assert (report["rows"], report["refused"]) == (3, {})
    refused = {"greedy": 1, "sampling_differs": 1}
    fields = {"top_p": 1, "logprobs": 1}  # with it, nothing says of which distribution the log-probs are
    assert report["in_training"] == {"rows_without_calls": 1, "rows_with_fewer_calls": 1, "refused": refused, "differing": fields}
    text = cli.run(str(tmp_path / f"{next(number)}.jsonl"), *which)
    assert "made of 3 of 3 rollouts; the export refused nothing\n" in text
    assert "in training GRPO would refuse 1 row, and a part of 1 more; of their model calls: 1 greedy, 1 sampling_differs\n" in text
    assert f"  greedy: {REASONS['greedy']}. Remedy: {REFUSED['greedy']}\n" in text
    assert f"  sampling_differs: {REASONS['sampling_differs']}, by logprobs 1, top_p 1. Remedy: {REFUSED['sampling_differs']}\n" in text
    assert "GRPO" not in cli.run(str(tmp_path / f"{next(number)}.jsonl"), *which, "--as", "sft"), "it compares no log-probs"
    assert "GRPO" not in cli.run(str(tmp_path / f"{next(number)}.jsonl"), *which[-2:])


def test_why_an_attempt_became_several_rows_is_told(store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def talked() -> str:
        begun = await store.start_rollout({}, mode="train")
        ids = (begun.rollout_id, begun.attempt.attempt_id)
        for number, prompt in enumerate(([1, 2], [9, 9]), 1):
            call = call_of(*ids, number)
            more = {conventions.LLM_PROMPT_TOKEN_IDS: prompt}
            await store.add_many_spans([call.model_copy(update={"attributes": {**call.attributes, **more}})])
        await store.add_many_spans([reward_of(*ids, 3, 1.0)])
        await store.update_attempt(*ids, status="succeeded")
        return begun.rollout_id

    rollout_id, cli = asyncio.run(talked()), Cli(store, capsys)
    ((why, count),) = json.loads(cli.run(str(tmp_path / "0.jsonl"), "--rollout", rollout_id, "--json"))["breaks"].items()
    text = cli.run(str(tmp_path / "1.jsonl"), "--rollout", rollout_id)
    assert "1 row beside the first of an attempt, because a call does not go on from an earlier one:\n" in text
    assert f"  {count} {why}: {SPLIT_REASONS[why]}. Remedy: {SPLIT[why]}\n" in text


def test_export_is_pinned_rebuilt_compared_and_masked(store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, poor = (asyncio.run(fill(store, value)) for value in (1.0, 0.25))
    which = [part for each in (good, poor) for part in ("--rollout", each.rollout_id)]
    cli, target = Cli(store, capsys), tmp_path / "batch.jsonl"
    report = json.loads(cli.run(str(target), *which, "--json"))
    assert (report["rows"], report["refused"], report["form"]) == (2, {}, "trajectories")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["rollout_id"], row["reward"]) for row in rows] == [(good.rollout_id, 1.0), (poor.rollout_id, 0.25)]
    assert (rows[0]["prompt_ids"], rows[0]["response_ids"], rows[0]["logprobs"]) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert [message["content"] for message in rows[0]["messages"]] == ["my number is 42", "noted"]

    pin = str(tmp_path / "batch.jsonl.pin.json")
    cli.run(str(tmp_path / "again.jsonl"), "--rebuild", pin)
    assert (tmp_path / "again.jsonl").read_bytes() == target.read_bytes()
    other = json.loads(cli.run("--diff", pin, "--min-reward", "0.5", "--json"))
    assert (other["only_old"], other["same"], other["refused"]["new"], other["since_the_pin"]) == (1, 1, {"low_reward": 1}, [])
    assert "1 gone" in cli.run("--diff", pin, "--min-reward", "0.5")
    output = cli.run(str(tmp_path / "good.jsonl"), *which, "--min-reward", "0.5")
    assert "wrote 1 row to" in output and "made of 1 of 2 rollouts" in output
    assert "made of 1 of 2 rollouts; of their attempts and model calls were refused: 1 low_reward\n" in output
    assert "  low_reward: its reward is less than min_reward. Remedy: lower min_reward to keep more\n" in output

    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\naction = 'hash_text'\nrole = 'user'\ntext = '[0-9]+'\n")
    cli.run(str(tmp_path / "masked.parquet"), *which, "--as", "sft", "--mask", str(rules))
    table = pq.read_table(tmp_path / "masked.parquet").to_pydict()
    assert table["input_ids"] == [[1, 2, 3, 4]] * 2
    assert table["labels"] == [[-100, -100, 3, 4]] * 2
    assert "42" not in str(table["messages"])
    cli.run(str(tmp_path / "returns.jsonl"), *which, "--returns", "--discount", "0.5")
    earned = [json.loads(line) for line in (tmp_path / "returns.jsonl").read_text().splitlines()]
    assert [(row["returns"], row["token_returns"]) for row in earned] == [([1.0], [1.0, 1.0]), ([0.25], [0.25, 0.25])]
    for form in ("messages", "triplets", "dpo", "transitions", "openai", "openai_dpo", "tinker"):
        cli.run(str(tmp_path / f"{form}.jsonl"), *which, "--as", form)
    assert (tmp_path / "dpo.jsonl").read_text() == "", "both replies are the same"
    other = asyncio.run(fill(store, 0.0, response=[5, 6]))
    cli.run(str(tmp_path / "pairs.jsonl"), *which, "--rollout", other.rollout_id, "--as", "dpo")
    (pair,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    assert (pair["rollout_id"], pair["rejected_rollout_id"]) == (good.rollout_id, other.rollout_id)
    best = json.loads(cli.run(str(tmp_path / "best"), *which, "--as", "openai", "--top-fraction", "0.5", "--json"))
    assert (best["rows"], best["refused"]) == (1, {"not_in_top": 1})
    with pa.OSFile(str(tmp_path / "best" / "data-00000-of-00001.arrow")) as file:
        (chat,) = pa.ipc.open_stream(file).read_all().to_pylist()
    assert [message["content"] for message in chat["messages"]] == ["my number is 42", "noted"]
    cli.run(str(tmp_path / "best"), *which, "--as", "sft", "--by-call", "--discount", "0.5", "--force")
    output = cli.run(str(tmp_path), *which, "--as", "sft", code=2)
    assert "is there already and holds no data set" in output

    asyncio.run(store.add_span(reward_of(good.rollout_id, good.attempt.attempt_id, 3, 0.0)))
    output = cli.run(str(tmp_path / "never.jsonl"), "--rebuild", pin, code=1)
    assert f"rollout {good.rollout_id} was read up to sequence 2, and goes up to 3 now" in output
    assert not (tmp_path / "never.jsonl").exists()


async def fill_many(store: LightningStore) -> list[AttemptedRollout]:
    """Rollouts of many kinds: with and without messages, rewards, images and tools, the first without what later ones have."""
    kinds: list[dict[str, Any]] = [{"asked": None}, {}, {"asked": PICTURE}, {}, {"asked": LEFT_OUT}, {}]
    many = [await fill(store, number / 8, **kind) for number, kind in enumerate(kinds)]
    return [await without_reward(store), *many, await store.start_rollout({"question": 2})]


CASES = [
    *([name, "--as", form] for form in FORMS for name in ("x.jsonl", "x.parquet")),
    ["x", "--as", "messages"],
    ["x", "--as", "sft", "--by-call", "--discount", "0.5", "--min-reward", "0.2"],
    ["x.jsonl", "--as", "openai", "--top-fraction", "0.5"],
    ["x.jsonl", "--as", "triplets", "--best-of-group", "1", "--fill-reward", "0"],
    ["x.jsonl", "--adapter", "agl_otel.adapters:TraceToMessages", "--fill-reward", "0.1"],
    ["-", "--as", "messages"],
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_export_in_pages_is_that_of_all_at_once(
    case: list[str],
    many: Sequence[str],
    store: LightningStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, *options = case
    monkeypatch.chdir(tmp_path)
    which = [part for rollout_id in many[::-1] for part in ("--rollout", rollout_id)]

    def made(size: int) -> tuple[Any, ...]:
        monkeypatch.setattr("agl_otel.cli.export.PAGE_ROLLOUTS", size)
        with pytest.raises(SystemExit) as ended:
            main(["export", target, *which, *options, "--force", "--json", "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        if target == "-":
            return out, json.loads(err)
        pin = (tmp_path / f"{target}.pin.json").read_text()
        return content_of(tmp_path / target), json.loads(out), pin

    once = made(1000)
    assert made(1) == once
    assert made(3) == once


@pytest.fixture(scope="module")
def many(store: LightningStore) -> Sequence[str]:
    return [each.rollout_id for each in asyncio.run(fill_many(store))]


def content_of(target: Path) -> Any:
    """Of a table its schema and rows, whatever its row groups are; a file's text."""
    if target.suffix == ".parquet":
        table = pq.read_table(target)
    elif target.suffix:
        return target.read_text()
    else:
        with pa.OSFile(str(target / "data-00000-of-00001.arrow")) as file:
            table = pa.ipc.open_stream(file).read_all()
    return table.schema, table.to_pylist()


def test_a_batch_is_rebuilt_with_the_rewards_that_it_had(store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = asyncio.run(fill(store, 0.75))
    asyncio.run(store.add_reward(0.5, rollout_id=begun.rollout_id, source="ann"))
    cli, pin = Cli(store, capsys), str(tmp_path / "batch.jsonl.pin.json")
    cli.run(str(tmp_path / "batch.jsonl"), "--rollout", begun.rollout_id, "--reward-source", "ann")
    asyncio.run(store.add_reward(0.0, rollout_id=begun.rollout_id, source="ann"))
    cli.run(str(tmp_path / "again.jsonl"), "--rebuild", pin)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "batch.jsonl").read_bytes()
    assert json.loads((tmp_path / "again.jsonl").read_text())["reward"] == 0.5
    cli.run(str(tmp_path / "now.jsonl"), "--rollout", begun.rollout_id, "--reward-source", "ann")
    assert json.loads((tmp_path / "now.jsonl").read_text())["reward"] == 0.0
    other = json.loads(cli.run("--diff", pin, "--json"))
    assert other["since_the_pin"] and other["reward_mean"] == [0.0, 0.0], "what has come since is named, and counts there"


def test_a_batch_in_pages_is_rebuilt_compared_and_refused(
    store: LightningStore, many: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_otel.cli.export.PAGE_ROLLOUTS", 2)
    monkeypatch.chdir(tmp_path)
    cli = Cli(store, capsys)
    late = asyncio.run(fill(store, 0.75))
    which = [part for rollout_id in (*many, late.rollout_id) for part in ("--rollout", rollout_id)]
    cli.run("batch.jsonl", *which)
    cli.run("again.jsonl", "--rebuild", "batch.jsonl.pin.json")
    assert Path("again.jsonl").read_bytes() == Path("batch.jsonl").read_bytes()
    other = json.loads(cli.run("--diff", "batch.jsonl.pin.json", "--min-reward", "0.3", "--json"))
    monkeypatch.setattr("agl_otel.cli.export.PAGE_ROLLOUTS", 1000)
    assert other == json.loads(cli.run("--diff", "batch.jsonl.pin.json", "--min-reward", "0.3", "--json"))
    assert other["only_old"] and other["since_the_pin"] == []

    monkeypatch.setattr("agl_otel.cli.export.PAGE_ROLLOUTS", 2)
    asyncio.run(store.add_span(reward_of(late.rollout_id, late.attempt.attempt_id, 3, 0.0)))
    before = sorted(tmp_path.iterdir())
    output = cli.run("never.jsonl", "--rebuild", "batch.jsonl.pin.json", code=1)
    assert f"rollout {late.rollout_id} was read up to sequence 2, and goes up to 3 now" in output
    with pytest.raises(SystemExit):
        main(["export", "-", "--rebuild", "batch.jsonl.pin.json", "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    assert capsys.readouterr().out == "", "no row of a batch that is another one"
    assert "no attempt has a reward 'acuracy': there are primary" in cli.run("never.jsonl", *which, "--reward", "acuracy", code=2)
    (tmp_path / "mine.py").write_text(f"def last(row):\n    return 1 / (row['rollout_id'] != {max(late.rollout_id, *many)!r})\n")
    (tmp_path / "mine.py").replace(tmp_path.parent / "mine_late.py")
    assert "ZeroDivisionError" in cli.run("never.jsonl", *which, "--filter", f"{tmp_path.parent}/mine_late.py:last", code=1)
    assert sorted(tmp_path.iterdir()) == before


def test_rows_go_to_standard_output_and_the_report_to_standard_error(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = asyncio.run(fill(store, 1.0))
    with pytest.raises(SystemExit) as ended:
        main(["export", "-", "--rollout", begun.rollout_id, "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    written = capsys.readouterr()
    (row,) = map(json.loads, written.out.splitlines())
    assert (ended.value.code, row["rollout_id"]) == (0, begun.rollout_id)
    assert "wrote 1 row to standard output, made of 1 of 1 rollout" in written.err
    assert list(tmp_path.iterdir()) == []


def test_tasks_that_score_a_training_are_not_trained_on_unless_they_are_asked_for(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modes: tuple[RolloutMode | None, ...] = ("train", "val", "test", None)
    train, val, test, free = (asyncio.run(fill(store, 1.0, mode=mode)).rollout_id for mode in modes)
    cli, target = Cli(store, capsys), tmp_path / "batch.jsonl"

    def taken(*options: str) -> set[str]:
        cli.run(str(target), *options, "--force")
        return {json.loads(line)["rollout_id"] for line in target.read_text().splitlines()} & {train, val, test, free}

    assert taken() == {train, free}
    report = json.loads(cli.run(str(target), "--json", "--force"))
    assert set(report["remedies"]) == set(report["refused"])
    assert report["left_out"]["val"] >= 1 and report["left_out"]["test"] >= 1
    assert f"left out: {report['left_out']['val']} rollouts of mode val" in cli.run(str(target), "--force")
    assert taken("--mode", "val") == {val}
    assert taken("--rollout", val, "--rollout", train) == {train, val}
    assert "left out" not in cli.run(str(target), "--mode", "val", "--mode", "train", "--force")


def test_trials_are_not_trained_on_unless_one_is_asked_for(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, tried = (asyncio.run(fill(store, 1.0, mode="test", run="of trials", trial=trial)).rollout_id for trial in (False, True))
    cli, target = Cli(store, capsys), tmp_path / "batch.jsonl"

    def taken(*options: str) -> set[str]:
        cli.run(str(target), *options, "--force")
        return {json.loads(line)["rollout_id"] for line in target.read_text().splitlines()}

    assert taken("--run", "of trials", "--mode", "test") == {made}
    shown = cli.run(str(target), "--run", "of trials", "--mode", "test", "--force")
    assert "left out: 1 trials, made by `agl-otel run` and `doctor` (--rollout takes one by its id)" in shown
    assert taken("--rollout", tried) == {tried}


def test_the_rollouts_of_one_run_are_taken_by_its_id_or_folder(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run", algorithm="grpo", options={})
    folder.close()
    kinds: tuple[tuple[RolloutMode, str], ...] = (("train", folder.run_id), ("val", folder.run_id), ("train", f"other-{folder.run_id}"))
    train, val, other = (asyncio.run(fill(store, 1.0, mode=mode, run=run)).rollout_id for mode, run in kinds)
    cli = Cli(store, capsys)

    def taken(name: str, *options: str) -> set[str]:
        cli.run(str(tmp_path / name), *options)
        return {json.loads(line)["rollout_id"] for line in (tmp_path / name).read_text().splitlines()}

    assert taken("id.jsonl", "--run", folder.run_id) == {train}
    assert taken("folder.jsonl", "--run", str(tmp_path / "run")) == {train}
    assert taken("all.jsonl", "--run", folder.run_id, "--mode", "train", "--mode", "val") == {train, val}
    assert taken("other.jsonl", "--run", f"other-{folder.run_id}") == {other}
    assert "1 rollouts of mode val" in cli.run(str(tmp_path / "again.jsonl"), "--run", folder.run_id)
    assert "no rollout is of a run 'nosuch': `agl-otel runs ls`" in cli.run(str(tmp_path / "x.jsonl"), "--run", "nosuch", code=2)
    assert "--run and --rollout" in cli.run(str(tmp_path / "x.jsonl"), "--run", folder.run_id, "--rollout", train, code=2)
    assert not (tmp_path / "x.jsonl").exists()


def test_what_is_there_already_is_replaced_with_force_only(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    which = ("--rollout", asyncio.run(fill(store, 1.0)).rollout_id)
    cli = Cli(store, capsys)
    for name in ("rows.jsonl", "rows"):
        target = tmp_path / name
        cli.run(str(target), *which)
        assert f"{target} is there already" in cli.run(str(target), *which, code=2)
        cli.run(str(target), *which, "--force")
    (tmp_path / "rows.jsonl").unlink()
    assert "rows.jsonl.pin.json is there already" in cli.run(str(tmp_path / "rows.jsonl"), *which, code=2)


def test_what_was_refused_is_reported_by_reward_and_task(store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = [asyncio.run(fill(store, value)) for value in (1.0, 0.25)]
    bare = asyncio.run(without_reward(store))
    which = [part for each in (*begun, bare) for part in ("--rollout", each.rollout_id)]
    output = Cli(store, capsys).run(str(tmp_path / "x.jsonl"), *which)
    assert "of the attempts without a reward" not in output, "it goes without saying"
    assert "of the attempts at task {}, 100 % were refused: no_reward" in output


@pytest.mark.parametrize(
    ("asked", "form", "rows", "refused"),
    [
        (None, "dpo", 0, {"no_reply": 2}),
        (None, "openai_dpo", 0, {"no_reply": 2}),
        (None, "sft", 2, {}),
        (LEFT_OUT, "dpo", 0, {"shortened": 2}),
        *((PICTURE, form, 0, {"no_image": 2}) for form in FORMS),
        *((SOUND, form, 0, {"other_media": 2}) for form in FORMS),
    ],
)
def test_calls_without_the_text_or_images_that_the_form_needs_make_no_row(
    asked: list[dict[str, Any]] | None,
    form: str,
    rows: int,
    refused: dict[str, int],
    store: LightningStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = [asyncio.run(fill(store, value, asked=asked)) for value in (1.0, 0.25)]
    which = [part for each in begun for part in ("--rollout", each.rollout_id)]
    report = json.loads(Cli(store, capsys).run(str(tmp_path / "x.jsonl"), *which, "--as", form, "--json"))
    assert (report["rows"], report["refused"], report["without_messages"]) == (rows, refused, rows)


def test_wrong_use_is_reported(store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(store, capsys)
    assert "neither .jsonl nor .parquet" in cli.run(str(tmp_path / "x.csv"), code=2)
    assert "name a FILE" in cli.run(code=2)
    assert "there is no folder" in cli.run(str(tmp_path / "nosuch" / "x.jsonl"), code=2)
    target = str(tmp_path / "x.jsonl")
    assert "'--agent-match': '(' is no regular expression" in cli.run(target, "--agent-match", "(", code=2)
    rewarded = asyncio.run(fill(store, 1.0)).rollout_id  # others of this store have rewards of other names
    assert "no attempt has a reward 'acuracy': there are primary" in cli.run(target, "--rollout", rewarded, "--reward", "acuracy", code=2)
    assert "'--fill-reward': nan is no finite number" in cli.run(target, "--fill-reward", "nan", code=2)
    assert "there is no rollout 'ro-nosuch'" in cli.run(target, "--rollout", "ro-nosuch", code=2)
    (tmp_path / "taken.jsonl").mkdir()
    assert "taken.jsonl cannot be written: Is a directory" in cli.run(str(tmp_path / "taken.jsonl"), code=2)
    assert "/dev/full is there already and holds no data set" in cli.run("/dev/full", code=2)
    (tmp_path / "rules.toml").write_text("[[rule]]\naction = 'burn'\n")
    assert "action = 'burn'" in cli.run(str(tmp_path / "x.jsonl"), "--mask", str(tmp_path / "rules.toml"), code=2)
    (tmp_path / "rules.toml").write_text("[[rule]]\naction = 'drop_text'\n")
    output = cli.run(str(tmp_path / "x.jsonl"), "--adapter", "json:loads", "--mask", str(tmp_path / "rules.toml"), code=2)
    assert "masking rules do not know the rows of an adapter of your own (json:loads)" in output
    (tmp_path / "pin").write_text("{}")
    assert "is no pin" in cli.run("--diff", str(tmp_path / "pin"), code=1)


def test_old_rollouts_are_read_with_an_adapter_a_reward_and_a_filter_of_the_users_own(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, poor = (asyncio.run(fill(store, value)) for value in (1.0, 0.25))
    cli, target = Cli(store, capsys), tmp_path / "batch.jsonl"
    cli.run(str(target), "--rollout", good.rollout_id, "--rollout", poor.rollout_id)
    pin = str(tmp_path / "batch.jsonl.pin.json")
    (tmp_path / "mine.py").write_text(
        "def adapt(spans):\n    return [{'names': [span.name for span in spans], 'reward': 'their own'}]\n"
        "def judge(spans):\n    return 0.5\n"
        "def best(row):\n    return row['reward'] >= 1\n"
        "def broken(row):\n    return row['no such field']\n"
    )
    mine = str(tmp_path / "mine.py")
    rewarded = json.loads(cli.run("--diff", pin, "--reward-function", f"{mine}:judge", "--json"))
    assert (rewarded["changed"], rewarded["reward_mean"]) == ({"reward": 2}, [0.625, 0.5])
    kept = json.loads(cli.run("--diff", pin, "--filter", f"{mine}:best", "--json"))
    assert (kept["only_old"], kept["same"], kept["refused"]["new"]) == (1, 1, {"filtered": 1})
    adapted = tmp_path / "adapted.jsonl"
    cli.run(str(adapted), "--rollout", good.rollout_id, "--adapter", f"{mine}:adapt")
    (row,) = map(json.loads, adapted.read_text().splitlines())
    assert (row["rollout_id"], row["reward"], row["own_reward"]) == (good.rollout_id, 1.0, "their own")
    assert row["names"] == [conventions.SPAN_LLM, conventions.SPAN_ANNOTATION]
    cli.run(str(tmp_path / "again.jsonl"), "--rebuild", f"{adapted}.pin.json")
    assert (tmp_path / "again.jsonl").read_bytes() == adapted.read_bytes()
    cli.run(str(tmp_path / "old.jsonl"), "--rollout", good.rollout_id, "--adapter", "agl_otel.adapters:TraceToMessages")
    assert "KeyError: 'no such field'" in cli.run("--diff", pin, "--filter", f"{mine}:broken", code=1)
    assert "has no 'nothing'" in cli.run("--diff", pin, "--filter", f"{mine}:nothing", code=2)
