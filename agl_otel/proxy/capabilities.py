"""Detect what model servers support, by probe requests of the proxy's own; an answer to an agent only triggers a probe.

The result decides what is recorded of all later calls, and agents influence the answers to their own requests: a server's error quotes
them, and may be caused by a parameter, header or model that the agent chose. So a probe contains nothing of an agent's except what
identifies a Place (a model that the resource leaves to agents, and a key of their own), and its result holds for that Place only.

A server may refuse the fields that request token ids; then calls are sent without them. It may have no route for Messages or Responses, or
answer there without token ids, or without all log-probs (vLLM's Responses), although its chat/completions returns them; then calls are
translated, and can be trained on. The answers
that triggered a probe are not usable as samples, and are counted. So are those of calls with another distribution than the logits' softmax
until it is known of which distribution the server's log-probs are (logprob_mode.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from agl_otel.proxy.dialects import CHAT, Dialect, prepare
from agl_otel.proxy.litellm import HOW
from agl_otel.proxy.logprob_mode import FIELDS, TEMPERATURES, logprob_mode
from agl_otel.proxy.recorder import Call
from agl_otel.proxy.reply import Json, Reply, parse_object, string
from agl_otel.proxy.upstream import Upstream
from agl_otel.types.sampling import LogProbs, heeded

AGAIN_SECONDS: Final = 60.0  # after an inconclusive probe, and after one of the log-probs
PROOF_SECONDS: Final = 2 * AGAIN_SECONDS  # how long before a call a probe of the log-probs may have been made
MAX_PLACES: Final = 10_000  # remembered places; the least recently called is dropped
MAX_MODEL: Final = 256  # characters of a model's name given by an agent
NO_ROUTE: Final = frozenset({404, 405, 501})
REFUSED: Final = frozenset({400, 422})
_MISSING: Final = {False: "token ids", True: "log-probs of all replies"}
logger = logging.getLogger("agl_otel.proxy")
Translate = Literal["auto", "missing", "always"]
Ask = Callable[[Dialect, Json], Awaitable[tuple[int, bytes]]]
"""Sends a probe to a route of a server; returns status and body of the answer, status 0 without an answer."""


class Place(NamedTuple):
    """A model at a route of a server, called with one key."""

    base_url: str
    path: str
    model: str
    key: bytes
    """A digest of the credentials that are sent to the server."""


Known = TypeVar("Known")


class Places(Generic[Known]):
    """What is known of model servers, by place: of MAX_PLACES at most, the least recently called is dropped.

    `make` creates what is known of a place in the beginning.
    """

    def __init__(self, make: Callable[[], Known]) -> None:
        self._make = make
        self._known: OrderedDict[Place, Known] = OrderedDict()
        """The least recently called first."""

    def __len__(self) -> int:
        return len(self._known)

    def of(self, place: Place) -> Known:
        """Return what is known of a place; what is new there stays only with `keep`."""
        known = self._known.get(place)
        if known is None:
            return self._make()
        self._known.move_to_end(place)
        return known

    def keep(self, place: Place, known: Known) -> None:
        """Remember it, unless an agent gave the model a very long name."""
        if len(place.model) <= MAX_MODEL:
            self._known[place] = known
            if len(self._known) > MAX_PLACES:
                self._known.popitem(last=False)

    def at(self, base_url: str) -> list[Known]:
        """Return what is known of a server's places."""
        return [known for place, known in self._known.items() if place.base_url == base_url]


@dataclass(slots=True)
class _Detected:
    again: float = 0.0
    """The earliest time of the next probe."""
    level: int = 0
    """Which of Dialect.levels are left out: the server refuses the fields of those before."""
    in_sglext: bool = False
    """Whether it refuses them in streams only, and takes others there (Dialect.stream_extras)."""
    by_chat: bool = False
    """Whether calls go to chat/completions."""
    logprobs: LogProbs = ""
    """What the last probe of its log-probs found."""
    proven: float = float("-inf")
    """When that probe began."""
    fingerprint: str | None = None
    """Of its answers."""
    again_logprobs: float = float("-inf")
    """The earliest time of the next one; -inf: none was needed yet."""
    probing: bool = False
    """Whether one is running."""
    outages: int = 0

    def logprobs_since(self, time: float, fingerprint: str | None) -> LogProbs:
        other = fingerprint is not None and self.fingerprint is not None and fingerprint != self.fingerprint
        return "" if other or self.proven < time else self.logprobs


