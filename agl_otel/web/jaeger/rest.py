"""Jaeger's HTTP query API: /api/v3 (OTLP as JSON) and the older /api/…, which Jaeger's UI and many scripts read.

Times are Unix microseconds in /api and RFC 3339 in /api/v3; durations are written like 1.5s, 200ms, 30us. Invalid queries answer 400,
an unknown trace 404, both with `errors` in Jaeger's format.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from multidict import MultiMapping

from agl_otel.errors import AglError, NotFoundError, UsageError, http_status
from agl_otel.store import Store
from agl_otel.traces.trace_query import DEFAULT_LIMIT, TraceQuery
from agl_otel.types import Span
from agl_otel.web.jaeger.legacy import trace_json
from agl_otel.web.jaeger.spans import Attempts, pages_of, traces_data
from agl_otel.web.routes import STORE

Handler = Callable[[web.Request, Store], Awaitable[Any]]
TRACE_ID: Final = re.compile(r"[0-9a-fA-F]{1,32}")
_DURATION: Final = re.compile(r"(\d{1,19}(?:\.\d{1,19})?)(ns|us|µs|ms|s|m|h)")
_UNITS: Final = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})


def add_routes(app: web.Application) -> None:
    """Add all routes to `app`, which holds the store under STORE."""
    for path, handler in {
        "/api/services": _services,
        "/api/services/{service}/operations": _operation_names,
        "/api/operations": _operations,
        "/api/traces": _search,
        "/api/traces/{trace_id}": _trace,
        "/api/dependencies": _dependencies,
        "/api/v3/services": _services_v3,
        "/api/v3/operations": _operations_v3,
        "/api/v3/traces": _search_v3,
        "/api/v3/traces/{trace_id}": _trace_v3,
    }.items():
        app.router.add_get(path, _answering(handler))


def _answering(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        try:
            body, status = await handler(request, request.app[STORE]), 200
        except AglError as error:
            status = http_status(error)
            body = {"data": None, "errors": [{"code": status, "msg": str(error)}]}
        text = await asyncio.to_thread(json.dumps, body, ensure_ascii=False)  # encoding a large trace is slow
        return web.Response(text=text, content_type="application/json", status=status)

    return answer


# --- /api


async def _services(_: web.Request, store: Store) -> Any:
    return _data(await store.services())


async def _operation_names(request: web.Request, store: Store) -> Any:
    return _data(sorted({name for name, _ in await store.operations(request.match_info["service"])}))


async def _operations(request: web.Request, store: Store) -> Any:
    service, kind = _required(request.query, "service"), request.query.get("spanKind", "")
    return _data([{"name": name, "spanKind": kind.lower()} for name, kind in await store.operations(service, kind.capitalize())])


async def _trace(request: web.Request, store: Store) -> Any:
    trace_id = _trace_id(request.match_info["trace_id"])
    found = await _legacy(store, [trace_id])
    if not found:
        raise NotFoundError(f"trace not found: {trace_id}")
    return _data(found)


async def _search(request: web.Request, store: Store) -> Any:
    params = request.query
    if params.getall("traceID", []):
        found = [_trace_id(each) for each in params.getall("traceID")]
    else:
        query = TraceQuery(
            service=_required(params, "service"),
            operation=params.get("operation", ""),
            tags=_tags(params),
            start_nano=_number(params, "start", 0) * 1000,
            end_nano=_number(params, "end", TraceQuery().end_nano // 1000) * 1000,
            min_duration=_duration(params, "minDuration"),
            max_duration=_duration(params, "maxDuration"),
            limit=_number(params, "limit", DEFAULT_LIMIT),
        )
        found = [each.trace_id for each in await store.find_traces(query)]
    return _data(await _legacy(store, found))


async def _legacy(store: Store, trace_ids: Sequence[str]) -> list[Any]:
    pages = pages_of(store, trace_ids)
    return [await asyncio.to_thread(trace_json, each, attempts) async for traces, attempts in pages for each in traces]


async def _dependencies(request: web.Request, store: Store) -> Any:
    end, before = _number(request.query, "endTs"), _number(request.query, "lookback", 24 * 3600 * 1000)
    found = await store.dependencies((end - before) * 10**6, end * 10**6)
    return _data([{"parent": caller, "child": called, "callCount": count} for caller, called, count in found])


def _data(items: Sequence[Any]) -> dict[str, Any]:
    return {"data": items, "total": len(items), "limit": 0, "offset": 0, "errors": None}


def _tags(params: MultiMapping[str]) -> dict[str, str]:
    """Merge `tags`, JSON like {"name": "text"}, with any number of `tag`, each name:text."""
    found: dict[str, str] = {}
    for pair in params.getall("tag", []):
        name, colon, text = pair.partition(":")
        if not colon:
            raise UsageError(f"tag={pair!r} is not name:value")
        found[name] = text
    return found | _json_tags(params.get("tags", ""), "tags")


def _json_tags(text: str, name: str) -> dict[str, str]:
    try:
        given = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{name} is not JSON ({error}): write {{"name": "value"}}') from None
    if not isinstance(given, dict):
        raise UsageError(f'{name} is not a JSON object: write {{"name": "value"}}')
    return {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}  # pyright: ignore[reportUnknownVariableType]  # any JSON


# --- /api/v3


async def _services_v3(_: web.Request, store: Store) -> Any:
    return {"services": await store.services()}


async def _operations_v3(request: web.Request, store: Store) -> Any:
    service, kind = _required(request.query, "service"), request.query.get("span_kind", "")
    return {"operations": [{"name": name, "spanKind": kind.lower()} for name, kind in await store.operations(service, kind.capitalize())]}


async def _trace_v3(request: web.Request, store: Store) -> Any:
    trace_id = _trace_id(request.match_info["trace_id"])
    return await _otlp(store, [trace_id], f"trace not found: {trace_id}")


async def _search_v3(request: web.Request, store: Store) -> Any:
    params = {name.removeprefix("query."): value for name, value in request.query.items()}
    query = TraceQuery(
        service=params.get("service_name", ""),
        operation=params.get("operation_name", ""),
        tags=_json_tags(params.get("attributes", ""), "query.attributes"),
        start_nano=_time(params, "start_time_min", 0),
        end_nano=_time(params, "start_time_max", TraceQuery().end_nano),
        min_duration=_duration(params, "duration_min"),
        max_duration=_duration(params, "duration_max"),
        limit=_number(params, "search_depth", _number(params, "num_traces", DEFAULT_LIMIT)),
    )
    return await _otlp(store, [each.trace_id for each in await store.find_traces(query)], "no traces found")


async def _otlp(store: Store, trace_ids: Sequence[str], none: str) -> Any:
    groups = [
        group async for traces, attempts in pages_of(store, trace_ids) for group in await asyncio.to_thread(_groups, traces, attempts)
    ]
    if not groups:
        raise NotFoundError(none)
    return {"result": {"resourceSpans": groups}}


def _groups(traces: Sequence[Sequence[Span]], attempts: Attempts) -> list[Any]:
    found = [each for spans in traces for data in traces_data(spans, attempts) for each in MessageToDict(data).get("resourceSpans", [])]
    return [_with_hex(each) for each in found]


def _with_hex(value: Any) -> Any:
    """Rewrite ids from base64, as protobuf's JSON mapping has them, to hex digits, as OTLP/JSON requires."""
    if isinstance(value, dict):
        held: dict[str, Any] = value
        return {key: base64.b64decode(each).hex() if key in _IDS else _with_hex(each) for key, each in held.items()}
    if isinstance(value, list):
        items: list[Any] = value
        return [_with_hex(each) for each in items]
    return value


