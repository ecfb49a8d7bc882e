"""Which calls are asked by chat/completions, though the agent speaks another protocol: learnt from what model servers answer.

A server may have no route for Messages or Responses, or answer them without token ids where its chat/completions has them. Then the
calls that follow are translated, and can be trained on. The answer that told is refused as a sample, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from agl_otel.proxy.dialects import CHAT, Dialect, prepare
from agl_otel.proxy.litellm import HOW
from agl_otel.proxy.recorder import Call
from agl_otel.proxy.reply import Json, Reply, encoded, parse_object
from agl_otel.proxy.upstream import Upstream

logger = logging.getLogger("agl_otel.proxy")
Translate = Literal["auto", "missing", "always"]
Ask = Callable[[bytes], Awaitable[bytes | None]]
"""Posts a body to a server's chat/completions; the answer's, None where it gave none."""
_TRY: Final[Json] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class Native:
    """What each model server speaks by itself.

    Args:
        translate: `missing`: calls are translated where the server has no route; `auto`: also where only its chat/completions gives
            token ids; `always`: wherever the dialect allows it.
        can_translate: whether litellm is set up.
    """

    def __init__(self, translate: Translate, *, can_translate: bool) -> None:
        self._translate = translate
        self._can_translate = can_translate
        self._by_chat: set[tuple[str, str]] = set()
        self._seen_without: set[tuple[str, str]] = set()
        self._trying: set[asyncio.Task[None]] = set()

    def is_asked_by_chat(self, dialect: Dialect, upstream: Upstream) -> bool:
        """Whether a call goes to chat/completions."""
        if not dialect.via_chat or upstream.provider != "openai":
            return False
        return (self._translate == "always" and self._can_translate) or (upstream.base_url, dialect.path) in self._by_chat

    def has_no_route(self, dialect: Dialect, base_url: str) -> None:
        """The server said that it does not know the route."""
        self._by_chat.add((base_url, dialect.path))

    def answered(self, call: Call, upstream: Upstream, ask: Ask) -> None:
        """Look at a native answer. The first one without token ids asks the server's chat/completions, once, for one token."""
        place = (upstream.base_url, call.dialect.path)
        if not call.dialect.via_chat or upstream.provider != "openai" or place in self._seen_without or not _lacks_ids(call):
            return
        self._seen_without.add(place)
        if not self._can_translate:
            logger.warning(
                "%s answers /%s without token ids: such calls cannot be trained on. Set up litellm, so that they are asked by "
                "chat/completions, which may have them: %s",
                *(*place, HOW),
            )
        elif self._translate == "auto":
            task = asyncio.create_task(self._learn(place, upstream.model or str(call.body.get("model")), ask))
            self._trying.add(task)
            task.add_done_callback(self._trying.discard)

    async def _learn(self, place: tuple[str, str], model: str, ask: Ask) -> None:
        body = prepare(CHAT, _TRY, model=model, sampling={}, capture=True).fields | _TRY
        answer = await ask(encoded(body))
        reply = Reply()
        if (payload := parse_object(answer) if answer is not None else None) is not None:
            CHAT.take(reply, payload)
        if reply.prompt_token_ids and any(choice.token_ids for choice in reply.choices.values()):
            self._by_chat.add(place)
            logger.warning("%s gives token ids in chat/completions and not in /%s: that is asked by chat/completions from now on", *place)
        else:
            logger.warning("%s answers neither /%s nor chat/completions with token ids: such calls cannot be trained on", *place)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._trying:
            task.cancel()
        await asyncio.gather(*self._trying, return_exceptions=True)


def _lacks_ids(call: Call) -> bool:
    """Whether something was sampled as a whole, and no token id was given."""
    reply = call.reply
    sampled = any(choice.finish_reason for choice in reply.choices.values())
    return sampled and call.failed is None and not reply.bad_ids and not any(choice.token_ids for choice in reply.choices.values())
