"""Conversations that are continued by their sampled tokens: held against what the model server itself says that it had and sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_otel.proxy.bridge import FORMS
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel.types.bridges import UNBRIDGED
from agl_otel_hook import conventions
from tests.contract.proxy.stand import Stand, ask, proxy
from tests.otlp_receiver import OtlpReceiver
from tests.thinking_server import ThinkingServer

Json = dict[str, Any]


@asynccontextmanager
async def bridged(receiver: OtlpReceiver, server: ThinkingServer, bridge: Any = "keep") -> AsyncGenerator[Stand]:
    async with server, proxy(receiver, FixedUpstreams(Upstream(server.url, "policy", "key", bridge=bridge))) as stand:
        yield stand


async def converse(stand: Stand, turns: int = 3, *, first: str = "first", **options: Any) -> list[Json]:
    """An agent that goes on with what it got, as clients of OpenAI's do: text without thinking."""
    messages: list[Json] = [{"role": "user", "content": first}]
    for turn in range(turns):
        if options.get("stream"):
            chunks = [chunk async for chunk in await ask(stand.client(), messages, **options)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert all(FORMS[0] not in (chunk.model_extra or {}) for chunk in chunks)
        else:
            answer = await ask(stand.client(), messages, **options)
            assert FORMS[0] not in (answer.model_extra or {})
            text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"question {turn}"}]
    return messages


async def recorded(stand: Stand) -> list[Json]:
    """What each call's span says of its bridge."""
    calls = sorted(await stand.calls(), key=lambda call: int(call.attributes[conventions.LLM_CALL]))
    return [json.loads(str(call.attributes.get(conventions.LLM_BRIDGE, "{}"))) for call in calls]


def is_one(server: ThinkingServer) -> list[bool]:
    """For each call but the first, whether its prompt begins with the one before and its reply."""
    pairs = zip(server.sampled, server.sampled[1:], strict=False)
    return [later[: len(prompt) + len(reply)] == prompt + reply for (prompt, reply), (later, _) in pairs]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", FORMS)
async def test_a_conversation_stays_one_whatever_the_template_drops(receiver: OtlpReceiver, form: str, stream: bool) -> None:
    server = ThinkingServer(takes=(form,))
    async with bridged(receiver, server) as stand:
        tried = FORMS.index(form)  # a call for each field that the server does not heed
        messages = await converse(stand, 4 + tried, stream=stream)
        found = await recorded(stand)
    assert is_one(server) == [False] * tried + [True] * 3
    assert [each.get("refused") for each in found[1:]] == ["not_taken"] * tried + [None] * 3
    for (prompt, _), of_call, number in list(zip(server.sampled, found, range(1, 99), strict=False))[tried + 1 :]:
        asked = messages[: 2 * number - 1]
        alone = server.render(asked)
        new = server.render([{"role": "user", "content": asked[-1]["content"]}])
        assert prompt[-len(new) :] == new, "the new message is the template's"
        assert of_call["template"]["tokens"] == len(alone)
        assert of_call["template"]["shared"] == next(n for n, (a, b) in enumerate(zip(alone, prompt, strict=False)) if a != b)
        assert of_call["call"] == number - 1


async def test_without_the_resources_word_nothing_is_asked_or_sent(receiver: OtlpReceiver) -> None:
    server = ThinkingServer()
    async with bridged(receiver, server, "off") as stand:
        await converse(stand)
        assert await recorded(stand) == [{}, {}, {}]
    assert is_one(server) == [False, False]
    assert all(form not in request for request in server.requests for form in FORMS)


async def test_drop_leaves_thinking_out_as_the_template_does(receiver: OtlpReceiver) -> None:
    server = ThinkingServer()
    async with bridged(receiver, server, "drop") as stand:
        await converse(stand)
        assert [each.get("refused") for each in await recorded(stand)] == [None, "thinking", "thinking"]
    assert is_one(server) == [False, False]


async def test_a_server_that_refuses_the_field_is_asked_again_without_it(receiver: OtlpReceiver) -> None:
    server = ThinkingServer(takes=(), refuses=True)
    async with bridged(receiver, server) as stand:
        await converse(stand, 6)
        assert [each.get("refused") for each in await recorded(stand)] == [None, *["not_taken"] * 5]
    sent = [next((form for form in FORMS if form in request), None) for request in server.requests]
    assert sent == [None, FORMS[0], None, FORMS[1], None, FORMS[2], None, None, None], "each field once, then none"
    assert len(server.sampled) == 6


async def test_calls_at_once_try_no_field_in_vain(receiver: OtlpReceiver) -> None:
    server = ThinkingServer(takes=FORMS[1:2])
    async with bridged(receiver, server) as stand:
        await asyncio.gather(*(converse(stand, 2, first=f"first {number}") for number in range(4)))
        await converse(stand, 2, first="last")
        assert not (await recorded(stand))[-1].get("refused"), "four calls that tried the first field moved on by one"


async def test_without_tokenize_the_messages_are_sent(receiver: OtlpReceiver) -> None:
    server = ThinkingServer(renders=False)
    async with bridged(receiver, server) as stand:
        await converse(stand)
        assert [each.get("refused") for each in await recorded(stand)] == [None, "render", "render"]


def messages_of(text: str, *, after: Json | None = None, **more: Any) -> list[Json]:
    return [{"role": "user", "content": "first"}, {"role": "assistant", "content": text, **more}, after or {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("why", "messages", "options"),
    [
        ("edited", messages_of("reply 0."), {}),
        ("edited", messages_of("reply 0", refusal="no"), {}),
        ("edited", messages_of("reply 0", reasoning_content="other"), {}),
        ("unknown", [{"role": "user", "content": "another"}, *messages_of("reply 0")[1:]], {}),
        ("media", messages_of("reply 0", after={"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}), {}),
        ("prefill", messages_of("reply 0")[:2], {}),
        ("request", messages_of("reply 0"), {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
        ("own_ids", messages_of("reply 0"), {"extra_body": {"prompt_token_ids": [1, 2]}}),
        (None, messages_of("reply 0", reasoning_content="hm 0"), {"temperature": 0.3, "max_tokens": 7, "user": "u"}),
        (None, messages_of("", after={"role": "user", "content": [{"type": "text", "text": "b"}]}) and [
            {"role": "user", "content": "first"}, {"role": "assistant", "content": [{"type": "text", "text": "reply 0"}]},
            {"role": "user", "content": "b"}], {}),
    ],
)  # fmt: skip
async def test_what_the_agent_changed_is_not_bridged(receiver: OtlpReceiver, why: str | None, messages: list[Json], options: Json) -> None:
    assert why is None or why in UNBRIDGED
    server = ThinkingServer()
    async with bridged(receiver, server) as stand:
        await ask(stand.client(), messages[:1] if why != "unknown" else [{"role": "user", "content": "first"}])
        await ask(stand.client(), messages, **options)
        _, found = await recorded(stand)
    assert found.get("refused") == why
    assert is_one(server) == [why is None]


async def test_an_answer_that_was_cut_off_is_not_continued(receiver: OtlpReceiver) -> None:
    server = ThinkingServer()
    server.finish = "length"
    async with bridged(receiver, server) as stand:
        await converse(stand, 2)
        assert [each.get("refused") for each in await recorded(stand)] == [None, "cut"]


def test_the_docs_explain_every_reason() -> None:
    text = Path("docs/bridging.md").read_text()
    assert all(f"| `{why}` | {words} |" in text for why, words in UNBRIDGED.items())
