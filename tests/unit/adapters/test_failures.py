from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from agl_otel.adapters.failures import LONGEST, REPLY, has_failed, named, normal, what_failed
from agl_otel.types import Attempt, AttemptStatus, Event, Span, TraceStatus, VerdictKind

KEY_ERROR = {"exception.type": "builtins.KeyError", "exception.message": "no order 'A-17' for 12 users"}


def span(
    name: str, attributes: dict[str, Any] | None = None, *, at: float = 1.0, parent: str = "", error: dict[str, Any] | None = None,
    status: tuple[Literal["OK", "ERROR"], str] = ("OK", ""),
) -> Span:  # fmt: skip
    made = Span.from_attributes(
        attributes=attributes or {}, name=name, span_id=name, parent_id=parent or None, start_time=at, end_time=at,
        status=TraceStatus(*status),
    )  # fmt: skip
    return made.model_copy(update={"events": [Event(name="exception", attributes=error, timestamp=at)] if error is not None else []})


def attempt(status: AttemptStatus = "succeeded", error: str | None = None) -> Attempt:
    return Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0, status=status, error=error)


def call(reply: str, finish: str = "stop", at: float = 1.0) -> Span:
    def messages(role: str, text: str) -> str:
        return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])

    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.finish_reasons": [finish],
        "gen_ai.input.messages": messages("user", "why?"), "gen_ai.output.messages": messages("assistant", reply),
    }  # fmt: skip
    return span(f"chat {at}", attributes, at=at)


TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "lookup"}


@pytest.mark.parametrize(
    ("spans", "given", "expected"),
    [
        ([call("x")], attempt("timeout", "after 60 s"), "timeout"),
        ([span("tool", TOOL, error=KEY_ERROR)], attempt(), "tool lookup: KeyError: no order <text> for <n> users"),
        (
            [span("tool", TOOL), span("http", at=2, parent="tool", error=KEY_ERROR), span("root", at=3, error=KEY_ERROR)],
            attempt(),
            "tool lookup: KeyError: no order <text> for <n> users",
        ),
        ([span("a", at=1, error=KEY_ERROR), span("b", at=2, error={"exception.type": "OSError"})], attempt(), "OSError"),
        ([span("search", {"gen_ai.operation.name": "retrieval"}, status=("ERROR", "no index 7"))], attempt(), "tool search: no index <n>"),
        ([span("x", {"error.type": "429"}, status=("ERROR", "slow down"))], attempt(), "429: slow down"),
        ([span("x", status=("ERROR", ""))], attempt(), "an error without a message"),
        ([span("agentlightning.exception", KEY_ERROR)], attempt(), "KeyError: no order <text> for <n> users"),
        ([call("x")], attempt("failed", "exit code 3"), "failed: exit code <n>"),
        ([call("x", at=1), call("y", "length", at=2)], attempt(), "finish reason: length"),
        ([call("x", "length", at=1), call("I do not know.", at=2)], attempt(), REPLY + "I do not know."),
        ([], attempt(), REPLY),
    ],
)
def test_what_failed_is_told_by_the_first_that_says_it(spans: list[Span], given: Attempt, expected: str) -> None:
    assert what_failed(spans, given, "complete") == expected


def test_a_verdict_is_what_failed_where_nothing_else_did() -> None:
    assert what_failed([call("fine")], attempt(), "incomplete") == "verdict: incomplete"


def test_a_circle_of_parents_ends() -> None:
    spans = [span("a", parent="b", error=KEY_ERROR), span("b", parent="a")]
    assert what_failed(spans, attempt(), "complete").startswith("KeyError")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file '/a/b.txt' not found", "file <text> not found"),
        ("open /srv/data/x.csv: 2 of 10", "open <path>: <n> of <n>"),
        ("GET https://example.org/a?b=1 failed", "GET <url> failed"),
        ("call call_8fA23bc9 at 0x7f3a, id 550e8400-e29b-41d4-a716-446655440000", "call <id> at <id>, id <id>"),
        ("it can't and won't", "it can't and won't"),
        ("\n  first\nsecond", "first"),
        ("key sk-abcdefgh12345678 refused", "key (secret-left-out) refused"),
        ("\x1b[31mred", "\\x1b[<n>mred"),
        ("", ""),
    ],
)
def test_what_differs_between_two_tries_becomes_a_mark(text: str, expected: str) -> None:
    assert normal(text) == expected


def test_replies_that_are_alike_are_one_cluster_under_the_name_of_the_first() -> None:
    replies = {
        "a": "I am sorry, but I cannot find the order 17 in our system",
        "b": "KeyError",
        "c": "I am sorry, but I cannot find the order 4711 in our system today",
        "d": "Paris",
        "e": "",
    }
    found = named({key: text if key == "b" else REPLY + text for key, text in replies.items()})
    assert found["a"] == found["c"] == "reply: I am sorry, but I cannot find the order <n> in our system"
    assert (found["b"], found["d"], found["e"]) == ("KeyError", "reply: Paris", "reply: none")


def test_the_name_of_a_cluster_is_short() -> None:
    (name,) = named({"a": REPLY + "word " * 100}).values()
    assert len(name) == LONGEST and name.endswith("…")


@pytest.mark.parametrize(
    ("verdict", "reward", "below", "failed"),
    [
        ("complete", None, None, False),
        ("unproven", 0.0, None, False),
        ("incomplete", 1.0, None, True),
        ("complete", 0.4, 0.5, True),
        ("complete", 0.5, 0.5, False),
        ("complete", None, 0.5, False),
    ],
)
def test_an_attempt_failed_by_its_status_verdict_or_reward(
    verdict: VerdictKind, reward: float | None, below: float | None, failed: bool
) -> None:
    assert has_failed("succeeded", verdict, reward, below) is failed
    assert has_failed("failed", verdict, reward, below)
