"""A stack with a token: what an agent gets of it, what its keys open, and where the token does not stand."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from agl_otel.ingest import ingest_key
from agl_otel.queue.proto import queue_pb2
from agl_otel.settings import PORTS
from tests.clickhouse_files import blocks
from tests.model_server import ModelServer
from tests.system.stack_process import Command, alive, naming, run, until

pytestmark = pytest.mark.system
TOKEN = "the-stacks-own-token-of-this-test"
KEY = "sk-the-upstreams-key-of-this-test"
AGENT = """
import json, os, sys, openai
from pathlib import Path
openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
argv = [p.read_bytes().decode() for p in Path("/proc").glob("[0-9]*/cmdline")]
Path(sys.argv[1]).write_text(json.dumps({"env": dict(os.environ), "argv": argv}))
"""


def status(url: str, method: str, authorization: str, body: bytes = b"") -> int:
    headers = {"Content-Type": "application/x-protobuf", **({"Authorization": authorization} if authorization else {})}
    request = urllib.request.Request(url, data=body if method == "POST" else None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def queue_code(address: str, authorization: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/agl.queue.v1.Queue/Describe", queue_pb2.DescribeRequest.SerializeToString, queue_pb2.DescribeResponse.FromString
        )
        metadata: Any = [("authorization", authorization)] if authorization else []
        try:
            call(queue_pb2.DescribeRequest(), timeout=60, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()  # pyright: ignore[reportAttributeAccessIssue]
    return grpc.StatusCode.OK


def test_an_agent_can_send_and_ask_its_model_and_nothing_else(tmp_path: Path, model_server: ModelServer) -> None:
    data, seen, script = tmp_path / "data", tmp_path / "seen.json", tmp_path / "agent.py"
    script.write_text(AGENT)
    free = [argument for port in PORTS for argument in (f"--{port.replace('_', '-')}", "0")]
    secret = {"AGL_TOKEN": TOKEN, "AGL_UPSTREAM_URL": model_server.url, "AGL_UPSTREAM_KEY": KEY, "OPENAI_BASE_URL": model_server.url}
    with Command("up", "--data-dir", str(data), *free, log=tmp_path / "up.log", cwd=tmp_path, env=secret) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "the stack runs")
        assert command.process.poll() is None, command.output
        stack = {name: entry["address"] for name, entry in json.loads((data / "stack.json").read_text()).items() if isinstance(entry, dict)}
        done = run("run", "--data-dir", str(data), "--", sys.executable, str(script), str(seen), cwd=tmp_path, env=secret)
        assert done.returncode == 0 and "verdict complete" in done.stdout, done.stdout + done.stderr
        found = json.loads(seen.read_text())
        env: dict[str, str] = found["env"]
        for name, value in env.items():
            assert TOKEN not in unquote(value) and (KEY not in value), name
        assert not [line for line in found["argv"] if TOKEN in line or KEY in line], "no process shows a secret in its command line"

        agents = unquote(env["OTEL_EXPORTER_OTLP_HEADERS"].partition("=")[2])
        assert agents == f"Bearer {ingest_key(TOKEN)}"
        otlp = env["OTEL_EXPORTER_OTLP_ENDPOINT"]
        described = f"{stack['web']}/v1/agl/describe"
        with urllib.request.urlopen(urllib.request.Request(described, headers={"Authorization": f"Bearer {TOKEN}"}), timeout=60) as answer:
            clickhouse = json.load(answer)["clickhouse"]
        for given in (agents, f"Bearer {env['OPENAI_API_KEY']}", "", "Bearer ", f"Bearer {TOKEN}x", "Bearer \xff"):
            assert status(f"{otlp}/v1/traces", "POST", given) == (200 if given == agents else 401), given
            closed = [f"POST {otlp}/{path}" for path in ("barrier", "delete", "maintain")] + [f"GET {otlp}/status", f"GET {otlp}/metrics"]
            closed += [f"GET {clickhouse}/?query=SELECT+1", f"GET {stack['web']}/v1/agl/rollouts", f"GET {stack['web']}/metrics"]
            closed += [f"POST {stack['web']}/v1/traces", f"POST {stack['proxy']}/pause", f"POST {stack['proxy']}/model_list"]
            for method, url in (line.split(" ", 1) for line in closed):
                assert status(url, method, given) == 401, (url, given)
            if given.isascii():
                assert queue_code(stack["queue"], given) is grpc.StatusCode.UNAUTHENTICATED
        assert queue_code(stack["queue"], f"Bearer {TOKEN}") is grpc.StatusCode.OK
        assert alive([command.process.pid]) and len(naming(data)) >= 5, "every service lives"
    for path in [*data.rglob("*"), tmp_path / "up.log"]:
        if path.is_file():
            content = path.read_bytes()
            for part in (content, *blocks(content)):
                assert TOKEN.encode() not in part and KEY.encode() not in part, path
            assert b"Traceback" not in content or path.suffix != ".log", path
