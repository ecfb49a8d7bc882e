"""The few calls of Kubernetes' API that running attempts as Jobs takes, by plain HTTP.

A call that found nobody, or too much going on there, is made again: every name is chosen by the caller, so a second creation finds the
first. The service account's token is read for every call, because Kubernetes renews the file. Nothing here knows what a rollout is.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import aiohttp

from agl_otel.errors import AgentError, UsageError

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_SECONDS: Final = 30.0
WATCH_SECONDS: Final = 300  # then the server ends a watch, and another begins
TRIES: Final = 6
FIRST_PAUSE_SECONDS: Final = 0.2  # doubled with each try: 6 s in all
LOG_BYTES: Final = 64 << 20
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
GROUPS: Final = {"jobs": "/apis/batch/v1", "pods": "/api/v1", "secrets": "/api/v1"}
Object = dict[str, Any]


class GoneError(AgentError):
    """What was asked for is not there (404), or the watch's place in history is too old (410)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the API server is, and who we are there."""

    url: str
    namespace: str = "default"
    token_file: Path | None = None
    authority_file: Path | None = None

    @classmethod
    def found(cls, url: str = "", namespace: str = "", *, account: Path = ACCOUNT) -> Cluster:
        """The cluster of the pod we run in, or the one at `url` (`kubectl proxy` gives such an address). Raises UsageError."""
        if url:
            return cls(url.rstrip("/"), namespace or "default")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host or not (account / "token").exists():
            raise UsageError(
                "this is no pod of a Kubernetes cluster with a service account: name its API server (`kubectl proxy` serves one at "
                "http://127.0.0.1:8001)"
            )
        named = f"[{host}]" if ":" in host else host
        own = (account / "namespace").read_text().strip()
        return cls(f"https://{named}:{port}", namespace or own, account / "token", account / "ca.crt")

    def headers(self) -> dict[str, str]:
        """What every call says about us."""
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"} if self.token_file else {}

    def context(self) -> ssl.SSLContext | bool:
        """Whom we trust."""
        return ssl.create_default_context(cafile=self.authority_file) if self.authority_file else True


class KubernetesApi:
    """Calls about objects of one namespace. Errors are AgentErrors that say what the server said."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS, sock_read=CALL_SECONDS)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, ssl=cluster.context()))

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def create(self, kind: str, body: Object) -> Object:
        """Create an object, or find the one that an earlier try has created."""
        name = body["metadata"]["name"]
        try:
            return await self._call("POST", kind, "", body=body)
        except ConflictError:
            return await self._call("GET", kind, name)

    async def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge `change` into an object."""
        return await self._call("PATCH", kind, name, body=change, content_type="application/merge-patch+json")

    async def delete(self, kind: str, name: str, *, wait: bool = False) -> None:
        """Delete an object; with `wait` it is gone only after all that it owns. One that is gone is fine."""
        options = {"propagationPolicy": "Foreground" if wait else "Background"}
        try:
            await self._call("DELETE", kind, name, body=options)
        except GoneError:
            return

    async def list(self, kind: str, labels: str) -> tuple[list[Object], str]:
        """(objects with these labels, the place in history to watch from)."""
        answer = await self._call("GET", kind, "", params={"labelSelector": labels})
        return answer.get("items") or [], answer["metadata"].get("resourceVersion", "")

    async def watch(self, kind: str, labels: str, version: str) -> AsyncGenerator[tuple[str, Object]]:
        """(ADDED, MODIFIED or DELETED, the object) as it happens, until the server ends it. Raises GoneError where `version` is too old."""
        params = {"labelSelector": labels, "resourceVersion": version, "watch": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        reading = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS, sock_read=WATCH_SECONDS + CALL_SECONDS)
        try:
            async with self._session.get(self._url(kind, ""), params=params, headers=self.cluster.headers(), timeout=reading) as answer:
                await _raise_for(answer, f"watch {kind}")
                buffer = b""
                async for data in answer.content.iter_any():  # an object may be larger than a line that aiohttp reads
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in filter(None, lines):
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise GoneError(f"Kubernetes ended the watch: {event['object'].get('message')}")
                        yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AgentError(f"the watch of {kind} broke: {error or type(error).__name__}") from error

    async def log(self, pod: str, container: str) -> AsyncGenerator[bytes]:
        """What a container printed, both streams together; at most LOG_BYTES."""
        params = {"container": container, "limitBytes": str(LOG_BYTES)}
        try:
            async with self._session.get(self._url("pods", f"{pod}/log"), params=params, headers=self.cluster.headers()) as answer:
                await _raise_for(answer, f"read the log of {pod}")
                async for data in answer.content.iter_any():
                    yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AgentError(f"the log of {pod} broke off: {error or type(error).__name__}") from error

    def _url(self, kind: str, name: str) -> str:
        return f"{self.cluster.url}{GROUPS[kind]}/namespaces/{self.cluster.namespace}/{kind}{f'/{name}' if name else ''}"

    async def _call(
        self,
        method: str,
        kind: str,
        name: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        what = f"{method} {kind}{f'/{name}' if name else ''}"
        data = None if body is None else json.dumps(body).encode()
        pause = FIRST_PAUSE_SECONDS
        for left in reversed(range(TRIES)):
            headers = {**self.cluster.headers(), "Content-Type": content_type}
            try:
                async with self._session.request(method, self._url(kind, name), params=params, data=data, headers=headers) as answer:
                    if answer.status not in _AGAIN or not left:
                        await _raise_for(answer, what)
                        return cast(Object, await answer.json())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not left:
                    raise AgentError(
                        f"Kubernetes at {self.cluster.url} does not answer ({what}): {error or type(error).__name__}"
                    ) from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")


class ConflictError(AgentError):
    """An object of that name is there (409)."""


async def _raise_for(answer: aiohttp.ClientResponse, what: str) -> None:
    if answer.status < 400:
        return
    text = (await answer.read()).decode(errors="replace")
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:300].strip() or str(answer.reason)
    kind = {404: GoneError, 409: ConflictError, 410: GoneError}.get(answer.status, AgentError)
    raise kind(f"Kubernetes refused {what} with {answer.status}: {message}")
