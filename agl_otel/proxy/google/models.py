"""The models of the proxy in Google's form, by OpenAI's list of them; and which requests for them are Google's."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from agl_otel.proxy.answer import error_response
from agl_otel.proxy.google.agent import COUNTED, KEY_HEADER, KEY_QUERY, WHOLE, as_google
from agl_otel.proxy.reply import Json, dicts, parse_object

OPENAIS_VERSION: Final = "v1"
"""The version of Google's API whose address of the list, /v1/models, is OpenAI's, too."""


def asks_google(request: web.Request) -> bool:
    """Whether a request for models is in Google's protocol: by its version, else by where it has the key."""
    by_version = request.match_info.get("version", OPENAIS_VERSION) != OPENAIS_VERSION
    return by_version or KEY_HEADER in request.headers or KEY_QUERY in request.query


def models(listed: web.Response, name: str | None) -> web.Response:
    """Return the answer to a request for all models, or for the one of that name, by OpenAI's list or the error in its place."""
    assert isinstance(listed.body, bytes), "it is a text"
    if listed.status != 200:
        return as_google(listed)
    payload = parse_object(listed.body)
    if payload is None or not isinstance(payload.get("data"), list):
        return as_google(error_response(502, "the model server's /models is no list in OpenAI's form", "upstream_error"))
    names = [each["id"] for each in dicts(payload["data"]) if isinstance(each.get("id"), str)]
    if name is None:
        return web.json_response({"models": [*map(_card, names)]})
    if name not in names:
        why = f"the proxy serves no model {name[:100]!r} here, but {', '.join(names)[:1000] or 'none'}"
        return as_google(error_response(404, why, "not_found"))
    return web.json_response(_card(name))


def _card(name: str) -> Json:
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": [WHOLE, COUNTED]}
