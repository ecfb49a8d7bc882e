"""Forward one call: admission, choice of endpoint, retries, and recording.

A call is retried only before the first byte of an answer: after that something was sampled. If the client disconnects, the upstream call
is cancelled; a server that is unreachable or silent is answered as a 502 or 504 that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import cycle, islice, takewhile
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from agl_otel.errors import RefusedError
from agl_otel.net.auth import is_ours, without_scheme
from agl_otel.proxy import crowded
from agl_otel.proxy.agent import Agent, RequestAgent
from agl_otel.proxy.answer import ANSWER_BYTES, CLIENT_SECONDS, NOT_PASSED, pass_on, passed
from agl_otel.proxy.attempts import Attempts
from agl_otel.proxy.bridging import Bridges
from agl_otel.proxy.budget import Budget
from agl_otel.proxy.callers import Conversation, caller_of, conversation_of, retry_of
from agl_otel.proxy.capabilities import NO_ROUTE, REFUSED, Capabilities, Place, Translate, names_any
from agl_otel.proxy.dialects import CHAT, DIALECTS, Dialect, as_sampled, prepare, told_of
from agl_otel.proxy.failures import failure_of, incomplete_of, public_address
from agl_otel.proxy.gate import Gate
from agl_otel.proxy.litellm import HOW, KEY_FIELD, Litellm
from agl_otel.proxy.outgoing import Asked, RedirectedError, RefusedAnswerError, ask, whole
from agl_otel.proxy.pool import Health
from agl_otel.proxy.recorder import Call, Recorder
from agl_otel.proxy.reply import Json, encoded, with_fields
from agl_otel.proxy.steering import HEADERS, for_litellm
from agl_otel.proxy.translation import Translation
from agl_otel.proxy.upstream import SEED, TOKENIZE, Route, Upstream, Upstreams, call_seed
from agl_otel.proxy.witness import Witnesses
from agl_otel.types.sampling import lenient, overridden
from agl_otel_hook import conventions
from agl_otel_hook.context import Key, format_traceparent

CONNECT_SECONDS: Final = 10.0
PROBE_SECONDS: Final = 30.0  # for an answer to a probe (capabilities.py)
SILENCE_SECONDS: Final = 600.0  # the longest that a model server may send nothing: a long prompt behind a full batch
KEEP_ALIVE_SECONDS: Final = 3.0  # shorter than the 5 s after which uvicorn, and so vLLM, closes
LARGE_BYTES: Final = 1 << 20
HELD_BYTES: Final = 1 << 30
SETTLE_SECONDS: Final = 0.02  # delay after a call, unless another call settles earlier
MAX_TRIES: Final = 3
PAUSE_SECONDS: Final = (0.05, 0.3)  # random pause between tries, so that agents started together do not retry together
_CANNOT_SERVE: Final = frozenset({502, 503, 504})
_LOOKED_AT: Final = NO_ROUTE | REFUSED
"""Statuses that may mean that the server does not support the request."""
_SET_HERE: Final = NOT_PASSED | {"content-type", "traceparent", "tracestate", "baggage", conventions.HEADER_CONVERSATION_ID}
_KEY_HEADERS: Final = ("authorization", "x-api-key")


class _NoRouteError(Exception):
    """The server has no such route."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a call."""

    silence_seconds: float = SILENCE_SECONDS
    client_seconds: float = CLIENT_SECONDS
    answer_bytes: int = ANSWER_BYTES
    held_bytes: int = HELD_BYTES
    """Total size of the bodies of all requests in flight."""
    budget: Budget = field(default_factory=Budget)
    """Default budget of attempts whose rollouts have none."""
    litellm_url: str = ""
    """The litellm server for providers with another protocol; empty: the local litellm process, if there is one."""
    translate: Translate = "auto"
    """Which calls litellm turns into chat/completions."""


