"""Finds the queue by a single address: the queue's own (gRPC), or the web service's (HTTP), which returns the queue's."""

from __future__ import annotations

import contextlib
import json
from typing import Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from agl_otel.errors import UnavailableError, UsageError
from agl_otel.net.auth import refused_error
from agl_otel.net.tls import advice, connector
from agl_otel.queue.calls import WHERE
from agl_otel.settings import Settings
from agl_otel.types import Describe

DESCRIBE_PATH = "/v1/agl/describe"
CONNECT_TIMEOUT_SECONDS = 10.0
SHOWN_BYTES: Final = 200  # of an answer, in an error
OK: Final = 200
UNAUTHORIZED: Final = 401
SERVER_ERRORS: Final = 500


class Address:
    """A running stack. An empty address or token means AGL_STORE or AGL_TOKEN, read on first use."""

    def __init__(self, address: str = "", token: str = "") -> None:
        self._address = address
        self._token = token

    @property
    def token(self) -> str:
        """The bearer token of the stack; empty means none."""
        return self._token or Settings.load().token.get_secret_value()

    def queue_address(self) -> str:
        """Return `address`."""
        return self.address()

    def address(self) -> str:
        """Return the queue's `host:port` or the web service's `http://host:port`. Raises UsageError if there is none."""
        address = self._address or Settings.load().store
        if not address:
            raise UsageError("no stack to connect to: give an address, set AGL_STORE, or start one with `agl-otel up`")
        return address

    def check(self) -> None:
        """Do nothing: the store did not start this stack."""

    stop = check


async def queue_address(address: str, token: str) -> str:
    """Return the queue's gRPC address: `address` itself, or the web service's answer. Raises UsageError, UnavailableError."""
    malformed = UsageError(f"address {address!r} is not host:port or http://host:port")
    if "://" not in address:
        if address.rpartition(":")[2].isdigit():
            return address
        raise malformed
    import aiohttp

    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise malformed
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector()) as session:
        try:
            answer = await session.get(address.rstrip("/") + DESCRIBE_PATH)
        except (aiohttp.ClientConnectorError, TimeoutError) as error:
            raise _unavailable(address, error) from error
        except (aiohttp.ClientError, OSError):
            return address.removeprefix("http://").rstrip("/")  # may also be the queue's address: gRPC does not answer HTTP/1
        async with answer:
            try:
                body = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _unavailable(address, error) from error
    return _described(address, token, answer.status, body).queue


def _described(address: str, token: str, status: int, body: bytes) -> Describe:
    """Return the description in an answer. Raises SettingsError, UsageError, UnavailableError."""
    text = " ".join(body[:SHOWN_BYTES].decode(errors="replace").split())
    if status == UNAUTHORIZED:
        raise refused_error(f"the stack at {address}", token, _detail(body) or text)
    if status >= SERVER_ERRORS:
        raise _unavailable(address, f"it answers {status}: {text}")
    if status != OK:
        raise _not_a_stack(address, f"it answers {status}: {text}")
    try:
        return Describe.model_validate_json(body)
    except ValidationError:
        raise _not_a_stack(address, f"it answers {text!r}") from None


def _detail(body: bytes) -> str:
    """Return the `detail` of an error of ours; empty if there is none."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(body)["detail"])
    return ""


def _not_a_stack(address: str, why: str) -> UsageError:
    return UsageError(f"what answers at {address} is no agl-otel stack ({why}): give {WHERE}")


def _unavailable(address: str, error: object) -> UnavailableError:
    what_to_do = advice(str(error), secure=address.startswith("https://")) or "is `agl-otel up` running?"
    return UnavailableError(f"no stack answers at {address}: {error}: {what_to_do}")
