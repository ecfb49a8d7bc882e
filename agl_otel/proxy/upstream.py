"""Resolve the model servers of a call: the LLMs among the resources that are pinned to its rollout, looked up in the queue.

Among several LLMs the agent chooses by model name or resource name, else it gets the first. LLMs with the same model form one pool. A
canary (an LLM with a `share`, canary.py) is chosen by its resource name only; else it gets calls in place of the LLM that was chosen.

Calls of no rollout go to the newest version of one set (newest.py). The proxy's own model list (models.py) serves resources whose endpoint
is this proxy, rollouts without an LLM, and calls of no rollout that the set leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final, Literal, NoReturn, Protocol
from urllib.parse import urlsplit

from agl_otel.errors import NotFoundError, RefusedError, UnavailableError
from agl_otel.proxy.budget import Budget, budget_of
from agl_otel.proxy.canary import Taken, canary_for
from agl_otel.proxy.newest import Newest
from agl_otel.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    PaginatedResult,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
)
from agl_otel.types.resources import Bridging, StrictTools, is_canary, shares_in
from agl_otel.types.sampling import EXTRA_BODY, EXTRA_HEADERS, POLICY
from agl_otel_hook.context import Key

MAX_CACHED: Final = 50_000
VERSION_SECONDS: Final = 3600.0
"""How long a version of resources stays cached after its last use by a new attempt."""
MAX_ROUTES: Final = 32  # model names cached for one attempt
SEED: Final = "seed"
"""The sampling parameter, by its name in OpenAI's protocol."""
LITELLM: Final = "litellm:"
"""Endpoint of an LLM resource whose address litellm knows (its model is `provider/name`)."""
OWN: Final = "proxy:"
"""Endpoint of an LLM resource that is served as calls of no rollout are: by the proxy's model list, else its upstream."""
_ATTEMPT_OVER: Final = frozenset({"failed", "succeeded", "timeout"})


