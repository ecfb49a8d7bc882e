"""REST under /v1/agl: the routes of Agent Lightning 0.3 as a table over one Store. JSON in, JSON out; pydantic does the checking."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web
from pydantic import Field, TypeAdapter, ValidationError

from agl_otel.errors import AglError, UsageError
from agl_otel.store import UNSET, Store
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutQuery,
    RolloutStatus,
    Span,
    Worker,
    WorkerStatus,
)
from agl_otel.web.routes import Page, PageOf, Route, Strict, asked_of, body_of, given_in, known, words

HEALTH_SECONDS: Final = 1.0  # less than a probe of /health waits

MAX_TEXT: Final = 200  # characters that are searched for: they fit into an address, whatever they are
_RESOURCES: Final = TypeAdapter(NamedResources)


class _Rollouts(Page):
    status_in: list[RolloutStatus] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None
    mode_in: list[RolloutMode] | None = None
    run: str | None = None
    """What `metadata.run` names, else the set of resources."""
    input_contains: str | None = Field(default=None, max_length=MAX_TEXT)
    """Of the latest 100,000 rollouts, those with this text in their input."""
    output_contains: str | None = Field(default=None, max_length=MAX_TEXT)
    """Of the first 500 that match all else, those whose last reply of a model has this text; `searched` says where there were more."""
    attempts_from: int = Field(default=0, ge=0, le=1 << 31)
    """With so many attempts, or more."""


class _Attempts(Page):
    sort_by: str | None = "sequence_id"


class _Spans(Page):
    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    sort_by: str | None = "sequence_id"


class _Resources(Page):
    resources_id: str | None = None
    resources_id_contains: str | None = None


class _Workers(Page):
    status_in: list[WorkerStatus] | None = None
    worker_id_contains: str | None = None


class _Dequeue(Strict):
    limit: int = Field(default=1, le=1 << 20)
    worker_id: str | None = None


class _Wait(Strict):
    rollout_ids: list[str]
    timeout: float | None = None


class _Start(EnqueueRolloutRequest):
    worker_id: str | None = None


class _Worker(Strict):
    worker_id: str | None = None


class _Enqueue(Strict):
    rollouts: list[EnqueueRolloutRequest]


class _Heartbeat(Strict):
    heartbeat_stats: dict[str, Any] | None = None


class _Sequence(Strict):
    rollout_id: str
    attempt_id: str


class _UpdateRollout(Strict):
    input: Any = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = RolloutConfig()
    metadata: dict[str, Any] | None = None


class _UpdateAttempt(Strict):
    status: AttemptStatus = "preparing"
    worker_id: str = ""
    last_heartbeat_time: float = 0.0
    metadata: dict[str, Any] | None = None


class _GivenResources(Strict):
    resources: dict[str, Any]
    resources_id: str | None = None
    """In the path already; sent by 0.3's client as well."""


# --- the routes


