"""`agl-otel select` on a real stack, and what reads a selection: it has exactly its attempts, or says which are gone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs] - pyarrow ships no types
import pytest

from agl_otel.cli import main
from agl_otel.store import LightningStore
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.types import PromptTemplate, RolloutMode, RolloutStatus
from tests.clickhouse_server import ClickHouseServer
from tests.contract.store.test_export import call_of, reward_of
from tests.unit.test_docs import ROOT


class Cli:
    """The commands on the store, each with --json."""

    def __init__(self, store: LightningStore, capsys: pytest.CaptureFixture[str]) -> None:
        self._store, self._capsys = store, capsys

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return json.loads(self.text(*arguments, "--json", code=code))

    def text(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--store", self._store._source.address()])  # pyright: ignore[reportPrivateUsage]
        captured = self._capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out or captured.err


@pytest.fixture(scope="module", params=["chdb", pytest.param("server", marks=pytest.mark.full)])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightningStore]:
    """A stack over each engine."""
    with ExitStack() as opened:
        settings: dict[str, Any] = {}
        if request.param == "server":
            settings["clickhouse_url"] = opened.enter_context(ClickHouseServer(tmp_path_factory.mktemp("server"))).url()
        made = LightningStore(source=EmbeddedStack(settings=settings))
        yield made
        asyncio.run(made.close())


@pytest.fixture
def cli(store: LightningStore, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(store, capsys)


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A run of this test alone: the store is that of all tests."""
    return f"select-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8]}"


async def attempt(
    store: LightningStore,
    run: str,
    task: Any,
    reward: float | None = 1.0,
    *,
    status: RolloutStatus = "succeeded",
    mode: RolloutMode = "train",
    error: dict[str, str] | None = None,
    tool: str = "",
) -> str:
    """Return the id of a rollout that ended after one model call; `error` is an exception in a span, of a tool if that is named."""
    begun = await store.start_rollout(task, mode=mode, metadata={"run": run})
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.add_span(call_of(*ids, 1))
    if error is not None:
        failing = call_of(*ids, 2)
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool} if tool else {}
        event = {"name": "exception", "attributes": error}
        await store.add_span(
            type(failing).model_validate({**failing.model_dump(), "name": "work", "attributes": attributes, "events": [event]})
        )
    if reward is not None:
        await store.add_span(reward_of(*ids, 3, reward))
    await store.update_attempt(*ids, status="succeeded" if status == "succeeded" else "failed")
    return begun.rollout_id


def rows_of(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_what_a_query_returns_is_selected_and_exported_and_nothing_else(
    store: LightningStore, cli: Cli, tmp_path: Path, run_name: str
) -> None:
    async def fill() -> list[str]:
        return [await attempt(store, run_name, {"q": number}, number / 4) for number in range(5)]

    ids = asyncio.run(fill())
    listed = ", ".join(f"'{each}'" for each in (ids[3], ids[1]))
    query = (
        f"SELECT RolloutId, max(Duration) + 7 AS value FROM otel_traces WHERE RolloutId IN ({listed}) GROUP BY RolloutId ORDER BY 1 DESC"
    )
    table = tmp_path / "picked.jsonl"
    report = cli.run("select", "picked", "--sql", query, "--to", str(table))
    assert (report["selection"], report["attempts"], report["made"]["read"]) == ("picked@1", 2, 2)
    assert report["digest"] == hashlib.sha256(table.read_bytes()).hexdigest(), "a stranger checks it by sha256sum"
    rows = rows_of(table)
    assert [(row["rollout_id"], row["reward"], row["value"]) for row in rows] == [(ids[3], 0.75, 7.0), (ids[1], 0.25, 7.0)]
    exported = cli.run("export", str(tmp_path / "rows.jsonl"), "--selection", "picked")
    assert exported["selection"] == {"selection": "picked@1", "digest": report["digest"], "attempts": 2, "gone": {}}
    assert {row["rollout_id"] for row in rows_of(tmp_path / "rows.jsonl")} == {ids[1], ids[3]}
    pin = json.loads((tmp_path / "rows.jsonl.pin.json").read_text())
    assert pin["selection"] == ["picked@1", report["digest"]]
    cli.run("export", str(tmp_path / "again.jsonl"), "--rebuild", str(tmp_path / "rows.jsonl.pin.json"))
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "rows.jsonl").read_text()
    assert json.loads((tmp_path / "again.jsonl.pin.json").read_text())["selection"] == pin["selection"]