class Forwarder:
    """Forwards calls. Make it in a running event loop; `close` it."""

    def __init__(
        self,
        upstreams: Upstreams,
        recorder: Recorder,
        attempts: Attempts,
        gate: Gate,
        *,
        limits: Limits,
        token: str = "",
        litellm: Litellm | None = None,
        witnesses: Witnesses | None = None,
    ) -> None:
        self._witnesses = witnesses
        self._upstreams = upstreams
        self._recorder = recorder
        self._attempts = attempts
        self._gate = gate
        self._limits = limits
        self._token = token
        self._settling: asyncio.TimerHandle | None = None
        self._bridges = Bridges()
        self._capabilities = Capabilities(limits.translate, can_translate=litellm is not None)
        self._litellm = litellm
        self._translation = (
            Translation(
                litellm,
                recorder,
                self._try_endpoints,
                client_seconds=limits.client_seconds,
                silence_seconds=limits.silence_seconds,
                answer_bytes=limits.answer_bytes,
                held_bytes=limits.held_bytes,
            )
            if litellm is not None
            else None
        )
        self.health = Health()
        self.version: str | None = None
        """The weights version announced last, for servers that do not report one."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=limits.silence_seconds),
        )

    def settle(self) -> None:
        """Export the spans of ended calls."""
        self._recorder.settle()

    def _settle_late(self) -> None:
        self._settling = None
        self.settle()

    async def start(self) -> None:
        """Start litellm, if there is one, without waiting until it answers."""
        if self._translation is not None:
            await self._translation.start()

    async def close(self) -> None:
        """Close the connections, and stop litellm."""
        if self._settling is not None:
            self._settling.cancel()
        self.settle()
        await self._capabilities.close()
        await self._session.close()
        if self._translation is not None:
            await self._translation.stop()

    async def call(self, agent: Agent, key: Key | None, dialect: Dialect) -> web.Response | None:
        """Forward a model call and record it; return an error to answer it with, or None if it has its answer.

        Raises UsageError, NotFoundError, UnavailableError or RefusedError if nothing was forwarded.
        """
        raw = await agent.body()
        body = crowded.read(raw, agent.path)
        await self._gate.enter()
        try:
            conversation = Conversation(key[0]) if key is not None else None if agent.own_key else conversation_of(agent.headers)
            route = await self._route(agent, key, body.get("model"), conversation)
            raw, body, pool = await self._for_litellm(agent, dialect, raw, body, route.pool)
            if key is not None:  # last: the attempt may be closed during any await
                default = self._limits.budget
                budget = default if route.budget is None else route.budget.or_else(default)
                self._admit(key, budget if dialect.samples else Budget())
            ordered = self.health.order(pool, conversation.id if conversation is not None else None)
            return await self._forward_recorded(agent, key, dialect, raw, body, ordered, route, conversation)
        finally:
            self._gate.leave()

    async def pass_through(self, agent: RequestAgent, key: Key | None, path: str) -> web.Response:
        """Forward a request without recording it."""
        raw = await agent.body()
        body = crowded.read(raw, agent.path) if raw else None
        model = body.get("model") if body is not None else None
        pool = (await self._route(agent, key, model)).pool
        if key is not None:
            self._check_open(key)
        if body is not None and (served := _by_litellm(pool)) is not None:
            if path == TOKENIZE:
                raise RefusedError("litellm has no /tokenize, by which tokens are counted", status=501, code="no_tokenize")
            known = DIALECTS.get(path.partition("/")[0])  # count_tokens takes a request of messages
            raw, body = for_litellm(body, known.fields if known is not None else (), served, agent.path)
        upstream = await self._with_litellm_address(self.health.order(pool, key[0] if key is not None else None)[0])
        if body is not None and isinstance(model, str) and upstream.model:
            raw = with_fields(raw, body, _with_key({"model": upstream.model}, upstream))
        headers = self._headers(agent, upstream, _KEY_HEADERS)
        if body is not None:
            headers["content-type"] = "application/json"  # it was parsed as JSON here
        try:
            async with ask(self._session, agent.method, upstream.url(path), data=_request_data(raw) or None, headers=headers) as response:
                content = await whole(response, self._limits.answer_bytes)
                return web.Response(status=response.status, body=content, headers=passed(response))
        except (aiohttp.ClientError, OSError, RedirectedError) as error:
            return failure_of(error, upstream)

    async def _route(self, agent: Agent, key: Key | None, model: object, conversation: Conversation | None = None) -> Route:
        """Resolve the route of a call, without our keys and passwords if the client sent its own key."""
        asked = model if isinstance(model, str) else None
        route = await self._upstreams.resolve(key, asked, conversation.id if conversation is not None else None)
        if not agent.own_key:
            return route
        if any(each.provider != "openai" for each in route.pool):
            raise RefusedError(f"model {model!r} is called with the stack's own key: send the stack's token", status=401, code="wrong_key")
        return replace(route, pool=[each.without_secrets() for each in route.pool])

    async def _for_litellm(
        self, agent: Agent, dialect: Dialect, raw: bytes, body: Json, pool: Sequence[Upstream]
    ) -> tuple[bytes, Json, Sequence[Upstream]]:
        """Return a request and its servers as litellm needs them where it serves one; without a canary that it cannot serve."""
        if (served := _by_litellm(pool)) is None:
            return raw, body, pool
        try:
            asked = for_litellm(body, dialect.fields, served, agent.path)
            return *asked, [await self._with_litellm_address(each) for each in pool]
        except RefusedError:
            usual = [each for each in pool if not each.canary]
            if len(usual) == len(pool):
                raise
            return await self._for_litellm(agent, dialect, raw, body, usual)

    async def _with_litellm_address(self, upstream: Upstream) -> Upstream:
        """Return the upstream with litellm's address if litellm serves it. Raises RefusedError without a litellm."""
        if upstream.provider == "openai":
            return upstream
        if self._limits.litellm_url:
            return replace(upstream, base_url=self._limits.litellm_url.rstrip("/"))
        if self._litellm is None:
            raise RefusedError(
                f"model {upstream.model} needs litellm, which is not set up: {HOW}; or run its proxy yourself and set "
                "AGL_LITELLM_URL=http://127.0.0.1:4001/v1",
                status=501,
                code="no_litellm",
            )
        address = await self._litellm.address()
        return replace(upstream, base_url=address.url, api_key=address.key, provider_key=upstream.api_key)

    def _check_open(self, key: Key) -> None:
        if self._attempts.is_closed(key):
            raise RefusedError(f"attempt {key[1]} of rollout {key[0]} is over: its calls are no longer taken", status=410, code="over")

    def _admit(self, key: Key, budget: Budget) -> None:
        """Raise RefusedError if the attempt is closed or has used up its budget."""
        self._check_open(key)
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        if budget.tokens:
            self.settle()
        for name, used, limit in (("calls", attempt.calls, budget.calls), ("tokens", attempt.tokens, budget.tokens)):
            if limit and used >= limit:
                self._recorder.counts["over_budget"] += 1
                raise RefusedError(
                    f"attempt {key[1]} of rollout {key[0]} has used its budget: {used} of {limit} {name}", status=403, code="budget"
                )

    async def _forward_recorded(
        self,
        agent: Agent,
        key: Key | None,
        dialect: Dialect,
        raw: bytes,
        body: Json,
        pool: Sequence[Upstream],
        route: Route,
        conversation: Conversation | None,
    ) -> web.Response | None:
        traceparent = None if agent.own_key else agent.headers.get("traceparent")
        told = told_of(dialect, pool[0].fields)
        if own := overridden(route.policy, body, told):
            nothing: Json = dict.fromkeys(own)
            raw, body = with_fields(raw, body, nothing), body | nothing
        if pool[0].strict_tools == "drop" and (tools := lenient(body.get("tools"))) is not None:
            own |= {"strict_tools": True}
            raw, body = with_fields(raw, body, {"tools": tools}), body | {"tools": tools}
        shown = as_sampled(body, pool[0].fields)
        retry, fingerprint = retry_of(agent.headers, raw) if key is not None else (0, b"")
        if retry:
            self.settle()  # needed to know whether the first try failed
        caller = None if agent.own_key else caller_of(agent.headers.getall("baggage", ()))
        call = self._recorder.start(key, dialect, shown, traceparent, caller=caller, retry=retry, fingerprint=fingerprint)
        call.asked, call.told, call.overridden = body, told, own
        call.conversation = conversation.id if conversation is not None and conversation.named else None
        call.canary_full = route.full
        if len(pool) < len(route.pool):
            call.canary_failed = route.pool[0].arm
        if route.seed is not None and dialect.samples:
            drawn = {SEED: call_seed(route.seed, call.logical_number)}
            pool = [replace(each, sampling={**each.sampling, **drawn}) for each in pool]
            call.body = {**drawn, **shown}
        try:
            if self._witnesses is not None and key is not None:
                await self._witnesses.announce(key, call.span.marker)
            if not self._goes_by_chat(agent, pool[0], body, dialect):
                with contextlib.suppress(_NoRouteError):
                    return await self._try_endpoints(agent, pool, raw, body, call)
            return await self._forward_translated(agent, pool, raw, body, call)
        except (asyncio.CancelledError, ConnectionResetError):
            if not call.delivered:
                call.incomplete = call.incomplete or "client_gone"
            raise
        finally:
            self._recorder.ended(call)
            if self._settling is None:
                self._settling = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._settle_late)

    async def _forward_translated(self, agent: Agent, pool: Sequence[Upstream], raw: bytes, body: Json, call: Call) -> web.Response | None:
        if self._translation is not None:
            return await self._translation.ask(agent, pool, raw, body, call)
        call.status = 501
        raise RefusedError(
            f"the model server {public_address(pool[0])} has no route /{call.dialect.path}, and litellm, which would translate the "
            f"call to chat/completions, is not set up: {HOW}",
            status=501,
            code="no_litellm",
        )

    async def _try_endpoints(self, agent: Agent, pool: Sequence[Upstream], raw: bytes, body: Json, call: Call) -> web.Response | None:
        """Try one endpoint after the other until one answers; a canary once, if it is up."""
        canaries = [*takewhile(lambda each: each.canary, pool)]
        usual = [each for each in pool if not each.canary]
        for number, upstream in enumerate((*canaries, *islice(cycle(usual), MAX_TRIES)), 1):
            call.tries, last = number, number == len(canaries) + MAX_TRIES
            if not upstream.canary:
                call.canary_failed = call.canary_failed or next((each.arm for each in pool if each.canary), None)
            try:
                if await self._exchange(agent, upstream, raw, body, call, may_skip=upstream.canary or (not last and len(usual) > 1)):
                    return None
            except RedirectedError as error:
                if upstream.canary:
                    self._failed(upstream)
                    continue
                failure = failure_of(error, upstream)
                call.status, call.incomplete = failure.status, "upstream_redirect"
                return failure
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, ConnectionResetError) and agent.has_gone():
                    raise
                timed_out = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
                self._failed(upstream)
                if upstream.canary and not call.first_byte:
                    continue
                if last or call.first_byte or timed_out or isinstance(error, RefusedAnswerError):
                    failure = failure_of(error, upstream)
                    call.status, call.incomplete = failure.status, incomplete_of(error, failure)
                    return failure
            if not upstream.canary:
                await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
        raise AssertionError("the last try answers or fails")

    async def _exchange(self, agent: Agent, upstream: Upstream, raw: bytes, body: Json, call: Call, *, may_skip: bool) -> bool:
        """Call one endpoint and pass its answer on; return False if it answers that it cannot serve now and `may_skip` is set."""
        dialect = call.dialect
        call.model_version, call.arm = self.version or upstream.version, upstream.arm
        if call.tries > 1:
            call.body = as_sampled(body, upstream.fields)
        call.told = told_of(dialect, upstream.fields)
        headers = self._headers(agent, upstream, dialect.key_headers)
        headers["content-type"] = "application/json"
        headers["traceparent"] = format_traceparent(call.span.context)
        url = f"{upstream.base_url}/{dialect.path}"
        place, send_probe = partial(_place, upstream, dialect, body, headers), partial(self._send_probe, agent, upstream)
        known = place() if self._capabilities else None
        if known is not None:
            call.probed = self._capabilities.logprobs(call, known, send_probe)
        ids: Json = {}
        if upstream.bridge != "off" and dialect is CHAT:
            ids = await self._bridges.fields(call, upstream, place(), partial(self._ask_server, agent, upstream, dialect))
        streamed = body.get("stream") is True
        levels = dialect.levels if known is None else self._capabilities.levels(known, dialect, streamed=streamed)
        for extras in levels:
            prepared = prepare(dialect, body, model=upstream.model, sampling=upstream.fields, extras=extras)
            if self._recorder.unsettled:  # while the model server works
                asyncio.get_running_loop().call_soon(self.settle)
            sent = _request_data(with_fields(raw, body, _with_key(prepared.fields | ids, upstream)))
            self._recorder.forwarded(call)
            async with Asked(self._session, url, sent, headers) as response:
                if may_skip and response.status in _CANNOT_SERVE:
                    self._failed(upstream)
                    return False
                self.health.answered(upstream.base_url)
                content = await whole(response, self._limits.answer_bytes) if response.status in _LOOKED_AT else None
                if response.status in NO_ROUTE and dialect.via_chat and await self._capabilities.lacks_route(place(), dialect, send_probe):
                    raise _NoRouteError
                if ids and response.status in REFUSED:
                    self._bridges.refused(call, place())
                    return await self._exchange(agent, upstream, raw, body, call, may_skip=may_skip)
                if content is not None and response.status in REFUSED and names_any(content, prepared.added):
                    self._capabilities.probe(place(), dialect, send_probe)
                    continue
                await pass_on(
                    agent,
                    response,
                    prepared.added,
                    call,
                    client_seconds=self._limits.client_seconds,
                    most=self._limits.answer_bytes,
                    body=content,
                    write_down=self._recorder.write_down,
                )
            if ids:
                self._bridges.answered(call, place())
            if dialect.via_chat:
                self._capabilities.answered(place(), call, upstream, send_probe)
            self._capabilities.sampled(call, place, send_probe)
            return True
        raise AssertionError("without extras nothing is refused because of them")

    def _failed(self, upstream: Upstream) -> None:
        self.health.failed(upstream)
        self._capabilities.unreachable(upstream.base_url)

    async def _send_probe(self, agent: Agent, upstream: Upstream, dialect: Dialect, body: Json) -> tuple[int, bytes]:
        """Send a probe (capabilities.Ask)."""
        return await self._ask_server(agent, upstream, dialect, f"{upstream.base_url}/{dialect.path}", body)

    async def _ask_server(self, agent: Agent, upstream: Upstream, dialect: Dialect, url: str, body: Json) -> tuple[int, bytes]:
        """Send a request of the proxy's own to a model server; return status and body of the answer, status 0 without one."""
        headers = CIMultiDict(_credentials(self._headers(agent, upstream, dialect.key_headers), upstream))
        headers["content-type"] = "application/json"
        data = encoded(_with_key(body, upstream))
        try:
            async with (
                asyncio.timeout(PROBE_SECONDS),
                ask(self._session, "POST", url, data=_request_data(data), headers=headers) as response,
            ):
                return response.status, await whole(response, self._limits.answer_bytes)
        except (aiohttp.ClientError, OSError, RedirectedError):
            return 0, b""

    def _goes_by_chat(self, agent: Agent, upstream: Upstream, body: Json, dialect: Dialect) -> bool:
        if dialect.via_chat and upstream.bridge != "off" and self._translation is not None:
            return True  # only there do servers take token ids beside messages

        def place() -> Place:
            return _place(upstream, dialect, body, self._headers(agent, upstream, dialect.key_headers))

        return self._capabilities.uses_chat(dialect, upstream, place)

    def _headers(self, agent: Agent, upstream: Upstream, key_headers: Sequence[str]) -> CIMultiDict[str]:
        given = [(name, name.lower(), value) for name, value in agent.headers.items()]
        headers = CIMultiDict([(name, value) for name, lower, value in given if lower not in _SET_HERE and not lower.startswith(HEADERS)])
        headers["accept-encoding"] = "identity"  # the proxy must be able to read the answer
        for name in _KEY_HEADERS:
            keys = [without_scheme(value) for value in headers.getall(name, [])]
            if upstream.api_key is not None or any(is_ours(each, self._token) for each in keys):
                headers.popall(name, None)
        if upstream.api_key:
            for name in key_headers:
                if name == "x-api-key":
                    headers[name] = upstream.api_key
                elif len(key_headers) == 1 or not (urlsplit(upstream.base_url).hostname or "").endswith("anthropic.com"):
                    headers[name] = f"Bearer {upstream.api_key}"
        headers.update(upstream.headers)
        if "@" in urlsplit(upstream.base_url).netloc:  # credentials in the URL are the authorization
            headers.popall("authorization", None)
        return headers


