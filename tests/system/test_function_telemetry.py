"""Telemetry in a process of ours that runs agent functions: global provider, instrumentations, baggage on the wire."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agl_otel import semconv
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.system
WORKER = """
import asyncio, sys, threading, http.server, json
from agl_otel.emit import emit_reward
from agl_otel.instrumentation import Telemetry, attempt_scope
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
        assert sorted(baggage) == [f"{semconv.ROLLOUT_ID}=ro-{n},{semconv.ATTEMPT_ID}=at-{n}" for n in range(3)]
        for span in receiver.spans(semconv.SPAN_ANNOTATION):
            assert span.key == (
                f"ro-{int(span.attributes[semconv.reward_value_key(0)])}",
                f"at-{int(span.attributes[semconv.reward_value_key(0)])}",
            )
        assert {span.key for span in receiver.ours()} == {(f"ro-{n}", f"at-{n}") for n in range(3)}
    finally:
        receiver.close()
