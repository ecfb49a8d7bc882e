"""The calls to Kubernetes' API that running Jobs takes, over kubernetes_asyncio (the extra `agl-otel[kubernetes]`).

Calls are retried while the server is unreachable or busy. This is safe for creations, because the caller chooses all names: a repeated
one finds the object. The service account's token is read for every call, because Kubernetes rotates the file. Responses are parsed
here: kubernetes_asyncio would build models, and log the bodies, including Secrets, at DEBUG. Rollouts do not belong here.
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
WATCH_SECONDS: Final = 300  # after that the server ends a watch, and the caller starts another
TRIES: Final = 6
BACKOFF: Final = Backoff(0.25, 4.0)  # about 6 s in total
LOG_BYTES: Final = 64 << 20
_METHODS: Final = {"create": "POST", "delete": "DELETE", "list": "GET", "patch": "PATCH", "read": "GET"}
_RETRIED_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
_CONNECTION_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)
_RAW: Final[dict[str, Any]] = {"_preload_content": False, "_request_timeout": (CALL_SECONDS, CALL_SECONDS)}
"""Options of a call whose response is parsed here; the timeouts are for connecting and for each read."""
Object = dict[str, Any]


class GoneError(AgentError):
    """The object does not exist (404), or the watch's resource version has expired (410)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The address of an API server, with the namespace and credentials to use."""

    url: str
    namespace: str = "default"
    token_file: Path | None = None
    authority_file: Path | None = None

    @classmethod
    def found(cls, url: str = "", namespace: str = "", *, account: Path = ACCOUNT) -> Cluster:
        """Return the cluster at `url` (for example from `kubectl proxy`), or that of the pod this runs in. Raises UsageError."""
        if url:
            return cls(url.rstrip("/"), namespace or "default")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host or not (account / "token").exists():
            raise UsageError(
                "this is not a Kubernetes pod with a service account: name the API server (`kubectl proxy` serves one at "
                "http://127.0.0.1:8001)"
            )
        named = f"[{host}]" if ":" in host else host
        default = (account / "namespace").read_text().strip()
        return cls(f"https://{named}:{port}", namespace or default, account / "token", account / "ca.crt")

    def configuration(self) -> Configuration:
        """Build kubernetes_asyncio's configuration."""
        from kubernetes_asyncio.client import Configuration  # an extra whose import takes two seconds of CPU

        configuration: Any = Configuration(host=self.url, api_key={"BearerToken": ""} if self.token_file else {})
        configuration.ssl_ca_cert, configuration.connection_pool_maxsize = self.authority_file, 0
        configuration.refresh_api_key_hook = self._read_token
        return configuration

    def _read_token(self, configuration: Any) -> None:
        if self.token_file:
            configuration.api_key["BearerToken"] = f"Bearer {self.token_file.read_text().strip()}"


def check_installed() -> None:
    """Raise UsageError where the extra is not installed."""
    if find_spec("kubernetes_asyncio") is None:
        raise UsageError("agents as Kubernetes Jobs need kubernetes_asyncio: pip install 'agl-otel[kubernetes]'")


class KubernetesApi:
    """Calls on objects of one namespace. Every call raises AgentError, with the server's message, where it fails."""

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
        """Create an object, or return the existing one of that name."""
        try:
            return await self._call("create", kind, body=body)
        except ConflictError:
            return await self._call("read", kind, name=body["metadata"]["name"])

    async def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge `change` into an object (JSON merge patch)."""
        return await self._call("patch", kind, name=name, body=change, _content_type="application/merge-patch+json")

    async def delete(self, kind: str, name: str, *, wait: bool = False) -> None:
        """Delete an object, if it exists; with `wait`, only after the objects that it owns (foreground propagation)."""
        options = {"propagationPolicy": "Foreground" if wait else "Background"}
        try:
            await self._call("delete", kind, name=name, body=options)
        except GoneError:
            return

    async def list(self, kind: str, labels: str) -> tuple[list[Object], str]:
        """Return (objects with these labels, resource version to watch from)."""
        answer = await self._call("list", kind, label_selector=labels)
        return answer.get("items") or [], answer["metadata"].get("resourceVersion", "")

    async def watch(self, kind: str, labels: str, version: str) -> AsyncGenerator[tuple[str, Object]]:
        """Yield (ADDED, MODIFIED or DELETED, object) until the server ends the watch. Raises GoneError where `version` has expired."""
        from kubernetes_asyncio.client import ApiException  # an extra
        from kubernetes_asyncio.watch import Watch

        selection = {"namespace": self.cluster.namespace, "label_selector": labels, "resource_version": version}
        limits = {"timeout_seconds": WATCH_SECONDS, "_request_timeout": (CALL_SECONDS, WATCH_SECONDS + CALL_SECONDS)}
        try:
            async with Watch("object") as watch:
                async for event in watch.stream(self._method("list", kind), **selection, **limits):
                    if not isinstance(event, dict):
                        raise AgentError(f"the watch of {kind} returned an event that is not JSON: {str(event)[:300]}")
                    yield event["type"], event["object"]
        except ApiException as error:
            raise _error_type(error.status)(f"Kubernetes ended the watch of {kind} with {error.status}: {error.reason}") from None
        except _CONNECTION_ERRORS as error:
            raise AgentError(f"the watch of {kind} broke: {error or type(error).__name__}") from error

    async def log(self, pod: str, container: str) -> AsyncGenerator[bytes]:
        """Yield a container's log, stdout and stderr merged; at most LOG_BYTES."""
        options = {"container": container, "limit_bytes": LOG_BYTES}
        try:
            reading = self._groups["pods"].read_namespaced_pod_log(pod, self.cluster.namespace, **options, **_RAW)
            async with await reading as answer:
                await _raise_for(answer, f"read the log of {pod}")
                async for data in answer.content.iter_any():
                    yield data
        except _CONNECTION_ERRORS as error:
            raise AgentError(f"the log of {pod} broke off: {error or type(error).__name__}") from error

    def _method(self, verb: str, kind: str) -> Any:
        return getattr(self._groups[kind], f"{verb}_namespaced_{kind.removesuffix('s')}")

    async def _call(self, verb: str, kind: str, **arguments: Any) -> Object:
        what = f"{_METHODS[verb]} {kind}{f'/{name}' if (name := arguments.get('name')) else ''}"
        tries = Tries(BACKOFF, limit=TRIES)
        while True:
            try:
                async with await self._method(verb, kind)(namespace=self.cluster.namespace, **_RAW, **arguments) as answer:
                    if answer.status not in _RETRIED_STATUSES or (pause := tries.pause()) is None:
                        await _raise_for(answer, what)
                        return cast(Object, await answer.json())
            except _CONNECTION_ERRORS as error:
                if (pause := tries.pause()) is None:
                    reason = error or type(error).__name__
                    raise AgentError(f"Kubernetes at {self.cluster.url} does not answer ({what}): {reason}") from error
            await asyncio.sleep(pause)


class ConflictError(AgentError):
    """An object of that name exists (409)."""


def _error_type(status: int | None) -> type[AgentError]:
    return {404: GoneError, 409: ConflictError, 410: GoneError}.get(status or 0, AgentError)


async def _raise_for(answer: aiohttp.ClientResponse, what: str) -> None:
    if answer.status < 400:
        return
    text = (await answer.read()).decode(errors="replace")
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:300].strip() or str(answer.reason)
    raise _error_type(answer.status)(f"Kubernetes refused {what} with {answer.status}: {message}")
