"""0.3's LLMProxy: a list of models as resources for agents. The proxy itself is a service of the stack (proxy/), always running.

A resource names the model's own server (or litellm). Runners replace its endpoint by the proxy's address of the attempt, and the proxy
forwards to the server that the rollout's resource names. `start` also sends the list to the proxy, for calls outside rollouts.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

from agl_otel.errors import UsageError
from agl_otel.net.auth import attempt_key
from agl_otel.proxy.models import sampling_in
from agl_otel.types import LLM, ProxyLLM, routed_base_url

if TYPE_CHECKING:
    from agl_otel.store import Store

DIRECT: Final[dict[str, str]] = {"openai": "https://api.openai.com/v1", "hosted_vllm": "", "vllm": ""}
"""{prefix of litellm's model names: default base URL} of servers with OpenAI's protocol, which need no litellm."""
LITELLM: Final = "litellm:"
"""Endpoint of a resource whose server litellm resolves."""
_IGNORED: Final = ("litellm_config", "num_workers", "launch_mode", "launcher_args", "middlewares", "callbacks", "host", "port")
_log = logging.getLogger(__name__)


class ModelConfig(TypedDict):
    """One entry of litellm's model list: the name that agents request, and the parameters of its server."""

    model_name: str
    litellm_params: dict[str, Any]


class LLMProxy:
    """Models behind the stack's proxy.

    Args:
        port: ignored, like host, litellm_config, num_workers, launch_mode, launcher_args, middlewares and callbacks: the proxy is a
            service of the stack, which always records token ids and log-probs.
        model_list: the models. Raises UsageError for an entry that cannot be served.
        store: the store of the stack; a Trainer sets it.
    """

    def __init__(
        self, port: int | None = None, model_list: Sequence[ModelConfig] | None = None, store: Store | None = None, **ignored: Any
    ) -> None:
        if unknown := ignored.keys() - set(_IGNORED):
            raise UsageError(f"LLMProxy takes no argument {', '.join(sorted(unknown))}")
        if ignored or port is not None:
            _log.info("LLMProxy(%s): ignored, because the proxy is a service of the stack", ", ".join([*ignored, "port"]))
        self.model_list: list[ModelConfig] = []
        self._store: weakref.ref[Store] | None = None
        self._running = False
        if store is not None:
            self.set_store(store)
        self.update_model_list(model_list or [])

    def set_store(self, store: Store) -> None:
        """Set the store of the proxy's stack; a weak reference is kept."""
        self._store = weakref.ref(store)

    def get_store(self) -> Store | None:
        """Return the store; None if none was set."""
        return self._store() if self._store is not None else None

    def update_model_list(self, model_list: Sequence[ModelConfig]) -> None:
        """Replace the models. Publish `as_resource()` again for it to affect new rollouts. Raises UsageError for an invalid entry."""
        for entry in model_list:
            _backend(entry)
        self.model_list = list(model_list)

    def is_running(self) -> bool:
        """Return whether `start` was called; the service itself runs as long as its stack."""
        return self._running

    async def start(self) -> None:
        """Send the models to the stack's proxy, for calls outside rollouts. Raises ModelServerError, UnavailableError."""
        await self._send(self.model_list)
        self._running = True

    async def stop(self) -> None:
        """Withdraw the models from the proxy; resources that name them keep working."""
        if not self._running:
            _log.warning("the proxy was not started: there is nothing to stop")
            return
        self._running = False
        await self._send([])

    async def restart(self, *, _port: int | None = None) -> None:
        """Send the current models to the stack's proxy; calls in flight are not interrupted."""
        await self.start()

    async def _send(self, models: Sequence[ModelConfig]) -> None:
        store = self.get_store()
        proxy = store.description.proxy if store is not None else None
        if store is not None and proxy is not None:
            from agl_otel.proxy.llm_proxy import replace_models

            await replace_models(proxy.rstrip("/"), models, token=store.token)

    def initialize(self) -> None:
        """Do nothing: 0.3's callers may call it."""

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> LLM:
        """Return a model as a resource: without ids for any rollout; with both ids for that attempt, including its key.

        `sampling_parameters` override those of its litellm_params.

        Raises ValueError if only one id is given, UsageError (a ValueError) if the model is ambiguous or not in the list.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("as_resource takes a rollout id and an attempt id, or neither")
        entry = self._entry(model)
        endpoint, served, key = _backend(entry)
        sampling = {**sampling_in(entry["litellm_params"]), **(sampling_parameters or {})}
        if rollout_id is None or attempt_id is None:
            return ProxyLLM(endpoint=endpoint, model=served, api_key=key, sampling_parameters=sampling)
        store = self.get_store()
        proxy = store.description.proxy if store is not None else None
        if proxy is None:
            raise UsageError("as_resource with ids needs the address of a running proxy: set_store(…) with a store that is connected")
        own = attempt_key(store.token, rollout_id, attempt_id) if store is not None and store.token else None
        return LLM(endpoint=routed_base_url(proxy, rollout_id, attempt_id), model=served, api_key=own, sampling_parameters=sampling)

    def _entry(self, model: str | None) -> ModelConfig:
        names = {entry["model_name"] for entry in self.model_list}
        if model is None and len(names) != 1:
            raise UsageError(f"which model? give model=, one of: {', '.join(sorted(names)) or 'none, the model list is empty'}")
        name = model or next(iter(names))
        found = next((entry for entry in self.model_list if entry["model_name"] == name), None)
        if found is None:
            raise UsageError(f"there is no model {name!r}; known are: {', '.join(sorted(names)) or 'none'}")
        return found


def _backend(entry: ModelConfig) -> tuple[str, str, str | None]:
    """Return (base URL, or LITELLM if litellm resolves the server; model name there; key). Raises UsageError without a server."""
    parameters = entry.get("litellm_params") or {}
    name = str(parameters.get("model", ""))
    prefix, slash, rest = name.partition("/")
    base = parameters.get("api_base") or parameters.get("base_url")
    if slash and prefix in DIRECT:
        base, name = base or DIRECT[prefix], rest
    elif slash and name and not base:
        base = LITELLM
    if not name or not base:
        raise UsageError(
            f"model {entry.get('model_name')!r} ({parameters.get('model')!r}) names no server: give "
            "litellm_params={'model': 'hosted_vllm/NAME' or 'openai/NAME', 'api_base': 'http://…/v1'}, or 'PROVIDER/NAME' for litellm"
        )
    key = parameters.get("api_key")
    if isinstance(key, str) and key.startswith("os.environ/"):
        key = os.environ.get(key.removeprefix("os.environ/"))
    return str(base), name, key or (os.environ.get("OPENAI_API_KEY") if prefix == "openai" else None)


__all__ = ["LLMProxy", "ModelConfig"]
