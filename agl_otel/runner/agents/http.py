"""An agent that is an HTTP endpoint: one POST for each attempt, to a service that somebody else runs.

The body is the task as JSON. Headers say whose request it is: `traceparent` and `baggage`, which an instrumented service hands on to
its own model calls and spans, the ids (`agl-rollout-id`, `agl-attempt-id`), and `agl-openai-base-url`, the attempt's own address of
the model, for a service that is not instrumented. Where the stack has a token, the attempt's own keys come in headers that nobody hands
on: `agl-otlp-key`, which a service under the hook uses by itself, and `agl-openai-api-key`. What it answers is the agent's answer; a stream
is read to its end.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from agl_otel.errors import AgentError, UsageError
from agl_otel.net.auth import attempt_ingest_key
from agl_otel.runner import placeholders
from agl_otel.runner.environment import Addresses, attempt_llm, merged_members
from agl_otel.runner.job import Grader, Job, grade, is_reward, reward
from agl_otel.runner.output import KEEP_BYTES, Capture
from agl_otel.spans.tolerant import json_of
from agl_otel.types import Answered
from agl_otel_hook import conventions

CONNECT_SECONDS: Final = 10.0
_DONE: Final = "[DONE]"


class HttpAgent:
    """Posts each task to `url`; what comes back, graded, is the reward.

    Args:
        url: http or https; `{name}` in it is filled from the task.
        grader: (task, answer) → reward. The answer is JSON as Python values, the joined text of an event stream, or text. Without
            one an answer that is a number (or a dict of numbers) is the reward.
        headers: sent with every request, for example authorization.
        hooked: whether the service runs under our hook, and with the instrumentation of its web framework, which takes over baggage.
        output_bytes: an answer that is larger fails the attempt.

    Raises UsageError where `url` is no HTTP address.
    """

    instrument: tuple[str, ...] = ()

    def __init__(
        self,
        url: str,
        *,
        grader: Grader | None = None,
        headers: Mapping[str, str] | None = None,
        hooked: bool = False,
        output_bytes: int = KEEP_BYTES,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise UsageError(f"{url!r} is no HTTP address: write for example http://127.0.0.1:9000/solve")
        self._url, self._grader, self._headers, self._output_bytes = url, grader, dict(headers or {}), output_bytes
        self.hooked = hooked
        self._session: aiohttp.ClientSession | None = None

    def prepare(self, addresses: Addresses) -> None:
        """Nothing: the service has an environment of its own."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task lacks what the address asks for."""
        placeholders.check([self._url], task)

    async def run(self, job: Job) -> None:
        """Ask, read, grade. Raises AgentError where the service is away, answers with an error, or answers too much."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # the attempt has a limit of its own
            tracing = aiohttp.TraceConfig()
            tracing.on_request_redirect.append(_stay_with_its_origin)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=True, trace_configs=[tracing])
        url = filled(self._url, job.rollout.input)
        said = Capture("stdout", 2 * self._output_bytes)
        job.captures.append(said)
        try:
            async with self._session.post(URL(url, encoded=True), json=job.rollout.input, headers=self._request_headers(job)) as response:
                job.answered |= answered_by(response)
                async for data in response.content.iter_any():
                    said.feed(data)
                    if said.total_bytes > self._output_bytes:
                        raise AgentError(f"{url} answers more than {self._output_bytes} bytes")
                job.over = time.time()
                if response.status >= 400:
                    raise AgentError(f"{url} answers {response.status} {response.reason}: {said.last_lines() or 'nothing else'}")
                answer = answer_of(response.content_type, said.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AgentError(f"{url} does not answer: {error or type(error).__name__}") from error
        if self._grader is not None:
            await grade(job, self._grader, answer)
        elif is_reward(answer):
            await reward(job, answer)

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _request_headers(self, job: Job) -> dict[str, str]:
        ids = {conventions.ROLLOUT_ID: job.rollout_id, conventions.ATTEMPT_ID: job.attempt_id}
        headers = {
            **self._headers,
            "traceparent": job.traceparent,
            "baggage": merged_members(os.environ.get("BAGGAGE", ""), ids),
            conventions.HEADER_ROLLOUT_ID: job.rollout_id,
            conventions.HEADER_ATTEMPT_ID: job.attempt_id,
        }
        llm = attempt_llm(job.resources, *job.key, job.addresses.proxy, token=job.token)
        if llm is not None:
            headers[conventions.HEADER_OPENAI_BASE_URL] = llm.endpoint
            if job.token and job.addresses.proxy is not None:  # else it is a provider's, which stays with whom it was given to
                headers[conventions.HEADER_OPENAI_API_KEY] = llm.api_key or ""
        if job.token:
            headers[conventions.HEADER_OTLP_KEY] = attempt_ingest_key(job.token, *job.key)
        return headers


async def _stay_with_its_origin(_: aiohttp.ClientSession, __: object, told: aiohttp.TraceRequestRedirectParams) -> None:
    named = told.url.join(URL(told.response.headers.get("location") or told.response.headers.get("uri", "")))
    if conventions.HEADER_OTLP_KEY in told.headers and named.origin() != told.url.origin():
        raise AgentError(f"{told.url.origin()} redirects to {named.origin()}, where the attempt's keys do not go: name that address")


def answered_by(response: aiohttp.ClientResponse) -> dict[str, Answered]:
    """{process marker: what it says} in the header of an answer; nothing where it is not of its form."""
    found = re.fullmatch(r"([0-9a-f]{16});(\d{1,18});(\d{1,18})", response.headers.get(conventions.HEADER_PROCESS, ""))
    return {found[1]: Answered(begun=int(found[2]), streamed=response.content_length is None)} if found else {}


def filled(url: str, task: Any) -> str:
    """`url` with the task's values put in, each percent-encoded: a value never adds a path or a query of its own."""
    values = placeholders.values_of(task).items()
    return placeholders.fill(
        [url], {name: quote(value if isinstance(value, str) else json.dumps(value), safe="") for name, value in values}
    )[0]


def answer_of(content_type: str, text: str) -> Any:
    """An answer as a grader gets it: JSON as values, an event stream's text joined, anything else stripped."""
    if content_type == "text/event-stream":
        return _joined(text)
    if content_type == "application/json" or content_type.endswith("+json"):
        try:
            return json_of(text)
        except ValueError as error:
            raise AgentError(f"the answer says that it is JSON and cannot be read: {error}") from error
    return text.strip()


def _joined(text: str) -> str:
    """The data of an event stream's events; of chunks of a chat completion, what they add to the answer."""
    parts: list[str] = []
    for event in text.replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:"))
        if data and data != _DONE:
            parts.append(_delta(data))
    return "".join(parts)


def _delta(data: str) -> str:
    try:
        choices: Any = json_of(data)["choices"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    except (ValueError, TypeError, KeyError, AttributeError):
        return data
