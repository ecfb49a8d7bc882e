"""A small hub of models over HTTP: the routes that huggingface_hub asks for one model, whose files lie in a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """One model with one branch, main; its commit may move."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.commit = model, "a" * 40
        self.folders = {self.commit: folder}
        """{commit: its files}."""
        self.asked: list[tuple[str, str, int]] = []
        """(method, path, bytes sent) of each request."""
        self.url = ""

    def push(self, folder: Path, commit: str) -> None:
        """Let main have other files."""
        self.folders[commit], self.commit = folder, commit

    def downloaded(self) -> set[str]:
        """Return the names of the files whose whole content was sent."""
        return {Path(path).name for method, path, size in self.asked if method == "GET" and "/resolve/" in path and size}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        if "/".join(parts[:2]) != self.model or parts[2:3] != ["resolve"]:
            return self._missing("RepoNotFound")
        file = self._folder(parts[3])
        if file is None:
            return self._missing("RevisionNotFound")
        if not (file / parts[4]).is_file():
            return self._missing("EntryNotFound")
        content = (file / parts[4]).read_bytes()
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self._commit(parts[3])}, content

    def _api(self, model: str, more: list[str]) -> tuple[int, dict[str, str], bytes]:
        if model != self.model:
            return self._missing("RepoNotFound")
        revision = more[1] if more else "main"
        folder = self._folder(revision)
        if folder is None:
            return self._missing("RevisionNotFound")
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        if more[:1] == ["tree"]:
            found: Any = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": hashlib.sha1(path.read_bytes()).hexdigest()}
                for path in files
            ]
        else:
            siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in files]
            found = {"id": model, "modelId": model, "sha": self._commit(revision), "siblings": siblings, "private": False, "tags": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()

    def _commit(self, revision: str) -> str:
        return self.commit if revision == "main" else revision

    def _folder(self, revision: str) -> Path | None:
        return self.folders.get(self._commit(revision))

    @staticmethod
    def _missing(code: str) -> tuple[int, dict[str, str], bytes]:
        return 404, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"


@contextmanager
def serving(hub: Hub) -> Generator[Hub]:
    """Serve the hub on a free port; `hub.url` is what HF_ENDPOINT takes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.path)
            given = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if status == 200 and given[1]:
                status, first, size = 206, int(given[0]), len(content)
                content = content[first : int(given[2]) + 1 if given[2] else None]
                headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
            sends = content if self.command == "GET" else b""
            hub.asked.append((self.command, self.path, len(sends) if status == 200 else 0))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sends)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
