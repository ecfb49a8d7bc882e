"""A page of a conversation has each message once, and ends before it is too large."""

from __future__ import annotations

import json
from typing import Any

from agl_otel.spans.history import INPUT
from agl_otel.types import Span
from agl_otel.web.views import PAGE_CHARACTERS, Conversation
from agl_otel.web.views import _conversation_of as conversation_of  # pyright: ignore[reportPrivateUsage] - the service around it is not needed
from agl_otel_hook import conventions
from tests.unit.adapters.spans import proxy_call

CALLS = 600


def said(*texts: str) -> str:
    return json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts])


def call(number: int, asked: str, *, after: int = 0) -> Span:
    prefix = {conventions.LLM_MESSAGES_CALL: after, conventions.LLM_MESSAGES_BEFORE: 1} if after else {}
    return proxy_call(f"s{number}", number, number + 0.5, None, **{conventions.LLM_CALL: number, INPUT: asked, **prefix})


def pages_of(spans: list[Span], limit: int) -> list[Conversation]:
    pages, found = list[Conversation](), 0
    while not pages or found < pages[-1].total:
        pages.append(conversation_of(spans, found, limit))
        assert pages[-1].calls, "every page goes on"
        found += len(pages[-1].calls)
    return pages


def prompts_of(page: Conversation) -> list[list[Any]]:
    """As docs/rest.md says that they are put together."""
    prompts: list[list[Any]] = []
    for place, each in enumerate(page.calls):
        before = [*prompts[-1], *page.calls[place - 1].reply][: each.repeated] if place else []
        prompts.append([*before, *each.messages])
    return prompts


def test_what_calls_share_is_on_a_page_once() -> None:
    spans = [call(1, said("x" * 200_000)), *(call(number, said(f"{number}"), after=1) for number in range(2, CALLS + 1))]
    page = conversation_of(spans, 0, 1000)
    assert len(page.model_dump_json()) < 1_000_000 and len(page.calls) == page.total == CALLS
    assert [prompt[-1]["content"] for prompt in prompts_of(page)[1:]] == [f"{number}" for number in range(2, CALLS + 1)]
    assert {len(prompt[0]["content"]) for prompt in prompts_of(page)} == {200_000}
    second = conversation_of(spans, 300, 2)
    assert prompts_of(second) == prompts_of(page)[300:302] and [each.repeated for each in second.calls] == [1, 1]


def test_a_page_ends_before_it_is_too_large_and_the_next_one_goes_on() -> None:
    spans = [call(number, said(f"{number} " + "x" * 500_000)) for number in range(1, 41)]
    pages = pages_of(spans, 1000)
    assert all(len(page.model_dump_json()) < PAGE_CHARACTERS + 100_000 for page in pages) and len(pages) > 1
    assert [int(each.messages[0]["content"].split()[0]) for page in pages for each in page.calls] == list(range(1, 41))


def test_a_call_that_is_larger_than_a_page_is_one() -> None:
    spans = [call(number, said("x" * (PAGE_CHARACTERS + number))) for number in (1, 2)]
    assert [len(page.calls) for page in pages_of(spans, 10)] == [1, 1]
