"""`agl-otel export` of what reviewers say: pairs by the mean of their reviews, and corrected answers as demonstrations."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agl_otel.store import LightningStore
from tests.contract.store.test_export import Cli, call_of, reward_of
from tests.unit.test_docs import ROOT, commands_in, with_run

TONE = "tone@1"


class Reviewed(NamedTuple):
    """An attempt that succeeded after two model calls of one conversation."""

    rollout_id: str
    attempt_id: str


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


async def reviewed(
    store: LightningStore, task: str, answer: str, *reviews: dict[str, Any], reward: float | None = 0.5, run: str | None = None
) -> Reviewed:
    mode, metadata = ("train", {"run": run}) if run else ("val", None)  # an export that names neither leaves val out
    begun = await store.start_rollout({"question": task}, mode=mode, metadata=metadata)
    made = Reviewed(begun.rollout_id, begun.attempt.attempt_id)
    said = [message("user", task)]
    for number, reply in enumerate(("let me think", answer), 1):
        span = call_of(*made, number)
        texts = {"gen_ai.input.messages": json.dumps(said), "gen_ai.output.messages": json.dumps([message("assistant", reply)])}
        span.attributes.update({**texts, "gen_ai.response.id": f"{made.rollout_id}-{number}"})
        await store.add_span(span)
        said = [*said, message("assistant", reply), message("user", "go on")]
    if reward is not None:
        await store.add_span(reward_of(*made, 3, reward))
    await store.update_attempt(*made, status="succeeded")
    for review in reviews:
        given: dict[str, Any] = {"rollout_id": made.rollout_id, "rubric": TONE, **review}
        await store.add_reward(**given)
    return made


def exported(cli: Cli, made: Sequence[Reviewed], target: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    which = [part for each in made for part in ("--rollout", each.rollout_id)]
    report = json.loads(cli.run(str(target), *which, *options, "--take", "incomplete", "--take", "unproven", "--json"))
    return report, [json.loads(line) for line in target.read_text().splitlines()]


@pytest.fixture
def cli(store: LightningStore, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(store, capsys)


def test_pairs_are_made_by_the_mean_of_the_last_reviews_under_a_rubric(store: LightningStore, cli: Cli, tmp_path: Path) -> None:
    async def fill() -> list[Reviewed]:
        return [
            await reviewed(store, "a", "split", {"source": "ann", "value": 1}, {"source": "bob", "value": 0}, reward=1.0),
            await reviewed(
                store, "a", "liked", {"source": "ann", "value": 0}, {"source": "ann", "value": 1}, {"source": "bob", "label": "pass"}
            ),
            await reviewed(store, "a", "other rubric", {"source": "ann", "value": 0, "rubric": "tone@2"}),
            await reviewed(store, "a", "not sure", {"source": "ann", "label": "not sure"}),
            await reviewed(store, "b", "alike", {"source": "ann", "value": 1}),
            await reviewed(store, "b", "alike, too", {"source": "ann", "value": 1}),
        ]

    made = asyncio.run(fill())
    report, rows = exported(cli, made, tmp_path / "pairs.jsonl", "--as", "openai_dpo", "--rubric", TONE)
    (pair,) = rows
    assert pair["preferred_output"][0]["content"] == "liked"
    assert pair["non_preferred_output"][0]["content"] == "split" and pair["input"]["messages"][0]["content"] == "a"
    assert report["refused"] == {"no_reward": 2, "no_pair": 4, "same_reply": 2} and report["rollouts_used"] == 2
    _, tokens = exported(cli, made[:2], tmp_path / "tokens.jsonl", "--as", "transitions", "--rubric", TONE)
    assert {row["rollout_id"]: row["reward"] for row in tokens} == {made[0].rollout_id: 0.5, made[1].rollout_id: 1.0}
    cli.run(str(tmp_path / "again.jsonl"), "--rebuild", str(tmp_path / "pairs.jsonl.pin.json"))
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "pairs.jsonl").read_text()


def test_a_corrected_answer_is_a_demonstration_in_place_of_the_last_reply(store: LightningStore, cli: Cli, tmp_path: Path) -> None:
    async def fill() -> list[Reviewed]:
        return [
            await reviewed(store, "a", "wrong", {"source": "ann", "value": 0, "correction": "right"}, reward=None),
            await reviewed(
                store, "b", "wrong", {"source": "ann", "correction": "first try"}, {"source": "ann", "correction": "second try"}
            ),
            await reviewed(store, "c", "fine", {"source": "ann", "correction": "worse"}, {"source": "ann", "value": 1}),
            await reviewed(store, "d", "fine", {"source": "ann", "value": 1}),
        ]

    made = asyncio.run(fill())
    report, rows = exported(cli, made, tmp_path / "shown.jsonl", "--as", "demonstrations")
    assert report["refused"] == {"no_correction": 2}
    first, second = sorted(rows, key=lambda row: row["messages"][0]["content"])
    assert first == {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "let me think", "weight": 0},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "right"},
        ]
    }
    assert second["messages"][-1]["content"] == "second try"
    assert exported(cli, made, tmp_path / "none.jsonl", "--as", "demonstrations", "--rubric", TONE)[1] == rows


def test_a_correction_of_a_response_replaces_that_reply(store: LightningStore, cli: Cli, tmp_path: Path) -> None:
    made = asyncio.run(reviewed(store, "a", "fine"))
    record: dict[str, Any] = {"source": "ann", "correction": "thought", "response_id": f"{made.rollout_id}-1"}
    asyncio.run(store.add_reward(**record))
    # The late pass finds a response's call half a minute later: here the attempt is named as it does then.
    asyncio.run(_placed(store, made, record))
    _, rows = exported(cli, [made], tmp_path / "shown.jsonl", "--as", "demonstrations")
    assert [each["messages"] for each in rows] == [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "thought"}]]


def test_a_correction_and_the_reply_that_it_corrects_are_a_pair_of_one_attempt(store: LightningStore, cli: Cli, tmp_path: Path) -> None:
    async def fill() -> list[Reviewed]:
        return [
            await reviewed(store, "a", "wrong", {"source": "ann", "correction": "right"}, reward=None),
            await reviewed(store, "b", "fine", {"source": "ann", "correction": "fine"}),
            await reviewed(store, "c", "fine", {"source": "ann", "correction": "worse"}, {"source": "ann", "value": 1}),
            await reviewed(store, "d", "good", {"source": "bob", "correction": "better", "rubric": "tone@2"}, reward=1.0),
            await reviewed(store, "d", "bad", reward=0.0),
        ]

    made = asyncio.run(fill())
    report, rows = exported(cli, made, tmp_path / "pairs.jsonl", "--as", "openai_dpo")
    asked = [{"role": "assistant", "content": "let me think"}, {"role": "user", "content": "go on"}]
    assert sorted((row["preferred_output"][0]["content"], row["non_preferred_output"][0]["content"]) for row in rows) == [
        ("better", "good"),
        ("good", "bad"),
        ("right", "wrong"),
    ]
    (pair,) = [row for row in rows if row["preferred_output"][0]["content"] == "right"]
    assert pair["input"]["messages"] == [{"role": "user", "content": "a"}, *asked]
    assert report["refused"] == {"no_other_attempt": 4, "unpaired_correction": 1, "same_reply": 2}, "an attempt in a pair is not refused"
    assert report["rollouts_used"] == 3

    def kept(*options: str) -> list[str]:
        found = exported(cli, made, tmp_path / "some.jsonl", "--as", "openai_dpo", "--force", *options)[1]
        return sorted(row["preferred_output"][0]["content"] for row in found)

    assert kept("--rubric", TONE) == ["right"]
    assert kept("--reward-source", "bob") == ["better"], "who is not trusted corrects nothing"
    assert kept("--min-reward", "1") == ["better"], "an attempt that its reward leaves out is in no pair"
    report, rows = exported(cli, made, tmp_path / "tokens.jsonl", "--as", "dpo")
    assert report["refused"]["correction_without_tokens"] == 2
    assert "--as openai_dpo pairs it with the reply as text" in report["remedies"]["correction_without_tokens"]
    asyncio.run(store.add_reward(rollout_id=made[0].rollout_id, source="ann", correction="on second thoughts"))
    cli.run(str(tmp_path / "again.jsonl"), "--rebuild", str(tmp_path / "pairs.jsonl.pin.json"))
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "pairs.jsonl").read_text(), "with the corrections that it had"


def test_a_correction_of_a_response_is_paired_with_that_reply(store: LightningStore, cli: Cli, tmp_path: Path) -> None:
    made = asyncio.run(reviewed(store, "a", "fine", {"source": "ann", "correction": "better"}))
    for number, text in ((1, "thought"), (2, "best")):
        asyncio.run(_placed(store, made, {"source": "ann", "correction": text, "response_id": f"{made.rollout_id}-{number}"}))
    _, rows = exported(cli, [made], tmp_path / "pairs.jsonl", "--as", "openai_dpo")
    assert [
        (len(row["input"]["messages"]), *(row[side][0]["content"] for side in ("preferred_output", "non_preferred_output"))) for row in rows
    ] == [
        (1, "thought", "let me think"),
        (3, "best", "fine"),
    ], "of two corrections of one reply the last counts"


async def _placed(store: LightningStore, made: Reviewed, fields: dict[str, Any]) -> None:
    from agl_otel.store.feedback import _Place, _request  # pyright: ignore[reportPrivateUsage]
    from agl_otel.types.feedback import Feedback

    connection = await store._open()  # pyright: ignore[reportPrivateUsage]
    await connection.writer.write_logs(_request(Feedback(**fields), _Place(*made)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rubric", "none@7"], "no review is stored under the rubric 'none@7'"),
        (["--rubric", TONE, "--reward", "exact"], "give one of them"),
        (["--rubric", TONE, "--reward-function", "m:f"], "give one of them"),
        (["--as", "demonstrations", "--min-reward", "1"], "demonstrations are chosen by"),
    ],
)
def test_options_that_contradict_are_refused(options: list[str], why: str, store: LightningStore, cli: Cli, tmp_path: Path) -> None:
    made = asyncio.run(reviewed(store, "a", "b", {"source": "ann", "value": 1}))
    assert why in cli.run(str(tmp_path / "x.jsonl"), "--rollout", made.rollout_id, *options, code=2)


def test_the_walk_of_the_docs_exports_pairs_and_demonstrations(
    store: LightningStore, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = with_run((ROOT / "docs" / "reviews.md").read_text(), "support-reviewed")
    typed = [shlex.split(each) for each in commands_in(page) if each.startswith("agl-otel export")]
    assert len(typed) == 2
    rubric = typed[0][typed[0].index("--rubric") + 1]

    async def fill() -> None:
        for answer, label in (("Sent.", "good"), ("What?", "bad")):
            value, correction = (1, "") if label == "good" else (0, "I have sent it again.")
            review = {"name": "primary", "source": "ann", "rubric": rubric, "label": label, "value": value, "correction": correction}
            await reviewed(store, "Where is my parcel?", answer, review, run="support-reviewed")

    asyncio.run(fill())
    monkeypatch.chdir(tmp_path)
    for _, _, *arguments in typed:
        cli.run(*arguments, "--take", "incomplete", "--take", "unproven")
    pairs, shown = ([json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()] for name in ("pairs", "shown"))
    said = [[pair[side][0]["content"] for side in ("preferred_output", "non_preferred_output")] for pair in pairs]
    assert said[-2:] == [["Sent.", "What?"], ["I have sent it again.", "What?"]]
    assert [each["messages"][-1]["content"] for each in shown] == ["I have sent it again."]
