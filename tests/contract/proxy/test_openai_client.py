"""The OpenAI SDK against the real proxy against a real model server; spans in a real OTLP receiver."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from agl_otel.proxy.forward import Limits
from agl_otel.proxy.unknown_paths import UnknownPaths
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, KEY, SCOPE, Stand, ask, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_call_is_answered_as_asked_and_recorded_with_tokens(stand: Stand, model: ModelServer) -> None:
    answer = await ask(stand.client(traceparent=TRACEPARENT))
    assert answer.choices[0].message.content == "olleh:0" and answer.choices[0].logprobs is None
    assert "token_ids" not in answer.choices[0].model_extra and "prompt_token_ids" not in answer.model_extra
    sent = model.requests[0]
    assert (sent["model"], sent["temperature"], sent["return_token_ids"], sent["logprobs"]) == ("served-model", 0.25, True, True)
    assert model.headers[0]["authorization"] == "Bearer real-key"
    (span,) = await stand.calls()
    held = span.attributes
    assert span.key == KEY and span.marker and not span.error
    assert (span.trace_id, span.parent_id) == tuple(TRACEPARENT.split("-")[1:3])
    assert (held[conventions.LLM_CALL], held[conventions.LLM_CHOICE], held[conventions.LLM_MODEL_VERSION]) == (1, 0, "7")
    assert held[conventions.LLM_PROMPT_TOKEN_IDS] == model.prompt_ids(HELLO)
    assert held[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in "olleh:0"]
    assert held[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5] * 7
    assert held["gen_ai.request.model"] == "gpt-any" and held["gen_ai.usage.output_tokens"] == 7
    assert held["gen_ai.input.messages"] == '[{"role":"user","parts":[{"type":"text","content":"hello"}]}]'
    assert "olleh:0" in held["gen_ai.output.messages"]


async def test_a_stream_is_recorded_like_a_whole_answer_and_passed_on_without_the_extras(stand: Stand, model: ModelServer) -> None:
    async with stand.client() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, n=2)  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain dicts, as users write them
        chunks = [chunk async for chunk in stream]
    assert all(chunk.choices[0].logprobs is None and not chunk.choices[0].model_extra for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == 1) == "olleh:1"
    first, second = await stand.calls()
    assert [span.attributes[conventions.LLM_CHOICE] for span in (first, second)] == [0, 1]
    assert first.attributes[conventions.LLM_CALL] == second.attributes[conventions.LLM_CALL] == 1
    assert (
        first.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == second.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == model.prompt_ids(HELLO)
    )
    assert first.attributes["gen_ai.usage.input_tokens"] == len(model.prompt_ids(HELLO)), "a stream without usage: the ids are counted"
    assert second.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in "olleh:1"]
    assert len(second.attributes[conventions.LLM_RESPONSE_LOGPROBS]) == 7
    assert first.start == second.start


async def test_what_the_agent_asked_for_stays_in_its_answer(stand: Stand, model: ModelServer) -> None:
    answer = await ask(stand.client(), logprobs=True, temperature=1, extra_body={"return_token_ids": True})
    assert answer.choices[0].logprobs.content[0].logprob == -0.5
    assert answer.choices[0].model_extra["token_ids"] and answer.model_extra["prompt_token_ids"]
    assert model.requests[0]["temperature"] == 1


async def test_a_conversation_is_stored_in_prefix_form(stand: Stand, model: ModelServer) -> None:
    messages = list(HELLO)
    for turn in range(3):
        answer = await ask(stand.client(), messages)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": f"turn {turn}"}]
    full: dict[int, list[int]] = {}
    for span in await stand.calls():
        held = span.attributes
        prompt = full.get(held.get(conventions.LLM_PREFIX_CALL, 0), []) + held[conventions.LLM_PROMPT_TOKEN_IDS]
        full[held[conventions.LLM_CALL]] = prompt + held[conventions.LLM_RESPONSE_TOKEN_IDS]
        assert (conventions.LLM_PREFIX_CALL in held) == (held[conventions.LLM_CALL] > 1)
    assert full[3][: len(model.prompt_ids(messages[:-2]))] == model.prompt_ids(messages[:-2])


async def test_a_conversation_of_ten_times_the_turns_costs_ten_times_the_bytes(stand: Stand) -> None:
    sizes: dict[int, float] = {}
    for turns in (20, 200):
        messages: list[Any] = [{"role": "system", "content": "be kind " * 50}]
        path = f"/rollout/ro-{turns}/attempt/at-1/v1/chat/completions"
        for turn in range(turns):
            messages.append({"role": "user", "content": f"turn {turn}"})
            _, answer, _ = await stand.post(path, {"model": "m", "messages": messages})
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        spans = [span for span in await stand.calls() if span.key[0] == f"ro-{turns}"]
        sizes[turns] = sum(len(json.dumps(span.attributes)) for span in spans) / turns
        assert [conventions.LLM_MESSAGES_CALL in span.attributes for span in spans] == [False, *[True] * (turns - 1)]
        assert json.loads(spans[-1].attributes["gen_ai.input.messages"])[-1]["parts"][0]["content"] == f"turn {turns - 1}"
    assert sizes[200] < 1.3 * sizes[20]


async def test_all_choices_of_a_call_share_its_messages(stand: Stand) -> None:
    await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m", "messages": [*HELLO, *HELLO], "n": 2})
    first, second = await stand.calls()
    assert len(json.loads(first.attributes["gen_ai.input.messages"])) == 2 and conventions.LLM_MESSAGES_CALL not in first.attributes
    assert len(json.loads(second.attributes["gen_ai.input.messages"])) == 1
    assert (second.attributes[conventions.LLM_MESSAGES_CALL], second.attributes[conventions.LLM_MESSAGES_BEFORE]) == (1, 1)


async def test_ids_come_from_baggage_where_the_path_has_none(stand: Stand) -> None:
    baggage = "theirs=1,agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1"
    await ask(stand.client("/v1", baggage=baggage))
    await ask(stand.client("", baggage="agentlightning.rollout_id=ro-2,agentlightning.attempt_id=at-2"))
    await ask(stand.client("/rollout/ro-1/attempt/at-1", baggage="agentlightning.rollout_id=ro-2"))
    assert [(span.key, span.attributes[conventions.LLM_CALL]) for span in await stand.calls()] == [
        (KEY, 1),
        (("ro-2", "at-2"), 1),
        (KEY, 2),
    ]


async def test_a_call_of_no_attempt_is_recorded_without_ids(stand: Stand) -> None:
    await ask(stand.client("/v1"))
    (span,) = await stand.calls()
    assert span.key == (None, None) and span.marker is None and conventions.LLM_CALL not in span.attributes


async def test_upstreams_error_reaches_the_agent_and_takes_a_call_number(stand: Stand, model: ModelServer) -> None:
    model.status = 500
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        await ask(stand.client())
    model.status = 200
    await ask(stand.client())
    failed, fine = await stand.calls()
    assert failed.error and failed.attributes["http.response.status_code"] == 500
    assert [span.attributes[conventions.LLM_CALL] for span in (failed, fine)] == [1, 2]
    assert (await stand.close())["spans"] == 2


async def test_an_upstream_that_is_down_is_named(stand: Stand, model: ModelServer) -> None:
    await model.stop()
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(stand.client())
    assert caught.value.status_code == 502 and model.url in str(caught.value)
    (span,) = await stand.calls()
    assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_error"


async def test_a_silent_upstream_is_a_timeout(receiver: OtlpReceiver, model: ModelServer) -> None:
    model.hold = asyncio.Event()
    async with proxy(receiver, FixedUpstreams(Upstream(model.url)), limits=Limits(silence_seconds=0.5)) as stand:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(stand.client())
        assert caught.value.status_code == 504 and len(model.requests) == 1
        (span,) = await stand.calls()
        assert span.attributes[conventions.LLM_INCOMPLETE] == "upstream_timeout"
        model.hold.set()


async def test_a_stream_that_breaks_off_is_seen_by_the_agent_and_recorded(stand: Stand, model: ModelServer) -> None:
    model.break_off_after = 1
    async with stand.client() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain dicts, as users write them
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass
    (span,) = await stand.calls()
    assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_error"
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord("o"), ord("l")]


async def test_a_truncated_answer_is_an_error_and_not_sampled_again(stand: Stand, model: ModelServer) -> None:
    model.cut_answers = True
    with pytest.raises(openai.InternalServerError, match="model server") as failure:
        await ask(stand.client())
    assert failure.value.status_code == 502 and len(model.requests) == 1
    (span,) = await stand.calls()
    assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_error"
    assert conventions.LLM_RESPONSE_TOKEN_IDS not in span.attributes


async def test_a_client_that_goes_away_ends_the_call_upstream(stand: Stand, model: ModelServer) -> None:
    model.hold = asyncio.Event()
    task = asyncio.create_task(ask(stand.client()))
    await model.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await stand.close())["spans"] == 1
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_INCOMPLETE] == "client_gone" and model.cancelled == 1


async def test_a_client_that_closes_at_the_last_event_had_the_whole_answer(stand: Stand, model: ModelServer) -> None:
    model.end = asyncio.Event()
    async with stand.client() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain dicts, as users write them
        async with asyncio.timeout(300):
            async for line in stream.response.aiter_lines():
                if line == "data: [DONE]":
                    break
        await stream.response.aclose()
    assert (await stand.close())["spans"] == 1
    (span,) = await stand.calls()
    assert (span.error, span.attributes.get(conventions.LLM_INCOMPLETE), model.cancelled) == (False, None, 1)


async def test_a_server_that_refuses_the_extras_is_asked_without_them(
    stand: Stand, model: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    model.plain = True
    assert (await ask(stand.client())).choices[0].message.content == "olleh:0"
    await stand.until(lambda _: "refuses" in caplog.text)  # what was learnt is logged
    assert len(model.requests) == 6, "the agent's call and the proxy's question, each with all, with those for token ids, and with none"
    assert (await ask(stand.client())).choices[0].message.content == "olleh:0"
    assert len(model.requests) == 7 and "return_token_ids" not in model.requests[6]
    assert all(conventions.LLM_RESPONSE_TOKEN_IDS not in span.attributes and not span.error for span in await stand.calls())
    assert (await stand.health())["counts"]["without_token_ids"] == 2


async def test_logprobs_that_are_not_finite_are_left_out(stand: Stand, model: ModelServer) -> None:
    model.logprob = float("-inf")
    await ask(stand.client())
    (span,) = await stand.calls()
    assert conventions.LLM_RESPONSE_LOGPROBS not in span.attributes and span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]


async def test_close_seals_flushes_and_says_the_same_again(stand: Stand, receiver: OtlpReceiver) -> None:
    await ask(stand.client())
    first = await stand.close()
    marker = receiver.spans(conventions.SPAN_LLM)[0].marker
    assert first == await stand.close() == {"marker": marker, "spans": 1, "dropped": 0, "counts": {marker: 1}}
    assert receiver.seals() == {first["marker"]: (1, 0)}


async def test_a_batch_of_attempts_is_closed_in_one_call(stand: Stand) -> None:
    await ask(stand.client())
    body = {"attempts": [["ro-1", "at-1"], ["ro-9", "at-9"]]}
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}/close", json=body) as answer:
        closed = await answer.json()
    assert [list(counts.values()) for counts in closed["counts"]] == [[1], []]


async def test_close_reports_spans_that_could_not_be_stored(stand: Stand, receiver: OtlpReceiver) -> None:
    receiver.refuse = True
    await ask(stand.client())
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}/rollout/ro-1/attempt/at-1/close") as answer:
        assert answer.status == 503 and answer.headers["retry-after"]
    receiver.refuse = False


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/images", b"{}", 404, "chat/completions"),
        ("/v1/chat/completions", b"{not json", 400, "JSON object"),
        ("/rollout/no%20spaces/attempt/a/v1/chat/completions", b"{}", 400, "not allowed"),
        ("/close", b"[]", 400, "attempts"),
    ],
)
async def test_an_invalid_request_is_answered_with_what_is_valid(stand: Stand, path: str, body: bytes, status: int, words: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(stand.url + path, data=body) as answer:
        assert answer.status == status and words in (await answer.json())["error"]["message"]


async def test_requests_at_unknown_paths_are_counted_for_their_attempt(stand: Stand) -> None:
    by_baggage = {"baggage": f"{conventions.ROLLOUT_ID}=ro-2,{conventions.ATTEMPT_ID}=at-2"}
    for path, headers in ((f"{SCOPE}/v9/images", {}), (f"{SCOPE}/v9/images", {}), ("/v9/images", by_baggage), ("/v9/images", {})):
        status, _, _ = await stand.post(path, {}, **headers)
        assert status == 404
    assert (await stand.health())["unknown_paths"] == {"ro-1/at-1": {"/v9/images": 2}, "ro-2/at-2": {"/v9/images": 1}}


def test_unknown_paths_are_kept_of_the_latest_attempts_and_a_few_of_each() -> None:
    seen = UnknownPaths(attempts=2, paths=2)
    for key, path in ((("ro", "1"), "/a"), (("ro", "2"), "/b" * 400), (("ro", "1"), "/c"), (("ro", "1"), "/d"), (("ro", "3"), "/e")):
        seen.add(key, path)
    assert seen.as_json() == {"ro/1": {"/a": 1, "/c": 1, "others": 1}, "ro/3": {"/e": 1}}


async def test_models_and_health_answer(stand: Stand) -> None:
    async with stand.client() as client:
        assert [model.id async for model in client.models.list()] == ["m"]
    async with aiohttp.ClientSession() as session, session.get(f"{stand.url}/health") as answer:
        assert (await answer.json())["status"] == "ok"
