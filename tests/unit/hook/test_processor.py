"""The attempt of a span that has no ids in the current context."""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_span_in_context

from agl_otel_hook.context import with_ids
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.processor import AttemptProcessor, key_of_attributes


def test_a_span_below_one_of_an_attempt_belongs_to_it_where_the_context_names_none() -> None:
    provider = TracerProvider()
    provider.add_span_processor(AttemptProcessor(Ledger(lambda: None), fallback=("ro-of-the-process", "at-1")))
    tracer = provider.get_tracer("server")
    request: Any = tracer.start_span("request", with_ids(("ro-1", "at-2"), Context()))
    below = tracer.start_span("below", set_span_in_context(request, Context()))
    other = tracer.start_span("other", with_ids(("ro-3", "at-4"), set_span_in_context(request, Context())))
    alone = tracer.start_span("alone", Context())
    made: list[Any] = [below, other, alone]
    found = [key_of_attributes(each) for each in made]
    assert found == [
        ("ro-1", "at-2"),
        ("ro-3", "at-4"),
        ("ro-of-the-process", "at-1"),
    ]
