"""Publish the model servers' addresses and the version of their weights, as resources and to the proxies. Does not import verl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from agl_otel.algorithms.verl.spec import RESOURCE_NAME, Spec
from agl_otel.errors import ModelServerError, UnavailableError
from agl_otel.net.auth import model_server_key
from agl_otel.net.tls import connector
from agl_otel.store import Store
from agl_otel.text import error_text
from agl_otel.types import LLM, NamedResources, RolloutMode
from agl_otel.types.sampling import all_parameters

TIMEOUT_SECONDS: Final = 30.0


@dataclass
class Publisher:
    """Publishes the resources and weights versions of one run."""

    store: Store
    spec: Spec
    sampling: dict[RolloutMode, dict[str, Any]]

    async def publish(self, addresses: Sequence[str], step: int) -> str:
        """Publish that the servers at `addresses` (host:port) have the weights after `step` updates.

        Returns the version of the training resources. Raises ModelServerError where a server or proxy refuses, UnavailableError.
        """
        await self.store.open()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), connector=connector()) as session:
            key = model_server_key(self.store.token) if self.spec.reports_version else ""  # verl's servers require none
            model = await _served_model(session, addresses[0], key)
            versions: dict[RolloutMode, int] = {}
            for mode, sampling in self.sampling.items():
                of_calls = {"bridge": self.spec.bridge, "strict_tools": self.spec.strict_tools}
                served, own_id = resources(addresses, model, sampling, key, **of_calls), self.spec.resources_id(mode)
                update = await self.store.publish(served, resources_id=own_id, aside=True)
                versions[mode] = update.version
            if not self.spec.reports_version:
                known = self.store.description
                for proxy in known.proxies or ([known.proxy] if known.proxy else []):
                    await set_proxy_version(session, proxy, str(step), self.store.token)
        return str(versions["train"])


def resources(addresses: Sequence[str], model: str, sampling: dict[str, Any], key: str = "", **of_calls: Any) -> NamedResources:
    """Create the resources: `main_llm` and one for each further replica. The proxy pools LLMs that serve the same model.

    `of_calls`: LLM's `bridge` and `strict_tools`.
    """
    names = [RESOURCE_NAME, *(f"{RESOURCE_NAME}_{number}" for number in range(2, len(addresses) + 1))]
    return {
        name: LLM(endpoint=f"http://{address}/v1", model=model, api_key=key or None, sampling_parameters=sampling, **of_calls)
        for name, address in zip(names, addresses, strict=True)
    }


def sampling_by_mode(rollout: Any) -> dict[RolloutMode, dict[str, Any]]:
    """Return the sampling parameters of verl's `actor_rollout_ref.rollout`, for training and for validation."""

    def parameters(section: Any) -> dict[str, Any]:
        more = {"top_p": float(section.top_p), "top_k": top_k_of(section)}
        return all_parameters(section.temperature, rollout.response_length, **more)

    return {"train": parameters(rollout), "val": parameters(rollout.val_kwargs)}


def top_k_of(section: Any) -> int:
    """Return the `top_k` of one of verl's sections, as requests have it: -1 is all tokens."""
    return int(section.top_k) if section.top_k > 0 else -1


async def _served_model(session: aiohttp.ClientSession, address: str, key: str) -> str:
    url = f"http://{address}/v1/models"
    try:
        async with session.get(url, headers=_authorization(key)) as answer:
            return (await answer.json())["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
        raise ModelServerError(f"verl's model server does not return at {url} what it serves: {error_text(error)}") from error


async def set_proxy_version(session: aiohttp.ClientSession, proxy: str, version: str, token: str) -> None:
    """Set the weights version that a proxy records. Raises ModelServerError where it refuses, UnavailableError where unreachable."""
    try:
        async with session.post(f"{proxy.rstrip('/')}/resume", json={"version": version}, headers=_authorization(token)) as answer:
            if answer.status != 200:
                raise ModelServerError(f"the proxy {proxy} did not take weights version {version}: HTTP {answer.status}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnavailableError(
            f"the proxy {proxy} is unreachable and has not got weights version {version}: {error_text(error)}"
        ) from error


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