def _by_litellm(pool: Sequence[Upstream]) -> Upstream | None:
    """A member of the pool that litellm serves; None if there is none."""
    return next((each for each in pool if each.provider == "litellm"), None)


def _with_key(fields: Json, upstream: Upstream) -> Json:
    """The fields to set in a body, with the provider's key for litellm."""
    return {**fields, KEY_FIELD: upstream.provider_key} if upstream.provider_key else fields


def _request_data(body: bytes) -> bytes | io.BytesIO:
    """Wrap a large body, so that it is sent in pieces and other calls run in between."""
    return body if len(body) < LARGE_BYTES else io.BytesIO(body)


def _place(upstream: Upstream, dialect: Dialect, body: Json, headers: CIMultiDict[str]) -> Place:
    """The Place (capabilities.py) of a call with these headers."""
    model = upstream.model or body.get("model")
    shown = repr((upstream.provider_key, _credentials(headers, upstream))).encode(errors="surrogateescape")
    return Place(upstream.base_url, dialect.path, model if isinstance(model, str) else "", blake2b(shown, digest_size=16).digest())


def _credentials(headers: CIMultiDict[str], upstream: Upstream) -> list[tuple[str, str]]:
    """The credentials among the headers of a call: keys, and headers added by its resource."""
    names = dict.fromkeys((*_KEY_HEADERS, *(name.lower() for name in upstream.headers)))
    return [(name, value) for name in names for value in headers.getall(name, ())]
