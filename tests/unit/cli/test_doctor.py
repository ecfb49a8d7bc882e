"""Doctor's counts of an agent's model calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from agl_otel.cli.doctor import core_is_compiled, examine, tables_are_whole
from agl_otel.cli.once import FinishedAttempt
from agl_otel.types import AttemptedRollout, TraceStatus
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


def test_a_model_server_that_does_not_answer_is_named_as_the_cause() -> None:
    """Not that it gives no token ids, which cannot be known then."""
    found = once([CallRow(prompt=[], response=[], incomplete="upstream_error")])
    status = TraceStatus(status_code="ERROR", description="the model server http://127.0.0.1:8000 cannot be reached or broke off: refused")
    attributes = {**found.spans[0].attributes, conventions.LLM_INCOMPLETE: "upstream_error"}
    span = found.spans[0].model_copy(update={"status": status, "attributes": attributes})
    (finding,) = [each for each in examine(replace(found, spans=[span])) if each.what == "token ids come with them"]
    assert not finding.good
    assert "does not answer" in finding.remedy and "OPENAI_BASE_URL" in finding.remedy and "AGL_UPSTREAM_URL" in finding.remedy
    assert "return_token_ids" not in finding.remedy


def test_damaged_tables_are_named() -> None:
    assert tables_are_whole([{"store_problems": []}, {"error": "HTTP 401"}]).good
    finding = tables_are_whole([{"store_problems": ["part a is damaged"]}, {"store_problems": ["part a is damaged", "part b is damaged"]}])
    assert not finding.good and finding.reasons == ["part a is damaged", "part b is damaged"] and "make room" in finding.remedy


def test_advice_tells_how_to_get_the_compiled_core() -> None:
    assert core_is_compiled([{"core": "compiled"}, {"error": "an OpenTelemetry Collector"}]).remedy == ""
    advice = core_is_compiled([{"core": "compiled"}, {"core": "python"}])
    assert advice.good and advice.detail == "not in 1 of 2" and "make core" in advice.remedy
    chosen = core_is_compiled([{"core": "compiled"}, {"core": "python", "core_installed": True}])
    assert chosen.good and "unset AGL_CORE" in chosen.remedy and "make core" not in chosen.remedy
