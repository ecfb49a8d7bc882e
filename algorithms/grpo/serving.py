"""The weights of a run as agents see them: a version of the resource `main_llm`, and the model server that samples with it.

What GRPO and SFT have in common beside their run's folder. Knows no model: how weights become a folder is its caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from agl_otel.algorithms.grpo.groups import GroupStore
from agl_otel.algorithms.grpo.policy import push_weights
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.run_log import StepStore
from agl_otel.errors import ModelServerError, UsageError
from agl_otel.types import LLM, AttemptedRollout, NamedResources, ResourcesUpdate, Rollout, RolloutMode, RolloutStatus
from agl_otel.types.columns import Traces

RESOURCE_NAME: Final = "main_llm"
MODEL_NAME: Final = "policy"
PROBE_TOKENS: Final = 8
PROBE_SECONDS: Final = 60.0


class RolloutStore(GroupStore, StepStore, Protocol):
    """What algorithms that train weights need of a store; `agl_otel.store.Store` is one."""

    async def publish(self, resources: NamedResources, *, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish resources as the next version of `resources_id`."""
        ...

    async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str]) -> Traces:
        """All that was observed of them."""
        ...

    async def query_rollouts(self, *, status_in: Sequence[RolloutStatus] | None = None) -> Sequence[Rollout | AttemptedRollout]:
        """Rollouts of these statuses, with their latest attempts."""
        ...

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The current version of a set; None where there is none."""
        ...


async def offline_rollouts(store: RolloutStore, mode: RolloutMode, taken: Collection[str]) -> list[Rollout | AttemptedRollout]:
    """The rollouts of this mode that have succeeded and that are not `taken` yet."""
    ended = await store.query_rollouts(status_in=["succeeded"])
    return [rollout for rollout in ended if rollout.mode == mode and rollout.rollout_id not in taken]


class Serving:
    """Where a run's weights are served.

    Args:
        store: gets the versions.
        session: of the calls to the model server.
        url: of the model server.
        sampling: what agents are asked to sample with.
        run_id: the id of the resources.
    """

    def __init__(self, store: RolloutStore, session: aiohttp.ClientSession, *, url: str, sampling: dict[str, Any], run_id: str) -> None:
        self._store, self._session, self._url, self._run_id, self._sampling = store, session, url, run_id, sampling
        self.resources: NamedResources = {
            RESOURCE_NAME: LLM(endpoint=f"{url.rstrip('/')}/v1", model=MODEL_NAME, sampling_parameters=sampling)
        }
        self._current: ResourcesUpdate | None = None
        self._stored: ResourcesUpdate | None = None

    @property
    def published(self) -> ResourcesUpdate:
        """The current version. Raises UsageError before the first."""
        if self._current is None:
            raise UsageError("nothing is published yet: a step works within a run, which publishes the first weights")
        return self._current

    async def begin(self, run: RunFolder | None) -> None:
        """Look up what a run that is kept had published when it was stopped."""
        self._stored = await self._store.get_resources_by_id(self._run_id) if run is not None else None

    def go_on(self, version: int, folder: Path) -> None:
        """The next version is this one, which the run published before it was stopped. Raises UsageError for another store than its own."""
        if self._stored is None or self._stored.version < version:
            raise UsageError(
                f"the store does not know what run {self._run_id} published: go on with the store (or data directory) that it was "
                f"begun with, or choose another folder than {folder}"
            )
        self._current = self._stored.model_copy(update={"version": version - 1})

    async def next_version(self) -> int:
        """Publish the next version, unless the run has done so before it was stopped; weights must be pushed under it."""
        wanted = self._current.version + 1 if self._current is not None else 1
        stored = self._stored
        if stored is not None and stored.version >= wanted and stored.resources == self.resources:
            self._current = stored.model_copy(update={"version": wanted})
        else:
            self._current = await self._store.publish(self.resources, resources_id=self._run_id)
        return self._current.version

    async def push(self, folder: Path) -> None:
        """Have the model server sample with the weights in `folder` under the current version. Raises ModelServerError."""
        await push_weights(self._session, self._url, folder, str(self.published.version))

    async def probe(self, drift: Callable[[Sequence[int], Sequence[int], Sequence[float]], Awaitable[float]], tolerance: float) -> None:
        """Hold a short reply of the model server against the weights that were pushed.

        Args:
            drift: objective.max_ratio_error of prompt ids, reply ids and the reply's log-probs under those weights.
            tolerance: how far a ratio may be from 1.

        Raises ModelServerError where it is further.
        """
        found = await drift(*await self.sample())
        if not found <= tolerance:
            raise ModelServerError(
                f"{self._url} does not sample with the weights that were pushed as version {self.published.version}: a ratio of "
                f"probabilities is {found:.4g} off 1 (probe_tolerance = {tolerance:g}). Does it load all of them, or is its precision "
                "lower?"
            )

    async def sample(self) -> tuple[list[int], list[int], list[float]]:
        """A short reply of the model server: the ids of prompt and reply, and the reply's log-probs. Raises ModelServerError."""
        url = f"{self._url.rstrip('/')}/v1/chat/completions"
        asked = {**self._sampling, "max_tokens": PROBE_TOKENS, "logprobs": True, "return_token_ids": True, "seed": self.published.version}
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Say something."}], **asked}
        try:
            async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as answer:
                text = await answer.text()
                told = json.loads(text)
                choice = told["choices"][0]
                logprobs = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
                return told["prompt_token_ids"], choice["token_ids"], logprobs
        except (LookupError, TypeError, ValueError) as error:
            raise ModelServerError(
                f"{url} sends no token ids and log-probs, so what it samples with cannot be checked: {error!r}"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ModelServerError(f"cannot ask {url}: {error!r}. Is the model server running?") from error
