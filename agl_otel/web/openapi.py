"""The OpenAPI document of /v1/agl, made from the tables of routes and the models they name. Pure."""

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
    "400": "The request is wrong; `detail` says what is.",
    "401": "A bearer token is needed.",
    "403": "The query is not allowed.",
    "404": "There is no such thing.",
    "409": "It collides with what is there, or came too late.",
    "413": "The body is too large.",
    "503": "A service of the stack is away; try again.",
}


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agl-otel", "version": version, "description": "Rollouts, resources, spans and what they add up to."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.ask.__name__.strip("_") + ("" if route.method == "GET" else "_post"),
        "summary": route.about,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)}", route.path)
        ],
        "responses": {
            str(route.status): {"description": "OK", "content": _json(_schema(route.answer, schemas, "serialization"))},
            **{
                status: {"description": about, "content": _json({"$ref": _REFERENCE.format(model="Error")})}
                for status, about in _ERRORS.items()
            },
        },
    }
    if route.given is not None and route.method == "GET":
        operation["parameters"] += _query(route.given)
    elif route.given is not None:
        operation["requestBody"] = {"required": True, "content": _json(_schema(route.given, schemas, "validation"))}
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
    """A query has no null: what is not asked for is left out."""
    kept = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    plain = {key: value for key, value in schema.items() if key not in ("anyOf", "default", "title")}
    return {**plain, **(kept[0] if len(kept) == 1 else {"anyOf": kept})} if kept else plain