TOKENIZE: Final = "tokenize"
"""The route of vLLM, SGLang and this package's server that renders messages to token ids."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A model server as the proxy calls it."""

    base_url: str
    """Without a trailing slash; `/chat/completions` follows."""
    model: str | None = None
    """None: the model that the agent requests."""
    api_key: str | None = field(default=None, repr=False)
    """None: the agent's own."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str | None = None
    """The version of the resources; used as the weights version if the server reports none."""
    bridge: Bridging = "off"
    strict_tools: StrictTools = "keep"
    provider: Literal["openai", "litellm"] = "openai"
    """Whether the server is called directly or through litellm."""
    provider_key: str | None = field(default=None, repr=False)
    """The provider's key for litellm to use; None: the one in litellm's environment."""
    arm: str | None = None
    """The name of its resource, where calls are recorded with it."""
    canary: bool = False
    """Whether it is asked in place of the other servers of its pool, which are asked if it fails."""

    def url(self, path: str) -> str:
        """Return the address of a route; TOKENIZE lies beside /v1."""
        base = self.base_url.removesuffix("/v1") if path == TOKENIZE else self.base_url
        return f"{base}/{path}"

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers added to the agent's (EXTRA_HEADERS); none for litellm, which takes them in the body."""
        given: Any = self.sampling.get(EXTRA_HEADERS) if self.provider == "openai" else None
        return {str(name): value for name, value in given.items() if isinstance(value, str)} if isinstance(given, Mapping) else {}

    @property
    def fields(self) -> Mapping[str, Any]:
        """Defaults for fields of the body that the agent did not set."""
        if self.provider != "openai" or not (EXTRA_HEADERS in self.sampling or EXTRA_BODY in self.sampling):
            return self.sampling
        more: Any = self.sampling.get(EXTRA_BODY)
        own = {name: value for name, value in self.sampling.items() if name not in (EXTRA_HEADERS, EXTRA_BODY)}
        return {**own, **more} if isinstance(more, Mapping) else own

    def without_secrets(self) -> Upstream:
        """Return a copy for clients with a key of their own: no key, no password in the address, no extra headers."""
        parts = urlsplit(self.base_url)
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        sampling = {name: value for name, value in self.sampling.items() if name != EXTRA_HEADERS}
        return replace(self, base_url=address, api_key=None, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes."""

    pool: Sequence[Upstream]
    """At least one that is no canary; canaries come first."""
    budget: Budget | None = None
    """The rollout's budget; None: the proxy's default."""
    seed: int | None = None
    """The sampling seed of the rollout; None: the model server's default."""
    policy: str | None = None
    """The rollout's sampling policy (types.sampling.POLICY)."""
    full: str | None = None
    """The canary to which it would go, had that not taken as many conversations as it may, as NAME@VERSION of the set."""


class Upstreams(Protocol):
    """Resolves calls to upstreams."""

    async def resolve(self, key: Key | None, asked: str | None, conversation: str | None = None) -> Route:
        """Return the route for calls of an attempt (or of none) that request model `asked`; without a `conversation`, to no canary.

        Raises NotFoundError, UnavailableError, and RefusedError for an attempt that is over.
        """
        ...

    async def names(self) -> Sequence[str]:
        """The models that calls of no rollout may request, besides those of the proxy's own list."""
        ...

    def forget(self, key: Key) -> None:
        """Drop cached state of an attempt."""
        ...


class Lists(Protocol):
    """A list of models by name."""

    def find(self, asked: str | None) -> Sequence[Upstream]:
        """Return the pool; empty without a match."""
        ...

    def names(self) -> list[str]:
        """All names."""
        ...


class Queue(Protocol):
    """The part of the queue's client that is used here."""

    async def query_rollouts(self, *, rollout_id_in: Sequence[str]) -> PaginatedResult[Rollout]:
        """Rollouts by id."""
        ...

    async def query_attempts(self, rollout_ids: Sequence[str]) -> PaginatedResult[Attempt]:
        """Attempts of rollouts."""
        ...

    async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
        """One version of a set of resources."""
        ...


class FixedUpstreams:
    """One pool for every call."""

    def __init__(self, *pool: Upstream, budget: Budget | None = None, policy: str | None = None) -> None:
        self._route = Route(pool, budget, policy=policy)

    async def resolve(self, key: Key | None, asked: str | None, conversation: str | None = None) -> Route:
        """The pool."""
        return self._route

    async def names(self) -> Sequence[str]:
        """None."""
        return ()

    def forget(self, key: Key) -> None:
        """Nothing is kept."""


class ListedUpstreams:
    """The model list for every call: for a proxy without a queue."""

    def __init__(self, models: Lists) -> None:
        self._models = models

    async def resolve(self, key: Key | None, asked: str | None, conversation: str | None = None) -> Route:
        """The pool of that name. Raises NotFoundError."""
        return Route(listed(self._models, asked))

    async def names(self) -> Sequence[str]:
        """None."""
        return ()

    def forget(self, key: Key) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Looked-up state of one attempt, or of calls of no rollout."""

    llms: Mapping[str, LLM | ProxyLLM]
    version: str | None
    """The version of the resources; None without resources."""
    budget: Budget | None
    seed: int | None = None
    policy: str | None = None
    of_rollout: bool = True
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    """{resource name of a canary: its share}."""
    routes: dict[tuple[str | None, str | None], Route] = field(default_factory=dict[tuple[str | None, str | None], Route])
    """{(requested model, canary that answers): its route}, if the resources alone decide it."""

    def arm(self, name: str) -> str | None:
        """Return the resource name, if calls are recorded with it."""
        return name if self.shares or not self.of_rollout else None

    def names(self, model: str | None) -> bool:
        """Whether an LLM has this model or resource name."""
        return model in self.llms or any(llm.model == model for llm in self.llms.values() if not is_canary(llm))


class QueueUpstreams:
    """Looks routes up in the queue, once for each attempt; attempts that are looked up at once share a query.

    Calls of no rollout use the set `resources_id`, if there is one. Others, or those of a rollout without an LLM, use the model list, else
    `fallback_url`, which may be several URLs separated by commas.
    `fallback_key` is the key of those servers, also for resources that name one of them without a key: so a personal key need not be
    published.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        models: Lists | None = None,
        fallback_url: str = "",
        fallback_key: str = "",
        own_urls: Collection[str] = (),
        resources_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._models = models
        urls = [url.strip().rstrip("/") for url in fallback_url.split(",") if url.strip()]
        self._fallback = [Upstream(url, api_key=fallback_key or None) for url in urls]
        self._own_urls = tuple(own_urls)
        self._known: OrderedDict[Key, asyncio.Task[_Known]] = OrderedDict()
        self._querying = asyncio.Lock()
        self._next: tuple[list[str], asyncio.Task[Mapping[str, Rollout]]] | None = None
        """The ids of the next query, which is made once the one before is answered."""
        self._clock = clock
        self._by_version: OrderedDict[tuple[str | None, int | None], tuple[float, ResourcesUpdate]] = OrderedDict()
        """{(id, version): (last use by a new attempt, resources)}, least recently used first."""
        self._newest = Newest(queue.get_resources, resources_id, clock=clock) if resources_id else None
        self._of_newest: tuple[ResourcesUpdate | None, _Known | None] = None, None
        self._taken = Taken()

    async def resolve(self, key: Key | None, asked: str | None, conversation: str | None = None) -> Route:
        """Return the route of a call. Raises NotFoundError, UnavailableError, RefusedError."""
        known = await self._look_up(key) if key is not None else await self._of_no_rollout()
        if known is None or (key is None and self._lists(asked) and not known.names(asked)):
            return Route(self._own_pool(asked) or self._nothing())
        canary = canary_for(known.shares, conversation) if known.shares and conversation is not None else None
        full = None
        if canary is not None and conversation is not None and key is None and not self._taken.takes(canary, conversation):
            canary, full = None, f"{canary}@{known.version}"
        route = known.routes.get((asked, canary))
        if route is None:
            route = Route(self._pool(known, asked, canary), known.budget, known.seed, known.policy)
            by_resources = known.llms and not any(self._is_own(llm) for llm in known.llms.values())
            if by_resources and len(known.routes) < MAX_ROUTES:
                known.routes[asked, canary] = route
        return route if full is None else replace(route, full=full)

    async def names(self) -> Sequence[str]:
        """The models of the set that serves calls of no rollout, without its canaries."""
        known = await self._of_no_rollout()
        llms = known.llms if known is not None else {}
        return [*dict.fromkeys(llm.model or name for name, llm in llms.items() if not is_canary(llm))]

    async def _of_no_rollout(self) -> _Known | None:
        """What serves calls of no rollout; None without such a set, or without an LLM in it."""
        update = await self._newest.get() if self._newest is not None else None
        if update is not self._of_newest[0]:
            known = _known(update, of_rollout=False)
            self._of_newest = update, known if known.llms else None
            self._taken.begin(update.resources if update is not None else {})
        return self._of_newest[1]

    def _lists(self, asked: str | None) -> bool:
        return self._models is not None and asked in self._models.names()

    def _nothing(self) -> NoReturn:
        newest = self._newest
        if newest is not None and not newest.answered:
            raise UnavailableError(
                f"this call names no rollout, and the queue was not reached yet, which may have resources {newest.resources_id} for it"
            )
        published = (
            f"publish an LLM in resources with the id {newest.resources_id} (AGL_UPSTREAM_RESOURCES)"
            if newest is not None
            else "set AGL_UPSTREAM_RESOURCES"
        )
        raise NotFoundError(
            "this call names no rollout: use the base URL that the runner gives (/rollout/…/attempt/…/v1), send the ids as W3C baggage, or "
            f"for calls of no rollout {published}, or set AGL_UPSTREAM_URL or AGL_MODELS"
        )

    def forget(self, key: Key) -> None:
        """Forget the attempt; its next call looks it up again."""
        self._known.pop(key, None)

    async def _look_up(self, key: Key) -> _Known:
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = asyncio.create_task(self._ask(key))
            if len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        try:
            return task.result() if task.done() else await asyncio.shield(task)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._known.pop(key, None)  # the next call looks it up again
            raise

    async def _ask(self, key: Key) -> _Known:
        rollout_id = key[0]
        rollout = await self._rollout(rollout_id)
        if rollout is None:
            raise NotFoundError(f"the queue knows no rollout {rollout_id}: was it deleted, or does the proxy serve another stack?")
        await self._check(key, rollout)
        pinned = (rollout.resources_id, rollout.resources_version)
        _, update = self._by_version.get(pinned, (0.0, None))
        if update is None and rollout.resources_id is not None:
            update = await self._queue.get_resources(rollout.resources_id, version=rollout.resources_version)
        policy = (rollout.metadata or {}).get(POLICY)
        known = _known(update, budget_of(rollout), seed_of(rollout), policy if isinstance(policy, str) else None)
        gone = update is None and rollout.resources_id is not None
        if gone or not (known.llms or self._has_own()):
            which = f" ({rollout.resources_id} version {rollout.resources_version})" if rollout.resources_id else ""
            raise NotFoundError(
                f"rollout {rollout_id} has no LLM among its resources{which}: publish an LLM whose endpoint is the model server before you "
                "enqueue, or start the stack with AGL_UPSTREAM_URL or AGL_MODELS"
            )
        if update is not None and None not in pinned:
            now, held = self._clock(), self._by_version
            held[pinned] = now, update
            held.move_to_end(pinned)
            while len(held) > MAX_CACHED or now - next(iter(held.values()))[0] > VERSION_SECONDS:
                held.popitem(last=False)
        return known

    async def _rollout(self, rollout_id: str) -> Rollout | None:
        if self._next is None:
            ids: list[str] = []
            self._next = ids, asyncio.create_task(self._query(ids))
        asked, query = self._next
        asked.append(rollout_id)
        return (await asyncio.shield(query)).get(rollout_id)

    async def _query(self, ids: list[str]) -> Mapping[str, Rollout]:
        async with self._querying:
            self._next = None
            return {found.rollout_id: found for found in await self._queue.query_rollouts(rollout_id_in=ids)}

    async def _check(self, key: Key, rollout: Rollout) -> None:
        """Raise RefusedError if the attempt is over, NotFoundError if it is unknown. Without an attempt id the latest is assumed."""
        latest = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        if latest is None or not key[1]:
            return
        if latest.attempt_id == key[1]:
            status = latest.status
        else:
            attempts = await self._queue.query_attempts([key[0]])
            if all(attempt.attempt_id != key[1] for attempt in attempts):
                raise NotFoundError(f"rollout {key[0]} has no attempt {key[1]}: its latest is {latest.attempt_id}")
            status = "succeeded by a newer attempt"
        if status in _ATTEMPT_OVER or latest.attempt_id != key[1]:
            raise RefusedError(
                f"attempt {key[1]} of rollout {key[0]} is over ({status}): its calls are no longer taken", status=410, code="over"
            )

    def _has_own(self) -> bool:
        return bool(self._fallback or (self._models is not None and self._models.names()))

    def _own_pool(self, asked: str | None) -> Sequence[Upstream]:
        """The proxy's own servers for a model name; may be empty."""
        return (self._models.find(asked) if self._models is not None else ()) or self._fallback

    def _pool(self, known: _Known, asked: str | None, canary: str | None) -> Sequence[Upstream]:
        if not known.llms:
            own = self._own_pool(asked) or listed(self._models, asked)
            return [replace(each, version=known.version) for each in own]
        chosen = choose(known.llms, asked, canaries=known.of_rollout)
        pool = self._servers(known, chosen, asked)
        if canary is None or chosen in known.shares:
            return pool
        return [*(replace(each, canary=True) for each in self._servers(known, canary, asked)), *pool]

    def _servers(self, known: _Known, name: str, asked: str | None) -> Sequence[Upstream]:
        """The servers of the LLM of that resource name: all those with its model, unless it is a canary."""
        chosen, equals = known.llms[name], {each: llm for each, llm in known.llms.items() if each not in known.shares}
        if not self._is_own(chosen):
            pool = {name: chosen} if name in known.shares else equals
            return [self._upstream(each, llm, known) for each, llm in pool.items() if llm.model == chosen.model and not self._is_own(llm)]
        others = [self._upstream(each, llm, known) for each, llm in equals.items() if not self._is_own(llm)]
        if others and not (self._models is not None and self._models.find(chosen.model or asked)):
            return others[:1]
        wanted = chosen.model or asked
        own = self._own_pool(wanted) or listed(self._models, wanted)
        sampling = chosen.sampling_parameters
        return [
            replace(
                each,
                model=each.model or chosen.model or None,
                version=known.version,
                arm=known.arm(name),
                sampling={**each.sampling, **sampling},
                bridge=chosen.bridge,
                strict_tools=chosen.strict_tools,
            )
            for each in own
        ]

    def _is_own(self, llm: LLM | ProxyLLM) -> bool:
        return llm.endpoint == OWN or any(llm.endpoint.startswith(url) for url in self._own_urls)

    def _upstream(self, name: str, llm: LLM | ProxyLLM, known: _Known) -> Upstream:
        endpoint, sampling, arm = llm.endpoint.rstrip("/"), llm.sampling_parameters, known.arm(name)
        if endpoint == LITELLM:
            strict = llm.strict_tools
            return Upstream("", llm.model, llm.api_key, sampling, known.version, strict_tools=strict, provider="litellm", arm=arm)
        own_key = next((each.api_key for each in self._fallback if each.base_url == endpoint), None)
        key = llm.api_key or own_key or ("" if known.of_rollout else None)
        return Upstream(endpoint, llm.model or None, key, sampling, known.version, llm.bridge, llm.strict_tools, arm=arm)


def _known(
    update: ResourcesUpdate | None,
    budget: Budget | None = None,
    seed: int | None = None,
    policy: str | None = None,
    *,
    of_rollout: bool = True,
) -> _Known:
    resources = update.resources if update is not None else {}
    llms = {name: resource for name, resource in resources.items() if isinstance(resource, (LLM, ProxyLLM))}
    return _Known(llms, str(update.version) if update is not None else None, budget, seed, policy, of_rollout, shares_in(llms))


def choose(llms: Mapping[str, LLM | ProxyLLM], asked: str | None, *, canaries: bool) -> str:
    """Choose an LLM by the requested model name, else by resource name, else the first, and return its name.

    `canaries`: whether a canary is reached by its resource name. Not by calls of no rollout: users would choose who answers them.
    """
    usual = {name: llm for name, llm in llms.items() if not is_canary(llm)}
    by_model = next((name for name, llm in usual.items() if asked and llm.model == asked), None)
    return by_model or (asked if asked and asked in (llms if canaries else usual) else next(iter(usual)))


def listed(models: Lists | None, asked: str | None) -> Sequence[Upstream]:
    """Return the pool of that name. Raises NotFoundError that lists the known names."""
    pool = models.find(asked) if models is not None else ()
    if not pool:
        names = models.names() if models is not None else []
        named = f" {asked!r}" if asked else ""
        raise NotFoundError(
            f"the proxy has no model{named} in its list ({', '.join(names) or 'which is empty'}), and the rollout has no LLM among its "
            "resources whose endpoint is a model server: publish one, or add the model (AGL_MODELS, LLMProxy) or an "
            "upstream (AGL_UPSTREAM_URL)"
        )
    return pool


def seed_of(rollout: Rollout) -> int | None:
    """The seed in the rollout's metadata ({"sampling_seed": 7}); None if there is none."""
    given: Any = (rollout.metadata or {}).get("sampling_seed")
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def call_seed(seed: int, call: int) -> int:
    """Derive the 48-bit seed of a call from `Call.logical_number` (recorder.py), so that equal requests sample differently."""
    return int.from_bytes(blake2b(f"{seed}/{call}".encode(), digest_size=6).digest())
