"""Spans that emitters make with a tracer provider. In a process of its own, because the provider is global."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from agl_otel_hook import conventions

PROGRAM = """
import asyncio, json, sys, warnings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import agl_otel as agl

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

@agl.operation
def add(a, b=2, *rest, c, **more):
    agl.emit_message("inside")
    return {"sum": a + b}

@agl.operation(kind="slow")
async def slow(value):
    return [value, value]

@agl.operation
def broken(a):
    raise KeyError("gone")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")

    @agl.reward
    def grade(answer):
        return answer and 0.5

    @agl.reward
    async def grade_slowly():
        return 1

assert [w.category for w in caught] == [DeprecationWarning] * 2
assert add(1, 2, "x", c=[1, "y"], d={"e": True}) == {"sum": 3}
assert asyncio.run(slow("v")) == ["v", "v"]
for wrong in (lambda: broken(1), lambda: broken(1, 2, z=3)):
    try:
        wrong()
    except (KeyError, TypeError):
        pass
assert (grade(True), grade(None), asyncio.run(grade_slowly())) == (0.5, None, 1)
agl.emit_exception(ValueError("bad"), {"step": 3})
agl.emit_object({"a": 1})
agl.emit_annotation({"kept": "here"}, propagate=False)
spans = [
    {"name": s.name, "status": s.status.status_code.name, "attributes": dict(s.attributes), "events": [e.name for e in s.events],
     "parent": s.parent and s.parent.span_id, "id": s.context.span_id}
    for s in exporter.get_finished_spans()
]
print(json.dumps(spans))
"""


@pytest.fixture(scope="module")
def spans() -> list[dict[str, Any]]:
    """All spans of the program, in the order of their end."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def operations(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["attributes"].get(conventions.OPERATION_NAME) == name]


def inputs(**values: Any) -> dict[str, Any]:
    return {f"{conventions.OPERATION_INPUT}.{key.replace('__', '.')}": value for key, value in values.items()}


def test_a_call_becomes_a_span_with_bound_arguments_and_result(spans: list[dict[str, Any]]) -> None:
    (span,) = operations(spans, "add")
    assert span["name"] == conventions.SPAN_OPERATION
    assert span["attributes"] == {
        conventions.OPERATION_NAME: "add",
        **inputs(a=1, b=2, rest__0="x", c__0=1, c__1="y", more__d__e=True),
        f"{conventions.OPERATION_OUTPUT}.sum": 3,
    }
    (message,) = (span for span in spans if span["name"] == conventions.SPAN_MESSAGE)
    assert message["parent"] == span["id"]  # spans made inside are its children


def test_an_async_function_is_traced_until_it_returns(spans: list[dict[str, Any]]) -> None:
    (span,) = operations(spans, "slow")
    held = {conventions.OPERATION_NAME: "slow", "kind": "slow", **inputs(value="v"), conventions.OPERATION_OUTPUT: ["v", "v"]}
    assert span["attributes"] == held


def test_an_exception_is_recorded_and_raised(spans: list[dict[str, Any]]) -> None:
    first, second = operations(spans, "broken")
    assert (first["status"], first["events"]) == (second["status"], second["events"]) == ("ERROR", ["exception"])
    assert inputs(a=1).items() <= first["attributes"].items()
    assert inputs(args__0=1, args__1=2, kwargs__z=3).items() <= second["attributes"].items()  # the arguments do not fit the signature


def test_the_reward_decorator_emits_numbers_only(spans: list[dict[str, Any]]) -> None:
    values = [span["attributes"].get(conventions.reward_value_key(0)) for span in spans if span["name"] == conventions.SPAN_ANNOTATION]
    assert values == [0.5, 1.0]


def test_exceptions_and_objects_become_spans_unless_propagate_is_false(spans: list[dict[str, Any]]) -> None:
    (exception,) = (span for span in spans if span["name"] == conventions.SPAN_EXCEPTION)
    assert {"exception.type": "ValueError", "exception.message": "bad", "exception.escaped": True, "step": 3}.items() <= exception[
        "attributes"
    ].items()
    assert (exception["status"], "ValueError: bad" in exception["attributes"]["exception.stacktrace"]) == ("OK", True)
    assert [span["attributes"][conventions.OBJECT_JSON] for span in spans if span["name"] == conventions.SPAN_OBJECT] == ['{"a": 1}']
    assert not [span for span in spans if "kept" in span["attributes"]]
