"""Malformed attributes of an agent's spans affect only its own attempt, in every form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.adapters import LlmProxyTraceToTriplet, TracerTraceToTriplet, rows_of, to_messages
from agl_otel.adapters.messages import image_urls
from agl_otel.adapters.records import FORMS, TOKEN_FORMS, Reading
from agl_otel.adapters.texts import conversation_at, messages_at
from agl_otel.adapters.tree import TraceTree
from agl_otel.cli.training_files import WRITERS, writing_rows
from agl_otel.spans.conversations import read_call
from agl_otel.spans.dialects import DIALECTS
from agl_otel.spans.emitted import find_final_reward
from agl_otel.spans.history import expand_texts
from agl_otel.types import Span
from agl_otel.types.columns import CallTexts, Traces
from agl_otel_hook import conventions
from tests.unit.adapters.spans import RECORDED, call, proxy_call, reward

DEEP = 20_000
HOSTILE: tuple[Any, ...] = (
    "[" * DEEP,
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "(" * 300 + ")" * 300,
    "9" * 5_000,
    "[" + "9" * 5_000 + "]",
    '["\\ud800"]',
    '[{"role": "user", "parts": [{"type": "text", "content": "\\udfff"}]}]',
    '[{"role": "user", "parts": ["no part"]}]',
    '[{"role": 1, "parts": [{"type": "image_url", "image_url": 5}]}]',
    '[{"role": "user", "parts": [{"type": "image_url", "image_url": {"url": 5}}, {"type": "uri"}]}]',
    '[{"role": "user", "parts": [{"type": "tool_call", "id": 7, "name": ["n"], "arguments": {"a": [1]}}]}]',
    '[{"role": "user", "content": {"a": 1}}]',
    '[{"role": "user", "content": ["a", 1]}]',
    '{"messages": 5, "choices": "x", "tools": [1]}',
    "[NaN, Infinity, 1e999]",
    "{'a': b'bytes'}",
    "[1, 2",
    "",
    float("nan"),
    float("inf"),
    1 << 62,
    -1,
    True,
    b"\xff\xfe",
    ["a", None, 5, b"\xff"],
    [[["deep"]]],
    {"a": {"b": b"\x00"}},
    {"role": "user"},
    [{"type": "image_url"}],
    [],
    None,
)  # fmt: skip


def recorded() -> Iterator[Span]:
    """One model call of every recording of another library's spans."""
    for path in sorted(RECORDED.rglob("*.json")):
        held = json.loads(path.read_text())
        for each in held["spans"] if isinstance(held, dict) else held:
            one = Span.model_validate(each)
            if read_call(one) is not None:
                yield one
                break


def calls() -> dict[str, Span]:
    """{dialect: a call in it}."""
    found: dict[str, Span] = {}
    for each in (call("c", 1, 2), proxy_call("p", 1, 2), *recorded()):
        model_call = read_call(each)
        assert model_call is not None
        found.setdefault(model_call.dialect.name, each)
    return found


CALLS = calls()
KEYS = (
    "gen_ai.prompt.0.role",
    "gen_ai.prompt.0.content",
    "gen_ai.prompt.1.content",
    "gen_ai.prompt." + "a." * 200 + "b",
    "gen_ai.prompt",
    "gen_ai.completion",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.system_instructions",
    "gen_ai.tool.definitions",
    "gen_ai.request.x.y",
    "tool.name",
    "tool.parameters",
    "llm.request.functions.0.parameters",
    "ai.prompt.messages",
    "ai.prompt.tools",
    "ai.response.toolCalls",
    "llm.input_messages.0.message.contents.0.message_content.type",
    "output.value",
    "llm.hosted_vllm.choices",
    "llm.hosted_vllm.messages",
    "prompt_token_ids",
    "response_token_ids",
    "logprobs.content",
    "gen_ai.usage.input_tokens",
    "gen_ai.agent.name",
    "agent.name",
    "agentops.task.output",
    "agentlightning.operation.input.messages",
    "agentlightning.operation.output.choices.0.token_ids",
    conventions.LLM_CALL,
    conventions.LLM_CHOICE,
    conventions.LLM_RETRY_OF,
    conventions.LLM_PREFIX_CALL,
    conventions.LLM_PREFIX_CHOICE,
    conventions.PROCESS,
    conventions.LLM_MESSAGES_CALL,
    conventions.LLM_MESSAGES_BEFORE,
    conventions.LLM_PROMPT_TOKEN_IDS,
    conventions.LLM_RESPONSE_LOGPROBS,
)