# --- parameters


def _trace_id(text: str) -> str:
    if not TRACE_ID.fullmatch(text):
        raise UsageError(f"{text[:64]!r} is not a trace id: 32 hex digits")
    return text.lower().zfill(32)


def _required(params: Mapping[str, str], name: str) -> str:
    if not params.get(name):
        raise UsageError(f"parameter '{name}' is required")
    return params[name]


def _number(params: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = params.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or len(text) > 19:
        raise UsageError(f"parameter {name!r} must be a whole number, not {text[:64]!r}")
    return int(text)


def _duration(params: Mapping[str, str], name: str) -> int:
    """Parse a duration to nanoseconds; 0 if absent."""
    text = params.get(name, "")
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        raise UsageError(f"parameter {name!r} must be a duration like 1.5s, 200ms or 1m30s, not {text[:64]!r}")
    return round(sum(float(number) * _UNITS[unit] for number, unit in parts))


def _time(params: Mapping[str, str], name: str, default: int) -> int:
    """Parse an RFC 3339 time to Unix nanoseconds."""
    text = params.get(name, "")
    if not text:
        return default
    try:
        whole, dot, rest = text.upper().replace("Z", "+00:00").partition(".")
        digits = re.match(r"\d*", rest)
        part = digits.group() if digits is not None else ""
        moment = datetime.fromisoformat(whole + rest[len(part) :] if dot else whole)
    except ValueError:
        raise UsageError(f"parameter {name!r} must be a time like 2026-01-31T12:00:00Z, not {text[:64]!r}") from None
    if moment.tzinfo is None:
        raise UsageError(f"parameter {name!r} must have a time zone: end it with Z")
    return int(moment.timestamp()) * 10**9 + int(part[:9].ljust(9, "0"))