async def health_of(store: Store) -> dict[str, Any]:
    """Whether all services of the stack are up; which are not. Only names: whoever asks may be without a token."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            down = sorted((await store.queue.describe()).down)
    except (AglError, TimeoutError):
        down = ["queue"]
    return {"status": "degraded", "down": down} if down else {"status": "ok"}


async def _health(store: Store, request: web.Request) -> Any:
    return await health_of(store)


async def _statistics(store: Store, request: web.Request) -> Any:
    return await store.statistics()


async def _enqueue(store: Store, request: web.Request) -> Any:
    asked = await body_of(request, _Enqueue, inputs=lambda asked: (each.input for each in asked.rollouts))
    return await store.enqueue_many_rollouts(asked.rollouts)


async def _dequeue(store: Store, request: web.Request) -> Any:
    asked = await body_of(request, _Dequeue)
    return await store.dequeue_many_rollouts(limit=asked.limit, worker_id=asked.worker_id)


async def _start(store: Store, request: web.Request) -> Any:
    asked = await body_of(request, _Start, inputs=lambda asked: [asked.input])
    return await store.start_rollout(asked.input, asked.mode, asked.resources_id, asked.config, asked.metadata, asked.worker_id)


async def _rollouts(store: Store, request: web.Request) -> Any:
    return await store.rollouts(RolloutQuery(**(await asked_of(request, _Rollouts)).checked(Rollout)))


async def _rollout(store: Store, request: web.Request) -> Any:
    rollout_id = request.match_info["rollout_id"]
    return known(await store.get_rollout_by_id(rollout_id), f"rollout {rollout_id!r}")


async def _update_rollout(store: Store, request: web.Request) -> Any:
    asked = await body_of(request, _UpdateRollout, inputs=lambda asked: [asked.input])
    return await store.update_rollout(request.match_info["rollout_id"], **given_in(asked))


async def _attempts(store: Store, request: web.Request) -> Any:
    asked = (await asked_of(request, _Attempts)).checked(Attempt)
    asked.pop("filter_logic")
    return await store.query_attempts(request.match_info["rollout_id"], **asked)


async def _start_attempt(store: Store, request: web.Request) -> Any:
    return await store.start_attempt(request.match_info["rollout_id"], (await body_of(request, _Worker)).worker_id)


async def _latest_attempt(store: Store, request: web.Request) -> Any:
    return await store.get_latest_attempt(request.match_info["rollout_id"])


async def _update_attempt(store: Store, request: web.Request) -> Any:
    given = given_in(await body_of(request, _UpdateAttempt))
    return await store.update_attempt(request.match_info["rollout_id"], request.match_info["attempt_id"], **given)


async def _resources(store: Store, request: web.Request) -> Any:
    asked = (await asked_of(request, _Resources)).checked(ResourcesUpdate)
    asked.pop("filter_logic")
    return await store.query_resources(**asked)


async def _add_resources(store: Store, request: web.Request) -> Any:
    return await store.add_resources(_named((await body_of(request, _GivenResources)).resources))


async def _latest_resources(store: Store, request: web.Request) -> Any:
    return await store.get_latest_resources()


async def _resources_by_id(store: Store, request: web.Request) -> Any:
    resources_id = request.match_info["resources_id"]
    return known(await store.get_resources_by_id(resources_id), f"set of resources {resources_id!r}")


async def _update_resources(store: Store, request: web.Request) -> Any:
    given = _named((await body_of(request, _GivenResources)).resources)
    return await store.update_resources(request.match_info["resources_id"], given)


def _named(resources: dict[str, Any]) -> NamedResources:
    try:
        return _RESOURCES.validate_python(resources)
    except ValidationError as error:
        raise UsageError(f"the resources are wrong: {words(error)}") from None


async def _add_span(store: Store, request: web.Request) -> Any:
    return await store.add_span(await body_of(request, Span))


async def _spans(store: Store, request: web.Request) -> Any:
    return await store.query_spans(**(await asked_of(request, _Spans)).checked(Span))


async def _next_sequence(store: Store, request: web.Request) -> Any:
    asked = await body_of(request, _Sequence)
    return {"sequence_id": await store.get_next_span_sequence_id(asked.rollout_id, asked.attempt_id)}


async def _workers(store: Store, request: web.Request) -> Any:
    return await store.query_workers(**(await asked_of(request, _Workers)).checked(Worker))


async def _worker(store: Store, request: web.Request) -> Any:
    worker_id = request.match_info["worker_id"]
    return known(await store.get_worker_by_id(worker_id), f"worker {worker_id!r}")


async def _update_worker(store: Store, request: web.Request) -> Any:
    stats = given_in(await body_of(request, _Heartbeat)).get("heartbeat_stats", UNSET)
    return await store.update_worker(request.match_info["worker_id"], stats)


async def _wait(store: Store, request: web.Request) -> Any:
    asked = await body_of(request, _Wait)
    return await store.wait_for_rollouts(asked.rollout_ids, asked.timeout)


ROUTES: Final = (
    Route("GET", "/health", _health, "The service answers; which others are down.", None, Any),
    Route("GET", "/statistics", _statistics, "How much there is, and rollouts by status.", None, Any),
    Route("POST", "/queues/rollouts/enqueue", _enqueue, "Put rollouts at the end of the queue.", _Enqueue, list[Rollout], 201),
    Route("POST", "/queues/rollouts/dequeue", _dequeue, "Claim rollouts to run them.", _Dequeue, list[AttemptedRollout]),
    Route("POST", "/rollouts", _start, "A rollout that is never queued, with its first attempt.", _Start, AttemptedRollout, 201),
    Route("GET", "/rollouts", _rollouts, "Rollouts that match, with their latest attempts.", _Rollouts, PageOf[AttemptedRollout | Rollout]),
    Route(
        "POST",
        "/rollouts/search",
        _rollouts,
        "Rollouts that match, with their latest attempts.",
        _Rollouts,
        PageOf[AttemptedRollout | Rollout],
        looks=True,
    ),
    Route("GET", "/rollouts/{rollout_id}", _rollout, "One rollout with its latest attempt.", None, AttemptedRollout | Rollout),
    Route(
        "POST", "/rollouts/{rollout_id}", _update_rollout, "Change what is given of a rollout.", _UpdateRollout, AttemptedRollout | Rollout
    ),
    Route("GET", "/rollouts/{rollout_id}/attempts", _attempts, "Attempts of a rollout.", _Attempts, PageOf[Attempt]),
    Route("POST", "/rollouts/{rollout_id}/attempts", _start_attempt, "A further attempt.", _Worker, AttemptedRollout, 201),
    Route("POST", "/rollouts/{rollout_id}/attempts/search", _attempts, "Attempts of a rollout.", _Attempts, PageOf[Attempt], looks=True),
    Route(
        "GET",
        "/rollouts/{rollout_id}/attempts/latest",
        _latest_attempt,
        "The latest attempt; null where there is none.",
        None,
        Attempt | None,
    ),
    Route(
        "POST",
        "/rollouts/{rollout_id}/attempts/{attempt_id}",
        _update_attempt,
        "Change what is given of an attempt, which may be `latest`.",
        _UpdateAttempt,
        Attempt,
    ),
    Route("GET", "/resources", _resources, "Current versions of sets of resources.", _Resources, PageOf[ResourcesUpdate]),
    Route("POST", "/resources", _add_resources, "A new set, in version 1.", _GivenResources, ResourcesUpdate, 201),
    Route(
        "GET",
        "/resources/latest",
        _latest_resources,
        "The set that was written last; null where there is none.",
        None,
        ResourcesUpdate | None,
    ),
    Route("GET", "/resources/{resources_id}", _resources_by_id, "The current version of a set.", None, ResourcesUpdate),
    Route(
        "POST",
        "/resources/{resources_id}",
        _update_resources,
        "The next version of a set; an unknown id is created.",
        _GivenResources,
        ResourcesUpdate,
    ),
    Route("POST", "/spans", _add_span, "Store a span; null where it is stored already.", Span, Span | None, 201),
    Route("GET", "/spans", _spans, "Spans of a rollout that match.", _Spans, PageOf[Span]),
    Route("POST", "/spans/search", _spans, "Spans of a rollout that match.", _Spans, PageOf[Span], looks=True),
    Route("POST", "/spans/next", _next_sequence, "The next number of the rollout's counter.", _Sequence, Any),
    Route("GET", "/workers", _workers, "Workers that match.", _Workers, PageOf[Worker]),
    Route("POST", "/workers/search", _workers, "Workers that match.", _Workers, PageOf[Worker], looks=True),
    Route("GET", "/workers/{worker_id}", _worker, "One worker.", None, Worker),
    Route("POST", "/workers/{worker_id}", _update_worker, "A heartbeat.", _Heartbeat, Worker),
    Route(
        "POST",
        "/waits/rollouts",
        _wait,
        "Those of the rollouts that have finished, once all have or the time is up.",
        _Wait,
        list[AttemptedRollout | Rollout],
        looks=True,
    ),
)
"""All routes of 0.3."""
