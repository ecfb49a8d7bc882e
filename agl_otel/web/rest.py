"""REST under /v1/agl: the routes of Agent Lightning 0.3 as a table over one Store. JSON in, JSON out; pydantic does the checking."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agl_otel.errors import NotFoundError, UsageError
from agl_otel.store import UNSET, Store
from agl_otel.types import (
    Attempt,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
    Worker,
    WorkerStatus,
)

PREFIX: Final = "/v1/agl"
STORE: Final = web.AppKey("store", Store)
M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RESOURCES: Final = TypeAdapter(NamedResources)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Page(_Strict):
    limit: int = -1
    offset: int = Field(default=0, ge=0)
    sort_by: str | None = None
    sort_order: Literal["asc", "desc"] = "asc"
    filter_logic: Literal["and", "or"] = "and"

    def checked(self, model: type[BaseModel]) -> dict[str, Any]:
        """What was asked for, as arguments. Raises UsageError for a page or an order that there cannot be."""
        if self.limit == 0 or self.limit < -1:
            raise UsageError(f"limit is {self.limit}: -1 (all) or more than 0")
        if self.sort_by is not None and self.sort_by not in model.model_fields:
            raise UsageError(f"sort_by {self.sort_by!r} is no field: {', '.join(model.model_fields)}")
        return self.model_dump(exclude_none=True)


class _Rollouts(_Page):
    status_in: list[RolloutStatus] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None
    mode_in: list[str] | None = None
    """Sent by 0.3's dashboard, which showed what it got."""


class _Attempts(_Page):
    sort_by: str | None = "sequence_id"


class _Spans(_Page):
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


class _Resources(_Page):
    resources_id: str | None = None
    resources_id_contains: str | None = None


class _Workers(_Page):
    status_in: list[WorkerStatus] | None = None
    worker_id_contains: str | None = None


class _Dequeue(_Strict):
    limit: int = 1
    worker_id: str | None = None


class _Wait(_Strict):
    rollout_ids: list[str]
    timeout: float | None = None


class _Start(EnqueueRolloutRequest):
    worker_id: str | None = None


class _Worker(_Strict):
    worker_id: str | None = None


class _Enqueue(_Strict):
    rollouts: list[EnqueueRolloutRequest]


class _Heartbeat(_Strict):
    heartbeat_stats: dict[str, Any] | None = None


class _Sequence(_Strict):
    rollout_id: str
    attempt_id: str


class _UpdateRollout(_Strict):
    input: Any = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = RolloutConfig()
    metadata: dict[str, Any] | None = None


class _UpdateAttempt(_Strict):
    status: AttemptStatus = "preparing"
    worker_id: str = ""
    last_heartbeat_time: float = 0.0
    metadata: dict[str, Any] | None = None


class _GivenResources(_Strict):
    resources: dict[str, Any]
    resources_id: str | None = None
    """In the path already; sent by 0.3's client as well."""


# --- requests and answers


async def _body(request: web.Request, model: type[M]) -> M:
    """The JSON body. Raises UsageError that names what is wrong in it."""
    try:
        return model.model_validate_json(await request.read() or b"{}")
    except ValidationError as error:
        raise UsageError(f"the body is no {model.__name__.lstrip('_')}: {_words(error)}") from None


async def _asked(request: web.Request, model: type[M]) -> M:
    """The query of a GET, or the body of a POST. Raises UsageError."""
    if request.method == "POST":
        return await _body(request, model)
    lists = {name for name in model.model_fields if name.endswith("_in")}
    given: dict[str, Any] = {name: request.query.getall(name) if name in lists else request.query[name] for name in request.query}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"the query is wrong: {_words(error)}") from None


def _words(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _plain(value: Any) -> Any:
    """A result as JSON holds it; the fencing token of a claim is its claimer's alone."""
    if isinstance(value, PaginatedResult):
        return {"items": _plain(list(value)), "limit": value.limit, "offset": value.offset, "total": value.total}
    if isinstance(value, list):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]  # of anything
    return value.model_dump(mode="json", exclude={"token"}) if isinstance(value, BaseModel) else value


def _known(value: Any, what: str) -> Any:
    if value is None:
        raise NotFoundError(f"there is no {what}")
    return value


def _given(model: BaseModel) -> dict[str, Any]:
    """What was sent, null included; what was not is left as it is."""
    return {name: getattr(model, name) for name in model.model_fields_set}


# --- the routes


async def _health(store: Store, request: web.Request) -> Any:
    return {"status": "ok"}


async def _statistics(store: Store, request: web.Request) -> Any:
    return await store.statistics()


async def _enqueue(store: Store, request: web.Request) -> Any:
    return await store.enqueue_many_rollouts((await _body(request, _Enqueue)).rollouts)


async def _dequeue(store: Store, request: web.Request) -> Any:
    asked = await _body(request, _Dequeue)
    return await store.dequeue_many_rollouts(limit=asked.limit, worker_id=asked.worker_id)


async def _start(store: Store, request: web.Request) -> Any:
    asked = await _body(request, _Start)
    return await store.start_rollout(asked.input, asked.mode, asked.resources_id, asked.config, asked.metadata, asked.worker_id)


async def _rollouts(store: Store, request: web.Request) -> Any:
    asked = (await _asked(request, _Rollouts)).checked(Rollout)
    asked.pop("mode_in", None)
    return await store.query_rollouts(**asked)


async def _rollout(store: Store, request: web.Request) -> Any:
    rollout_id = request.match_info["rollout_id"]
    return _known(await store.get_rollout_by_id(rollout_id), f"rollout {rollout_id!r}")


