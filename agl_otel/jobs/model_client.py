"""Ask the model of a judge, a replay or a back-test, behind any server with OpenAI's API, within bounds on calls, tokens and cost.

It is asked directly, without the proxy, which would record its calls as those of an agent.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, Self

import aiohttp

from agl_otel.errors import AglError, ModelServerError
from agl_otel.proxy.outgoing import RedirectedError, ask, whole
from agl_otel.service.retry import Backoff, Tries
from agl_otel.spans.dialects.dialect import Message
from agl_otel.text import error_text, printable, without_secrets
from agl_otel.types.reviews import Took

TRIES: Final = 4
BACKOFF: Final = Backoff(1.0, 30.0)
_LONGEST_WAIT_SECONDS: Final = 120.0
LEAST_LOGPROB: Final = -1e9
MOST_LOGPROB: Final = 1e-3
"""A log-prob is at most 0, but for rounding."""
"""Of a server's Retry-After."""
_AGAIN: Final = frozenset({408, 409, 429})
"""Statuses below 500 of calls that are made again."""
_OF_THE_PROMPT: Final = frozenset({400, 413, 422})
"""Statuses by which a server refuses what one call asks for, and not the caller."""
_MOST_BYTES: Final = 16 << 20
_TEMPLATE_TOKENS: Final = 256
"""More than a chat template adds to the texts of three or four messages."""
_NOT_SAMPLED: Final = "00-00000000000000000000000000006a64-0000000000006a64-00"
"""A trace that is not recorded: a model server with OpenTelemetry then exports no spans of these calls, which nobody is to train on."""


class BoundError(AglError):
    """The next call might exceed a bound."""


class PromptRefusedError(AglError):
    """The server refuses this prompt."""


