"""An agent that is an HTTP service: each request is a plan to play, in the context that its headers carry."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry import context, propagate

sys.path.insert(0, str(Path(__file__).parent))
from agent import Notes, Player  # pyright: ignore[reportImplicitRelativeImport]  # a script, in a process of its own


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        task: Any = json.loads(self.rfile.read(int(self.headers["content-length"])))
        token = context.attach(propagate.extract(dict(self.headers.items())))
        try:
            note = Notes(self.headers["agl-attempt-id"])
            Player(note, self.headers["agl-openai-base-url"]).to_the_end(task["plan"])
            status, body = 200, b"1.0"
        except ConnectionError as error:
            status, body = 500, str(error).encode()
        finally:
            context.detach(token)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        return


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
