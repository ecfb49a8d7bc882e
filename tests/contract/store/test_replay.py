"""`agl-otel replay` with a real store and a real model server, whose tool calls depend on the prompt alone.

`REPLAY_ATTEMPTS=10000 … --timeout=3000` replays as many attempts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from agl_otel.cli import main
from agl_otel.store import LightningStore
from agl_otel.types import Span
from agl_otel_hook import conventions
from tests.contract.store.test_export import span_of
from tests.model_server import ModelServer, in_a_thread

Json = dict[str, Any]
Policy = Callable[[int], list[Json]]
ATTEMPTS = int(os.environ.get("REPLAY_ATTEMPTS", "200"))
TOOLS = [{"type": "function", "name": "look_up", "parameters": {"type": "object"}}]


def look_up(number: int) -> Json:
    return {"type": "function", "id": "call_1", "function": {"name": "look_up", "arguments": json.dumps({"deep": True, "number": number})}}


class Server:
    """Calls tools as its policy says, by the number in the prompt; with the result of a tool it answers a text."""

    def __init__(self) -> None:
        self.policy: Policy = lambda number: [look_up(number)]
        self.refuses: Callable[[int], bool] = lambda number: False
        self.bodies: list[Json] = []
        self.server = ModelServer({"/v1/chat/completions": self._answer})

    async def _answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        number, last = int(body["messages"][0]["content"].removeprefix("no. ")), body["messages"][-1]
        if self.refuses(number):
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        calls = [] if last["role"] == "tool" else self.policy(number)
        message = {"role": "assistant", "content": None if calls else "it is said", **({"tool_calls": calls} if calls else {})}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.fixture
def model() -> Iterator[Server]:
    made = Server()
    with in_a_thread(made.server):
        yield made


def calls_of(rollout_id: str, attempt_id: str, number: int) -> list[Span]:
    """Two model calls: one that looks up a number, and one that answers with what was found."""
    asked = {"role": "user", "parts": [{"type": "text", "content": f"no. {number}"}]}
    called = {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c", "name": "look_up", "arguments": {"number": number, "deep": True}}],
    }
    found = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": f"{number} is found"}]}
    answered = {"role": "assistant", "parts": [{"type": "text", "content": "it is so"}]}
    return [
        span_of(
            rollout_id,
            attempt_id,
            place,
            conventions.SPAN_LLM,
            {
                conventions.LLM_CALL: place,
                conventions.LLM_CHOICE: 0,
                "gen_ai.operation.name": "chat",
                "gen_ai.response.id": f"{rollout_id}-{place}",
                "gen_ai.input.messages": json.dumps(prompt),
                "gen_ai.output.messages": json.dumps([reply]),
                "gen_ai.tool.definitions": json.dumps(TOOLS),
            },
        )
        for place, prompt, reply in ((1, [asked], called), (2, [asked, called, found], answered))
    ]


async def fill(store: LightningStore, run: str, count: int) -> None:
    """Attempts no. 0 … count - 1 of a run."""
    begun = [await store.start_rollout({}, mode="train", metadata={"run": run}) for _ in range(count)]
    keys = [(each.rollout_id, each.attempt.attempt_id) for each in begun]
    await store.add_many_spans([span for number, key in enumerate(keys) for span in calls_of(*key, number)])
    for key in keys:
        await store.update_attempt(*key, status="succeeded")


class Cli:
    def __init__(self, store: LightningStore, model: Server, capsys: pytest.CaptureFixture[str], run: str) -> None:
        self._capsys = capsys
        address = store._source.address()  # pyright: ignore[reportPrivateUsage]
        self._arguments = ["replay", "--server", model.server.url, "--model", "new", "--store", address, "--run", run]

    def run(self, *options: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*self._arguments, *options])
        captured = self._capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out + captured.err

    def report(self, *options: str, code: int = 0) -> Json:
        return json.loads(self.run(*options, "--json", code=code))


def test_replays_have_one_digest_however_many_run_at_once(store: LightningStore, model: Server, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(fill(store, "one-digest", ATTEMPTS))
    cli = Cli(store, model, capsys, "one-digest")
    first = cli.report("--at-once", "1")
    counts = ("verdict", "attempts", "calls", "compared", "differing", "tools")
    fates = {"hit": ATTEMPTS, "elsewhere": 0, "miss": 0, "not_made": 0}
    assert [first[each] for each in counts] == ["same", ATTEMPTS, 2 * ATTEMPTS, ATTEMPTS, 0, {"look_up": fates}]
    asked, model.bodies = model.bodies, []
    assert cli.report("--at-once", "64") == first
    assert sorted(map(json.dumps, asked)) == sorted(map(json.dumps, model.bodies))
    function = {"name": "look_up", "description": "", "parameters": {"type": "object"}}
    sent = {
        "model": "new",
        "temperature": 0.0,
        "seed": 0,
        "max_completion_tokens": 1024,
        "tools": [{"type": "function", "function": function}],
    }
    assert asked[0] == sent | {"messages": [{"role": "user", "content": "no. 0"}]}
    model.policy = lambda number: [look_up(number + (number == 150))]
    other = cli.report(code=3)
    assert other["digest"] != first["digest"] and other["misses"] == [
        {"name": "look_up", "arguments": '{"deep": true, "number": 151}', "count": 1}
    ]
    assert (other["verdict"], other["differing"], other["share"]) == ("regressed", 1, 1 / ATTEMPTS)
    assert cli.report("--misses", "0.005")["verdict"] == "same"


def test_what_differs_is_named(store: LightningStore, model: Server, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(fill(store, "differs", 6))
    cli = Cli(store, model, capsys, "differs")
    model.policy = lambda number: [[look_up(0)], [], [look_up(7), look_up(2)], [look_up(3)], [look_up(4)], [look_up(7)]][number]
    model.refuses = lambda number: number == 4
    lines = cli.run(code=3).splitlines()
    assert lines[:-1] == [
        "regressed: 5 of 7 model calls with tools differ, a share of 0.7143 where 0 may",
        "6 attempts, 12 model calls replayed",
        "1 model call answered with a text instead of tool calls",
        f"2 prompts refused by the server: {model.server.url} answers 'new' with HTTP 400: the prompt is too long",
        "  look_up: 3 as recorded, 2 not recorded, 3 recorded, and not made",
        "not recorded, the most frequent of 1:",
        '  2 look_up({"deep": true, "number": 7})',
    ]


def test_without_tools_it_cannot_tell_and_a_server_that_refuses_all_is_an_error(
    store: LightningStore, model: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prepare() -> str:
        begun = await store.start_rollout({}, mode="train", metadata={"run": "nothing"})
        key = (begun.rollout_id, begun.attempt.attempt_id)
        await store.add_many_spans(calls_of(*key, 0)[1:])
        await store.update_attempt(*key, status="succeeded")
        return begun.rollout_id

    asyncio.run(prepare())
    assert Cli(store, model, capsys, "nothing").report(code=4)["verdict"] == "cannot_tell"
    asyncio.run(fill(store, "refuses", 5))
    model.refuses = lambda number: True
    assert "the first 5 prompts were refused, the last one" in Cli(store, model, capsys, "refuses").run("--at-once", "1", code=1)


def test_an_address_that_is_the_proxy_or_none_is_refused(store: LightningStore, model: Server, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(fill(store, "address", 1))
    cli = Cli(store, model, capsys, "address")
    assert "--server 'localhost:80' is no http:// or https:// address" in cli.run("--server", "localhost:80", code=2)
    assert "--server holds a password" in cli.run("--server", "http://me:secret@host/v1", code=2)
