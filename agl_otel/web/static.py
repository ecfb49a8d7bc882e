"""Serve the dashboard's files, which `make web` builds into static/, each with a strict Content-Security-Policy.

Agent output is untrusted: the policy lets a page load only these files and connect only to this service.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Final

from aiohttp import web

FOLDER: Final = Path(__file__).parent / "static"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
FOREVER: Final = "public, max-age=31536000, immutable"
"""Cache-Control of /assets/, whose file names contain a hash of their content."""
PAGE: Final = "page"
"""Name of the routes that serve files. They need no token: the files hold no data of the stack."""
_NOT_BUILT: Final = """<!doctype html><title>agl-otel</title><h1>The dashboard is not built here</h1>
<p>This is a checkout without the built pages. Run <code>make web</code>, start the stack again and load this page again; an installed
wheel has them. REST is under /v1/agl (<a href="/v1/agl/openapi.json">OpenAPI</a>), metrics at /metrics."""


def add_routes(app: web.Application, folder: Path = FOLDER) -> None:
    """Add the pages to `app`. Every path that is no API serves the single-page application, which routes in the browser."""
    files = {f"/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*") if path.is_file()} if folder.is_dir() else {}
    bodies: dict[Path, tuple[bytes, str]] = {}

    async def page(request: web.Request) -> web.StreamResponse:
        """GET: a file of the dashboard, else index.html."""
        found = files.get(request.path)
        if found is None and request.path.startswith("/assets/"):
            raise web.HTTPNotFound(text="there is no such file: load the page again")
        if not files:
            return web.Response(text=_NOT_BUILT, content_type="text/html", headers=HEADERS, status=503)
        path = found or files["/index.html"]
        if path not in bodies:
            bodies[path] = (path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream")
        body, kind = bodies[path]
        kept = FOREVER if request.path.startswith("/assets/") else "no-cache"
        charset = "utf-8" if kind.startswith("text/") else None
        answer = web.Response(body=body, content_type=kind, charset=charset, headers={**HEADERS, "Cache-Control": kept})
        if len(body) > 1000 and not kind.startswith("font/"):
            answer.enable_compression()
        return answer

    app.router.add_get(r"/{path:(?!(?:v1|api|metrics|health)(?:/|$)).*}", page, name=PAGE)
