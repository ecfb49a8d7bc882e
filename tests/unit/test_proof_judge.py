"""The judge of `make proof` finds what was lost, and only that: it can fail, in both directions."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.proof.campaign import ATTEMPTS, entries, rounds, shares
from tests.proof.judge import Case, Kill, Loss, Process, Sampled, Stored, Truth, is_lie, is_refusal, loss, processes, table
from tests.proof.plans import SCENARIOS

ENDED = [["beginning", 1], ["begun", 2, "a1"], ["ending", 3, "a1"], ["ended", 4, "a1"]]
OPEN = ENDED[:2]
CLOSING: list[Any] = ["closing", 9, "return"]
SAMPLED = Sampled("at-1", "n1", "reply-1", "b1", 5)


def lost(lines: list[list[Any]], *stored: str, signals: bytes = b"", kills: tuple[Kill, ...] = (), over: int | None = None) -> Loss:
    process = Process(7, 0, lines, signals, list(kills))
    return loss(Truth([process], (), over), {Stored(span_id) for span_id in stored})


@pytest.mark.parametrize(
    ("lines", "stored", "spans", "abandoned", "unclear"),
    [
        pytest.param([*ENDED, CLOSING], ("a1",), 0, 0, 0, id="stored"),
        pytest.param([*ENDED, CLOSING], (), 1, 0, 0, id="ended, not stored"),
        pytest.param(OPEN, (), 1, 0, 0, id="cut off in it"),
        pytest.param(ENDED[:3], (), 1, 0, 0, id="cut off while ending it"),
        pytest.param([*OPEN, CLOSING], (), 0, 1, 0, id="left open by a process that closes"),
        pytest.param(ENDED[:1], (), 0, 0, 1, id="cut off before it could say that it began"),
        pytest.param([*ENDED, ["leaving", 5, "mount"]], ("a1",), 0, 0, 1, id="stored, of one that could keep no ledger"),
        pytest.param([*ENDED, ["leaving", 5, "mount"]], (), 1, 0, 1, id="not stored, of one that could keep no ledger"),
        pytest.param([["born", 0, 7, 1, False], ["begun", 2, ""], CLOSING], (), 1, 0, 0, id="of a tracer that makes no spans"),
        pytest.param([["born", 0, 7, 1, True], ["begun", 2, ""], CLOSING], (), 0, 0, 0, id="of one that is not to make any"),
    ],
)
def test_a_span_is_lost_where_it_ended_or_was_cut_off_and_is_not_stored(
    lines: list[list[Any]], stored: tuple[str, ...], spans: int, abandoned: int, unclear: int
) -> None:
    found = lost(lines, *stored)
    assert (len(found.spans), found.abandoned, len(found.unclear)) == (spans, abandoned, unclear)


def test_an_open_span_of_a_process_that_got_sigterm_is_abandoned_and_of_one_that_was_then_killed_is_unclear() -> None:
    assert lost(OPEN, signals=bytes([signal.SIGTERM])).abandoned == 1
    both = lost(OPEN, signals=bytes([signal.SIGTERM]), kills=(Kill(7, 8, signal.SIGKILL),))
    assert (both.any, both.abandoned, len(both.unclear)) == (False, 0, 1)
    assert lost([*ENDED, *OPEN[:1]], signals=bytes([signal.SIGTERM])).any


def test_an_id_that_two_processes_drew_is_unclear_for_readers_take_one_span_of_an_id() -> None:
    both = [Process(pid, 0, [*ENDED, CLOSING]) for pid in (7, 8)]
    assert loss(Truth(both), {Stored("a1")}).unclear


def test_what_begins_when_the_attempt_is_over_is_not_lost() -> None:
    assert lost(OPEN, over=2).any
    assert not lost(OPEN, over=1).any


def test_a_call_is_lost_where_neither_the_callers_span_nor_the_reply_that_the_agent_got_is_stored() -> None:
    truth = Truth([], [SAMPLED])
    assert len(loss(truth, set()).calls) == 1
    assert not loss(truth, {Stored("b1")}).any  # cut off by the agent: recorded, without its reply
    assert loss(Truth([Process(7, 0, [["called", 6, "n1", "reply-1"]])], [SAMPLED]), {Stored("b1")}).calls
    assert not loss(Truth([Process(7, 0, [["called", 6, "n1", "reply-1"]])], [SAMPLED]), {Stored("b1", "reply-1")}).any


def test_a_lie_is_complete_with_a_loss_and_a_refusal_is_anything_else_without_one() -> None:
    gone, nothing, unclear, idle = lost(OPEN), lost([*ENDED, CLOSING], "a1"), lost(ENDED[:1]), Loss()
    assert [is_lie("complete", each) for each in (gone, nothing, unclear, idle)] == [True, False, False, False]
    assert [is_refusal("incomplete", each) for each in (gone, nothing, unclear, idle)] == [False, True, False, False]
    assert not is_lie("incomplete", gone) and not is_refusal("complete", nothing)
    cases = [Case("s", 0, "ro", "at", "anew", [], kinds=("incomplete", "complete"), losses=(each, each)) for each in (gone, nothing, idle)]
    cases.append(Case("s", 1, "ro", "at", "anew", [], kinds=("complete", "incomplete"), losses=(gone, nothing)))
    counted = table(cases)["all"]
    assert (counted.attempts, counted.lies, counted.whole, counted.complete, counted.idle) == (4, 2, 2, 1, 1)
    assert counted.share == 0.5


def test_notes_of_processes_are_read_to_their_last_whole_line_with_their_signals_and_kills(tmp_path: Path) -> None:
    (tmp_path / "7-100").write_text("".join(json.dumps(line) + "\n" for line in OPEN) + '["endi')
    (tmp_path / "7-100.signals").write_bytes(bytes([signal.SIGTERM]))
    (tmp_path / "7-300").write_text(json.dumps(OPEN[0]) + "\n")
    first, second = processes(tmp_path, [Kill(7, 200, signal.SIGKILL), Kill(8, 200, signal.SIGKILL), Kill(7, 50, signal.SIGKILL)])
    assert (first.lines, first.signals, len(first.kills), second.kills) == (OPEN, bytes([signal.SIGTERM]), 1, [])
    assert processes(tmp_path / "none", []) == []


def test_the_same_seed_draws_the_same_plans_and_every_round_has_one_fault() -> None:
    counts = shares(300, list(SCENARIOS))
    assert min(counts.values()) > 0
    drawn = entries(7, counts)
    assert drawn == entries(7, counts) != entries(8, counts)
    assert entries(7, {"child-killed": 1}, index=2)[0] == [each for each in drawn if each.scenario == "child-killed"][2]
    played = rounds(drawn)
    assert sorted((e.scenario, e.number) for some in played for e in some) == sorted((e.scenario, e.number) for e in drawn)
    assert all(len({entry.fault for entry in some}) == 1 for some in played)
    random.seed(0)
    assert drawn == entries(7, counts)


def test_a_campaign_has_500_attempts_by_baggage() -> None:
    assert shares(ATTEMPTS, list(SCENARIOS))["by-baggage"] >= 500
