"""The model of a judge: what it may spend, and which failures are tried again, with a real server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.errors import ModelServerError
from agl_otel.jobs.model_client import TRIES, Access, BoundError, Bounds, ModelClient, Price, PromptRefusedError, Spend, _logprobs_of  # pyright: ignore[reportPrivateUsage]  # its shapes
from agl_otel.service.retry import Backoff
from tests.model_server import ModelServer

PROMPT = [{"role": "system", "content": "judge"}, {"role": "user", "content": "what"}]
ANSWER = {"choices": [{"message": {"content": "good"}}], "usage": {"prompt_tokens": 11, "completion_tokens": 7}}


class Script:
    """Answers each call with the next of some responses, the last one again and again."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = [*answers]
        self.calls = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.calls += 1
        status, text = self.answers[min(self.calls, len(self.answers)) - 1]
        headers = {"location": "http://elsewhere.example/"} if status == 307 else {}
        return web.Response(status=status, text=text, content_type="application/json", headers=headers)


@asynccontextmanager
async def asked(script: Script, spend: Spend, *, timeout_seconds: float = 60.0) -> AsyncGenerator[ModelClient]:
    server = ModelServer({"/v1/own/chat/completions": script.answer})
    await server.start()
    access = Access("m", f"{server.url}/own/", key_from="MY_KEY", max_answer_tokens=100, timeout_seconds=timeout_seconds)
    try:
        async with ModelClient(access, spend, backoff=Backoff(0.001, 0.001)) as model:
            yield model
    finally:
        await server.stop()


async def test_a_call_that_fails_is_made_again_and_each_request_counts() -> None:
    script, spend = Script((503, "{}"), (429, "{}"), (200, json.dumps(ANSWER))), Spend(Bounds(), Price(1, 2))
    async with asked(script, spend) as model:
        assert await model.answer(PROMPT) == "good"
    assert (script.calls, spend.calls, spend.prompt_tokens, spend.answer_tokens, spend.estimated) == (3, 3, 11, 7, 0)
    assert spend.cost == pytest.approx(25e-6)


@pytest.mark.parametrize(
    ("answer", "error", "says", "calls"),
    [
        ((500, '{"error": {"message": "out of memory"}}'), ModelServerError, "HTTP 500: out of memory (4 times)", TRIES),
        ((404, '{"error": "no model m"}'), ModelServerError, "HTTP 404: no model m", 1),
        ((401, "{}"), ModelServerError, "Is the key in MY_KEY this server's?", 1),
        ((400, '{"error": {"message": "too long: sk-abcdefgh1234"}}'), PromptRefusedError, "too long: (secret-left-out)", 1),
        ((307, ""), ModelServerError, "redirects", 1),
        ((200, "<html>"), ModelServerError, "no chat completion: <html>", 1),
        ((200, '{"choices": []}'), ModelServerError, "no chat completion", 1),
    ],
)
async def test_a_server_that_fails_is_named_with_what_it_says(
    answer: tuple[int, str], error: type[Exception], says: str, calls: int
) -> None:
    script = Script(answer)
    async with asked(script, Spend(Bounds())) as model:
        with pytest.raises(error) as raised:
            await model.answer(PROMPT)
    assert says in str(raised.value) and script.calls == calls


async def test_calls_that_are_made_again_are_bounded_too() -> None:
    script, spend = Script((503, "{}")), Spend(Bounds(calls=2))
    async with asked(script, spend) as model:
        with pytest.raises(BoundError, match="--max-calls 2 are made"):
            await model.answer(PROMPT)
    assert script.calls == 2


async def test_tokens_that_no_server_counts_are_the_most_that_they_may_be() -> None:
    spend = Spend(Bounds())
    async with asked(Script((200, '{"choices": [{"message": {"content": null}}], "usage": {"prompt_tokens": -1}}')), spend) as model:
        assert await model.answer(PROMPT) == ""
        assert (spend.prompt_tokens, spend.answer_tokens) == model.most_tokens(PROMPT) and spend.estimated == 1


async def test_a_server_that_is_silent_or_away_ends_the_call() -> None:
    class Silent(Script):
        async def answer(self, request: web.Request) -> web.Response:
            self.calls += 1
            await asyncio.Event().wait()
            return web.Response()

    spend = Spend(Bounds())
    async with asked(silent := Silent(), spend, timeout_seconds=0.05) as model:
        with pytest.raises(ModelServerError, match=r"nothing within 0\.05 s"):
            await model.answer(PROMPT)
        assert silent.calls == spend.estimated == TRIES, "nobody knows what they took"
    spend = Spend(Bounds())
    async with ModelClient(Access("m", "http://127.0.0.1:1/v1"), spend, backoff=Backoff(0.001, 0.001)) as model:
        with pytest.raises(ModelServerError, match=r"http://127\.0\.0\.1:1/v1 does not answer: "):
            await model.answer(PROMPT)
    assert (spend.prompt_tokens, spend.estimated) == (0, 0)


@settings(deadline=None, max_examples=300)
@given(
    calls=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.sampled_from([0.0, 0.5, 1.0, 1.0])), min_size=3, max_size=30),
    bounds=st.tuples(st.none() | st.integers(0, 20), st.none() | st.integers(50, 300), st.none() | st.floats(0.0001, 0.0005)),
    at_once=st.integers(1, 5),
)
def test_no_bound_is_exceeded_and_no_room_is_left_for_a_call(
    calls: Sequence[tuple[int, int, float]], bounds: tuple[int | None, int | None, float | None], at_once: int
) -> None:
    """Calls of at most (prompt, answer) tokens, of which they use a share; those for which there is no room end the run."""
    price, stopped = Price(1, 2), list[tuple[int, int]]()

    async def play() -> Spend:
        spend, room = Spend(Bounds(*bounds), price), asyncio.Semaphore(at_once)

        async def call(prompt: int, answer: int, share: float) -> None:
            async with room:
                if stopped:
                    return
                try:
                    await spend.reserve((prompt, answer))
                except BoundError:
                    stopped.append((prompt, answer))
                    return
                await asyncio.sleep(0)
                await spend.settle((prompt, answer), (int(prompt * share), int(answer * share)))

        await asyncio.gather(*(call(*each) for each in calls))
        return spend

    spend = asyncio.run(play())
    most_calls, most_tokens, most_cost = bounds
    assert most_calls is None or spend.calls <= most_calls
    assert most_tokens is None or spend.prompt_tokens + spend.answer_tokens <= most_tokens
    assert most_cost is None or price.of(spend.prompt_tokens, spend.answer_tokens) <= most_cost
    if stopped:
        prompt, answer = spend.prompt_tokens + stopped[0][0], spend.answer_tokens + stopped[0][1]
        over = (spend.calls + 1, most_calls), (prompt + answer, most_tokens), (price.of(prompt, answer), most_cost)
        assert any(bound is not None and value > bound for value, bound in over)
    if not stopped:
        assert spend.calls == len(calls)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.5, True, -(10**400), "-0.5", None])
def test_what_is_no_logprob_is_refused(wrong: object) -> None:
    found = {"choices": [{"logprobs": {"token_logprobs": [None, -0.5, wrong]}}]}
    with pytest.raises(ModelServerError, match="has no log-probs of the 3 tokens"):
        _logprobs_of(found, 3)
    assert _logprobs_of({"choices": [{"logprobs": {"token_logprobs": [None, -0.5, 0]}}]}, 3) == [-0.5, 0]
