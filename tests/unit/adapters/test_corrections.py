"""Which model call a correction is of."""

from __future__ import annotations

import json

from agl_otel.adapters.messages import corrected_calls
from agl_otel.adapters.reviews import Correction
from agl_otel.types import Span
from tests.contract.store.test_export import call_of

SECOND = 1_000_000_000


def conversation() -> list[Span]:
    """Return two calls, which ended at second 10 and at second 20."""
    spans: list[Span] = []
    for number, asked in enumerate(("first", "second"), 1):
        span = call_of("ro-1", "at-1", number)
        texts = {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": asked}]}])}
        span.attributes.update({**texts, "gen_ai.response.id": f"response-{number}"})
        spans.append(span.model_copy(update={"start_time": 10.0 * number - 1, "end_time": 10.0 * number}))
    return spans


def corrected(**given: Correction) -> list[tuple[str, str]]:
    """Return (response id, text) of the calls that are corrected; `any` names no response."""
    corrections = {"" if name == "any" else name.replace("_", "-"): each for name, each in given.items()}
    return [(str(call.span.attributes["gen_ai.response.id"]), text) for call, text in corrected_calls(conversation(), corrections)]


def test_a_correction_of_no_response_is_of_the_last_call_that_had_ended() -> None:
    assert corrected(any=Correction("better", 15 * SECOND)) == [("response-1", "better")]
    assert corrected(any=Correction("better", 20 * SECOND)) == [("response-2", "better")]


def test_where_no_call_had_ended_clocks_differ_and_it_is_of_the_last() -> None:
    assert corrected(any=Correction("better", 5 * SECOND)) == [("response-2", "better")]


def test_one_of_a_response_is_of_its_call_whenever_it_is_given() -> None:
    assert corrected(response_1=Correction("better", 30 * SECOND)) == [("response-1", "better")]
    both = {"response_1": Correction("later", 40 * SECOND), "any": Correction("earlier", 15 * SECOND)}
    assert corrected(**both) == [("response-1", "later")], "of several the first counts, which is the latest"
