"""A stack with a token: what an agent gets of it, what its keys permit, and where the token must not appear."""

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

from agl_otel.net.auth import attempt_ingest_key
from agl_otel.queue.proto import queue_pb2
from agl_otel.settings import PORTS, free_port
from agl_otel.text import LEFT_OUT
from tests.clickhouse_files import blocks
from tests.model_server import ModelServer
from tests.system.stack_process import Command, alive, naming, run, until

pytestmark = pytest.mark.full
TOKEN = "the-stacks-own-token-of-this-test"
KEY = "sk-the-upstreams-key-of-this-test"
AGENT = """
import json, os, sys, openai
from pathlib import Path
openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
argv = [p.read_bytes().decode() for p in Path("/proc").glob("[0-9]*/cmdline")]
Path(sys.argv[1]).write_text(json.dumps({"env": dict(os.environ), "argv": argv}))
"""


JOB_KEY, RESOURCE_KEY, HEADER_KEY, PASSWORD = (
    "sk-jobs-own-key-of-this-test",
    "resources-own-key-of-this-test",
    "header-key-x-2718",
    "pass-word-31415",
)
JOB = """
[agent]
function = "functions.py:answer"

[data]
train = "tasks.jsonl"

[resources]
main_llm = {{ resource_type = "llm", endpoint = "http://someone:{password}@{host}/v1", model = "m", api_key = "{resource}" }}

[algorithm]
name = "functions.py:search"
api_key = "{job}"
address = "https://someone:{password}@models.example/v1"
headers = {{ Authorization = "Bearer {header}", X-Api-Key = "{header}" }}
litellm_params = [{{ model = "openai/m", api_key = "{job}" }}]
patience = 3
"""
FUNCTIONS = """
import json
from pathlib import Path
import agl_otel as agl

def search(api_key, address, headers, litellm_params, patience):
    @agl.algo
    async def work(store, train_dataset, run_folder, initial_resources):
        assert (api_key, patience) == ("{job}", 3), "it has what the job says, on a resumed run, too"
        run_folder.metric({{"step": 1, "patience": patience}})
        kept = await store.add_resources(initial_resources)
        made = await store.enqueue(train_dataset, resources_id=kept.resources_id)
        ended = await store.wait([each.rollout_id for each in made])
        assert [each.status for each in ended] == ["succeeded"] * len(made), ended
    return work

async def answer(task, llm: agl.LLM):
    argv = [p.read_bytes().decode(errors="replace") for p in Path("/proc").glob("[0-9]*/cmdline")]
    Path("argv.json").write_text(json.dumps(argv))
    return 1.0
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
            return error.code()  # pyright: ignore[reportAttributeAccessIssue] - it is also a grpc.Call
    return grpc.StatusCode.OK


def test_an_agents_keys_permit_only_its_telemetry_and_its_model_calls(tmp_path: Path, model_server: ModelServer) -> None:
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
        ids = env["AGL_ROLLOUT_ID"], env["AGL_ATTEMPT_ID"]
        assert agents == f"Bearer {attempt_ingest_key(TOKEN, *ids)}"
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
        assert alive([command.process.pid]) and len(naming(data)) >= 4, "every process lives"
    for path in [*data.rglob("*"), tmp_path / "up.log"]:
        if path.is_file():
            content = path.read_bytes()
            for part in (content, *blocks(content)):
                assert TOKEN.encode() not in part and KEY.encode() not in part, path
            assert b"Traceback" not in content or path.suffix != ".log", path


def test_a_runs_folder_and_output_contain_no_secret_and_the_run_continues(tmp_path: Path, model_server: ModelServer) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    host = model_server.url.removeprefix("http://").removesuffix("/v1")
    given = {"password": PASSWORD, "host": host, "resource": RESOURCE_KEY, "job": JOB_KEY, "header": HEADER_KEY}
    (tmp_path / "job.toml").write_text(JOB.format(**given))
    (tmp_path / "functions.py").write_text(FUNCTIONS.format(**given))
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    ports = {f"AGL_{port.upper()}": "0" for port in PORTS}
    secrets = {"AGL_TOKEN": TOKEN, "AGL_UPSTREAM_URL": model_server.url, "AGL_UPSTREAM_KEY": KEY, "OPENAI_API_KEY": KEY, **ports}
    given_to_train = ("train", "job.toml", "--data-dir", str(data), "--run-dir", str(folder))
    first, done = (run(*given_to_train, cwd=tmp_path, env=secrets) for _ in range(2))  # the second start continues the run
    assert first.returncode == done.returncode == 0, first.stderr + done.stdout + done.stderr
    begun = json.loads((folder / "run.json").read_text())
    assert begun["options"]["options"]["patience"] == 3 and begun["options"]["options"]["api_key"] == LEFT_OUT
    (tmp_path / "job.toml").write_text(JOB.format(**{**given, "header": "another-key-141421"}))
    assert run(*given_to_train, cwd=tmp_path, env=secrets).returncode == 0, "another key is no other run"
    (tmp_path / "job.toml").write_text(JOB.format(**given).replace("patience = 3", "patience = 4"))
    refused = run(*given_to_train, cwd=tmp_path, env=secrets)
    assert refused.returncode == 2 and "begun with another options" in refused.stderr, refused.stderr
    output = first.stdout + first.stderr + done.stdout + done.stderr + refused.stderr + (tmp_path / "argv.json").read_text()
    forbidden = [TOKEN, KEY, JOB_KEY, RESOURCE_KEY, HEADER_KEY, PASSWORD]
    assert not [secret for secret in forbidden if secret in output], output
    for path in [*data.rglob("*"), *folder.rglob("*")]:
        kept_by_the_queue = (RESOURCE_KEY, PASSWORD) if path.name.startswith("queue.db") else ()
        if path.is_file():
            content = path.read_bytes()
            for part in (content, *blocks(content)):
                assert not [each for each in forbidden if each.encode() in part and each not in kept_by_the_queue], path


def test_a_password_in_a_model_servers_address_is_shown_nowhere(tmp_path: Path) -> None:
    """The server does not exist: the error goes to the agent, into its spans, and into logs."""
    data = tmp_path / "data"
    ask = "import openai; openai.OpenAI(max_retries=0).chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hello'}])"
    address = f"http://someone:{PASSWORD}@127.0.0.1:{free_port()}/v1"
    secrets = {"AGL_UPSTREAM_URL": address, "OPENAI_API_KEY": "none", **{f"AGL_{port.upper()}": "0" for port in PORTS}}
    done = run("run", "--data-dir", str(data), "--", sys.executable, "-c", ask, cwd=tmp_path, env=secrets)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "cannot be reached" in output and LEFT_OUT in output, output
    assert PASSWORD not in output
    for path in data.rglob("*"):
        if path.is_file() and not path.name.startswith("queue.db"):  # the queue keeps it: it is part of a resource
            content = path.read_bytes()
            assert not [part for part in (content, *blocks(content)) if PASSWORD.encode() in part], path
