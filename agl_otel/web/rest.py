"""REST under /v1/agl: the routes of Agent Lightning 0.3, as a table over one Store."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web
from pydantic import Field, TypeAdapter, ValidationError

from agl_otel.compat.stores import UNSET, LightningStore
from agl_otel.errors import AglError, UsageError
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
from agl_otel.types.model import describe_invalid
from agl_otel.web.routes import Page, PageOf, Route, Strict, body_of, fields_sent, params_of, require_found

HEALTH_SECONDS: Final = 1.0  # shorter than the time-out of a probe of /health

MAX_TEXT: Final = 200  # characters of a text to search for: they fit into a URL even when escaped
_RESOURCES: Final = TypeAdapter(NamedResources)


class _Rollouts(Page):
    status_in: list[RolloutStatus] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None
    mode_in: list[RolloutMode] | None = None
    run: str | None = None
    """Run of the rollout: its `metadata.run`, else its resources id."""
    input_contains: str | None = Field(default=None, max_length=MAX_TEXT)
    """Text in the input; only the latest 100,000 rollouts are searched."""
    output_contains: str | None = Field(default=None, max_length=MAX_TEXT)
    """Text in the model's last reply; only the first 500 rollouts that match otherwise are searched, then `searched` is set."""
    attempts_from: int = Field(default=0, ge=0, le=1 << 31)
    """Least number of attempts."""


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
    """Ignored: the path names it. 0.3's client sends it too."""