def hostile(base: Span, value: Any) -> list[Span]:
    """Make an attempt with `value` at every place of its spans, one span per place, and also within the dialect's own attributes."""
    renamed = base.model_copy(update={"rollout_id": "ro-bad", "attempt_id": "at-bad"})
    spans: list[Span] = []
    for number, key in enumerate((*KEYS, *base.attributes)):
        ids = {"span_id": f"s{number}", "parent_id": None, "sequence_id": number}
        spans.append(renamed.model_copy(update={**ids, "attributes": {**base.attributes, key: value}}))
        child = {**ids, "span_id": f"t{number}", "parent_id": f"s{number}", "name": "tool"}
        spans.append(
            renamed.model_copy(update={**child, "attributes": {"tool.name": "t", "tool.call.id": value, "tool.parameters": value}})
        )
    return spans


@pytest.fixture
def two(traces: Any, row: Any) -> Traces:
    """A rollout of each kind, both with a reward."""
    return traces.build(row(rollout="ro-good", attempt="at-good"), row(rollout="ro-bad", attempt="at-bad"))


def polite() -> list[Span]:
    own = [call("c", 1, 2), reward("r", 3, 1.0)]
    return [each.model_copy(update={"rollout_id": "ro-good", "attempt_id": "at-good"}) for each in own]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.mark.full
@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:24])
def test_no_value_of_an_attribute_stops_a_reader(dialect: str, value: Any) -> None:
    spans = hostile(CALLS[dialect], value)
    for read in (to_messages, TracerTraceToTriplet(), LlmProxyTraceToTriplet(), find_final_reward, TraceTree.from_spans):
        read(spans)  # pyright: ignore[reportArgumentType] - spans of a wrong type


def test_every_dialect_is_tried() -> None:
    assert {each.name for each in DIALECTS} <= CALLS.keys()


@pytest.mark.full
@pytest.mark.parametrize("form", sorted(FORMS.keys() - TOKEN_FORMS))
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:24])
def test_a_hostile_attempt_leaves_the_rows_of_others_as_they_are(form: str, value: Any, two: Traces, both: Path) -> None:
    """…in every form of spans, and what was read can be written in every kind of file."""
    reading = Reading(form=form)
    alone = rows_of(reading, two, polite()).rows
    beside: list[dict[str, Any]] = []
    for base in CALLS.values():
        rows = rows_of(reading, two, [*polite(), *hostile(base, value)]).rows
        assert [row for row in rows if row["rollout_id"] == "ro-good"] == alone
        beside += rows
    for ending in WRITERS:
        with writing_rows(both / f"rows{ending}") as write:
            write(beside)
    lines = [json.loads(line) for line in (both / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len(beside)


@pytest.mark.parametrize("value", [each for each in HOSTILE if isinstance(each, str)], ids=lambda value: value[:24])
def test_hostile_texts_in_columns_leave_other_calls_as_they_are(value: str) -> None:
    polite_texts = ('[{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]', '[{"role": "assistant", "parts": []}]')
    texts = CallTexts(
        instructions=["", value, ""],
        asked=[value, *[polite_texts[0]] * 2],
        answered=[value, value, polite_texts[1]],
        tools=[value] * 3,
        versions=[value] * 3,
        experts=[value] * 3,
        bridges=[value] * 3,
    )
    for row in range(3):
        image_urls(conversation_at(texts, row).prompt)
        messages_at(texts, row)
    places = [("ro", "at", "p", 1), ("ro", "at", "p", 2), ("ro-2", "at", "p", 1)]
    assert expand_texts(places, [value, value, polite_texts[0]], [0, 1, 0], [0, 1, 0])[2] == polite_texts[0]
