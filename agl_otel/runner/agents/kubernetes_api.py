"""The few calls of Kubernetes' API that running attempts as Jobs takes, over kubernetes_asyncio (the extra `agl-otel[kubernetes]`).

A call that meets no server, or a busy one, is made again: every name is chosen by the caller, so a second creation finds the first. The
service account's token is read for every call, because Kubernetes renews the file. Answers are read here, as JSON: kubernetes_asyncio would
make models of them, and log them, Secrets too, at DEBUG. Nothing here knows what a rollout is.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp

from agl_otel.errors import AgentError, UsageError
from agl_otel.service.retry import Backoff, Tries

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_SECONDS: Final = 30.0
WATCH_SECONDS: Final = 300  # then the server ends a watch, and another begins
TRIES: Final = 6
BACKOFF: Final = Backoff(0.25, 4.0)  # with the jitter about 6 s in all
LOG_BYTES: Final = 64 << 20
_METHODS: Final = {"create": "POST", "delete": "DELETE", "list": "GET", "patch": "PATCH", "read": "GET"}
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_BROKEN: Final = (aiohttp.ClientError, TimeoutError, OSError)
_RAW: Final[dict[str, Any]] = {"_preload_content": False, "_request_timeout": (CALL_SECONDS, CALL_SECONDS)}
"""Options of a call whose answer is read here; the timeouts are of connecting and of each read."""
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

    def configuration(self) -> Configuration:
        """kubernetes_asyncio's."""
        from kubernetes_asyncio.client import Configuration  # an extra, which takes two seconds of CPU

        made: Any = Configuration(host=self.url, api_key={"BearerToken": ""} if self.token_file else {})
        made.ssl_ca_cert, made.connection_pool_maxsize = self.authority_file, 0
        made.refresh_api_key_hook = self._read_token
        return made

    def _read_token(self, configuration: Any) -> None:
        if self.token_file:
            configuration.api_key["BearerToken"] = f"Bearer {self.token_file.read_text().strip()}"


def check_installed() -> None:
    """Raise UsageError where the extra is not installed."""
    if find_spec("kubernetes_asyncio") is None:
        raise UsageError("agents as Kubernetes Jobs need kubernetes_asyncio: pip install 'agl-otel[kubernetes]'")


class KubernetesApi:
    """Calls about objects of one namespace. Errors are AgentErrors with the server's message."""

    def __init__(self, cluster: Cluster) -> None:
        from kubernetes_asyncio.client import ApiClient, BatchV1Api, CoreV1Api  # an extra

        self.cluster = cluster
        self._client = ApiClient(cluster.configuration())
        core: Any = CoreV1Api(self._client)
        self._groups: Final[dict[str, Any]] = {"jobs": BatchV1Api(self._client), "pods": core, "secrets": core}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def create(self, kind: str, body: Object) -> Object:
        """Create an object, or find the one that an earlier try has created."""
        try:
            return await self._call("create", kind, body=body)
        except ConflictError:
            return await self._call("read", kind, name=body["metadata"]["name"])

    async def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge `change` into an object."""
        return await self._call("patch", kind, name=name, body=change, _content_type="application/merge-patch+json")

    async def delete(self, kind: str, name: str, *, wait: bool = False) -> None:
        """Delete an object; with `wait` it is gone only after all that it owns. One that is gone is fine."""
        options = {"propagationPolicy": "Foreground" if wait else "Background"}
        try:
            await self._call("delete", kind, name=name, body=options)
        except GoneError:
            return

    async def list(self, kind: str, labels: str) -> tuple[list[Object], str]:
        """(objects with these labels, the place in history to watch from)."""
        answer = await self._call("list", kind, label_selector=labels)
        return answer.get("items") or [], answer["metadata"].get("resourceVersion", "")

    async def watch(self, kind: str, labels: str, version: str) -> AsyncGenerator[tuple[str, Object]]:
        """(ADDED, MODIFIED or DELETED, the object) as it happens, until the server ends it. Raises GoneError where `version` is too old."""
        from kubernetes_asyncio.client import ApiException  # an extra
        from kubernetes_asyncio.watch import Watch

        asked = {"namespace": self.cluster.namespace, "label_selector": labels, "resource_version": version}
        until = {"timeout_seconds": WATCH_SECONDS, "_request_timeout": (CALL_SECONDS, WATCH_SECONDS + CALL_SECONDS)}
        try:
            async with Watch("object") as watch:
                async for event in watch.stream(self._method("list", kind), **asked, **until):
                    if not isinstance(event, dict):
                        raise AgentError(f"the watch of {kind} answers with what is no JSON: {str(event)[:300]}")
                    yield event["type"], event["object"]
        except ApiException as error:
            raise _kind_of(error.status)(f"Kubernetes ended the watch of {kind} with {error.status}: {error.reason}") from None
        except _BROKEN as error:
            raise AgentError(f"the watch of {kind} broke: {error or type(error).__name__}") from error

    async def log(self, pod: str, container: str) -> AsyncGenerator[bytes]:
        """What a container printed, both streams together; at most LOG_BYTES."""
        asked = {"container": container, "limit_bytes": LOG_BYTES}
        try:
            reading = self._groups["pods"].read_namespaced_pod_log(pod, self.cluster.namespace, **asked, **_RAW)
            async with await reading as answer:
                await _raise_for(answer, f"read the log of {pod}")
                async for data in answer.content.iter_any():
                    yield data
        except _BROKEN as error:
            raise AgentError(f"the log of {pod} broke off: {error or type(error).__name__}") from error

    def _method(self, verb: str, kind: str) -> Any:
        return getattr(self._groups[kind], f"{verb}_namespaced_{kind.removesuffix('s')}")

    async def _call(self, verb: str, kind: str, **arguments: Any) -> Object:
        what = f"{_METHODS[verb]} {kind}{f'/{name}' if (name := arguments.get('name')) else ''}"
        tries = Tries(BACKOFF, limit=TRIES)
        while True:
            try:
                async with await self._method(verb, kind)(namespace=self.cluster.namespace, **_RAW, **arguments) as answer:
                    if answer.status not in _AGAIN or (pause := tries.pause()) is None:
                        await _raise_for(answer, what)
                        return cast(Object, await answer.json())
            except _BROKEN as error:
                if (pause := tries.pause()) is None:
                    why = error or type(error).__name__
                    raise AgentError(f"Kubernetes at {self.cluster.url} does not answer ({what}): {why}") from error
            await asyncio.sleep(pause)


class ConflictError(AgentError):
    """An object of that name is there (409)."""


def _kind_of(status: int | None) -> type[AgentError]:
    return {404: GoneError, 409: ConflictError, 410: GoneError}.get(status or 0, AgentError)


async def _raise_for(answer: aiohttp.ClientResponse, what: str) -> None:
    if answer.status < 400:
        return
    text = (await answer.read()).decode(errors="replace")
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:300].strip() or str(answer.reason)
    raise _kind_of(answer.status)(f"Kubernetes refused {what} with {answer.status}: {message}")
