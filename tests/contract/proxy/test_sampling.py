"""The sampling contract of each call as its span records it, held against what the model server was asked; and its enforcement."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel.types.sampling import NEUTRAL, Contract, all_parameters
from agl_otel_hook import conventions
from tests.contract.proxy.stand import SCOPE, Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

HELLO = [{"role": "user", "content": "Hello?"}]
RUN = all_parameters(0.8, 64)
LOGITS = (2.0, 1.0, -1.0)


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    """A model server with routes of all protocols, which writes down what it was asked."""

    async def taken(request: web.Request) -> web.Response:
        server.requests.append(await request.json())
        return web.json_response({"id": "x", "model": "m", "type": "message", "role": "assistant", "content": [], "output": []})

    server = ModelServer({"/v1/messages": taken, "/v1/responses": taken})
    await server.start()
    yield server
    await server.stop()


async def contracts(stand: Stand) -> list[dict[str, Any]]:
    return [json.loads(str(span.attributes[conventions.LLM_SAMPLING])) for span in await stand.calls()]


async def asked(stand: Stand, path: str = "chat/completions", **fields: Any) -> None:
    status, answer, _ = await stand.post(
        f"{SCOPE}/v1/{path}", {"model": "m", ("input" if path == "responses" else "messages"): HELLO, **fields}
    )
    assert status == 200, answer


@pytest.mark.parametrize(
    ("path", "fields", "agent"),
    [
        ("chat/completions", {}, None),
        ("chat/completions", {"temperature": 0.2, "stop": ["x"], "max_completion_tokens": 5}, None),
        (
            "chat/completions",
            {"tool_choice": "required", "logit_bias": {"7": -100}},
            {"tool_choice": "required", "logit_bias": '{"7": -100}'},
        ),
        ("messages", {"tool_choice": {"type": "any"}, "stop_sequences": ["x"]}, {"tool_choice": "any", "stop": '["x"]'}),
        (
            "responses",
            {"text": {"format": {"type": "json_schema"}}, "max_output_tokens": 9},
            {"response_format": "json_schema", "max_tokens": 9},
        ),
    ],
)
async def test_a_span_has_what_agent_and_resource_set_and_what_the_server_may_have_filled_in(
    model: ModelServer, receiver: OtlpReceiver, path: str, fields: dict[str, Any], agent: dict[str, Any] | None
) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "m", sampling={"temperature": 0.8, "top_k": 20}))) as stand:
        await asked(stand, path, **fields)
        (contract,) = await contracts(stand)
    (sent,) = model.requests
    for name in ("temperature", "top_k", "top_p", "min_p"):
        recorded = Contract.loads(json.dumps(contract))
        assert recorded is not None and recorded.fields.get(name) == sent.get(name), "the span says what the model server was asked"
        assert (name in recorded.server) == (name not in sent)
    for name, value in (agent or {}).items():
        assert contract["agent"][name] == value


@pytest.mark.parametrize("policy", [None, "enforce"])
async def test_a_grammar_is_not_hidden_by_another_protocols_field(model: ModelServer, receiver: OtlpReceiver, policy: str | None) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "m", sampling=RUN), policy=policy)) as stand:
        await asked(stand, response_format={"type": "json_object"}, text={"format": {"type": "text"}}, output_format="text")
        recorded = Contract.loads(json.dumps((await contracts(stand))[0]))
    assert model.requests[0]["response_format"] == {"type": "json_object"}
    assert recorded is not None and "response_format" in recorded.differing(NEUTRAL)


async def test_a_number_beyond_all_bounds_is_recorded_as_no_number(model: ModelServer, receiver: OtlpReceiver) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "m", sampling=RUN))) as stand:
        await asked(stand, temperature=10**400, top_p=10**400)
        recorded = Contract.loads(json.dumps((await contracts(stand))[0]))
    assert recorded is not None and math.isnan(recorded.temperature) and "top_p" in recorded.differing(NEUTRAL)


async def test_a_server_that_says_what_it_heeds_leaves_nothing_unknown(model: ModelServer, receiver: OtlpReceiver) -> None:
    model.heeds = ["temperature, top_p"]
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "m"))) as stand:
        await asked(stand, top_k=5, temperature=0.5)
        assert await contracts(stand) == [{"agent": {"temperature": 0.5}, "logprobs": "processed"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        (["temperature", "*"], ("top_k",)),
        (["*", "temperature"], ("top_k",)),
        (["temperature", "top_k"], ("top_k",)),
        (["temperature", "garbage;q=1"], ("top_k", "logprobs")),
        ([""], ("top_k", "logprobs")),
        (["temperature"], ()),
    ],
)
async def test_all_headers_of_a_server_count_and_one_that_cannot_be_read_says_nothing(
    model: ModelServer, receiver: OtlpReceiver, headers: list[str], fields: tuple[str, ...], stream: bool
) -> None:
    model.heeds = headers
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "m", sampling=RUN))) as stand:
        async with stand.client() as client:
            own: Any = {"temperature": 0.5, "extra_body": {"top_k": 5}, "stream": stream}
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello?"}], **own)
            assert not stream or [each async for each in answer]
        recorded = Contract.loads(json.dumps((await contracts(stand))[0]))
    assert recorded is not None and (recorded.temperature, recorded.differing(NEUTRAL)) == (0.5, fields)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_the_runs_parameters_replace_the_agents_own_where_the_rollout_says_so(
    model: ModelServer, receiver: OtlpReceiver, path: str
) -> None:
    own = {"temperature": 0.2, "top_p": 0.9, "stream": False}
    if path == "chat/completions":
        own |= {"logit_bias": {"7": 5}, "presence_penalty": 1.5, "typical_p": 0.9, "stop": ["x"], "tool_choice": "required", "n": 1}
    upstreams = FixedUpstreams(Upstream(model.url, "m", sampling=RUN), policy="enforce")
    async with proxy(receiver, upstreams) as stand:
        await asked(stand, path, **own)
        (contract,) = await contracts(stand)
    (sent,) = model.requests
    assert (sent["temperature"], sent["top_p"]) == (0.8, 1.0)
    assert contract["overridden"]["temperature"] == 0.2 and "temperature" not in contract.get("agent", {})
    if path == "chat/completions":
        assert (sent.get("logit_bias"), sent["presence_penalty"], sent["stop"], sent["tool_choice"]) == (None, 0.0, ["x"], "required")
        assert sent.get("typical_p") is None and contract["overridden"]["typical_p"] == 0.9
        recorded = Contract.loads(json.dumps(contract))
        assert recorded is not None and recorded.differing(NEUTRAL)[0] == "tool_choice", "what its program relies on stays"


@pytest.mark.parametrize(("policy", "temperature"), [(None, 0), ("enforce", 0), ("enforce_all", 0.8), ("odd", 0)])
async def test_greedy_calls_stay_greedy_unless_all_are_enforced(
    model: ModelServer, receiver: OtlpReceiver, policy: str | None, temperature: float
) -> None:
    upstreams = FixedUpstreams(Upstream(model.url, "m", sampling=RUN), policy=policy)
    async with proxy(receiver, upstreams) as stand:
        await asked(stand, temperature=0, top_p=0.5)
    assert model.requests[0]["temperature"] == temperature
    assert model.requests[0]["top_p"] == (1.0 if policy == "enforce_all" else 0.5)


async def test_a_resource_that_is_not_trained_enforces_nothing(model: ModelServer, receiver: OtlpReceiver) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "m", sampling={"max_tokens": 5}), policy="enforce")) as stand:
        await asked(stand, temperature=0.2)
    assert model.requests[0]["temperature"] == 0.2


def answer_at(scale: float) -> dict[str, Any]:
    """An answer of one token, with the log-probs of LOGITS divided by `scale`."""
    exponentials = [math.exp(logit / scale) for logit in LOGITS]
    top = [{"token": str(token), "logprob": math.log(each / sum(exponentials))} for token, each in enumerate(exponentials)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "0"},
        "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
        "token_ids": [0],
        "finish_reason": "stop",
    }
    return {"id": "x", "model": "m", "prompt_token_ids": [1, 2], "choices": [choice]}


@pytest.mark.parametrize("drop", [False, True])
async def test_tools_are_sent_without_strict_where_the_resource_says_so(receiver: OtlpReceiver, model: ModelServer, drop: bool) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
    upstream = Upstream(model.url, "m", sampling=all_parameters(1.0, 5), strict_tools="drop" if drop else "keep")
    async with proxy(receiver, FixedUpstreams(upstream)) as stand:
        await asked(stand, tools=[{"type": "function", "function": function}])
        await asked(stand)
        strict, plain = (Contract.loads(str(span.attributes[conventions.LLM_SAMPLING])) for span in await stand.calls())
    assert model.requests[0]["tools"] == [{"type": "function", "function": {**function, "strict": not drop}}]
    assert strict is not None and plain is not None and plain.notes({}) == []
    assert strict.differing(NEUTRAL) == (() if drop else ("strict_tools", "logprobs"))
    assert strict.notes({}) == ["replaced strict_tools" if drop else "own strict_tools"]


@pytest.mark.parametrize(("mode", "probes"), [("processed", [1.0, 2.0]), ("raw", [1.0, 2.0]), ("", [1.0, 2.0]), ("said", [])])
async def test_log_probs_of_a_server_that_says_nothing_are_probed_once(receiver: OtlpReceiver, mode: str, probes: list[float]) -> None:
    asked_for, probed = list[float](), asyncio.Event()

    async def chat(request: web.Request) -> web.Response:
        temperature: float = (await request.json())["temperature"]
        asked_for.append(temperature)
        if len(asked_for) == 2 + len(probes):
            probed.set()
        scale = 1.0 if mode == "raw" else temperature if mode else 1.4 ** len(asked_for)
        headers = {conventions.HEADER_SAMPLING: "*"} if mode == "said" else {}
        return web.json_response(answer_at(scale), headers=headers)

    server = ModelServer({"/v1/chat/completions": chat})
    await server.start()
    try:
        async with proxy(receiver, FixedUpstreams(Upstream(server.url, "m", sampling=all_parameters(1.0, 5)))) as stand:
            await asked(stand)
            assert asked_for == [1.0], "at temperature 1 there is nothing to know"
            await asked(stand, temperature=0.5)
            await probed.wait()
            await asked(stand, temperature=0.5)
            while mode and (await contracts(stand))[-1].get("logprobs") is None:  # its answer may not have been read
                await asked(stand, temperature=0.5)
            recorded = [each.get("logprobs") for each in await contracts(stand)]
    finally:
        await server.stop()
    assert sorted(asked_for) == sorted([1.0, *probes, *[0.5] * (len(recorded) - 1)])
    assert recorded[-1] == {"said": "processed", "": None}.get(mode, mode)
    assert recorded[1] == ("processed" if mode == "said" else None), "the call that shows the need for a probe stays unknown"


class Restarted:
    """A server of chats that says nothing of its log-probs, and may be started again with others."""

    def __init__(self) -> None:
        self.raw = False
        self.fingerprint: str | None = None
        self.served = ModelServer({"/v1/chat/completions": self._chat})
        self.probes = 0

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.probes += body.get("top_logprobs") == 5
        scale = 1.0 if self.raw else body["temperature"]
        return web.json_response({**answer_at(scale), "system_fingerprint": self.fingerprint})

    async def restart(self, *, raw: bool) -> None:
        """Start again at the same port."""
        port = int(self.served.url.rsplit(":", 1)[1].split("/")[0])
        self.raw, self.served = raw, ModelServer({"/v1/chat/completions": self._chat})
        await self.served.start(port)


@pytest.fixture
async def restarted() -> AsyncIterator[Restarted]:
    server = Restarted()
    await server.served.start()
    yield server
    await server.served.stop()


async def probed(stand: Stand, server: Restarted) -> list[dict[str, Any]]:
    """Call at temperature 0.5 until a call's log-probs are known; return the contracts."""
    while (found := await contracts(stand)) == [] or "logprobs" not in found[-1]:
        await asked(stand, temperature=0.5)
    return found


