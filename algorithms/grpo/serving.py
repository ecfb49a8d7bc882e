"""Serve the weights of a run to agents: versions of the resource `main_llm`, and the model server that samples with them.

Shared by GRPO and SFT. Models do not belong here: callers write the weights to folders.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from agl_otel.algorithms.grpo.groups import GroupStore
from agl_otel.algorithms.offline import OfflineStore
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.run_log import StepStore
from agl_otel.errors import ModelServerError, UsageError
from agl_otel.text import error_text
from agl_otel.types import LLM, AttemptedRollout, NamedResources, ResourcesUpdate, Rollout, Span
from agl_otel.types.columns import Traces
from agl_otel.types.resources import Bridging, StrictTools

RESOURCE_NAME: Final = "main_llm"
MODEL_NAME: Final = "policy"
PUSH_TIMEOUT_SECONDS: Final = 600.0  # a push waits for the calls in flight, and the server reads large weights from disk
PROBE_TOKENS: Final = 32
PROBE_SECONDS: Final = 60.0
SLEEP_SECONDS: Final = 600.0  # it waits for the calls in flight, and copies the weights


class RolloutStore(GroupStore, StepStore, OfflineStore, Protocol):
    """The part of `agl_otel.store.Store` that algorithms use to train weights."""

    async def publish(self, resources: NamedResources, *, resources_id: str | None = None, aside: bool = False) -> ResourcesUpdate:
        """Publish resources as the next version of `resources_id`; `aside`: only for rollouts that name it."""
        ...

    async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str], *, tree: bool = False) -> Traces:
        """Read the traces of rollouts; `tree`: with all of their spans."""
        ...

    async def spans(self, rollout_ids: str | Sequence[str]) -> list[Span]:
        """Return the spans of rollouts."""
        ...

    async def rewarded(self, rollout_ids: Sequence[str], sources: Collection[str] | None = None) -> set[str]:
        """Return those of the rollouts that have a reward of one of these sources; None: of any."""
        ...

    async def resources(self, resources_id: str | None = None) -> ResourcesUpdate | None:
        """Return the current version of a set; None where there is none."""
        ...


@dataclass(frozen=True)
class ServerWeights:
    """What a model server samples with, and takes: GET /weights of model_port.py."""

    version: str | None = None
    """None where the server does not say it."""
    path: str | None = None
    """The folder whose files these weights are of; None where it is not known."""
    adapter_rank: int = 0
    """The greatest rank of a LoRA adapter that it takes; 0: it takes merged weights only."""
    sleeps: bool = False
    """Whether it can free the GPU's memory between phases of sampling."""


async def server_weights(session: aiohttp.ClientSession, url: str) -> ServerWeights:
    """Ask the model server at `url` what it samples with.

    Raises ModelServerError where it does not answer, or has no POST /weights, so that it can only be sampled.
    """
    address = f"{url.rstrip('/')}/weights"
    status, text = await _get(session, address)
    if status == 405:  # there is POST /weights only
        return ServerWeights()
    if status != 200:
        raise ModelServerError(
            f"{url} can be sampled, but not trained: GET {address} answers HTTP {status}, so it has no POST /weights to load new weights "
            "by. Start, on this machine, `python -m agl_otel.algorithms.grpo.vllm --model DIR` (vLLM) or "
            "`python -m agl_otel.algorithms.grpo.server --model DIR`, and give its address"
        )
    try:
        found = json.loads(text)
        version = found.get("version")
        known = str(version) if version is not None else None
        return ServerWeights(known, found.get("path"), int(found.get("adapter_rank", 0)), bool(found.get("sleeps", False)))
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelServerError(f"{address} does not say what the server samples with: {error_text(error)} in {text[:200]!r}") from error


async def check_context(session: aiohttp.ClientSession, url: str, max_tokens: int) -> int | None:
    """Return the greatest number of tokens of a prompt and its reply, as GET /v1/models says it; None where it does not.

    Raises UsageError where `max_tokens` leave no room for a prompt, ModelServerError where the server does not answer.
    """
    _, text = await _get(session, f"{url.rstrip('/')}/v1/models")
    try:
        limit: int | None = json.loads(text)["data"][0].get("max_model_len")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if limit is not None and max_tokens >= limit:
        raise UsageError(
            f"max_tokens = {max_tokens}: it must be less than {limit}, because the context of the model server {url} (max_model_len) holds "
            "the prompt, too, and every call would be refused; give such a value, or serve a longer context"
        )
    return limit


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """Return status and body. Raises ModelServerError."""
    with _reaching(url):
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as answer:
            return answer.status, await answer.text()


