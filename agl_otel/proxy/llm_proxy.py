"""Agent Lightning 0.3's `LLMProxy`: the same calls, in front of the stack's own proxy.

0.3 started a server of its own; here the stack has one already. So `start` hands the list of models to it and `stop` takes it back;
what 0.3 needed options for (port, workers, launch mode, middlewares, callbacks) is always on or not needed, and said so once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import aiohttp

from agl_otel.errors import ModelServerError, UnavailableError, UsageError
from agl_otel.proxy.models import parse_entry
from agl_otel.tls import connector
from agl_otel.types import LLM, Describe, ProxyLLM, routed_base_url

logger = logging.getLogger("agl_otel.proxy")
TIMEOUT_SECONDS: Final = 30.0
_NOT_NEEDED: Final = ("port", "host", "num_workers", "launch_mode", "launcher_args", "middlewares", "callbacks", "litellm_config")


class Describing(Protocol):
    """A queue's client that knows where the stack's services are."""

    async def describe(self) -> Describe:
        """The addresses."""
        ...


class StoreLike(Protocol):
    """What of a store is needed here."""

    @property
    def queue(self) -> Describing:
        """The queue's client."""
        ...


class LLMProxy:
    """A list of models behind the stack's proxy. Everything that waits is async; it works with and without rollouts."""

    def __init__(
        self, *, model_list: Sequence[Mapping[str, Any]] | None = None, store: StoreLike | None = None, token: str = "", **options: Any
    ) -> None:
        """Take 0.3's arguments.

        Args:
            model_list: [{"model_name": what agents ask for, "litellm_params": {"model", "api_base", "api_key", …}}].
            store: the store whose stack has the proxy.
            token: bearer token of the stack; empty means none.
            options: 0.3's other arguments, which change nothing here.

        Raises UsageError for an argument that 0.3 did not have, and for a wrong model list.
        """
        if unknown := sorted(set(options) - set(_NOT_NEEDED)):
            raise UsageError(
                f"LLMProxy takes no {', '.join(unknown)}; it takes model_list, store, token, and ignores {', '.join(_NOT_NEEDED)}"
            )
        if given := sorted(name for name, value in options.items() if value is not None):
            logger.info("LLMProxy stands for the stack's proxy: %s change nothing (AGL_PROXY_PORT, AGL_HOST do)", ", ".join(given))
        self._store = store
        self._token = token
        self._endpoint: str | None = None
        self.model_list: list[Mapping[str, Any]] = []
        self.update_model_list(model_list or [])

    def set_store(self, store: StoreLike) -> None:
        """The store whose stack has the proxy; from the next start on."""
        self._store = store

    def get_store(self) -> StoreLike | None:
        """The store, where there is one."""
        return self._store

    def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Another list, from the next `start` or `restart` on. Raises UsageError that names what is wrong."""
        for entry in model_list:
            parse_entry(entry)
        self.model_list = list(model_list)

    async def start(self) -> None:
        """Hand the models to the stack's proxy. Raises UsageError without a store, UnavailableError without a proxy."""
        if self._store is None:
            raise UsageError("LLMProxy needs a store before it starts: LLMProxy(store=…) or set_store(…)")
        found = await self._store.queue.describe()
        if found.proxy is None:
            raise UnavailableError("the stack has no proxy running: `agl-otel up` starts one")
        await self._hand_over(found.proxy.rstrip("/"), self.model_list)
        self._endpoint = found.proxy.rstrip("/")

    async def stop(self) -> None:
        """Take the models back. Does nothing, with a warning, where it was not started."""
        if self._endpoint is None:
            logger.warning("LLMProxy is not running, so there is nothing to stop")
            return
        endpoint, self._endpoint = self._endpoint, None
        await self._hand_over(endpoint, [])

    async def restart(self) -> None:
        """Hand over the list as it is now; calls under way go on."""
        await self.start()

    def is_running(self) -> bool:
        """Whether the models were handed over and not taken back."""
        return self._endpoint is not None

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> LLM | ProxyLLM:
        """The proxy as a resource: for every attempt, or with both ids for one.

        Raises ValueError (UsageError) where only one id is given, where it is not running, and where several models leave open which.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise UsageError("as_resource takes a rollout id and an attempt id, or neither")
        if self._endpoint is None:
            raise UsageError("LLMProxy is not running: await its start() before as_resource()")
        names = list(dict.fromkeys(str(entry["model_name"]) for entry in self.model_list))
        if model is None and len(names) != 1:
            raise UsageError(f"as_resource needs model=…: there are {', '.join(names) or 'no models'}")
        fields: dict[str, Any] = {"model": model or names[0], "sampling_parameters": dict(sampling_parameters or {})}
        if rollout_id is None or attempt_id is None:
            return ProxyLLM(endpoint=self._endpoint, **fields)
        return LLM(endpoint=routed_base_url(self._endpoint, rollout_id, attempt_id), **fields)

    async def _hand_over(self, endpoint: str, models: Sequence[Mapping[str, Any]]) -> None:
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, connector=connector()) as session,
                session.post(f"{endpoint}/model_list", json={"model_list": list(models)}, headers=headers) as answer,
            ):
                if answer.status != 200:
                    raise ModelServerError(f"the proxy {endpoint} did not take the models (HTTP {answer.status}): {await answer.text()}")
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"the proxy {endpoint} cannot be reached: {error!r}") from error
