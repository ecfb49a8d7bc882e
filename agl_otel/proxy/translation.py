"""Translate calls in a protocol that the model server lacks: litellm runs between the agent's route and our capture.

agent → its route (keys, budget, number) → litellm, which turns the call into chat/completions → the capture side here → model server.

So the recorded call is the chat call as it was sampled, with its token ids, and it is recorded once: the capture side fills the Call that
the agent's request opened. The two sides are matched by a random name that replaces the model's name: it authorises this call only, and
expires with it. In the answer the agent sees the name that it requested.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp
from aiohttp import web

from agl_otel.errors import AglError, RefusedError, http_status
from agl_otel.net.auth import BrowserAccess
from agl_otel.net.bodies import Bodies, body_of
from agl_otel.net.http_server import browser_access, make_runner
from agl_otel.net.in_flight import InFlight
from agl_otel.proxy.agent import Agent, RequestAgent
from agl_otel.proxy.answer import error_response, pass_on
from agl_otel.proxy.dialects import CHAT, as_sampled
from agl_otel.proxy.litellm import PREFIX, PROVIDER, Litellm
from agl_otel.proxy.outgoing import RedirectedError, ask
from agl_otel.proxy.recorder import Call, Recorder
from agl_otel.proxy.reply import Json, Reply, parse_object, with_fields
from agl_otel.proxy.steering import for_litellm
from agl_otel.proxy.upstream import Upstream
from agl_otel.text import error_text

HOST: Final = "127.0.0.1"
END_SECONDS: Final = 10.0  # for the capture side to finish after the end of litellm's answer
MAX_BODY_BYTES: Final = 128 << 20  # an agent's request in another protocol
_PASSED_HEADERS: Final = ("accept", "anthropic-version", "anthropic-beta", "user-agent")
Send = Callable[[Agent, Sequence[Upstream], bytes, Json, Call], Awaitable[web.Response | None]]


@dataclass(slots=True)
class _Held:
    """An agent's request in progress at litellm."""

    agent: Agent
    pool: Sequence[Upstream]
    call: Call
    model: str
    """The model that the agent requested."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    taken: bool = False
    """Whether the capture side has the call; further requests of litellm's are recorded as calls of their own."""


