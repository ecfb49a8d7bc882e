"""Ask the model server of a trial for its models before the agent is started: whether it can be reached, and with which key."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from agl_otel.cli.findings import Finding, advice, good, wrong
from agl_otel.cli.once import DEFAULT_UPSTREAM
from agl_otel.errors import UnavailableError
from agl_otel.net.tls import connector
from agl_otel.proxy.outgoing import RedirectedError, RefusedAnswerError, ask, whole
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import running_address
from agl_otel.text import error_text, printable, without_secrets

ANSWER_SECONDS: Final = 10.0
SHOWN: Final = 300  # characters of an answer
_MOST_BYTES: Final = 1 << 20
_NO_SERVER: Final = "this call names no rollout"
"""How a proxy without a model server of its own begins its answer (proxy/upstream.py)."""
_WHAT: Final = "the model server can be reached"


@dataclass(frozen=True)
class ModelServer:
    """Where the model calls of a trial go, and which settings say so."""

    base_url: str
    came_from: str
    key: str = field(default="", repr=False)
    key_from: str = ""
    """Empty: there is no key."""
    by_proxy: bool = False
    """Whether the address is that of a running stack's proxy, which calls the model server of its own settings."""


@dataclass(frozen=True)
class Answer:
    """How a model server answered."""

    status: int = 0
    """Of HTTP; 0: it did not answer."""
    text: str = ""
    """The start of the answer, or why there was none."""


async def find_model_server(settings: Settings) -> ModelServer:
    """Return the model server that `run_once` would use. Raises UnavailableError if the running stack does not answer."""
    given, key = os.environ.get("OPENAI_BASE_URL", ""), settings.upstream_key.get_secret_value()
    key_from = _source("upstream_key") if key else "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else ""
    key = key or os.environ.get("OPENAI_API_KEY", "")
    running = running_address(settings)
    if running and not given:
        token = settings.token.get_secret_value()
        async with QueueClient(running, token=token) as queue:
            proxy = (await queue.describe()).proxy
        if proxy is None:
            raise UnavailableError(f"the stack at {running} has no proxy")
        return ModelServer(f"{proxy}/v1", f"AGL_UPSTREAM_URL of the stack at {running}", token, "AGL_TOKEN" if token else "", by_proxy=True)
    if given:
        return ModelServer(given, "OPENAI_BASE_URL", key, key_from)
    if settings.upstream_url:
        return ModelServer(settings.upstream_url, _source("upstream_url"), key, key_from)
    return ModelServer(DEFAULT_UPSTREAM, "OpenAI's, for neither OPENAI_BASE_URL nor AGL_UPSTREAM_URL is set", key, key_from)


def _source(setting: str) -> str:
    variable = f"AGL_{setting.upper()}"
    return variable if os.environ.get(variable) else f"{setting} in agl.toml"


async def ask_for_models(server: ModelServer, *, seconds: float = ANSWER_SECONDS) -> Answer:
    """Send GET /models to the server, as the proxy would."""
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {server.key}"} if server.key else {})
    url = f"{server.base_url.rstrip('/')}/models"
    timeout = aiohttp.ClientTimeout(total=seconds)
    own = connector() if server.by_proxy else aiohttp.TCPConnector()
    try:
        async with (
            aiohttp.ClientSession(connector=own, auto_decompress=False, timeout=timeout) as session,
            ask(session, "GET", url, headers=headers) as response,
        ):
            return Answer(response.status, _said(await whole(response, _MOST_BYTES)))
    except RedirectedError as error:
        return Answer(0, str(error))
    except RefusedAnswerError as error:
        return Answer(200, str(error))
    except TimeoutError:
        return Answer(0, f"it did not answer within {seconds:g} s")
    except aiohttp.ClientConnectorDNSError as error:
        return Answer(0, f"there is no host {error.host!r}: {error.os_error}")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        return Answer(0, "this is no http:// or https:// address")
    except aiohttp.ClientConnectorError as error:
        return Answer(0, f"{os.strerror(error.os_error.errno) if error.os_error.errno else type(error).__name__}: {error.os_error}")
    except (aiohttp.ClientError, OSError) as error:
        return Answer(0, error_text(error))


def _said(content: bytes) -> str:
    """Return the message of an error in OpenAI's form, else the start of the content."""
    try:
        error: Any = json.loads(content)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        text = content.decode(errors="replace")
    return text[:SHOWN]


async def check_model_server(settings: Settings) -> Finding:
    """Ask the model server of a trial. Raises UnavailableError if the running stack does not answer."""
    server = await find_model_server(settings)
    return model_server_finding(server, await ask_for_models(server))


def model_server_finding(server: ModelServer, answer: Answer) -> Finding:
    """Tell what an answer means. Pure."""
    address, said = without_secrets(server.base_url), printable(answer.text.strip())
    named = f"{address} ({server.came_from})"
    mend = f"start the model server, or correct its address ({server.came_from})"
    if answer.status == 0:
        return wrong(_WHAT, f"{address} cannot be reached: {said}", mend)
    if server.by_proxy and said.startswith(_NO_SERVER):
        remedy = "start that stack with AGL_UPSTREAM_URL (and AGL_UPSTREAM_KEY), or give OPENAI_BASE_URL to this command"
        return wrong(_WHAT, f"there is none: {server.came_from} is not set", remedy)
    if server.by_proxy and answer.status in (502, 504):  # the proxy's own words
        return wrong(_WHAT, said, mend)
    if answer.status == 401:
        key = (
            f"the key in {server.key_from} is refused"
            if server.key_from
            else "there is no key: OPENAI_API_KEY and AGL_UPSTREAM_KEY are not set"
        )
        remedy = f"set OPENAI_API_KEY to a key of this server, or correct its address ({server.came_from})"
        return wrong(_WHAT, f"{address} answers HTTP 401: {key}: {said}", remedy)
    if answer.status == 403:
        key = f"the key in {server.key_from}" if server.key_from else "no key (OPENAI_API_KEY is not set)"
        return advice(_WHAT, f"{named}; with {key} it shows no models: HTTP 403: {said}", "if its calls fail, too, use another key")
    if answer.status >= 500 and answer.status != 501:
        return wrong(_WHAT, f"{address} answers HTTP {answer.status}: {said}", f"wait until it is up, or see its log; {mend}")
    return good(_WHAT, named)
