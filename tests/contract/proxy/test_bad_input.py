"""Errors between an agent and a model server: each has one defined outcome, and no defect is recorded as valid."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agl_otel.net.front import HTTP2_PREFACE
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, ask, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

IDS = (conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS)


@pytest.mark.parametrize("body", [b"{not json", b"[1]", b'"text"', b"\xff\xfe", b"", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused_and_takes_no_call_number(stand: Stand, body: bytes) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{SCOPE}/v1/chat/completions", data=body) as answer:
        assert answer.status == 400 and "JSON object" in (await answer.json())["error"]["message"]
    assert await stand.calls() == []


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses", "embeddings", "messages/count_tokens"])
@pytest.mark.parametrize("value", ["{}", "[]", "1", '""', '{"a":1}', '"\\\\","\\""'])
async def test_a_small_body_of_too_many_values_is_refused_before_parsing(stand: Stand, model: ModelServer, path: str, value: str) -> None:
    body = gzip.compress(f'{{"model": "m", "messages": [{",".join([value] * 600_000)}]}}'.encode(), 1)
    headers = {"content-encoding": "gzip"}
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{SCOPE}/v1/{path}", data=body, headers=headers) as answer:
        said = (await answer.json())["error"]
        assert answer.status == 413 and "100000 JSON objects or 500000 JSON values" in said["message"], said
    assert model.requests == [] and await stand.calls() == []


async def test_a_text_may_hold_any_number_of_commas_and_brackets(stand: Stand, model: ModelServer) -> None:
    model.prompt_tokens = [5]
    text = '{"a": ["\\", "\\\\"", 1]},' * 200_000
    said = [{"role": "user", "content": text}, *HELLO]
    status, _, _ = await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m", "messages": said})
    assert status == 200 and model.requests[0]["messages"][0]["content"] == text


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
async def test_a_model_name_has_a_length_limit(stand: Stand, model: ModelServer, path: str) -> None:
    status, said, _ = await stand.post(f"{SCOPE}/v1/{path}", {"model": "m" * 1025, "messages": HELLO})
    assert status == 400 and "1024 characters" in said["error"]["message"] and len(str(said)) < 500
    assert model.requests == [] and await stand.calls() == []
    assert (await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m" * 1024, "messages": HELLO}))[0] == 200


async def test_fields_of_wrong_types_are_the_model_servers_to_refuse(stand: Stand, model: ModelServer) -> None:
    status, _ = await _raw(stand, {"messages": 3, "model": ["x"], "logprobs": "yes"})
    assert status == 500 and len(model.requests) == 1
    (span,) = await stand.calls()
    assert span.error and span.attributes["http.response.status_code"] == 500


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({"temperature": "0.3", "top_p": " 1e-1 ", "seed": "7", "max_tokens": "5"}, (0.3, 0.1, 7, 5)),
        ({"temperature": "warm", "top_p": "nan", "seed": "7.5", "max_tokens": "9" * 20}, (None, None, None, None)),
        ({"temperature": "٣", "top_p": "1" * 5000, "seed": [7], "max_tokens": "5.0"}, (None, None, None, 5)),
    ],
)
async def test_a_sampling_parameter_that_is_text_is_recorded_as_the_number_that_servers_read(
    stand: Stand, model: ModelServer, asked: dict[str, Any], recorded: tuple[Any, ...]
) -> None:
    await _raw(stand, {"model": "m", "messages": HELLO, **asked})
    assert {name: model.requests[0][name] for name in asked} == asked
    (span,) = await stand.calls()
    assert tuple(span.attributes.get(f"gen_ai.request.{name}") for name in asked) == recorded


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 4000, "9" * 20, "٣", "-1", "x"])
async def test_an_invalid_number_in_a_header_is_ignored(stand: Stand, model: ModelServer, number: str) -> None:
    model.vocabulary = number
    headers = {"x-stainless-retry-count": number}
    url = f"{stand.url}{SCOPE}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json={"model": "m", "messages": HELLO}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    (span,) = await stand.calls()
    assert conventions.LLM_RETRY not in span.attributes and span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]


async def test_numbers_beyond_64_bits_lose_no_span(stand: Stand) -> None:
    for body in ({"seed": 10**30, "max_tokens": -(10**30), "top_p": 10**400}, {"seed": 7, "max_tokens": 1 << 62}):
        assert (await _raw(stand, {"model": "m", "messages": HELLO, **body}))[0] == 200
    first, second = await stand.calls()
    assert "gen_ai.request.seed" not in first.attributes and (second.attributes["gen_ai.request.seed"]) == 7
    assert (await stand.close())["spans"] == 2


async def test_a_stream_cut_inside_characters_is_recorded_and_passed_on_exactly(stand: Stand, model: ModelServer) -> None:
    model.cut_bytes = 1
    async with stand.client() as client:
        said: Any = [{"role": "user", "content": "héłło 😀"}]
        stream = await client.chat.completions.create(model="m", messages=said, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "😀 ołłéh:0"
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in text] and not span.error


@pytest.mark.parametrize(
    ("change", "defect", "kept"),
    [
        ({"logprob": None}, "logprobs_not_finite", IDS[:2]),
        ({"logprob": float("nan")}, "logprobs_not_finite", IDS[:2]),
        ({"logprob": "x"}, "logprobs_not_finite", IDS[:2]),
        ({"extra_logprobs": 1}, "logprobs_length", IDS[:2]),
        ({"extra_logprobs": -7}, "no_logprobs", IDS[:2]),
        ({"vocabulary": 100}, "ids_out_of_range", ()),
        ({"prompt_tokens": [1, 1 << 40]}, "ids_out_of_range", ()),
        ({"prompt_tokens": [1, -1]}, "ids_out_of_range", ()),
        ({"prompt_tokens": ["1"]}, "ids_out_of_range", ()),
        ({"prompt_tokens": []}, "no_prompt_ids", ()),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_unusable_token_ids_are_dropped_with_the_reason(
    stand: Stand, model: ModelServer, change: dict[str, Any], defect: str, kept: tuple[str, ...], streamed: bool
) -> None:
    for name, value in change.items():
        setattr(model, name, value)
    status, text = await _raw(stand, {"model": "m", "messages": HELLO, "stream": streamed})
    assert status == 200 and "logprob" not in text.replace('"logprobs":null', "").replace('"logprobs": null', "")
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_DEFECT] == defect
    assert tuple(name for name in IDS if name in span.attributes) == kept
    assert (await stand.health())["counts"][defect] == 1
    assert (await stand.close())["spans"] == 1


@pytest.mark.parametrize("numbered", [{}, {"index": 0}, {"index": None}, {"index": "1"}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_choices_without_a_number_of_their_own_are_not_taken_for_one(
    stand: Stand, model: ModelServer, numbered: dict[str, Any], streamed: bool
) -> None:
    model.numbered = numbered
    status, text = await _raw(stand, {"model": "m", "messages": HELLO, "n": 2, "stream": streamed})
    assert status == 200 and "token_ids" not in text
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_DEFECT] == "mixed_choices" and not span.error
    assert not any(name in span.attributes for name in (*IDS, "gen_ai.output.messages")), "which reply said it, nobody knows"
    assert (await stand.health())["counts"]["mixed_choices"] == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_single_choice_needs_no_number(stand: Stand, model: ModelServer, streamed: bool) -> None:
    model.numbered = {}
    await _raw(stand, {"model": "m", "messages": HELLO, "stream": streamed})
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in "olleh:0"]
    assert conventions.LLM_DEFECT not in span.attributes


@pytest.mark.parametrize("prompts", [["ab", "cde"], ["ab", "ab"]])
async def test_replies_to_several_prompts_are_passed_on_and_not_trained_on(stand: Stand, prompts: list[str]) -> None:
    async with stand.client() as client:
        answer = await client.completions.create(model="m", prompt=prompts)
    assert [choice.text for choice in answer.choices] == [prompt[::-1] for prompt in prompts]
    spans = await stand.calls()
    assert len(spans) == 2
    for span in spans:
        assert span.attributes[conventions.LLM_DEFECT] == "several_prompts"
        assert not any(name in span.attributes for name in IDS)
    assert (await stand.health())["counts"]["several_prompts"] == 1


async def test_a_list_of_one_prompt_is_one(stand: Stand) -> None:
    async with stand.client() as client:
        await client.completions.create(model="m", prompt=["ab"])
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == [97, 98] and span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [98, 97]


async def test_ids_within_the_vocabulary_are_kept(stand: Stand, model: ModelServer) -> None:
    model.vocabulary = 256
    await ask(stand.client())
    (span,) = await stand.calls()
    assert all(name in span.attributes for name in IDS)


async def test_a_prompt_of_50_megabytes_is_forwarded_and_shortened_in_the_span(stand: Stand, model: ModelServer) -> None:
    model.prompt_tokens = [5, 6]
    said = [{"role": "user", "content": "y" * (50 << 20)}, {"role": "user", "content": "short"}]
    status, _, _ = await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m", "messages": said})
    assert status == 200 and len(model.requests[0]["messages"][0]["content"]) == 50 << 20
    (span,) = await stand.calls()
    assert len(span.attributes["gen_ai.input.messages"]) < 2000 and "left out" in span.attributes["gen_ai.input.messages"]
    assert span.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == [5, 6]


async def test_a_request_that_is_too_large_is_refused_with_the_reason(stand: Stand) -> None:
    data = io.BytesIO(b" " * (65 << 20))
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{SCOPE}/v1/chat/completions", data=data) as answer:
        assert answer.status == 413


@pytest.mark.full
async def test_ten_thousand_calls_of_one_attempt_are_all_there(stand: Stand, model: ModelServer) -> None:
    model.prompt_tokens = [5, 6]
    numbers = iter(range(10_000))
    async with aiohttp.ClientSession() as session:

        async def agent() -> None:
            for number in numbers:
                body = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
                async with session.post(f"{stand.url}{SCOPE}/chat/completions", json=body) as answer:
                    assert answer.status == 200

        await asyncio.gather(*(agent() for _ in range(8)))
    model.requests.clear()
    assert (await stand.close())["spans"] == 10_000
    spans = await stand.calls()
    assert sorted(span.attributes[conventions.LLM_CALL] for span in spans) == list(range(1, 10_001))
    assert all(conventions.LLM_RESPONSE_LOGPROBS in span.attributes for span in spans)


async def test_a_client_that_never_reads_is_disconnected_and_its_sample_kept(receiver: OtlpReceiver, model: ModelServer) -> None:
    model.padding, model.chunks = "z" * 100_000, 400
    limits = Limits(silence_seconds=30.0, client_seconds=0.2)
    async with proxy(receiver, FixedUpstreams(Upstream(model.url)), limits=limits) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rpartition(":")[2]), limit=1024)
        body = json.dumps({"model": "m", "messages": HELLO, "stream": True}).encode()
        head = f"POST {SCOPE}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # pyright: ignore  # a client that never reads
        await stand.until(lambda health: health["counts"].get("failed") == 1)
        (span,) = await stand.calls()
        assert span.attributes[conventions.LLM_INCOMPLETE] == "client_stalled"
        assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in "olleh:0"]
        writer.close()


async def test_a_stream_whose_client_disconnects_keeps_what_was_sampled(stand: Stand, model: ModelServer) -> None:
    model.gap = asyncio.Event()
    async with stand.client() as client:
        messages: Any = HELLO
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        assert (await anext(aiter(stream))).choices[0].delta.content == "ol"
        await stream.close()
    assert (await stand.close())["spans"] == 1
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_INCOMPLETE] == "client_gone" and span.error
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord("o"), ord("l")]
    assert len(span.attributes[conventions.LLM_RESPONSE_LOGPROBS]) == 2 and model.cancelled == 1


async def test_lone_surrogates_do_not_break_answer_or_span(stand: Stand) -> None:
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud83d"}]}'
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{SCOPE}/v1/chat/completions", data=raw) as answer:
        assert answer.status == 200 and (await answer.json())["choices"][0]["message"]["content"] == "\ud83da:0"
    (span,) = await stand.calls()
    assert "?a:0" in span.attributes["gen_ai.output.messages"]


async def test_an_attempt_that_is_over_gets_no_more_answers(stand: Stand, model: ModelServer) -> None:
    await ask(stand.client())
    assert (await stand.close())["spans"] == 1
    status, answer, _ = await stand.post(f"{SCOPE}/v1/chat/completions", {"messages": HELLO})
    assert status == 410 and "at-1" in answer["error"]["message"] and len(model.requests) == 1
    assert (await stand.close())["spans"] == 1


async def _raw(stand: Stand, body: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{SCOPE}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.text()


async def test_a_client_of_http2_is_told_which_protocol_is_spoken(stand: Stand) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(stand.url).port)
    writer.write(HTTP2_PREFACE)
    assert b"HTTP/1.1" in (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    await writer.wait_closed()