def test_a_name_without_options_shows_what_is_stored(store: LightningStore, cli: Cli, tmp_path: Path, run_name: str) -> None:
    first = asyncio.run(attempt(store, run_name, {"q": 1}))
    made = cli.run("select", run_name, "--run", run_name)
    asyncio.run(attempt(store, run_name, {"q": 2}))
    again = cli.run("select", run_name, "--run", run_name)
    assert (made["selection"], again["selection"]) == (f"{run_name}@1", f"{run_name}@2") and again["attempts"] == 2
    shown = cli.run("select", f"{run_name}@1", "--to", str(tmp_path / "one.parquet"))
    assert (shown["digest"], shown["made"]) == (made["digest"], made["made"])
    assert pq.read_table(tmp_path / "one.parquet").to_pylist()[0]["rollout_id"] == first
    assert cli.run("select", run_name)["selection"] == f"{run_name}@2"
    assert "there is no selection 'nobody'" in cli.text("select", "nobody", code=2)


def test_attempts_that_were_deleted_or_replaced_are_named_and_the_rest_is_taken(
    store: LightningStore, cli: Cli, tmp_path: Path, run_name: str
) -> None:
    async def fill() -> list[str]:
        return [await attempt(store, run_name, {"q": number}) for number in range(3)]

    async def change(deleted: str, replaced: str) -> None:
        await store.open()
        await store.queue.delete([deleted])
        again = await store.start_attempt(replaced)
        await store.update_attempt(replaced, again.attempt.attempt_id, status="succeeded")

    ids = asyncio.run(fill())
    cli.run("select", run_name, "--run", run_name)
    asyncio.run(change(ids[0], ids[1]))
    options = ("--selection", run_name)
    report = cli.run("export", str(tmp_path / "left.jsonl"), *options)
    assert report["selection"]["gone"] == {ids[0]: "deleted", ids[1]: "replaced"}
    assert [row["rollout_id"] for row in rows_of(tmp_path / "left.jsonl")] == [ids[2]]
    text = cli.text("export", str(tmp_path / "told.jsonl"), *options)
    assert f"2 attempts of {run_name}@1 left out, because of changes since: {ids[0]} was deleted; {ids[1]} has another latest" in text
    assert cli.run("select", run_name)["gone"] == report["selection"]["gone"]
    asyncio.run(change(ids[2], ids[1]))
    assert f"nothing is left of the selection {run_name}@1: 3 attempts" in cli.text("export", str(tmp_path / "no.jsonl"), *options, code=2)


def test_an_edited_table_is_refused_by_its_name(store: LightningStore, cli: Cli, tmp_path: Path, run_name: str) -> None:
    asyncio.run(attempt(store, run_name, {"q": 1}))
    cli.run("select", run_name, "--run", run_name)

    async def edit() -> None:
        held = await store.resources(f"selection-{run_name}")
        assert held is not None
        templates = {name: each.template for name, each in held.resources.items() if isinstance(each, PromptTemplate)}
        templates["rows"] = templates["rows"].replace('"reward":1.0', '"reward":0.0')
        made = {name: PromptTemplate(template=text, engine="jinja") for name, text in templates.items()}
        await store.publish(made, resources_id=f"selection-{run_name}", aside=True)

    asyncio.run(edit())
    why = f"the selection {run_name}@2 (resources selection-{run_name}) is damaged or was edited"
    assert why in cli.text("export", str(tmp_path / "x.jsonl"), "--selection", run_name, code=1)
    assert cli.run("select", f"{run_name}@1")["attempts"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--all", "--sql", "SELECT 1"], "--all and --sql both say"),
        (["--dry-run"], "--dry-run needs options"),
        (["--sql", "SELECT 1 AS a"], "the query returns a: it needs a column RolloutId"),
        (["--sql", "SELECT 'ro-1' AS RolloutId, 'x' AS Value"], "the Value 'x' of rollout 'ro-1': a number is needed"),
        (["--all", "--near", "0"], "--near"),
        (["--all", "--to", "table.csv"], "neither .jsonl nor .parquet"),
    ],
)
def test_options_that_select_nothing_are_refused(options: list[str], why: str, cli: Cli) -> None:
    assert why in cli.text("select", "x", *options, code=2)


