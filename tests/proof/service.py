"""An agent that is an HTTP service: each request is a plan to play, in the context that its headers carry."""

from __future__ import annotations

import json
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry import context, propagate
from opentelemetry.instrumentation.propagators import get_global_response_propagator

sys.path.insert(0, str(Path(__file__).parent))
from agent import Notes, Player  # pyright: ignore[reportImplicitRelativeImport]  # a script, in a process of its own


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        task: Any = json.loads(self.rfile.read(int(self.headers["content-length"])))
        token = context.attach(propagate.extract(dict(self.headers.items())))
        player = Player(Notes(self.headers["agl-attempt-id"]), self.headers["agl-openai-base-url"])
        answered: list[int] = []

        def answer(status: int = 200, body: bytes = b"1.0") -> None:
            if not answered:
                answered.append(status)
                self._answer(status, body)

        player.answers = answer
        try:
            player.to_the_end(task["plan"])
        except ConnectionError as error:
            answer(500, str(error).encode())
        finally:
            context.detach(token)
        answer()

    def _answer(self, status: int, body: bytes) -> None:
        """Where a span is open, with the header of a web framework that is instrumented."""
        headers: dict[str, str] = {}
        if (propagator := get_global_response_propagator()) is not None:
            propagator.inject(headers)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        return


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(sys.argv[1]))  # which listens, and outlives this process
    server.serve_forever()
