"""Generate the OpenAPI document of /v1/agl from the route tables and their models. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from agl_otel.web.routes import PREFIX, Route

_REFERENCE: Final = "#/components/schemas/{model}"
_ERROR: Final = {
    "type": "object",
    "required": ["detail"],
    "properties": {"detail": {"type": "string"}, "error_type": {"type": "string"}},
}
_ERRORS: Final = {
    "400": "The request is invalid; `detail` says why.",
    "401": "A bearer token is required.",
    "403": "The query is not allowed.",
    "404": "Not found.",
    "409": "The request conflicts with the current state, or came too late.",
    "413": "The body is too large.",
    "503": "A service of the stack is unavailable; try again.",
}


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the document, in OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agl-otel", "version": version, "description": "Rollouts, resources, spans, runs and their figures."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handle.__name__.strip("_") + ("" if route.method == "GET" else "_post"),
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)}", route.path)
        ],
        "responses": {
            str(route.status): {"description": "OK", "content": _json(_schema(route.response, schemas, "serialization"))},
            **{
                status: {"description": description, "content": _json({"$ref": _REFERENCE.format(model="Error")})}
                for status, description in _ERRORS.items()
            },
        },
    }
    if route.request is not None and route.method == "GET":
        operation["parameters"] += _query(route.request)
    elif route.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(_schema(route.request, schemas, "validation"))}
    return operation


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _schema(type_: Any, schemas: dict[str, Any], mode: Any) -> Any:
    made = TypeAdapter(type_).json_schema(ref_template=_REFERENCE, mode=mode)
    schemas |= made.pop("$defs", {})
    return made


def _query(model: type[BaseModel]) -> list[dict[str, Any]]:
    made = model.model_json_schema(ref_template=_REFERENCE)
    required = set(made.get("required", ()))
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(schema)}
        for name, schema in made["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a schema: a query string cannot hold it, and leaves the parameter out instead."""
    kept = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    plain = {key: value for key, value in schema.items() if key not in ("anyOf", "default", "title")}
    return {**plain, **(kept[0] if len(kept) == 1 else {"anyOf": kept})} if kept else plain