def test_a_query_that_writes_is_refused(cli: Cli) -> None:
    assert "refused a query" in cli.text("select", "x", "--sql", "DROP TABLE otel_traces", code=1)


def test_two_answers_to_the_same_question_are_refused(cli: Cli, tmp_path: Path) -> None:
    assert "--selection and --run both say" in cli.text("export", str(tmp_path / "x.jsonl"), "--selection", "x", "--run", "y", code=2)


def test_failures_are_clustered_by_what_failed(store: LightningStore, cli: Cli, run_name: str) -> None:
    async def fill() -> dict[str, str]:
        missing = {"exception.type": "builtins.KeyError", "exception.message": "no order 'A-17'"}
        other = {"exception.type": "KeyError", "exception.message": "no order 'B-4'"}
        return {
            await attempt(store, run_name, {"q": 1}, 0.0, error=missing, tool="lookup"): "tool",
            await attempt(store, run_name, {"q": 2}, 0.0, error=other, tool="lookup"): "tool",
            await attempt(store, run_name, {"q": 3}, 0.0, error=missing): "no tool",
            await attempt(store, run_name, {"q": 4}, 0.0): "reply",
            await attempt(store, run_name, {"q": 5}, None, status="failed"): "verdict",
            await attempt(store, run_name, {"q": 6}, 1.0): "fine",
        }

    kinds = asyncio.run(fill())
    report = cli.run("select", run_name, "--run", run_name, "--below", "0.5")
    tool = "tool lookup: KeyError: no order <text>"
    assert report["clusters"][tool] == 2 and report["clusters"]["KeyError: no order <text>"] == 1 and report["attempts"] >= 5
    assert "reply: noted" in report["clusters"]
    (shown,) = [line for line in cli.text("select", run_name).splitlines() if "lookup" in line]
    assert "2" in shown
    one = cli.run("select", f"{run_name}-tool", "--run", run_name, "--cluster", "tool lookup", "--below", "0.5", "--per-cluster", "1")
    assert one["attempts"] == 1 and one["made"]["left_out"]["beyond_cluster"] == 1
    assert {"tool"} == {kinds[each.rollout_id] for each in asyncio.run(store.selection(f"{run_name}-tool")).rows}


def test_near_duplicates_of_an_earlier_task_are_left_out_and_the_most_valuable_come_first(
    store: LightningStore, cli: Cli, run_name: str
) -> None:
    words = "please tell me where my parcel is which was sent a week ago from the shop in the town by the sea to my aunt"

    async def fill() -> list[list[str]]:
        tasks = [
            ({"q": words}, (1, 1)),
            ({"q": words + " thanks"}, (0, 1)),
            ({"q": "what is two plus two"}, (0, 1)),
            ({"q": "alone"}, (1,)),
        ]
        return [[await attempt(store, run_name, task, float(reward)) for reward in rewards] for task, rewards in tasks]

    settled, copies, open_, alone = asyncio.run(fill())
    report = cli.run("select", run_name, "--run", run_name, "--near", "0.8", "--by-value")
    rows = asyncio.run(store.selection(run_name)).rows
    assert [(row.rollout_id, row.value) for row in rows] == [
        *((each, 0.25) for each in open_), *((each, 0.0) for each in settled), *((each, None) for each in alone)
    ]  # fmt: skip
    assert report["made"]["left_out"] == {"near_duplicate": len(copies)}
    none = cli.run("select", run_name, "--run", run_name, "--below", "0", code=1)
    assert none["made"]["options"] == {"run": run_name, "failed": True, "below": 0.0} and none["selection"] is None
    top = cli.run("select", run_name, "--run", run_name, "--by-value", "--per-task", "1", "--top", "2", "--dry-run")
    assert top["selection"] is None and top["attempts"] == 2 and top["made"]["left_out"] == {"beyond_task": 3, "beyond_top": 2}
    assert cli.run("select", run_name)["selection"] == f"{run_name}@1", "a dry run stores nothing"