class Translation:
    """The side above litellm (`ask`) and the side below it (an HTTP server on loopback). Use it between `start` and `stop`.

    Args:
        litellm: the process; started and stopped with this object.
        send: calls a pool of model servers and passes the answer on.
    """

    def __init__(
        self,
        litellm: Litellm,
        recorder: Recorder,
        send: Send,
        *,
        client_seconds: float,
        silence_seconds: float,
        answer_bytes: int,
        held_bytes: int,
    ) -> None:
        self._litellm = litellm
        self._recorder = recorder
        self._send = send
        self._client_seconds = client_seconds
        self._silence_seconds = silence_seconds
        self._answer_bytes = answer_bytes
        self._held_bytes = held_bytes
        self._held: dict[str, _Held] = {}
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen, and start litellm."""
        bodies = Bodies(InFlight(self._held_bytes, "AGL_PROXY_MAX_IN_FLIGHT_BYTES"), MAX_BODY_BYTES)  # own budget: no self-wait
        app = web.Application(middlewares=[browser_access(BrowserAccess(names=())), bodies.held])
        app.router.add_post("/v1/chat/completions", self._capture)
        self._runner = make_runner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._silence_seconds),
            auto_decompress=False,
        )
        self._litellm.start(f"http://{HOST}:{self._runner.addresses[0][1]}/v1")

    async def stop(self) -> None:
        """Stop litellm and close the port."""
        await self._litellm.stop()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def ask(self, agent: Agent, pool: Sequence[Upstream], raw: bytes, asked: Json, call: Call) -> None:
        """Answer an agent's request through litellm. Raises RefusedError if litellm is not running."""
        assert self._session is not None, "start() comes first"
        above = replace(call, reply=Reply())  # what the agent sees; `call` gets what was sampled
        name = secrets.token_hex(12)
        model = asked.get("model")
        held = self._held[name] = _Held(agent, pool, call, model if isinstance(model, str) else "")
        try:
            raw, asked = for_litellm(asked, call.dialect.fields, pool[0], agent.path)
            body = with_fields(raw, asked, {"model": PREFIX + name})
            address = await self._litellm.address()
            url = f"{address.url}/{call.dialect.path}"
            async with ask(self._session, "POST", url, data=body, headers=_headers(agent, address.key)) as response:
                edit = _renamed(name, held.model)
                most, patience = self._answer_bytes, self._client_seconds
                await pass_on(agent, response, frozenset(), above, client_seconds=patience, most=most, translated=edit)
            if held.tasks:  # litellm stops reading at the last event, so the capture side may end a moment later
                await asyncio.wait(held.tasks, timeout=END_SECONDS)
        except RefusedError as error:
            above.status = error.status
            raise
        except (aiohttp.ClientError, RedirectedError) as error:
            above.status = 503
            raise self._litellm.absent(f"broke off ({error_text(error)})") from None
        finally:
            del self._held[name]
            for task in held.tasks:
                task.cancel()
            await asyncio.gather(*held.tasks, return_exceptions=True)
            _merge(call, above, taken=held.taken)

    async def _capture(self, request: web.Request) -> web.StreamResponse:
        """Serve chat/completions to litellm."""
        try:
            raw = await body_of(request)
        except AglError as error:
            return error_response(http_status(error), str(error), type(error).__name__)
        given = parse_object(raw)
        held = self._held.get(str(given.get("model"))) if given is not None else None
        task = asyncio.current_task()
        if held is None or given is None or task is None:
            return error_response(404, "this port is for litellm, and the request names no call in flight", "no_call")
        litellms = RequestAgent(request, held.agent.headers)
        raw = with_fields(raw, given, {"model": held.model})
        asked = {**given, "model": held.model}
        shown = as_sampled(asked, held.pool[0].fields)
        first, held.taken = not held.taken, True
        call = held.call if first else self._recorder.start(held.call.key, CHAT, shown, request.headers.get("traceparent"))
        call.dialect, call.body, call.asked, call.overridden = CHAT, shown, asked, held.call.overridden
        call.conversation = held.call.conversation
        held.tasks.add(task)
        try:
            return await self._send(litellms, held.pool, raw, asked, call) or litellms.answered()
        except (asyncio.CancelledError, ConnectionResetError):
            if not call.delivered:
                call.incomplete = call.incomplete or "client_gone"
            raise
        finally:
            if not first:
                self._recorder.finish(call)


def _merge(call: Call, above: Call, *, taken: bool) -> None:
    """Copy to the sampled call what the agent saw of it."""
    call.delivered = above.delivered
    if not taken:
        call.status, call.first_byte, call.incomplete, call.reply = above.status, above.first_byte, above.incomplete, above.reply
        return
    call.reply.id = above.reply.id or call.reply.id  # the id in the agent's own span
    if call.failed is None and above.failed is not None:
        call.incomplete = above.incomplete or "translation_failed"


def _headers(agent: Agent, key: str) -> dict[str, str]:
    passed = {name: agent.headers[name] for name in _PASSED_HEADERS if name in agent.headers}
    return {**passed, "authorization": f"Bearer {key}", "content-type": "application/json", "accept-encoding": "identity"}


def _renamed(name: str, model: str) -> Callable[[bytes], bytes]:
    """Return an edit that replaces the random name with the model's name as the agent requested it."""
    shown = json.dumps(model)[1:-1].encode()
    made_up = [f"{prefix}{name}".encode() for prefix in (PREFIX, PROVIDER, "")]

    def edit(data: bytes) -> bytes:
        if made_up[-1] in data:
            for each in made_up:
                data = data.replace(each, shown)
        return data

    return edit
