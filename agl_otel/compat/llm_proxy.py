"""0.3's LLMProxy: which models there are, as resources for agents. The proxy itself is the stack's service (proxy/), always running.

A resource names the model's own server (or litellm); a runner hands it to the agent behind the proxy, under the attempt's address, and the
proxy forwards to the server that the rollout's resource names. `start` also tells the proxy the list, for calls of no rollout.
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
"""{prefix of litellm's model names: base URL where none is given}; these speak OpenAI's protocol themselves."""
LITELLM: Final = "litellm:"
"""The endpoint of a resource whose model litellm knows where to find."""
_IGNORED: Final = ("litellm_config", "num_workers", "launch_mode", "launcher_args", "middlewares", "callbacks", "host", "port")
_log = logging.getLogger(__name__)


class ModelConfig(TypedDict):
    """One entry of a model list: what agents ask for, and where that is served (litellm's words)."""

    model_name: str
    litellm_params: dict[str, Any]


class LLMProxy:
    """Models behind the stack's proxy.

    Args:
        port: and all of host, litellm_config, num_workers, launch_mode, launcher_args, middlewares, callbacks: they change nothing,
            because the proxy is a service of the stack, which always records token ids and log-probs.
        model_list: the models. Raises UsageError for an entry that cannot be served.
        store: the store of the stack; a Trainer sets it.
    """

    def __init__(
        self, port: int | None = None, model_list: Sequence[ModelConfig] | None = None, store: Store | None = None, **ignored: Any
    ) -> None:
        if unknown := ignored.keys() - set(_IGNORED):
            raise UsageError(f"LLMProxy takes no argument {', '.join(sorted(unknown))}")
        if ignored or port is not None:
            _log.info("LLMProxy(%s): the proxy is a service of the stack; these change nothing", ", ".join([*ignored, "port"]))
        self.model_list: list[ModelConfig] = []
        self._store: weakref.ref[Store] | None = None
        self._running = False
        if store is not None:
            self.set_store(store)
        self.update_model_list(model_list or [])

    def set_store(self, store: Store) -> None:
        """Say which stack's proxy it is; a weak reference is kept."""
        self._store = weakref.ref(store)

    def get_store(self) -> Store | None:
        """The store; None where none was set."""
        return self._store() if self._store is not None else None

    def update_model_list(self, model_list: Sequence[ModelConfig]) -> None:
        """Serve these models from now on: publish `as_resource()` anew for the next rollouts. Raises UsageError."""
        for entry in model_list:
            _backend(entry)
        self.model_list = list(model_list)

    def is_running(self) -> bool:
        """Whether `start` was called; the service runs with its stack."""
        return self._running

    async def start(self) -> None:
        """Tell the stack's proxy the models, for calls of no rollout. Raises ModelServerError, UnavailableError."""
        await self._hand_over(self.model_list)
        self._running = True

    async def stop(self) -> None:
        """Take the models back; resources that name them go on."""
        if not self._running:
            _log.warning("the proxy was not started: there is nothing to stop")
            return
        self._running = False
        await self._hand_over([])

    async def restart(self, *, _port: int | None = None) -> None:
        """Tell the stack's proxy the list as it is now; calls under way go on."""
        await self.start()

    async def _hand_over(self, models: Sequence[ModelConfig]) -> None:
        store = self.get_store()
        proxy = store.description.proxy if store is not None else None
        if store is not None and proxy is not None:
            from agl_otel.proxy.llm_proxy import hand_over

            await hand_over(proxy.rstrip("/"), models, token=store.token)

    def initialize(self) -> None:
        """Nothing to set up."""

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> LLM:
        """A model as a resource: without ids for any rollout, with both for that attempt, with its key.

        It samples as its litellm_params say, and `sampling_parameters` where those say otherwise.

        Raises ValueError where only one id is given, UsageError (a ValueError) where the model is not clear or not in the list.
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
        wanted = model or next(iter(names))
        found = next((entry for entry in self.model_list if entry["model_name"] == wanted), None)
        if found is None:
            raise UsageError(f"there is no model {wanted!r}; known are: {', '.join(sorted(names)) or 'none'}")
        return found


def _backend(entry: ModelConfig) -> tuple[str, str, str | None]:
    """(base URL, or LITELLM for what litellm knows where to find; model name there; key). Raises UsageError that names what is wrong."""
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
