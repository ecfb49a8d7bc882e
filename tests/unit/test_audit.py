"""`make audit` tells findings, nothing, and nobody to ask apart. uv is the real one; OSV is a small server that speaks its protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.audit import ROOT, npm_answer

SAID = {"id": "OSV-1", "modified": "2026-01-01T00:00:00Z"}
Serve = Callable[[str], str]


@pytest.fixture
def osv() -> Iterator[Serve]:
    """Starts an OSV that knows of a vulnerability in one package; its address."""
    servers: list[ThreadingHTTPServer] = []

    def serve(vulnerable: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
                self.answer({"results": [{"vulns": [SAID]} if query["package"]["name"] == vulnerable else {} for query in asked]})

            def do_GET(self) -> None:
                self.answer({**SAID, "published": SAID["modified"], "summary": "it leaks", "details": "", "affected": []})

            def answer(self, content: Any) -> None:
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def audit(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    uv = next((str(path) for path in (ROOT / ".tools/bin/uv", shutil.which("uv")) if path and Path(path).exists()), None)
    if uv is None:
        pytest.skip("there is no uv here: `make setup` brings it")
    environment = {
        "UV_AUDIT_URL": url,
        "UV_HTTP_RETRIES": "0",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    command = [sys.executable, "-m", "tests.audit", "--uv", uv, "--only", "python", *more]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_known_vulnerability_fails(osv: Serve) -> None:
    done = audit(osv("aiohttp"))
    assert done.returncode == 1 and "1 known vulnerabilities" in done.stdout and "OSV-1 it leaks" in done.stdout, done


def test_nothing_known_passes_and_says_of_how_many(osv: Serve) -> None:
    done = audit(osv("nobody"), "--strict")
    assert done.returncode == 0 and "nothing is known of" in done.stdout, done


def test_nobody_to_ask_is_said_and_fails_only_where_it_must_not_be() -> None:
    closed = "http://127.0.0.1:9"
    lenient, strict = audit(closed), audit(closed, "--strict")
    assert (lenient.returncode, strict.returncode) == (0, 1) and "NOT ASKED" in lenient.stdout, lenient


@pytest.mark.parametrize(
    ("said", "found", "reason"),
    [
        ({"vulnerabilities": {"vite": {"severity": "high"}}}, ["vite: high"], ""),
        ({"vulnerabilities": {}, "metadata": {"dependencies": {"total": 9}}}, [], ""),
        ({"message": "405 Method Not Allowed", "method": "POST"}, [], "405 Method Not Allowed"),
        ({"error": {"summary": "offline"}}, [], "offline"),
    ],
)
def test_what_npm_says_is_a_finding_nothing_or_no_answer(said: Any, found: list[str], reason: str) -> None:
    answer = npm_answer(said)
    assert (list(answer.found), answer.reason) == (found, reason)
