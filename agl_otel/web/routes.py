"""A table of REST routes: requests are parsed into pydantic models, results are written as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_otel.compat.stores import LightningStore
from agl_otel.errors import NotFoundError, UsageError
from agl_otel.net import bodies
from agl_otel.net.http_server import Handler
from agl_otel.text import strict_json
from agl_otel.types import PaginatedResult, ResourcesUpdate
from agl_otel.types.model import describe_invalid
from agl_otel.types.strict import check_json, number_in_range

PREFIX: Final = "/v1/agl"
STORE: Final = web.AppKey("store", LightningStore)
LARGEST: Final = (1 << 62) - 1
PIECE: Final = 500  # items of a long page per chunk of the response
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Route(NamedTuple):
    """One route below PREFIX."""

    method: Literal["GET", "POST"]
    path: str
    handle: Callable[[LightningStore, web.Request], Awaitable[Any]]
    """Its name, without underscores, is the `operationId` of OpenAPI."""
    summary: str
    request: type[BaseModel] | None
    """Model of a GET's query or of a POST's body; None for neither."""
    response: Any
    """Type of the result, for the OpenAPI document."""
    status: int = 200
    """Status of a success."""
    read_only: bool = False
    """Whether a POST changes nothing; a GET never does."""


class PageOf(BaseModel, Generic[T]):
    """One page of results."""

    items: list[T]
    limit: int
    offset: int
    total: int
    """How many match, before paging."""
    searched: int | None = None
    """How many were searched, if not all."""


class Strict(BaseModel):
    """Base of requests: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Page(Strict):
    """Paging and order of a query."""

    limit: int = Field(default=-1, le=LARGEST, ge=-LARGEST)
    offset: int = Field(default=0, ge=0, le=LARGEST)
    sort_by: str | None = None
    sort_order: Literal["asc", "desc"] = "asc"
    filter_logic: Literal["and", "or"] = "and"

    def checked(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the fields that are set, as keyword arguments. Raises UsageError for an invalid limit or an unknown `sort_by`."""
        if self.limit < -1:
            raise UsageError(f"limit is {self.limit}: -1 (all), 0 (none) or more")
        if self.sort_by is not None and self.sort_by not in model.model_fields:
            raise UsageError(f"sort_by {self.sort_by!r} is no field: {', '.join(model.model_fields)}")
        return self.model_dump(exclude_none=True)


async def body_of(request: web.Request, model: type[M], *, inputs: Callable[[M], Iterable[Any]] | None = None) -> M:
    """Parse the JSON body. NaN and Infinity, which clients of 0.3 send in metadata and attributes, are refused in `inputs`.

    Raises UsageError that names the invalid fields.
    """
    body = await bodies.body_of(request) or b"{}"
    parse = partial(_parsed, body, model, inputs)
    return parse() if len(body) < bodies.LONG_BYTES else await asyncio.to_thread(parse)


def _parsed(body: bytes, model: type[M], inputs: Callable[[M], Iterable[Any]] | None) -> M:
    try:
        given = model.model_validate_json(body)
        constants: list[str] = []
        json.loads(body, parse_float=number_in_range, parse_constant=constants.append)
        if inputs is not None and constants:
            check_json(list(inputs(given)))
    except ValidationError as error:
        raise UsageError(f"the body is wrong: {describe_invalid(error)}") from None
    except ValueError as error:
        raise UsageError(f"the body is wrong: {error}") from None
    return given


async def params_of(request: web.Request, model: type[M]) -> M:
    """Parse the query of a GET or the body of a POST. Raises UsageError."""
    if request.method == "POST":
        return await body_of(request, model)
    lists = {name for name in model.model_fields if name.endswith("_in")}
    given: dict[str, Any] = {name: request.query.getall(name) if name in lists else request.query[name] for name in request.query}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"the query is wrong: {describe_invalid(error)}") from None


def plain(value: Any) -> Any:
    """Convert a result to plain JSON values, without the fencing tokens of claims and the keys of providers."""
    if isinstance(value, PaginatedResult):
        return {"items": plain(list(value)), **_page(value)}  # pyright: ignore[reportUnknownArgumentType]  # items of any type
    if isinstance(value, list):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]  # items of any type
    if isinstance(value, ResourcesUpdate):
        value = value.without_keys()
    return value.model_dump(mode="json", exclude={"token"}) if isinstance(value, BaseModel) else value


def _page(value: PaginatedResult[Any]) -> dict[str, int]:
    cut = {} if value.searched is None else {"searched": value.searched}
    return {"limit": value.limit, "offset": value.offset, "total": value.total, **cut}


def require_found(value: Any, what: str) -> Any:
    """Return `value`. Raises NotFoundError that names `what` if it is None."""
    if value is None:
        raise NotFoundError(f"there is no {what}")
    return value


def fields_sent(model: BaseModel) -> dict[str, Any]:
    """Return the fields that the client sent, null included; a partial update leaves the others unchanged."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def add_table(app: web.Application, routes: Iterable[Route]) -> None:
    """Add routes to `app`, which holds the store under STORE."""
    for route in routes:
        app.router.add_route(route.method, PREFIX + route.path, _handler(route.handle, route.status))


def _handler(operation: Callable[[LightningStore, web.Request], Awaitable[Any]], status: int) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        found: Any = await operation(request.app[STORE], request)
        if isinstance(found, PaginatedResult | list) and len(found) > PIECE:  # pyright: ignore[reportUnknownArgumentType]  # items of any type
            return await _in_pieces(request, found, status)  # pyright: ignore[reportUnknownArgumentType]
        return web.json_response(plain(found), status=status, dumps=strict_json)

    return handle


async def _in_pieces(request: web.Request, found: PaginatedResult[Any] | list[Any], status: int) -> web.StreamResponse:
    """Stream a long result in chunks that a thread serialises, so the event loop is not blocked and the text is never whole in memory."""
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    items: Sequence[Any] = found.items if isinstance(found, PaginatedResult) else found
    before, end = ('{"items": [', f"], {strict_json(_page(found))[1:]}") if isinstance(found, PaginatedResult) else ("[", "]")
    for start in range(0, len(items), PIECE):
        text = await asyncio.to_thread(lambda piece: strict_json(plain(piece))[1:-1], list(items[start : start + PIECE]))
        await response.write((before + text).encode())
        before = ", "
    await response.write(end.encode())
    await response.write_eof()
    return response