def test_what_training_should_not_see_is_left_out_and_counted(store: LightningStore, cli: Cli, run_name: str) -> None:
    async def fill() -> list[str]:
        running = await store.start_rollout({"q": 0}, mode="train", metadata={"run": run_name})
        ended = [await attempt(store, run_name, {"q": 1}, mode=mode) for mode in ("train", "val")]
        return [running.rollout_id, *ended]

    ids = asyncio.run(fill())
    listed = ", ".join(f"'{each}'" for each in (*ids, "ro-gone"))
    query = f"SELECT arrayJoin([{listed}]) AS RolloutId"
    report = cli.run("select", run_name, "--sql", query)
    assert report["attempts"] == 1 and report["made"]["read"] == 4
    assert report["made"]["left_out"] == {"not_in_queue": 1, "not_ended": 1, "held_out": 1}
    assert cli.run("select", run_name, "--sql", query, "--over", "val")["attempts"] == 1
    replaced = f"SELECT '{ids[1]}' AS RolloutId, 'at-other' AS AttemptId"
    assert cli.run("select", run_name, "--sql", replaced, "--dry-run", code=1)["made"]["left_out"] == {"replaced": 1}


TOWNS = ("York", "Bath", "Leeds", "Truro", "Derby", "Ely")
WALK: list[tuple[str, tuple[float, ...], str]] = [
    *((f"Where is my order {n} from the shop in {town}?", (0.0, 1.0), f"no order '{n}'") for n, town in enumerate(TOWNS, 4711)),
    ("How do I send back a pair of shoes that I bought last week, please?", (0.0, 0.0), ""),
    ("How do I send back a pair of shoes that I bought last week, please? Thanks!", (0.0, 1.0), ""),
    ("May I pay by card at the door when the parcel comes?", (1.0, 1.0), ""),
    ("Which of your coats keep out the rain?", (1.0,), ""),
]
"""Tasks, the rewards of their attempts, and the error of the tool in those that earn nothing; without one the reply is what failed."""


def told(text: str) -> list[str]:
    """The lines of an output, with marks in place of dates and digests."""
    return [re.sub(r"read \d{4}-.*", "read …", re.sub(r"\b[0-9a-f]{64}\b", "…", line)) for line in text.splitlines()]


def test_the_walk_of_the_docs_is_played_and_prints_what_the_page_says(
    store: LightningStore, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "selection.md").read_text()

    async def fill() -> None:
        for task, rewards, error in WALK:
            for reward in rewards:
                raised = {"exception.type": "KeyError", "exception.message": error} if error and not reward else None
                await attempt(store, "support", {"question": task}, reward, error=raised, tool="lookup")

    asyncio.run(fill())
    monkeypatch.chdir(tmp_path)
    played = 0
    for block in re.findall(r"^```console\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        for typed, said in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE):
            _, *arguments = shlex.split(typed)
            if typed.startswith("sha256sum"):
                assert hashlib.sha256(Path(arguments[0]).read_bytes()).hexdigest() == asyncio.run(store.selection("hard")).digest
            elif arguments[0] in ("select", "export"):
                printed = told(cli.text(*arguments))
                assert [line for line in told(said) if line not in printed] == [], printed
            played += 1
    assert played >= 7
    (toml,) = re.findall(r"^```toml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert asyncio.run(store.selection(tomllib.loads(toml)["algorithm"]["selection"])).version == 1