async def test_a_server_that_could_not_be_reached_is_asked_again_what_its_log_probs_are(
    receiver: OtlpReceiver, restarted: Restarted
) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(restarted.served.url, "m", sampling=all_parameters(1.0, 5)))) as stand:
        found = await probed(stand, restarted)
        assert found[-1]["logprobs"] == "processed"
        await restarted.served.stop()
        status, _, _ = await stand.post(f"{SCOPE}/v1/chat/completions", {"model": "m", "messages": HELLO, "temperature": 0.5})
        assert status == 502
        await restarted.restart(raw=True)
        await asked(stand, temperature=0.5)
        assert (await contracts(stand))[-1].get("logprobs") != "processed"
        assert (await probed(stand, restarted))[-1]["logprobs"] == "raw"


async def test_an_answer_of_another_server_than_was_asked_is_not_known(receiver: OtlpReceiver, restarted: Restarted) -> None:
    """Several may serve one address; some say in each answer which they are."""
    restarted.fingerprint = "first"
    async with proxy(receiver, FixedUpstreams(Upstream(restarted.served.url, "m", sampling=all_parameters(1.0, 5)))) as stand:
        assert (await probed(stand, restarted))[-1]["logprobs"] == "processed"
        restarted.fingerprint = "second"
        await asked(stand, temperature=0.5)
        restarted.fingerprint = "first"
        await asked(stand, temperature=0.5)
        assert [each.get("logprobs") for each in await contracts(stand)][-2:] == [None, "processed"]
    assert restarted.probes == 2
