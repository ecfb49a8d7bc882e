"""Doctor's counts of an agent's model calls."""

from __future__ import annotations

from typing import Any, cast

from agl_otel.cli.doctor import examine
from agl_otel.cli.once import FinishedAttempt
from agl_otel.types import AttemptedRollout
from agl_otel_hook import conventions
from tests.unit.adapters.conftest import CallRow, TracesBuilder
from tests.unit.adapters.spans import proxy_call


def details(once: FinishedAttempt) -> dict[str, tuple[bool, str]]:
    return {finding.what: (finding.good, finding.detail) for finding in examine(once)}


def once(rows: list[CallRow]) -> FinishedAttempt:
    traces = TracesBuilder().build(*rows)
    numbers: list[dict[str, Any]] = [{conventions.LLM_CALL: row.call, conventions.LLM_CHOICE: row.choice} for row in rows]
    spans = [proxy_call(f"s{n}", n, n + 1, **attributes) for n, attributes in enumerate(numbers)]
    return FinishedAttempt(cast("AttemptedRollout", traces.rollouts[0]), traces, spans)


def test_choices_of_one_call_count_as_one_and_give_advice() -> None:
    found = details(once([CallRow(choice=choice) for choice in range(3)] + [CallRow(call=2)]))
    assert found["its model calls pass through the proxy"] == (True, "2 calls")
    assert found["token ids come with them"] == (True, "2 of 2 calls")
    assert found["and log-probs"] == (True, "2 of 2 calls")
    assert found["each call asks for one choice"][0]


def test_a_call_with_one_choice_without_log_probs_counts_as_without() -> None:
    found = details(once([CallRow(choice=0), CallRow(choice=1, logprobs=[]), CallRow(call=2)]))
    assert found["token ids come with them"] == (True, "2 of 2 calls")
    assert found["and log-probs"] == (False, "1 of 2 calls")


def test_calls_of_one_choice_get_no_advice_on_choices() -> None:
    assert "each call asks for one choice" not in details(once([CallRow(), CallRow(call=2)]))
