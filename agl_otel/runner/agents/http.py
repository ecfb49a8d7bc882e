"""HTTP agents: one POST for each attempt, to a service that the runner does not start.

The request body is the task as JSON. Headers identify the attempt: `traceparent` and `baggage`, which an instrumented service propagates
to its spans and model calls; `agl-rollout-id` and `agl-attempt-id`; and `agl-openai-base-url`, the attempt's model address for services
without instrumentation. If the stack has a token, the attempt's keys come in headers that are not propagated: `agl-otlp-key`, which the
hook picks up, and `agl-openai-api-key`. The response body is the answer; streams are read to their end.
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
from agl_otel.runner.job import Grader, Job, as_reward, grade, reward
from agl_otel.runner.output import KEEP_BYTES, Capture
from agl_otel.spans.tolerant import json_of
from agl_otel.types import Answered
from agl_otel_hook import conventions

CONNECT_SECONDS: Final = 10.0
_DONE: Final = "[DONE]"


class HttpAgent:
    """Posts each task to `url` and grades the response.

    Args:
        url: http or https; `{name}` in it is filled from the task.
        grader: (task, answer) → reward. The answer is decoded JSON, the joined text of an event stream, or stripped text. Without a
            grader, an answer that is a number or a dict of numbers is the reward.
        headers: sent with every request, for example authorization.
        hooked: whether the service runs under the hook and its web framework's instrumentation, which extracts baggage.
        output_bytes: size limit of the answer; a larger one fails the attempt.

    Raises UsageError where `url` is not an HTTP address.
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
            raise UsageError(f"{url!r} is not an HTTP address: write for example http://127.0.0.1:9000/solve")
        self._url, self._grader, self._headers, self._output_bytes = url, grader, dict(headers or {}), output_bytes
        self.hooked = hooked
        self._session: aiohttp.ClientSession | None = None

    def prepare(self, addresses: Addresses) -> None:
        """Do nothing: the service has its own environment."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task cannot fill the URL's placeholders."""
        placeholders.check([self._url], task)

    async def run(self, job: Job) -> None:
        """Post the task, read the response and grade it. Raises AgentError on connection errors, error statuses and oversized answers."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # the runner enforces the attempt's time limit
            tracing = aiohttp.TraceConfig()
            tracing.on_request_redirect.append(_refuse_other_origin)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=True, trace_configs=[tracing])
        url = filled(self._url, job.rollout.input)
        body = Capture("stdout", 2 * self._output_bytes)
        job.captures.append(body)
        try:
            async with self._session.post(URL(url, encoded=True), json=job.rollout.input, headers=self._request_headers(job)) as response:
                job.answered |= process_header(response)
                async for data in response.content.iter_any():
                    body.feed(data)
                    if body.total_bytes > self._output_bytes:
                        raise AgentError(f"{url} answers more than {self._output_bytes} bytes")
                job.over = time.time()
                if response.status >= 400:
                    raise AgentError(f"{url} answers {response.status} {response.reason}: {body.last_lines() or 'nothing else'}")
                answer = parse_answer(response.content_type, body.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AgentError(f"{url} does not answer: {error or type(error).__name__}") from error
        if self._grader is not None:
            await grade(job, self._grader, answer)
        elif (found := as_reward(answer)) is not None:
            await reward(job, found)

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
            if job.token and job.addresses.proxy is not None:  # otherwise the key is the provider's, and stays here
                headers[conventions.HEADER_OPENAI_API_KEY] = llm.api_key or ""
        if job.token:
            headers[conventions.HEADER_OTLP_KEY] = attempt_ingest_key(job.token, *job.key)
        return headers


async def _refuse_other_origin(_: aiohttp.ClientSession, __: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    target = params.url.join(URL(params.response.headers.get("location") or params.response.headers.get("uri", "")))
    if conventions.HEADER_OTLP_KEY in params.headers and target.origin() != params.url.origin():
        raise AgentError(f"{params.url.origin()} redirects to {target.origin()}, where the attempt's keys are not sent: use that address")


def process_header(response: aiohttp.ClientResponse) -> dict[str, Answered]:
    """Parse the response header with the service's span counts: {process marker: Answered}, empty where absent or malformed."""
    found = re.fullmatch(r"([0-9a-f]{16});(\d{1,18});(\d{1,18})", response.headers.get(conventions.HEADER_PROCESS, ""))
    return {found[1]: Answered(begun=int(found[2]), streamed=response.content_length is None)} if found else {}


def filled(url: str, task: Any) -> str:
    """Fill the URL's placeholders with the task's values, percent-encoded so that they cannot add path segments or a query."""
    values = placeholders.values_of(task).items()
    return placeholders.fill(
        [url], {name: quote(value if isinstance(value, str) else json.dumps(value), safe="") for name, value in values}
    )[0]


def parse_answer(content_type: str, text: str) -> Any:
    """Decode a response body for the grader: JSON, the joined text of an event stream, or stripped text. Raises AgentError."""
    if content_type == "text/event-stream":
        return _joined(text)
    if content_type == "application/json" or content_type.endswith("+json"):
        try:
            return json_of(text)
        except ValueError as error:
            raise AgentError(f"the answer's content type is JSON, but it cannot be parsed: {error}") from error
    return text.strip()


def _joined(text: str) -> str:
    """Join the data of an event stream's events; chunks of a chat completion contribute their content deltas."""
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
