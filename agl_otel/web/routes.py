"""What every route stands on: a table of them, what is asked as pydantic models, what is answered as JSON."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_otel.errors import NotFoundError, UsageError
from agl_otel.store import Store
from agl_otel.types import PaginatedResult, ResourcesUpdate
from agl_otel.types.strict import check_json, number_in_range

PREFIX: Final = "/v1/agl"
STORE: Final = web.AppKey("store", Store)
LARGEST: Final = (1 << 62) - 1
PIECE: Final = 500  # items of a page that are written at once
_MAY_OVERFLOW: Final = re.compile(rb"[eE]\+?\d{3}|\d{200}")  # every number beyond a double's range is written with one of these
_CONSTANTS: Final = re.compile(rb"NaN|Infinity")
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """One route below PREFIX."""

    method: Literal["GET", "POST"]
    path: str
    ask: Callable[[Store, web.Request], Awaitable[Any]]
    about: str
    given: type[BaseModel] | None
    """The query of a GET, the body of a POST; None: nothing."""
    answer: Any
    """Its type, for the OpenAPI document."""
    status: int = 200
    """Of a success."""
    looks: bool = False
    """Whether a POST changes nothing; a GET never does."""


class PageOf(BaseModel, Generic[T]):
    """One page of what was asked for."""

    items: list[T]
    limit: int
    offset: int
    total: int
    """How many match, before paging."""
    searched: int | None = None
    """How many were looked into, where that was not all of them."""


class Strict(BaseModel):
    """What is asked for; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Page(Strict):
    """A page of something, sorted."""

    limit: int = Field(default=-1, le=LARGEST, ge=-LARGEST)
    offset: int = Field(default=0, ge=0, le=LARGEST)
    sort_by: str | None = None
    sort_order: Literal["asc", "desc"] = "asc"
    filter_logic: Literal["and", "or"] = "and"

    def checked(self, model: type[BaseModel]) -> dict[str, Any]:
        """What was asked for, as arguments. Raises UsageError for a page or an order that there cannot be."""
        if self.limit < -1:
            raise UsageError(f"limit is {self.limit}: -1 (all), 0 (none) or more")
        if self.sort_by is not None and self.sort_by not in model.model_fields:
            raise UsageError(f"sort_by {self.sort_by!r} is no field: {', '.join(model.model_fields)}")
        return self.model_dump(exclude_none=True)


async def body_of(request: web.Request, model: type[M], *, inputs: Callable[[M], Iterable[Any]] | None = None) -> M:
    """The JSON body; NaN and Infinity, which clients of 0.3 send in metadata and attributes, are in none of its `inputs`.

    Raises UsageError that names what is wrong in it.
    """
    body = await request.read() or b"{}"
    try:
        given = model.model_validate_json(body)
        if _MAY_OVERFLOW.search(body):
            json.loads(body, parse_float=number_in_range)
        if inputs is not None and _CONSTANTS.search(body):
            check_json(list(inputs(given)))
    except ValidationError as error:
        raise UsageError(f"the body is wrong: {words(error)}") from None
    except ValueError as error:
        raise UsageError(f"the body is wrong: {error}") from None
    return given


async def asked_of(request: web.Request, model: type[M]) -> M:
    """The query of a GET, or the body of a POST. Raises UsageError."""
    if request.method == "POST":
        return await body_of(request, model)
    lists = {name for name in model.model_fields if name.endswith("_in")}
    given: dict[str, Any] = {name: request.query.getall(name) if name in lists else request.query[name] for name in request.query}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"the query is wrong: {words(error)}") from None


def words(error: ValidationError) -> str:
    """What is wrong, for a person; of what is wrong as a whole (no JSON, no object) no field is named."""
    return "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors())


def plain(value: Any) -> Any:
    """A result as JSON holds it; the fencing token of a claim is its claimer's alone, and providers' keys are the proxy's."""
    if isinstance(value, PaginatedResult):
        return {"items": plain(list(value)), **_page(value)}  # pyright: ignore[reportUnknownArgumentType]  # of anything
    if isinstance(value, list):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]  # of anything
    if isinstance(value, ResourcesUpdate):
        value = value.without_keys()
    return value.model_dump(mode="json", exclude={"token"}) if isinstance(value, BaseModel) else value


def _page(value: PaginatedResult[Any]) -> dict[str, int]:
    cut = {} if value.searched is None else {"searched": value.searched}
    return {"limit": value.limit, "offset": value.offset, "total": value.total, **cut}


def known(value: Any, what: str) -> Any:
    """`value`. Raises NotFoundError that names `what` where it is None."""
    if value is None:
        raise NotFoundError(f"there is no {what}")
    return value


def given_in(model: BaseModel) -> dict[str, Any]:
    """What was sent, null included; what was not is left as it is."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def add_table(app: web.Application, routes: Iterable[Route]) -> None:
    """Put routes into `app`, which holds the store under STORE."""
    for route in routes:
        app.router.add_route(route.method, PREFIX + route.path, _handler(route.ask, route.status))


def _handler(ask: Callable[[Store, web.Request], Awaitable[Any]], status: int) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        found: Any = await ask(request.app[STORE], request)
        page: PaginatedResult[Any] | None = found if isinstance(found, PaginatedResult) else None
        if page is not None and len(page) > PIECE:
            return await _in_pieces(request, page, status)
        return web.json_response(plain(found), status=status, dumps=_dumps)

    return handle


async def _in_pieces(request: web.Request, found: PaginatedResult[Any], status: int) -> web.StreamResponse:
    """What `plain` makes of a long page, written as it is made, beside the loop: others do not wait, and its text is never held whole."""
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    before = '{"items": ['
    for start in range(0, len(found), PIECE):
        text = await asyncio.to_thread(lambda piece: _dumps(plain(piece))[1:-1], list(found.items[start : start + PIECE]))
        await response.write((before + text).encode())
        before = ", "
    await response.write(f"], {_dumps(_page(found))[1:]}".encode())
    await response.write_eof()
    return response


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # a number that JSON has not: users' metadata and attributes may hold one
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