@contextmanager
def _reaching(url: str) -> Generator[None]:
    """Raise ModelServerError where the block cannot reach the model server."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ModelServerError(f"cannot reach {url}: {error_text(error)}. Is the model server running?") from error


class Serving:
    """Publishes the weights of a run.

    Args:
        store: stores the versions.
        session: for calls to the model server.
        url: of the model server.
        sampling: sampling parameters for agents.
        run_id: also the id of the resources.
        bridge: how conversations go on.
        strict_tools: whether agents' tools are sent as strict ones.
    """

    def __init__(
        self,
        store: RolloutStore,
        session: aiohttp.ClientSession,
        *,
        url: str,
        sampling: dict[str, Any],
        run_id: str,
        bridge: Bridging = "off",
        strict_tools: StrictTools = "keep",
    ) -> None:
        self._store, self._session, self._url, self._run_id, self._sampling = store, session, url, run_id, sampling
        endpoint = f"{url.rstrip('/')}/v1"
        served = LLM(endpoint=endpoint, model=MODEL_NAME, sampling_parameters=sampling, bridge=bridge, strict_tools=strict_tools)
        self.resources: NamedResources = {RESOURCE_NAME: served}
        self._current: ResourcesUpdate | None = None
        self._stored: ResourcesUpdate | None = None
        self._pushed: Path | None = None
        self.server = ServerWeights()

    @property
    def published(self) -> ResourcesUpdate:
        """The current version. Raises UsageError before the first one."""
        if self._current is None:
            raise UsageError("nothing is published yet: a step works within a run, which publishes the first weights")
        return self._current

    async def begin(self, run: RunFolder | None) -> None:
        """Check the model server, and look up what a run with a folder had published when it was stopped.

        Raises what `server_weights` and `check_context` raise.
        """
        self.server = await server_weights(self._session, self._url)
        await check_context(self._session, self._url, self._sampling["max_tokens"])
        self._stored = await self._store.resources(self._run_id) if run is not None else None

    def resume(self, version: int, folder: Path) -> None:
        """Continue with `version` as the next one, which was published before the stop. Raises UsageError where the store lacks it."""
        if self._stored is None or self._stored.version < version:
            raise UsageError(
                f"the store does not have what run {self._run_id} published: resume with the store (or data directory) that it was "
                f"started with, or choose another folder than {folder}"
            )
        self._current = self._stored.model_copy(update={"version": version - 1})

    async def next_version(self) -> int:
        """Publish the next version, unless the run did so before it was stopped, and return it; the weights are pushed under it.

        Where the model server has another address since then, that is published once, and the weights keep their numbers: rollouts from
        before the stop name these.
        """
        version = self._current.version + 1 if self._current is not None else 1
        if self._stored is None or self._stored.version < version or self._stored.resources != self.resources:
            self._stored = await self._store.publish(self.resources, resources_id=self._run_id, aside=True)
        self._current = self._stored.model_copy(update={"version": version})
        return version

    async def push(self, folder: Path) -> None:
        """Load the weights in `folder` (an absolute path) into the model server as the current version; return when they are active.

        The server gets the path, so it must share the file system. Raises ModelServerError where it is unreachable or refuses them.
        """
        url, version = f"{self._url.rstrip('/')}/weights", str(self.published.version)
        body = {"path": str(folder), "version": version}
        try:
            async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=PUSH_TIMEOUT_SECONDS)) as answer:
                if answer.status != 200:
                    raise ModelServerError(f"{url} refused weights version {version}: HTTP {answer.status} {(await answer.text())[:500]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ModelServerError(
                f"cannot push weights version {version} to {url}: {error_text(error)}. Is the model server running?"
            ) from error
        self._pushed = await asyncio.to_thread(folder.resolve)

    async def check_server(self) -> None:
        """Raise ModelServerError where the model server no longer has the weights of the last push, or cannot be reached.

        Then the rollouts since were sampled by others, which small updates hide from `ratio_error_limit`.
        """
        now, wanted = await server_weights(self._session, self._url), str(self.published.version)
        other_file = now.path is not None and self._pushed is not None and now.path != str(self._pushed)
        if now.version in (None, wanted) and not other_file:
            return
        raise ModelServerError(
            f"{self._url} has version {now.version} of the weights in {now.path or 'files that have changed since'}, and this run pushed "
            f"version {wanted} from {self._pushed}: another training uses the server, or it was started again, and the last rollouts were "
            "sampled by other weights. Nothing was trained on them. Give each run a server of its own, and start the run again in a new "
            "folder, or, if only the server was started again, in the same one"
        )

    async def push_origin(self, folder: Path) -> bool:
        """If the model server was started with the weights in `folder`, make these the current version, without reading them again.

        Returns whether it was. Raises ModelServerError.
        """
        place = await asyncio.to_thread(folder.resolve)
        if self.server.path != str(place):
            return False
        await self.push(place)
        return True

    @asynccontextmanager
    async def asleep(self, release: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
        """Have the model server free the GPU's memory during the block, if it can.

        `release` frees the trainer's cached memory at its end, before the server takes its own again. Raises ModelServerError.
        """
        if not self.server.sleeps:
            yield
            return
        await self._post("sleep")
        try:
            yield
        except BaseException:
            with suppress(ModelServerError):  # the block's error is the cause
                await release()
                await self._post("wake")
            raise
        await release()
        await self._post("wake")

    async def _post(self, what: str) -> None:
        url = f"{self._url.rstrip('/')}/{what}"
        try:
            async with self._session.post(url, json={}, timeout=aiohttp.ClientTimeout(total=SLEEP_SECONDS)) as answer:
                if answer.status == 200:
                    return
                why = f"HTTP {answer.status} {(await answer.text())[:500]}"
        except TimeoutError:
            why = f"no answer within {SLEEP_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            why = error_text(error)
        raise ModelServerError(
            f"{url} failed ({why}). Look at the model server's log, and start the run again, which resumes after its last checkpoint, or "
            "leave out --sleep ([policy] sleep)"
        )

    async def probe(self, drift: Callable[[Sequence[int], Sequence[int], Sequence[float]], Awaitable[float]], tolerance: float) -> None:
        """Check that the model server samples with the pushed weights.

        Args:
            drift: (prompt ids, reply ids, log-probs of the reply) → mean of objective.ratio_errors under those weights.
            tolerance: its maximum. A mean, because in bfloat16 single tokens are off by more than 0.1 with the right weights.

        Raises ModelServerError where it is exceeded.
        """
        error = await drift(*await self.sample())
        if not error <= tolerance:
            raise ModelServerError(
                f"{self._url} does not sample with the weights that were pushed as version {self.published.version}: the "
                f"ratios of its tokens' probabilities are {error:.4g} off 1 on average (probe_tolerance = {tolerance:g}). Does it load all "
                "of them, or is its precision lower?"
            )

    async def sample(self) -> tuple[list[int], list[int], list[float]]:
        """Sample a short reply; return prompt ids, reply ids and the reply's log-probs. Raises ModelServerError."""
        url = f"{self._url.rstrip('/')}/v1/chat/completions"
        options = {**self._sampling, "max_tokens": PROBE_TOKENS, "logprobs": True, "return_token_ids": True, "seed": self.published.version}
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Say something."}], **options}
        with _reaching(url):
            async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as answer:
                text = await answer.text()
        if answer.status != 200:
            raise ModelServerError(
                f"{url} refuses a single user message, by which its weights are checked: HTTP {answer.status} {text[:500]}. Correct the "
                "model's chat template or the server, or leave out probe_tolerance"
            )
        try:
            reply = json.loads(text)
            choice = reply["choices"][0]
            logprobs = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
            return reply["prompt_token_ids"], choice["token_ids"], logprobs
        except (LookupError, TypeError, ValueError) as error:
            raise ModelServerError(
                f"{url} returns no token ids and log-probs, so its weights cannot be checked: {error_text(error)}"
            ) from error
