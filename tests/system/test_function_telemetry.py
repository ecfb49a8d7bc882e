"""Telemetry in a process that runs agent functions: global provider, instrumentations, baggage in requests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.full
WORKER = """
import asyncio, sys, threading, http.server, json
from agl_otel_hook.emit import emit_reward
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook import attempt_scope
import openai

class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        sys.stdout.write(self.headers["baggage"] + "\\n")
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "hi"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}).encode()
        self.send_response(200); self.send_header("content-type", "application/json"); self.send_header("content-length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
telemetry = Telemetry.start(otlp_endpoint=sys.argv[1], service_name="worker", instrument=("openai", "httpx"))

async def agent(number):
    with attempt_scope(f"ro-{number}", f"at-{number}", traceparent=telemetry.attempt_span(f"ro-{number}", f"at-{number}")):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k") as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        emit_reward(number)

async def main():
    await asyncio.gather(*(agent(n) for n in range(3)))

asyncio.run(main())
keys = [(f"ro-{n}", f"at-{n}") for n in range(3)]
print(json.dumps([list(telemetry.seal(keys)[key].values()) for key in keys]))
"""


def test_concurrent_agent_functions_keep_their_spans_rewards_and_calls_apart() -> None:
    receiver = OtlpReceiver()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, receiver.grpc_address], capture_output=True, text=True, timeout=300, check=True
        )
        *baggage, counts = done.stdout.splitlines()
        assert counts == "[[3], [3], [3]]"
        assert sorted(baggage) == [f"{conventions.ROLLOUT_ID}=ro-{n},{conventions.ATTEMPT_ID}=at-{n}" for n in range(3)]
        for span in receiver.spans(conventions.SPAN_ANNOTATION):
            assert span.key == (
                f"ro-{int(span.attributes[conventions.reward_value_key(0)])}",
                f"at-{int(span.attributes[conventions.reward_value_key(0)])}",
            )
        assert {span.key for span in receiver.ours()} == {(f"ro-{n}", f"at-{n}") for n in range(3)}
    finally:
        receiver.close()


FORKS = """
import asyncio, os, socket, sys, threading
import grpc.aio
from opentelemetry.context import Context
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook.context import with_ids

key = ("ro-1", "at-1")
telemetry = Telemetry.start(otlp_endpoint=sys.argv[1], otlp_http=sys.argv[2], token="secret", service_name="worker")
telemetry.attempt_span(*key)
silent = socket.create_server(("127.0.0.1", 0))

async def waits():
    await grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}").unary_unary("/a/b")(b"", wait_for_ready=True)

threading.Thread(target=lambda: asyncio.run(waits()), daemon=True).start()
silent.accept()  # a thread is in gRPC, as those of a runner always are
child = os.fork()
telemetry.tracer("t").start_span("child" if child == 0 else "parent", with_ids(key, Context())).end()
if child == 0:
    os._exit(0)  # as multiprocessing ends its children
counts = list(telemetry.seal([key], timeout_seconds=60)[key].values())
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or counts != [1])
"""


@pytest.mark.parametrize("refused", [[], [503, 429]])
def test_a_fork_of_a_process_with_grpc_in_its_threads_exports_by_http(refused: list[int]) -> None:
    """gRPC cannot be used there: it skips its fork handlers while other threads are in its calls."""
    receiver = OtlpReceiver()
    receiver.statuses += refused
    try:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, receiver.grpc_address, receiver.http_url],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (child,), (parent,) = receiver.spans("child"), receiver.spans("parent")
        assert child.key == parent.key == ("ro-1", "at-1") and child.marker != parent.marker
        assert receiver.seals() == {child.marker: (1, 0), parent.marker: (1, 0)}
        assert {headers["authorization"] for _, _, headers in receiver.bodies} == {"Bearer secret"}
        assert [path for path, _, _ in receiver.bodies] == ["/v1/traces"] * (len(refused) + 1)
    finally:
        receiver.close()