async def health_of(store: LightningStore) -> dict[str, Any]:
    """Return `status` (ok, degraded) and the names of the services that are down."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            down = sorted((await store.queue.describe()).down)
    except (AglError, TimeoutError):
        down = ["queue"]
    return {"status": "degraded", "down": down} if down else {"status": "ok"}


async def _health(store: LightningStore, request: web.Request) -> Any:
    return await health_of(store)


async def _statistics(store: LightningStore, request: web.Request) -> Any:
    return await store.statistics()


async def _enqueue(store: LightningStore, request: web.Request) -> Any:
    params = await body_of(request, _Enqueue, inputs=lambda params: (each.input for each in params.rollouts))
    return await store.enqueue_many_rollouts(params.rollouts)


async def _dequeue(store: LightningStore, request: web.Request) -> Any:
    params = await body_of(request, _Dequeue)
    return await store.dequeue_many_rollouts(limit=params.limit, worker_id=params.worker_id)


async def _start(store: LightningStore, request: web.Request) -> Any:
    params = await body_of(request, _Start, inputs=lambda params: [params.input])
    return await store.start_rollout(params.input, params.mode, params.resources_id, params.config, params.metadata, params.worker_id)


async def _rollouts(store: LightningStore, request: web.Request) -> Any:
    return await store.rollouts(RolloutQuery(**(await params_of(request, _Rollouts)).checked(Rollout)))


async def _rollout(store: LightningStore, request: web.Request) -> Any:
    rollout_id = request.match_info["rollout_id"]
    return require_found(await store.get_rollout_by_id(rollout_id), f"rollout {rollout_id!r}")


async def _update_rollout(store: LightningStore, request: web.Request) -> Any:
    params = await body_of(request, _UpdateRollout, inputs=lambda params: [params.input])
    return await store.update_rollout(request.match_info["rollout_id"], **fields_sent(params))


async def _attempts(store: LightningStore, request: web.Request) -> Any:
    params = (await params_of(request, _Attempts)).checked(Attempt)
    params.pop("filter_logic")
    return await store.query_attempts(request.match_info["rollout_id"], **params)


async def _start_attempt(store: LightningStore, request: web.Request) -> Any:
    return await store.start_attempt(request.match_info["rollout_id"], (await body_of(request, _Worker)).worker_id)


async def _latest_attempt(store: LightningStore, request: web.Request) -> Any:
    return await store.get_latest_attempt(request.match_info["rollout_id"])


async def _update_attempt(store: LightningStore, request: web.Request) -> Any:
    given = fields_sent(await body_of(request, _UpdateAttempt))
    return await store.update_attempt(request.match_info["rollout_id"], request.match_info["attempt_id"], **given)


async def _resources(store: LightningStore, request: web.Request) -> Any:
    params = (await params_of(request, _Resources)).checked(ResourcesUpdate)
    params.pop("filter_logic")
    return await store.query_resources(**params)


async def _add_resources(store: LightningStore, request: web.Request) -> Any:
    return await store.add_resources(_named((await body_of(request, _GivenResources)).resources))


async def _latest_resources(store: LightningStore, request: web.Request) -> Any:
    return await store.get_latest_resources()


async def _resources_by_id(store: LightningStore, request: web.Request) -> Any:
    resources_id = request.match_info["resources_id"]
    return require_found(await store.get_resources_by_id(resources_id), f"set of resources {resources_id!r}")


async def _update_resources(store: LightningStore, request: web.Request) -> Any:
    given = _named((await body_of(request, _GivenResources)).resources)
    return await store.update_resources(request.match_info["resources_id"], given)


def _named(resources: dict[str, Any]) -> NamedResources:
    try:
        return _RESOURCES.validate_python(resources)
    except ValidationError as error:
        raise UsageError(f"the resources are wrong: {describe_invalid(error)}") from None


async def _add_span(store: LightningStore, request: web.Request) -> Any:
    return await store.add_span(await body_of(request, Span))


async def _spans(store: LightningStore, request: web.Request) -> Any:
    return await store.query_spans(**(await params_of(request, _Spans)).checked(Span))


async def _next_sequence(store: LightningStore, request: web.Request) -> Any:
    params = await body_of(request, _Sequence)
    return {"sequence_id": await store.get_next_span_sequence_id(params.rollout_id, params.attempt_id)}


async def _workers(store: LightningStore, request: web.Request) -> Any:
    return await store.query_workers(**(await params_of(request, _Workers)).checked(Worker))


async def _worker(store: LightningStore, request: web.Request) -> Any:
    worker_id = request.match_info["worker_id"]
    return require_found(await store.get_worker_by_id(worker_id), f"worker {worker_id!r}")


async def _update_worker(store: LightningStore, request: web.Request) -> Any:
    stats = fields_sent(await body_of(request, _Heartbeat)).get("heartbeat_stats", UNSET)
    return await store.update_worker(request.match_info["worker_id"], stats)


async def _wait(store: LightningStore, request: web.Request) -> Any:
    params = await body_of(request, _Wait)
    return await store.wait_for_rollouts(params.rollout_ids, params.timeout)


ROUTES: Final = (
    Route("GET", "/health", _health, "Status of the service; names of services that are down.", None, Any),
    Route("GET", "/statistics", _statistics, "Counts of the store, and rollouts by status.", None, Any),
    Route("POST", "/queues/rollouts/enqueue", _enqueue, "Put rollouts at the end of the queue.", _Enqueue, list[Rollout], 201),
    Route("POST", "/queues/rollouts/dequeue", _dequeue, "Claim rollouts to run them.", _Dequeue, list[AttemptedRollout]),
    Route("POST", "/rollouts", _start, "Start a rollout that is never queued, with its first attempt.", _Start, AttemptedRollout, 201),
    Route("GET", "/rollouts", _rollouts, "Rollouts that match, with their latest attempts.", _Rollouts, PageOf[AttemptedRollout | Rollout]),
    Route(
        "POST",
        "/rollouts/search",
        _rollouts,
        "Rollouts that match, with their latest attempts.",
        _Rollouts,
        PageOf[AttemptedRollout | Rollout],
        read_only=True,
    ),
    Route("GET", "/rollouts/{rollout_id}", _rollout, "One rollout with its latest attempt.", None, AttemptedRollout | Rollout),
    Route("POST", "/rollouts/{rollout_id}", _update_rollout, "Update fields of a rollout.", _UpdateRollout, AttemptedRollout | Rollout),
    Route("GET", "/rollouts/{rollout_id}/attempts", _attempts, "Attempts of a rollout.", _Attempts, PageOf[Attempt]),
    Route("POST", "/rollouts/{rollout_id}/attempts", _start_attempt, "Start another attempt.", _Worker, AttemptedRollout, 201),
    Route(
        "POST", "/rollouts/{rollout_id}/attempts/search", _attempts, "Attempts of a rollout.", _Attempts, PageOf[Attempt], read_only=True
    ),
    Route(
        "GET",
        "/rollouts/{rollout_id}/attempts/latest",
        _latest_attempt,
        "The latest attempt, or null.",
        None,
        Attempt | None,
    ),
    Route(
        "POST",
        "/rollouts/{rollout_id}/attempts/{attempt_id}",
        _update_attempt,
        "Update fields of an attempt; its id may be `latest`.",
        _UpdateAttempt,
        Attempt,
    ),
    Route("GET", "/resources", _resources, "Current versions of sets of resources.", _Resources, PageOf[ResourcesUpdate]),
    Route("POST", "/resources", _add_resources, "Add a set, as version 1.", _GivenResources, ResourcesUpdate, 201),
    Route(
        "GET",
        "/resources/latest",
        _latest_resources,
        "The set that was written last and is the default of rollouts that name none, which those of training jobs never are; or null.",
        None,
        ResourcesUpdate | None,
    ),
    Route("GET", "/resources/{resources_id}", _resources_by_id, "The current version of a set.", None, ResourcesUpdate),
    Route(
        "POST",
        "/resources/{resources_id}",
        _update_resources,
        "Add the next version of a set; an unknown id is created.",
        _GivenResources,
        ResourcesUpdate,
    ),
    Route("POST", "/spans", _add_span, "Store a span; null if it is stored already.", Span, Span | None, 201),
    Route("GET", "/spans", _spans, "Spans of a rollout that match.", _Spans, PageOf[Span]),
    Route("POST", "/spans/search", _spans, "Spans of a rollout that match.", _Spans, PageOf[Span], read_only=True),
    Route("POST", "/spans/next", _next_sequence, "Take the next sequence number of a rollout.", _Sequence, Any),
    Route("GET", "/workers", _workers, "Workers that match.", _Workers, PageOf[Worker]),
    Route("POST", "/workers/search", _workers, "Workers that match.", _Workers, PageOf[Worker], read_only=True),
    Route("GET", "/workers/{worker_id}", _worker, "One worker.", None, Worker),
    Route("POST", "/workers/{worker_id}", _update_worker, "Record a heartbeat.", _Heartbeat, Worker),
    Route(
        "POST",
        "/waits/rollouts",
        _wait,
        "Wait until all of the rollouts have finished or the time is up; return the finished ones.",
        _Wait,
        list[AttemptedRollout | Rollout],
        read_only=True,
    ),
)
"""All routes of Agent Lightning 0.3."""