class Price(NamedTuple):
    """US dollars for a million tokens."""

    prompt: float
    answer: float

    def of(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Return the price of so many tokens."""
        return (prompt_tokens * self.prompt + answer_tokens * self.answer) / 1e6


class Bounds(NamedTuple):
    """What a run of a judge may spend; None: no bound."""

    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None
    budget: float | None = None
    """US dollars, with what earlier runs have spent."""


class Journal(Protocol):
    """Where calls are recorded, so that a later run knows of them even if this one is killed."""

    async def begin(self, call: str, most: tuple[int, int]) -> None:
        """Record a call of at most so many (prompt, answer) tokens, before it is made."""
        ...

    async def end(self, call: str, tokens: tuple[int, int]) -> None:
        """Record what the call took."""
        ...


@dataclass
class Call:
    """A call in flight."""

    used: tuple[int, int] | None = None
    """The (prompt, answer) tokens that it took; None: nobody knows."""


@dataclass
class Spend:
    """What was spent, and what calls in flight may spend at most."""

    bounds: Bounds
    price: Price | None = None
    earlier: Took = field(default_factory=Took)
    """Of earlier runs."""
    journal: Journal | None = None
    calls: int = 0
    """Requests that were sent, failed ones included."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    estimated: int = 0
    """Calls of which the server did not say how many tokens they took: the most that they may have taken counts."""
    _reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _settled: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def cost(self) -> float | None:
        """US dollars; None without a price."""
        return self.price and self.price.of(self.prompt_tokens, self.answer_tokens)

    @property
    def earlier_cost(self) -> float | None:
        """US dollars of earlier runs, by this one's price; None without a price."""
        return self.price and self.price.of(*self.earlier[1:])

    @asynccontextmanager
    async def call(self, most: tuple[int, int]) -> AsyncGenerator[Call]:
        """Count a call of at most so many (prompt, answer) tokens while it is made. Raises BoundError, and what the journal raises."""
        await self.reserve(most)
        name, made = uuid.uuid4().hex, Call((0, 0))
        try:
            if self.journal is not None:
                await self.journal.begin(name, most)
            made.used = None
            yield made
        finally:
            await self.settle(most, made.used)
            if self.journal is not None:
                await self.journal.end(name, most if made.used is None else made.used)

    async def reserve(self, most: tuple[int, int]) -> None:
        """Count a call of at most so many (prompt, answer) tokens, once there is room. Raises BoundError if there will be none."""
        async with self._settled:
            while why := self._exceeded(most, self._reserved):
                if not self._reserved or self._exceeded(most, ()):
                    raise BoundError(why)
                await self._settled.wait()
            self._reserved.append(most)
            self.calls += 1

    async def settle(self, most: tuple[int, int], used: tuple[int, int] | None) -> None:
        """Replace what a call had reserved by what it used; None: nobody knows."""
        async with self._settled:
            self._reserved.remove(most)
            prompt, answer = most if used is None else used
            self.prompt_tokens += prompt
            self.answer_tokens += answer
            self.estimated += used is None
            self._settled.notify_all()

    def _exceeded(self, most: tuple[int, int], reserved: Sequence[tuple[int, int]]) -> str:
        prompt, answer = (sum(each) for each in zip((self.prompt_tokens, self.answer_tokens), most, *reserved, strict=True))
        calls, tokens, cost, budget = self.bounds
        if calls is not None and self.calls + 1 > calls:
            return f"--max-calls {calls} are made"
        if tokens is not None and prompt + answer > tokens:
            return f"the next call of up to {sum(most)} tokens might exceed --max-tokens {tokens}"
        if cost is not None and self.price is not None and self.price.of(prompt, answer) > cost:
            return f"the next call of up to ${self.price.of(*most):.6f} might exceed --max-cost {cost:g}"
        before = self.earlier_cost
        if budget is not None and self.price is not None and before is not None and before + self.price.of(prompt, answer) > budget:
            return f"the next call of up to ${self.price.of(*most):.6f} might exceed --budget {budget:g}: earlier runs spent ${before:.6f}"
        return ""


@dataclass(frozen=True)
class Access:
    """How a model is reached and sampled."""

    model: str
    endpoint: str
    """The base URL, such as https://api.openai.com/v1."""
    key: str = field(default="", repr=False)
    key_from: str = ""
    """The variable that would hold the key, for messages."""
    temperature: float = 0.0
    max_answer_tokens: int = 1024
    timeout_seconds: float = 600.0


class ModelClient:
    """A model behind an endpoint. Use `async with`."""

    def __init__(self, access: Access, spend: Spend, *, backoff: Backoff = BACKOFF) -> None:
        self._access = access
        self._backoff = backoff
        self._spend = spend
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"accept-encoding": "identity", "traceparent": _NOT_SAMPLED}
        headers |= {"authorization": f"Bearer {self._access.key}"} if self._access.key else {}
        timeout = aiohttp.ClientTimeout(total=self._access.timeout_seconds)
        self._session = aiohttp.ClientSession(headers=headers, auto_decompress=False, timeout=timeout, trust_env=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def most_tokens(self, messages: Sequence[Message]) -> tuple[int, int]:
        """Return the most (prompt, answer) tokens of a call: a token has at least one byte of UTF-8."""
        size = sum(len(str(each["content"]).encode(errors="replace")) for each in messages)
        return size + _TEMPLATE_TOKENS, self._access.max_answer_tokens

    async def answer(self, messages: Sequence[Message]) -> str:
        """Return the text of the model's reply, empty if it has none. Raises as `reply`."""
        content = (await self.reply(messages)).get("content")
        return content if isinstance(content, str) else ""

    async def reply(self, messages: Sequence[Message], **fields: Any) -> Message:
        """Return the model's reply as it is; `fields`: more of the request. Raises BoundError, PromptRefusedError, ModelServerError."""
        own = {"messages": list(messages), "temperature": self._access.temperature, "max_completion_tokens": self._access.max_answer_tokens}
        return _message_of(await self._asked("chat/completions", {**own, **fields}, self.most_tokens(messages)))

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first after those before it, at temperature 1. Raises as `reply`.

        The server has to take token ids as the prompt of /completions, with `echo` and `logprobs`, as vLLM and SGLang do.
        """
        body = {"prompt": list(token_ids), "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 1.0}
        return _logprobs_of(await self._asked("completions", body, (len(token_ids), 1)), len(token_ids))

    async def _asked(self, path: str, fields: Mapping[str, Any], most: tuple[int, int]) -> Any:
        """Return the JSON of an answer. Calls that fail are made again, TRIES times in all."""
        tries = Tries(self._backoff, limit=TRIES)
        while True:
            status, found, wait = await self._call(path, {"model": self._access.model, **fields}, most)
            if status == 200:
                return found
            why = f"{without_secrets(self._access.endpoint)} answers {self._access.model!r} with HTTP {status}: {_said(found)}"
            why = why if status else f"{without_secrets(self._access.endpoint)} does not answer: {found}"
            if status in _OF_THE_PROMPT:
                raise PromptRefusedError(why)
            if status in (401, 403):
                raise ModelServerError(f"{why}. Is the key in {self._access.key_from} this server's?")
            if status and status < 500 and status not in _AGAIN:
                raise ModelServerError(why)
            if (pause := tries.pause(at_least=wait)) is None:
                raise ModelServerError(f"{why} ({TRIES} times)")
            await asyncio.sleep(pause)

    async def _call(self, path: str, body: Mapping[str, Any], most: tuple[int, int]) -> tuple[int, Any, float]:
        """Return (status, JSON or text of the answer, seconds of Retry-After); status 0: no answer, for the reason in the text."""
        assert self._session is not None, "it is open"
        access = self._access
        async with self._spend.call(most) as call:
            try:
                async with ask(self._session, "POST", f"{access.endpoint.rstrip('/')}/{path}", json=body) as response:
                    content = await whole(response, _MOST_BYTES)
                    found = _json_of(content)
                    call.used = _usage_of(found) if response.status == 200 else (0, 0)
                    return response.status, found, _seconds_of(response.headers.get("retry-after", ""))
            except RedirectedError as error:
                call.used = (0, 0)
                raise ModelServerError(str(error)) from None
            except aiohttp.ClientConnectorError as error:
                call.used = (0, 0)
                return 0, error_text(error), 0.0
            except TimeoutError:
                return 0, f"nothing within {access.timeout_seconds:g} s", 0.0
            except (aiohttp.ClientError, OSError) as error:
                return 0, error_text(error), 0.0


@asynccontextmanager
async def tasks() -> AsyncGenerator[asyncio.TaskGroup]:
    """A group of tasks; of several errors the first is raised by itself, and the other tasks are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


def _usage_of(found: Any) -> tuple[int, int] | None:
    usage = found.get("usage") if isinstance(found, Mapping) else None
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, Mapping) else []
    known = [count for count in counts if isinstance(count, int) and count >= 0]
    return (known[0], known[1]) if len(known) == 2 else None


