"""Detection of a model server's capabilities by probes that contain nothing of an agent's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import pytest

from agl_otel.proxy.capabilities import AGAIN_SECONDS, MAX_PLACES, PROOF_SECONDS, Capabilities, Place
from agl_otel.proxy.dialects import CHAT, DIALECTS, Dialect
from agl_otel.proxy.recorder import Call
from agl_otel.proxy.reply import Json, Reply
from agl_otel.proxy.upstream import Upstream
from agl_otel.types.sampling import NEUTRAL

MESSAGES = DIALECTS["messages"]
SERVER = Upstream("http://server/v1", "m", "key")
Answer = tuple[int, Any]
CHAT_ANSWER = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "a"}}]}
CHAT_IDS = {"prompt_token_ids": [1], "choices": [{**CHAT_ANSWER["choices"][0], "token_ids": [2]}]}
MESSAGE = {"type": "message", "content": [], "stop_reason": "end_turn"}
MESSAGE_IDS = {**MESSAGE, "prompt_token_ids": [1], "token_ids": [2]}
UNKNOWN = {"error": "Extra inputs are not permitted: return_token_ids"}


class Server:
    """Answers by a rule, and records the requests."""

    def __init__(self, rule: Callable[[Dialect, Json], Answer]) -> None:
        self.rule = rule
        self.asked: list[tuple[str, Json]] = []

    async def __call__(self, dialect: Dialect, body: Json) -> tuple[int, bytes]:
        self.asked.append((dialect.path, body))
        status, answer = self.rule(dialect, body)
        return status, json.dumps(answer).encode()


def place(dialect: Dialect = MESSAGES, *, model: str = "m", key: bytes = b"") -> Place:
    return Place(SERVER.base_url, dialect.path, model, key)


def is_plain(capabilities: Capabilities, at: Place) -> bool:
    """Whether calls are sent without the fields that request token ids."""
    return capabilities.levels(at, DIALECTS[at.path], streamed=False) == [{}]


async def settled() -> None:
    """Wait until no other task is running."""
    while under_way := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(under_way)


@pytest.mark.parametrize(
    ("native", "chat", "plain", "by_chat"),
    [
        ((200, MESSAGE), (200, CHAT_IDS), False, True),
        ((200, MESSAGE_IDS), (200, CHAT_IDS), False, False),  # the agent's call had none because of what it asked for
        ((200, MESSAGE), (200, CHAT_ANSWER), False, False),
        ((400, UNKNOWN), (200, CHAT_IDS), False, False),  # with the fields or without: it does not answer at all
        ((503, {}), (200, CHAT_IDS), False, False),
    ],
)
async def test_only_answers_to_the_proxys_own_probes_decide(native: Answer, chat: Answer, plain: bool, by_chat: bool) -> None:
    server = Server(lambda dialect, _: chat if dialect is CHAT else native)
    capabilities = Capabilities("auto", can_translate=True)
    capabilities.probe(place(), MESSAGES, server)
    await settled()
    assert (is_plain(capabilities, place()), capabilities.uses_chat(MESSAGES, SERVER, place)) == (plain, by_chat)
    for other in (place(model="of-another"), place(key=b"of-another"), place(DIALECTS["responses"])):
        assert not is_plain(capabilities, other) and not capabilities.uses_chat(MESSAGES, SERVER, lambda at=other: at)


@pytest.mark.parametrize("refused", [UNKNOWN, {"error": "Unsupported parameter: use 'max_completion_tokens'. return_token_ids"}])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
async def test_a_server_that_refuses_the_fields_is_called_without_them(path: str, refused: Json) -> None:
    dialect = DIALECTS[path]
    answer = {"messages": MESSAGE, "responses": {"output": [], "status": "completed"}}.get(path, CHAT_ANSWER)
    server = Server(lambda _, body: (400, refused) if "return_token_ids" in body else (200, answer))
    capabilities = Capabilities("auto", can_translate=False)
    for _ in range(3):
        capabilities.probe(place(dialect), dialect, server)
        await settled()
    assert is_plain(capabilities, place(dialect))
    assert all("return_token_ids" in body for _, body in server.asked[:-1]) and "return_token_ids" not in server.asked[-1][1]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_a_server_that_refuses_what_only_some_engines_say_is_still_asked_for_token_ids(path: str) -> None:
    dialect = DIALECTS[path]
    answer = {"responses": {"output": [], "status": "completed"}}.get(path, CHAT_ANSWER)
    unknown = {"error": f"unknown: {', '.join(dialect.engine_extras)}; there are return_token_ids, logprobs"}
    server = Server(lambda _, body: (400, unknown) if dialect.engine_extras.keys() & body.keys() else (200, answer))
    capabilities = Capabilities("auto", can_translate=False)
    capabilities.probe(place(dialect), dialect, server)
    await settled()
    assert capabilities.levels(place(dialect), dialect, streamed=False) == [dialect.extras, {}]


async def test_a_model_without_max_tokens_is_probed_without_it() -> None:
    def rule(_: Dialect, body: Json) -> Answer:
        if "return_token_ids" in body:
            return 400, UNKNOWN
        return (400, {"error": "max_tokens: use max_completion_tokens"}) if "max_tokens" in body else (200, CHAT_ANSWER)

    capabilities, server = Capabilities("auto", can_translate=True), Server(rule)
    capabilities.probe(place(CHAT), CHAT, server)
    await settled()
    assert is_plain(capabilities, place(CHAT)) and [sorted(body) for _, body in server.asked][-1] == ["messages", "model"]


async def test_an_inconclusive_probe_is_repeated_after_a_minute() -> None:
    now, server = [0.0], Server(lambda *_: (503, {}))
    capabilities = Capabilities("auto", can_translate=True, clock=lambda: now[0])
    for moment, asked in ((0.0, 1), (AGAIN_SECONDS - 1, 1), (AGAIN_SECONDS, 2)):
        now[0] = moment
        capabilities.probe(place(), MESSAGES, server)
        await settled()
        assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("own", "chat", "lacks"), [(404, 400, True), (405, 500, True), (404, 404, False), (404, 0, False), (400, 400, False), (0, 400, False)]
)
async def test_a_route_is_missing_if_an_empty_object_finds_chat_but_not_the_route(own: int, chat: int, lacks: bool) -> None:
    capabilities, server = Capabilities("auto", can_translate=True), Server(lambda dialect, _: (chat if dialect is CHAT else own, {}))
    assert await capabilities.lacks_route(place(), MESSAGES, server) is lacks
    assert all(body == {} for _, body in server.asked) and capabilities.uses_chat(MESSAGES, SERVER, place) is lacks


@pytest.mark.parametrize("translate", ["missing", "always"])
async def test_calls_that_may_not_be_translated_are_not(translate: Literal["missing", "always"]) -> None:
    capabilities = Capabilities(translate, can_translate=True)
    capabilities.probe(place(), MESSAGES, Server(lambda dialect, _: (200, CHAT_IDS if dialect is CHAT else MESSAGE)))
    await settled()
    assert capabilities.uses_chat(MESSAGES, SERVER, place) is (translate == "always")


async def test_many_model_names_of_agents_are_bounded_and_keep_places_in_use() -> None:
    capabilities, server = Capabilities("auto", can_translate=True), Server(lambda dialect, _: (400 if dialect is CHAT else 404, {}))
    for number in range(2 * MAX_PLACES):
        assert await capabilities.lacks_route(place(model=str(number)), MESSAGES, server)
        assert number % 1000 or await capabilities.lacks_route(place(), MESSAGES, server)
    assert len(server.asked) == 2 * (2 * MAX_PLACES + 1), "each place is asked about once"
    assert len(capabilities._detected) == MAX_PLACES  # pyright: ignore[reportPrivateUsage] - what it keeps shows in nothing public


def likely(temperature: float) -> Answer:
    top = [{"token": token, "logprob": logit / temperature} for token, logit in (("a", -1.0), ("b", -2.0))]
    return 200, {**CHAT_ANSWER, "choices": [{**CHAT_ANSWER["choices"][0], "logprobs": {"content": [{"top_logprobs": top}]}}]}


def call_at(temperature: float) -> Call:
    begun: Any = None
    call = Call(None, CHAT, None, 1, begun, {}, 0, Reply())
    call.asked, call.told = {"temperature": temperature}, NEUTRAL
    CHAT.take(call.reply, likely(temperature)[1])
    call.reply.choice().logprobs.append(-1.0)
    return call


async def test_what_a_probe_found_of_the_log_probs_holds_for_a_while_and_is_asked_again_before() -> None:
    now, raw = [0.0], [False]
    server = Server(lambda _, body: likely(1.0 if raw[0] else body["temperature"]))
    capabilities = Capabilities("auto", can_translate=False, clock=lambda: now[0])

    def begin(temperature: float = 0.5) -> Callable[[str | None], str]:
        return capabilities.logprobs(call_at(temperature), place(CHAT), server)

    assert begin()(None) == "" and server.asked == []
    capabilities.sampled(call_at(0.5), lambda: place(CHAT), server)
    await settled()
    assert begin()(None) == "processed" and len(server.asked) == 2
    now[0] = AGAIN_SECONDS - 1
    assert begin()(None) == "processed" and len(server.asked) == 2
    now[0], raw[0] = AGAIN_SECONDS, True
    begin(1.0)
    await settled()
    assert len(server.asked) == 2, "at temperature 1 there is nothing to know"
    told = begin()
    assert told(None) == "processed"
    await settled()
    assert (told(None), len(server.asked)) == ("raw", 4), "asked again while the call is answered"
    now[0] += PROOF_SECONDS + 1
    told = begin()
    assert told(None) == "", "too old"
    await settled()
    assert told(None) == "raw", "found while the call was answered"


async def test_a_probe_that_an_outage_overtakes_shows_nothing() -> None:
    """Its answers may be those of the server before."""
    capabilities = Capabilities("auto", can_translate=False)
    server = Server(lambda _, body: likely(body["temperature"]))
    capabilities.sampled(call_at(0.5), lambda: place(CHAT), server)
    capabilities.unreachable("http://other/v1")
    await settled()
    told = capabilities.logprobs(call_at(0.5), place(CHAT), server)
    assert told(None) == "processed"
    capabilities.unreachable(SERVER.base_url)
    assert told(None) == ""
    capabilities.logprobs(call_at(0.5), place(CHAT), server)
    capabilities.unreachable(SERVER.base_url)
    await settled()
    assert told(None) == ""
    told = capabilities.logprobs(call_at(0.5), place(CHAT), server)
    await settled()
    assert told(None) == "processed"


@pytest.mark.parametrize(("chat", "by_chat"), [((200, CHAT_IDS), True), ((200, CHAT_ANSWER), False)])
async def test_responses_with_raw_messages_of_vllm_are_asked_by_chat(chat: Answer, by_chat: bool) -> None:
    raw = {"message": "", "tokens": [1], "type": "raw_message_tokens"}
    text = {"type": "output_text", "text": "a", "logprobs": [{"logprob": -0.5}]}
    answer = {"output": [{"type": "message", "content": [text]}], "status": "completed", "input_messages": [raw], "output_messages": [raw]}
    server = Server(lambda dialect, _: chat if dialect is CHAT else (200, answer))
    capabilities, responses = Capabilities("auto", can_translate=True), DIALECTS["responses"]
    capabilities.probe(place(responses), responses, server)
    await settled()
    assert capabilities.uses_chat(responses, SERVER, lambda: place(responses)) is by_chat and not is_plain(capabilities, place(responses))


@pytest.mark.parametrize(("other", "in_sglext"), [(True, True), (False, False)])
async def test_a_server_that_refuses_the_fields_in_streams_is_asked_there_for_sglext(other: bool, in_sglext: bool) -> None:
    def rule(_: Dialect, body: Json) -> Answer:
        if body.get("stream") and "return_token_ids" in body:
            return 400, {"error": "return_token_ids is not supported with streaming"}
        if body.get("stream"):
            return 200, {"sglext": {"output_ids": [[1]]}} if other else {}
        return 200, CHAT_IDS

    capabilities, server = Capabilities("auto", can_translate=False), Server(rule)
    capabilities.probe(place(CHAT), CHAT, server)
    await settled()
    assert capabilities.levels(place(CHAT), CHAT, streamed=True)[0] == (CHAT.stream_extras if in_sglext else CHAT.levels[0])
    assert capabilities.levels(place(CHAT), CHAT, streamed=False) == CHAT.levels
