"""The expanded size of an attempt's prefix-form calls is computed before any of them is expanded."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agl_otel.adapters.messages import whole_messages
from agl_otel.adapters.records import Reading, rows_of
from agl_otel.adapters.trajectories import CALL_REFUSALS, to_trajectories
from agl_otel.adapters.triplets import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agl_otel.errors import SpanShapeError
from agl_otel.spans.history import INPUT, MAX_CHARACTERS, MAX_TOKENS, Place, expand_texts
from agl_otel.types import Span
from agl_otel_hook import conventions
from tests.unit.adapters.conftest import CallRow, TracesBuilder
from tests.unit.adapters.spans import proxy_call

LARGE = 1 << 18  # token ids or characters of one call
MIB = 1 << 20


def peak(work: Callable[[], object]) -> int:
    """Peak memory in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forks(calls: int, prompt: int, *, rollout: str = "ro-1", process: str = "m1") -> list[CallRow]:
    """Calls that all continue the first one, so each copies its prompt."""
    first = CallRow(rollout=rollout, process=process, prompt=[7] * prompt)
    return [first, *(CallRow(rollout=rollout, process=process, call=call, prefix=(1, 0), prompt=[1]) for call in range(2, calls + 1))]


def spans_of(rows: list[CallRow]) -> list[Span]:
    return [
        proxy_call(
            f"s{row.process}{row.call}",
            row.call,
            row.call + 0.5,
            None,
            **{
                conventions.LLM_CALL: row.call,
                conventions.PROCESS: row.process,
                conventions.LLM_PROMPT_TOKEN_IDS: list(row.prompt),
                **({conventions.LLM_PREFIX_CALL: row.prefix[0], conventions.LLM_PREFIX_CHOICE: 0} if row.prefix[0] else {}),
            },
        ).model_copy(update={"rollout_id": row.rollout})
        for row in rows
    ]


@pytest.mark.parametrize("processes", [1, 3])
def test_trajectories_of_an_attempt_whose_prompts_are_too_many_tokens_are_refused(processes: int) -> None:
    calls = 1 + -(-MAX_TOKENS // LARGE) // processes + processes  # the attempt is over the bound, no process alone where there are several
    bomb = [row for process in range(processes) for row in forks(calls, LARGE, process=f"m{process}")]
    honest = forks(3, 10, rollout="ro-2")
    built = TracesBuilder().build(*bomb, *honest)
    made: list[Any] = []
    assert peak(lambda: made.append(to_trajectories(built))) < 64 * MIB
    (batch,) = made
    assert batch.refused == {"too_many_tokens": len(bomb)} and "too_many_tokens" in CALL_REFUSALS
    assert set(batch.rollout_id) == {"ro-2"}


def test_a_long_chain_is_taken_because_nothing_of_it_is_copied() -> None:
    chain = [CallRow(prompt=[7] * LARGE)]
    chain += [CallRow(call=call, prefix=(call - 1, 0), prompt=[1]) for call in range(2, MAX_TOKENS // LARGE + 10)]
    made: list[Any] = []
    assert peak(lambda: made.append(to_trajectories(TracesBuilder().build(*chain)))) < 64 * MIB
    assert not made[0].refused and made[0].calls.tolist() == [len(chain)]


def test_two_hundred_calls_of_32_000_tokens_are_taken_in_little_more_than_their_own_size() -> None:
    rows = forks(200, 32_000)
    built, made = TracesBuilder().build(*rows), list[Any]()
    assert peak(lambda: made.append(to_trajectories(built))) < 7 * 4 * 200 * 32_000  # prompts, and what is laid out of them
    assert not made[0].refused and len(made[0]) == 200 - 1 and made[0].calls.tolist()[0] == 2


def test_adapters_of_spans_name_the_attempt_that_is_too_large_and_expand_nothing() -> None:
    bomb = spans_of(forks(2 + MAX_TOKENS // LARGE, LARGE))
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):

        def refused(adapter: Any = adapter) -> None:
            with pytest.raises(SpanShapeError, match=r"attempt at-1 of rollout ro-1 .* tokens in all"):
                adapter.adapt(bomb)

        assert peak(refused) < 64 * MIB


def test_rows_of_other_attempts_are_made_where_one_is_too_large() -> None:
    rows = [*forks(2 + MAX_TOKENS // LARGE, LARGE), *forks(3, 10, rollout="ro-2")]
    found = rows_of(Reading(form="triplets"), TracesBuilder().build(*rows), spans_of(rows))
    assert found.refused == {"unreadable_spans": 1}
    assert [(row["rollout_id"], len(row["prompt"]["token_ids"])) for row in found.rows] == [("ro-2", 10), ("ro-2", 12), ("ro-2", 12)]


def message(text: str) -> str:
    return json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])


def test_messages_that_come_to_too_many_characters_are_left_out_before_they_are_written() -> None:
    calls = 2 + MAX_CHARACTERS // LARGE

    def places(attempt: str, count: int) -> list[Place]:
        return [("ro-1", attempt, "p", call) for call in range(1, count + 1)]

    asked = [message("x" * LARGE), *([message("y")] * (calls - 1)), message("a"), message("b")]
    made: list[list[str]] = []
    assert (
        peak(
            lambda: made.append(
                expand_texts(
                    [*places("at-1", calls), *places("at-2", 2)], asked, [0, *[1] * (calls - 1), 0, 1], [0, *[1] * (calls - 1), 0, 1]
                )
            )
        )
        < 16 * MIB
    )
    assert made[0][0] == asked[0] and set(made[0][1:calls]) == {""}
    assert [len(json.loads(text)) for text in made[0][calls:]] == [1, 2]


@pytest.mark.full
def test_many_small_messages_are_counted_too() -> None:
    """As lists they would take 8 bytes per message for each call."""
    many = json.dumps([0] * LARGE)
    calls = 2 + MAX_CHARACTERS // len(many)
    bomb = [
        proxy_call(
            f"s{call}",
            call,
            call + 0.5,
            None,
            **{conventions.LLM_CALL: call, INPUT: many if call == 1 else "[0]"},
            **({conventions.LLM_MESSAGES_CALL: 1, conventions.LLM_MESSAGES_BEFORE: LARGE} if call > 1 else {}),
        )
        for call in range(1, calls + 1)
    ]

    def refused() -> None:
        with pytest.raises(SpanShapeError, match=r"attempt at-1 of rollout ro-1 .* characters in all"):
            whole_messages(bomb, Counter())

    assert peak(refused) < 64 * MIB


def test_calls_that_share_only_their_beginning_count_what_they_share() -> None:
    """Their own text is not multiplied by the number of calls."""
    system, calls = message("be brief"), 2 * MAX_CHARACTERS // (1 << 24)
    asked = [json.dumps([*json.loads(system), *json.loads(message("x" * (1 << 20)))]), *([message("y" * (1 << 20))] * (calls - 1))]
    places: list[Place] = [("ro-1", "at-1", "p", call) for call in range(1, calls + 1)]
    whole = expand_texts(places, asked, [0, *range(1, calls)], [0, *[1] * (calls - 1)])
    assert all(len(json.loads(text)) == 2 for text in whole)