class Capabilities:
    """Detected capabilities of each model server. Use it in one event loop; `close` it.

    Args:
        translate: `missing`: calls are translated if the server has no route; `auto`: also if only its chat/completions returns
            token ids; `always`: whenever the dialect allows it.
        can_translate: whether litellm is set up.
    """

    def __init__(self, translate: Translate, *, can_translate: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._translate = translate
        self._can_translate = can_translate
        self._clock = clock
        self._detected = Places(_Detected)
        self._asking: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """The number of places of which something is known."""
        return len(self._detected)

    def uses_chat(self, dialect: Dialect, upstream: Upstream, find_place: Callable[[], Place]) -> bool:
        """Whether calls are sent to chat/completions."""
        if not dialect.via_chat or upstream.provider != "openai":
            return False
        return (self._translate == "always" and self._can_translate) or self._detected.of(find_place()).by_chat

    def levels(self, place: Place, dialect: Dialect, *, streamed: bool) -> Sequence[Mapping[str, Any]]:
        """Return the fields to request for capture: the next ones where the server refuses the first (Dialect.levels)."""
        detected = self._detected.of(place)
        if streamed and detected.in_sglext:
            return [dialect.stream_extras, {}]
        return dialect.levels[detected.level :]

    def logprobs(self, call: Call, place: Place, ask: Ask) -> Callable[[str | None], LogProbs]:
        """Return what tells of which distribution the log-probs of a call that begins now are, by the fingerprint of its answer.

        If the last probe is a while ago, another one starts, and is usually answered before the call: the result is asked for after that.
        """
        detected, since = self._detected.of(place), self._clock() - PROOF_SECONDS
        if detected.again_logprobs > float("-inf") and _needs_mode(call):
            self._probe_logprobs(detected, place, ask)
        return partial(detected.logprobs_since, since)

    def unreachable(self, base_url: str) -> None:
        """Forget of which distribution the log-probs of a server are that cannot be reached: it may be started again with others."""
        for detected in self._detected.at(base_url):
            detected.logprobs, detected.outages = "", detected.outages + 1
            detected.again_logprobs = min(detected.again_logprobs, self._clock())

    async def lacks_route(self, place: Place, dialect: Dialect, ask: Ask) -> bool:
        """Whether a server that answered "not found" has chat/completions but not this route; both are probed with an empty object."""
        detected = self._detected.of(place)
        if not detected.by_chat:
            own, _ = await ask(dialect, {})
            detected.by_chat = own in NO_ROUTE and (await ask(CHAT, {}))[0] not in {0, *NO_ROUTE}
            if detected.by_chat:
                self._detected.keep(place, detected)
        return detected.by_chat

    def probe(self, place: Place, dialect: Dialect, ask: Ask) -> None:
        """Start a probe of the server, unless one was conclusive, recent or is running."""
        detected, now = self._detected.of(place), self._clock()
        if now >= detected.again and len(place.model) <= MAX_MODEL:
            detected.again = now + AGAIN_SECONDS
            self._detected.keep(place, detected)
            self._start(self._detect(detected, place, dialect, ask))

    def answered(self, place: Place, call: Call, upstream: Upstream, ask: Ask) -> None:
        """Start a probe if a call was answered without token ids, or with vLLM's raw messages."""
        useful = self._translate == "auto" or not self._can_translate
        if useful and call.dialect.via_chat and upstream.provider == "openai" and call.failed is None and _lacks_tokens(call.reply):
            self.probe(place, call.dialect, ask)

    def sampled(self, call: Call, find_place: Callable[[], Place], ask: Ask) -> None:
        """Start a probe of the server's log-probs if a call has some, and all is known of its distribution but whether they are of it."""
        if heeded(call.honoured) is None and _needs_mode(call) and any(choice.logprobs for choice in call.reply.choices.values()):
            place = find_place()
            self._probe_logprobs(self._detected.of(place), place, ask)

    def _probe_logprobs(self, detected: _Detected, place: Place, ask: Ask) -> None:
        now = self._clock()
        if now >= detected.again_logprobs and not detected.probing and len(place.model) <= MAX_MODEL:
            detected.again_logprobs, detected.probing = now + AGAIN_SECONDS, True
            self._detected.keep(place, detected)
            self._start(self._detect_logprobs(detected, now, detected.outages, place, ask))

    def _start(self, probing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(probing)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Cancel running probes."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _detect(self, detected: _Detected, place: Place, dialect: Dialect, ask: Ask) -> None:
        level, status, answer = await _most_taken(dialect, place, ask)
        extras = dialect.levels[level]
        reply = _reply(dialect, answer) if status == 200 else Reply()
        if not reply.choices:
            return  # inconclusive
        detected.again, detected.level = float("inf"), level
        if extras and dialect.stream_extras:
            detected.in_sglext = await self._wants_others_in_streams(dialect, extras, place, ask)
        if dialect.extras and not extras:
            logger.warning("%s refuses in /%s what brings token ids: such calls cannot be trained on", place.base_url, place.path)
        if not dialect.via_chat or not _lacks_tokens(reply):
            return
        if not self._can_translate:
            logger.warning(
                "%s answers /%s without %s: such calls cannot be trained on. Set up litellm, so that they are asked by "
                "chat/completions, which may have them: %s",
                *(place.base_url, place.path, _MISSING[reply.raw_messages], HOW),
            )
        elif self._translate == "auto":
            await self._detect_chat(detected, place, ask)

    async def _wants_others_in_streams(self, dialect: Dialect, extras: Mapping[str, Any], place: Place, ask: Ask) -> bool:
        status, answer = await _answer(dialect, place, ask, {"stream": True, **extras})
        if not _refuses(status, answer, dialect, extras):
            return False
        status, answer = await _answer(dialect, place, ask, {"stream": True, **dialect.stream_extras})
        return status == 200 and b'"output_ids"' in answer

    async def _detect_logprobs(self, detected: _Detected, begun: float, outages: int, place: Place, ask: Ask) -> None:
        answers = list[Json]()
        try:
            for temperature in TEMPERATURES:
                prepared = prepare(CHAT, CHAT.smallest_request, model=place.model, sampling={}, extras={}).fields
                status, answer = await ask(CHAT, {**CHAT.smallest_request, **prepared, **FIELDS, "temperature": temperature})
                answers.append((parse_object(answer) if status == 200 else None) or {})
        finally:
            detected.probing = False
        if detected.outages != outages:
            return  # the answers may be those of the server before
        before, detected.logprobs, detected.proven = detected.logprobs, logprob_mode(*answers), begun
        first, second = (string(each.get("system_fingerprint")) for each in answers)
        detected.fingerprint = first
        if first != second:  # of two servers
            detected.logprobs = ""
        if detected.logprobs == "raw" != before:
            logger.warning(
                "%s returns log-probs of the logits before the temperature: calls at another one than 1 cannot be trained on (refused as "
                "sampling_differs: logprobs). Start vLLM with --logprobs-mode processed_logprobs",
                place.base_url,
            )

    async def _detect_chat(self, detected: _Detected, place: Place, ask: Ask) -> None:
        status, answer = await _answer(CHAT, place, ask, CHAT.extras)
        reply = _reply(CHAT, answer) if status == 200 else Reply()
        detected.by_chat = bool(reply.prompt_token_ids) and any(choice.token_ids for choice in reply.choices.values())
        message = (
            "%s returns more tokens and log-probs in chat/completions than in /%s: such calls are sent to chat/completions from now on"
            if detected.by_chat
            else "%s answers neither /%s nor chat/completions with token ids: such calls cannot be trained on"
        )
        logger.warning(message, place.base_url, place.path)
        if status != 200 and status not in REFUSED:  # unreachable or busy is no refusal
            detected.again = self._clock() + AGAIN_SECONDS


def _needs_mode(call: Call) -> bool:
    """Return whether it matters of which distribution the log-probs of a call are, and all else of it is known."""
    return not (call.contract.server or call.contract.is_plain)


def names_any(body: bytes, fields: frozenset[str]) -> bool:
    """Whether an answer mentions one of these fields."""
    return any(name.encode() in body for name in fields)


def _refuses(status: int, answer: bytes, dialect: Dialect, extras: Mapping[str, Any]) -> bool:
    asked = prepare(dialect, dialect.smallest_request, model=None, sampling={}, extras=extras).added
    return status in REFUSED and names_any(answer, asked)


async def _most_taken(dialect: Dialect, place: Place, ask: Ask) -> tuple[int, int, bytes]:
    """Send the smallest request with each of Dialect.levels until one is not refused; return its place, and the answer."""
    for level, extras in enumerate(dialect.levels):
        status, answer = await _answer(dialect, place, ask, extras)
        if not _refuses(status, answer, dialect, extras):
            return level, status, answer
    raise AssertionError("without extras nothing is refused because of them")


async def _answer(dialect: Dialect, place: Place, ask: Ask, extras: Mapping[str, Any]) -> tuple[int, bytes]:
    """Send the smallest request with these fields; return status and body."""
    body = dialect.smallest_request | prepare(dialect, dialect.smallest_request, model=place.model, sampling={}, extras=extras).fields
    status, answer = await ask(dialect, body)
    if status in REFUSED and b"max_completion_tokens" in answer:  # newer models of OpenAI's take no other limit, and reason first
        status, answer = await ask(dialect, {name: value for name, value in body.items() if name != "max_tokens"})
    return status, answer


def _reply(dialect: Dialect, answer: bytes) -> Reply:
    reply = Reply()
    if (payload := parse_object(answer)) is not None:
        dialect.take(reply, payload)
    return reply


def _lacks_tokens(reply: Reply) -> bool:
    """Whether a complete reply has no token ids, or may lack log-probs of some."""
    sampled = any(choice.finish_reason for choice in reply.choices.values())
    without = reply.raw_messages or not any(choice.token_ids for choice in reply.choices.values())
    return sampled and without and not (reply.bad_ids or reply.too_many_ids)
