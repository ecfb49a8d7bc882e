"""`agl-otel rollouts show` on a real stack."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from agl_otel.cli import main
from agl_otel.queue.client import RolloutUpdate
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout, Event, RolloutConfig
from agl_otel_hook import conventions
from tests.contract.collector.otlp import request_of, span
from tests.contract.store.test_export import call_of, span_of

EVALUATED = {conventions.EVALUATION_LABEL: "so-so"}
CONFIGS = {
    "timeout": RolloutConfig(timeout_seconds=0.01),
    "unresponsive": RolloutConfig(unresponsive_seconds=0.01),
    "cancelled": RolloutConfig(),
}


@pytest.fixture(params=CONFIGS)
async def over(request: pytest.FixtureRequest, store: LightningStore) -> AttemptedRollout:
    """A rollout that is over, and that no runner has ended."""
    begun = await store.start_rollout({"question": 1}, config=CONFIGS[request.param])
    await store.add_many_spans([call_of(begun.rollout_id, begun.attempt.attempt_id, 1)])
    if request.param == "cancelled":
        await store.queue.update_rollouts([RolloutUpdate(rollout_id=begun.rollout_id, status="cancelled")])
    await store.wait([begun.rollout_id])
    return begun


@pytest.fixture
async def evaluated(store: LightningStore, begun: AttemptedRollout) -> AttemptedRollout:
    made = span_of(begun.rollout_id, begun.attempt.attempt_id, 1, "chat", {"gen_ai.conversation.id": "c-1"})
    event = Event(name=conventions.EVALUATION, attributes=EVALUATED, timestamp=time.time())
    await store.add_many_spans([made.model_copy(update={"events": [event]})])
    return begun


def test_conversations_and_unread_labels_of_an_attempt_are_shown(
    store: LightningStore, evaluated: AttemptedRollout, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["rollouts", "show", evaluated.rollout_id, "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    shown = capsys.readouterr().out
    assert "conversation c-1\n" in shown and "whose labels are no number: 1 × 'so-so'\n" in shown


def test_the_verdict_of_an_attempt_that_has_no_end_is_shown(
    store: LightningStore, over: AttemptedRollout, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of one that was killed with its runner."""
    with pytest.raises(SystemExit):
        main(["rollouts", "show", over.rollout_id, "--json", "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    shown = json.loads(capsys.readouterr().out)
    assert [attempt["end_time"] for attempt in shown["attempts"]] == [None]
    assert {name: verdict["kind"] for name, verdict in shown["verdicts"].items()} == {over.attempt.attempt_id: "unproven"}


@pytest.fixture
async def rewarded(store: LightningStore) -> AttemptedRollout:
    """A rollout that succeeded with a reward of a half."""
    question = "how many ships entered the harbour of Marseille in the year 1687, by the books of the port?"
    begun = await store.start_rollout({"question": question}, config=RolloutConfig())
    reward: dict[str, object] = {conventions.reward_name_key(0): "exact", conventions.reward_value_key(0): 0.5}
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.add_many_spans([call_of(*ids, 1), span_of(*ids, 2, conventions.SPAN_ANNOTATION, reward)])
    await store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="succeeded")
    return begun


@pytest.mark.parametrize(("columns", "whole"), [("80", False), ("", True)])
def test_a_list_of_rollouts_has_verdicts_and_rewards_on_lines_of_80_columns_and_is_whole_in_a_pipe(
    store: LightningStore,
    rewarded: AttemptedRollout,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    whole: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["rollouts", "ls", "--limit", "1", "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    _, heading, line = (line.rstrip() for line in capsys.readouterr().out.rstrip().split("\n"))
    assert heading.split()[:5] == ["rollout", "status", "verdict", "reward", "input"]
    assert line.split()[:6] == [rewarded.rollout_id, "succeeded", "unproven", "0.5", "how", "many"]
    assert (len(line) <= 80, "by the books of the port?" in line, "queued" in heading) == (not whole, whole, whole)


@pytest.mark.parametrize("command", [("traces", "show"), ("rollouts", "show"), ("feedback",)])
@pytest.mark.parametrize("name", ["trace", "conversation"])
def test_the_id_of_a_trace_or_conversation_names_its_rollout(
    store: LightningStore, strays: Strays, command: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [strays.known if name == "trace" else strays.conversation, *(["1"] if command == ("feedback",) else [])]
    with pytest.raises(SystemExit):
        main([*command, *given, "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    assert strays.rollout_of_known in capsys.readouterr().out


async def send(store: LightningStore, trace: bytes, rollout_id: str = "", conversation: str = "") -> None:
    headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
    made = request_of([span(values={conventions.CONVERSATION_ID: conversation} if conversation else {}, trace=trace)])
    if rollout_id:
        headers[conventions.HEADER_ROLLOUT_ID] = rollout_id
    (collector,) = (await (await store.open()).queue.describe()).collectors
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{collector}/v1/traces", data=made.SerializeToString(), headers=headers),
    ):
        pass


@dataclass
class Strays:
    """Trace ids, and a rollout id that only spans have."""

    alone: str
    known: str
    rollout_of_known: str
    conversation: str
    stray: str = "ro-stray"


@pytest.fixture
async def strays(store: LightningStore) -> Strays:
    alone, known = os.urandom(16), os.urandom(16)
    begun = await store.start_rollout({"question": 1})
    await send(store, alone)
    conversation = f"talk-{known.hex()}"
    await send(store, known, begun.rollout_id, conversation)
    await send(store, os.urandom(16), "ro-stray")
    return Strays(alone.hex(), known.hex(), begun.rollout_id, conversation)


@pytest.mark.parametrize("command", [("traces", "show"), ("rollouts", "show"), ("export", "x.jsonl", "--rollout")])
def test_an_id_that_the_queue_does_not_know_is_looked_for_among_the_spans(
    store: LightningStore,
    strays: Strays,
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(name: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*command, name, "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
        assert ended.value.code == 2
        return capsys.readouterr().err

    by_trace = told(strays.alone.upper())
    assert f"WHERE TraceId = '{strays.alone}'" in by_trace and "AGL_UNIDENTIFIED=adopt" in by_trace
    if command[0] == "export":
        assert f"is a trace of rollout {strays.rollout_of_known}: name that" in told(strays.known)
    assert f"WHERE RolloutId = '{strays.stray}'" in told(strays.stray)
    assert "there is no rollout 'ro-nosuch'; `agl-otel rollouts ls`" in told("ro-nosuch")