def _message_of(found: Any) -> Message:
    try:
        message = found["choices"][0]["message"]
        if "content" in message or message["tool_calls"]:
            return dict(message)
    except (LookupError, TypeError, ValueError):
        pass
    raise ModelServerError(f"the answer is no chat completion: {_said(found)}")


def _logprobs_of(found: Any, tokens: int) -> list[float]:
    try:
        given = found["choices"][0]["logprobs"]["token_logprobs"][1:tokens]
    except (LookupError, TypeError):
        given = []
    if len(given) != tokens - 1 or not all(map(_is_logprob, given)):
        raise ModelServerError(
            f"the answer of /completions has no log-probs of the {tokens} tokens of a prompt: the server has to take token ids, `echo` and "
            f"`logprobs`, as vLLM and SGLang do. It answers {_said(found)}"
        )
    return given


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST_LOGPROB < value <= MOST_LOGPROB


def _said(found: Any) -> str:
    """Return the message of an error in OpenAI's form, else the start of the answer."""
    error = found.get("error", found) if isinstance(found, Mapping) else found
    said = error.get("message", error) if isinstance(error, Mapping) else error
    return printable(without_secrets(str(said)[:500]))


def _seconds_of(header: str) -> float:
    return min(float(header), _LONGEST_WAIT_SECONDS) if header.isascii() and header.isdigit() else 0.0