async def _update_rollout(store: Store, request: web.Request) -> Any:
    return await store.update_rollout(request.match_info["rollout_id"], **_given(await _body(request, _UpdateRollout)))


async def _attempts(store: Store, request: web.Request) -> Any:
    asked = (await _asked(request, _Attempts)).checked(Attempt)
    asked.pop("filter_logic")
    return await store.query_attempts(request.match_info["rollout_id"], **asked)


async def _start_attempt(store: Store, request: web.Request) -> Any:
    return await store.start_attempt(request.match_info["rollout_id"], (await _body(request, _Worker)).worker_id)


async def _latest_attempt(store: Store, request: web.Request) -> Any:
    return await store.get_latest_attempt(request.match_info["rollout_id"])


async def _update_attempt(store: Store, request: web.Request) -> Any:
    given = _given(await _body(request, _UpdateAttempt))
    return await store.update_attempt(request.match_info["rollout_id"], request.match_info["attempt_id"], **given)


async def _resources(store: Store, request: web.Request) -> Any:
    asked = (await _asked(request, _Resources)).checked(ResourcesUpdate)
    asked.pop("filter_logic")
    return await store.query_resources(**asked)


async def _add_resources(store: Store, request: web.Request) -> Any:
    return await store.add_resources(_named((await _body(request, _GivenResources)).resources))


async def _latest_resources(store: Store, request: web.Request) -> Any:
    return await store.get_latest_resources()


async def _resources_by_id(store: Store, request: web.Request) -> Any:
    resources_id = request.match_info["resources_id"]
    return _known(await store.get_resources_by_id(resources_id), f"set of resources {resources_id!r}")


async def _update_resources(store: Store, request: web.Request) -> Any:
    given = _named((await _body(request, _GivenResources)).resources)
    return await store.update_resources(request.match_info["resources_id"], given)


def _named(resources: dict[str, Any]) -> NamedResources:
    try:
        return _RESOURCES.validate_python(resources)
    except ValidationError as error:
        raise UsageError(f"the resources are wrong: {_words(error)}") from None


async def _add_span(store: Store, request: web.Request) -> Any:
    return await store.add_span(await _body(request, Span))


async def _spans(store: Store, request: web.Request) -> Any:
    return await store.query_spans(**(await _asked(request, _Spans)).checked(Span))


async def _next_sequence(store: Store, request: web.Request) -> Any:
    asked = await _body(request, _Sequence)
    return {"sequence_id": await store.get_next_span_sequence_id(asked.rollout_id, asked.attempt_id)}


async def _workers(store: Store, request: web.Request) -> Any:
    return await store.query_workers(**(await _asked(request, _Workers)).checked(Worker))


async def _worker(store: Store, request: web.Request) -> Any:
    worker_id = request.match_info["worker_id"]
    return _known(await store.get_worker_by_id(worker_id), f"worker {worker_id!r}")


async def _update_worker(store: Store, request: web.Request) -> Any:
    stats = _given(await _body(request, _Heartbeat)).get("heartbeat_stats", UNSET)
    return await store.update_worker(request.match_info["worker_id"], stats)


async def _wait(store: Store, request: web.Request) -> Any:
    asked = await _body(request, _Wait)
    return await store.wait_for_rollouts(asked.rollout_ids, asked.timeout)


ROUTES: Final[tuple[tuple[str, str, Callable[[Store, web.Request], Awaitable[Any]], int], ...]] = (
    ("GET", "/health", _health, 200),
    ("GET", "/statistics", _statistics, 200),
    ("POST", "/queues/rollouts/enqueue", _enqueue, 201),
    ("POST", "/queues/rollouts/dequeue", _dequeue, 200),
    ("POST", "/rollouts", _start, 201),
    ("GET", "/rollouts", _rollouts, 200),
    ("POST", "/rollouts/search", _rollouts, 200),
    ("GET", "/rollouts/{rollout_id}", _rollout, 200),
    ("POST", "/rollouts/{rollout_id}", _update_rollout, 200),
    ("GET", "/rollouts/{rollout_id}/attempts", _attempts, 200),
    ("POST", "/rollouts/{rollout_id}/attempts", _start_attempt, 201),
    ("POST", "/rollouts/{rollout_id}/attempts/search", _attempts, 200),
    ("GET", "/rollouts/{rollout_id}/attempts/latest", _latest_attempt, 200),
    ("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", _update_attempt, 200),
    ("GET", "/resources", _resources, 200),
    ("POST", "/resources", _add_resources, 201),
    ("GET", "/resources/latest", _latest_resources, 200),
    ("GET", "/resources/{resources_id}", _resources_by_id, 200),
    ("POST", "/resources/{resources_id}", _update_resources, 200),
    ("POST", "/spans", _add_span, 201),
    ("GET", "/spans", _spans, 200),
    ("POST", "/spans/search", _spans, 200),
    ("POST", "/spans/next", _next_sequence, 200),
    ("GET", "/workers", _workers, 200),
    ("POST", "/workers/search", _workers, 200),
    ("GET", "/workers/{worker_id}", _worker, 200),
    ("POST", "/workers/{worker_id}", _update_worker, 200),
    ("POST", "/waits/rollouts", _wait, 200),
)
"""(method, path below /v1/agl, what it asks of the store, status of a success)."""


def add_routes(app: web.Application) -> None:
    """Put the routes into `app`, which holds the store under STORE."""
    for method, path, ask, status in ROUTES:
        app.router.add_route(method, PREFIX + path, _handler(ask, status))


def _handler(ask: Callable[[Store, web.Request], Awaitable[Any]], status: int) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(_plain(await ask(request.app[STORE], request)), status=status)

    return handle
