"""Make the bridges of bridge.py: ask the model server how its template renders a conversation, and find by which field it takes token ids.

No list of servers is kept. A field is tried, and the prompt that the server reports shows whether it was heeded; a server that heeds none
is called by messages, as without a bridge.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.proxy.bridge import FORMS, Bridge, bridged, frame_of, renderings
from agl_otel.proxy.capabilities import Place, Places
from agl_otel.proxy.recorder import Call
from agl_otel.proxy.reply import Json, parse_object
from agl_otel.proxy.upstream import TOKENIZE, Upstream

AGAIN_SECONDS: Final = 60.0  # after a server heeded no field, or had no /tokenize
logger = logging.getLogger("agl_otel.proxy")
Post = Callable[[str, Json], Awaitable[tuple[int, bytes]]]
"""Sends a request to an address of the model server; returns status and body of the answer, status 0 without an answer."""


@dataclass(slots=True)
class _Known:
    """What is known of a model server."""

    form: int = 0
    """The place in FORMS of the field to try."""
    taken: bool = False
    """Whether it was heeded."""
    again: float = 0.0
    """The earliest time of the next try."""


class Bridges:
    """The bridges of all calls. Use it in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known = Places(_Known)

    async def fields(self, call: Call, upstream: Upstream, place: Place, post: Post) -> Json:
        """Return the fields that hand a call's prompt to its model server as token ids; none without a bridge, which `call.bridge` says."""
        known, server = self._known.of(place), (upstream.base_url, place.model)
        if call.bridge is not None and call.bridge.server == server:  # another try
            return call.bridge.fields(FORMS[known.form])
        bridge = call.bridge = Bridge(server, frame_of(call.asked))
        if call.attempt is None or (earlier := call.attempt.conversations.find(call.asked, bridge)) is None:
            return {}
        if known.again > self._clock():
            bridge.refuse("not_taken")
            return {}
        asked = renderings(call.asked, model=place.model, first=earlier.before is None)
        answers = await asyncio.gather(*(post(upstream.url(TOKENIZE), each) for each in asked.values()))
        rendered = {name: tokens for name, answer in zip(asked, answers, strict=True) if (tokens := _tokens(*answer)) is not None}
        if len(rendered) < len(asked):
            bridge.refuse("render")
        else:
            bridged(bridge, earlier, rendered, upstream.bridge)
        return bridge.fields(FORMS[known.form])

    def refused(self, call: Call, place: Place) -> None:
        """Note that a server refused a call with token ids, so that it is sent again without them."""
        if call.bridge is not None:
            call.bridge.refuse("not_taken")
            self._try_next(place, call.bridge.form)

    def answered(self, call: Call, place: Place) -> None:
        """Note whether the server heeded the field of a bridged call."""
        bridge, reply = call.bridge, call.reply
        if bridge is None or bridge.earlier is None or call.failed is not None:
            return
        if bridge.refused == "not_taken":
            self._try_next(place, bridge.form)
        elif not bridge.refused and reply.prompt_token_ids is not None:
            known = self._known.of(place)
            known.taken = True
            self._known.keep(place, known)

    def _try_next(self, place: Place, tried: str) -> None:
        known = self._known.of(place)
        if known.taken or FORMS[known.form] != tried:  # it was heeded before: this call is an exception; another call has moved on
            return
        known.form += 1
        if known.form == len(FORMS):
            known.form, known.again = 0, self._clock() + AGAIN_SECONDS
            logger.warning(
                "%s takes no token ids beside messages (%s): conversations are sent as messages, and the chat template may split them",
                place.base_url,
                ", ".join(FORMS),
            )
        self._known.keep(place, known)


def _tokens(status: int, body: bytes) -> list[int] | None:
    """Return the token ids of an answer of /tokenize; None if it has none."""
    answer: Any = parse_object(body) if status == 200 else None
    tokens = answer.get("tokens") if answer is not None else None
    return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None
