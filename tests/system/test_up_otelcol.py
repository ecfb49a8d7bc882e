"""The stack with the OpenTelemetry Collector as its collector and a ClickHouse server: the demo, and `up` with TLS, token and password."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.authority import Authority
from tests.clickhouse_server import PASSWORD, ClickHouseServer
from tests.model_server import ModelServer
from tests.system.otelcol_process import binary
from tests.system.stack_process import Command, naming, run, run_here, small_demo, until
from tests.system.test_up import FREE_PORTS, stack_file

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "first_light" / "agent.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    binary()
    with ClickHouseServer(tmp_path_factory.mktemp("server")) as made:
        yield made


def environment(server: ClickHouseServer) -> dict[str, str]:
    return {"AGL_COLLECTOR": str(binary()), "AGL_CLICKHOUSE_URL": server.url()}


def test_the_demo_trains_on_the_sampled_and_stored_tokens(
    server: ClickHouseServer, tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the [train] extra")
    data = tmp_path / "data"
    shutil.copytree(tiny_policy, data / "run" / "policy")
    on_server = ["--clickhouse", server.url(), "--collector", str(binary())]
    done = run_here(capsys, "demo", "--json", "--max-steps", "2", "--data-dir", str(data), *on_server, cwd=small_demo(tmp_path, val=2))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["trajectories"] == result["trajectories_in_clickhouse"] == 2 * 16
    assert result["calls_not_equal"] == 0
    assert result["calls_equal_to_model_server"] == result["rollouts"] == 2 * 16 + 2 * result["tasks_scored"] + 2 * 2
    assert result["verdicts"] == {"complete": result["rollouts"]}
    assert result["max_ratio_error"] < 1e-4
    assert naming(data) == []
    shown = run("traces", "show", result["rollout_shown"], "--json", "--data-dir", str(data), cwd=tmp_path, env=environment(server))
    names = {span["name"] for span in json.loads(shown.stdout)["spans"]}
    assert {"agentlightning.attempt", "agentlightning.llm", "agentlightning.annotation", "agentlightning.seal"} <= names


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
def test_up_with_tls_does_not_reveal_the_servers_password(server: ClickHouseServer, tmp_path: Path, model_server: ModelServer) -> None:
    authority = Authority(tmp_path / "authority")
    data = tmp_path / "data"
    stack = {**environment(server), **authority.serving(mutual=True), "AGL_TOKEN": "sesame"}
    client = {**authority.dialling(mutual=True), "AGL_TOKEN": "sesame", "OPENAI_BASE_URL": model_server.url, "OPENAI_API_KEY": "sk-1"}
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=tmp_path / "up.log", cwd=tmp_path, env=stack) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "stack.json is written")
        assert command.process.poll() is None, command.output
        services = stack_file(data)
        assert list(services) == ["queue", "sql", "collector", "proxy", "web", "maintain"]
        arguments = ["run", "--json", "--store", services["web"]["address"], "--", sys.executable, str(AGENT), "hi"]
        done = run(*arguments, cwd=tmp_path, env=client)
        assert done.returncode == 0, done.stderr
        assert [verdict["kind"] for verdict in json.loads(done.stdout)["verdicts"]] == ["complete"]
        ran = run("maintain", "--once", "--json", "--store", services["queue"]["address"], cwd=tmp_path, env={**stack, **client})
        assert "holds the lease" in ran.stderr, "the late pass runs already"
        ran = run("collector", "status", "--store", services["queue"]["address"], cwd=tmp_path, env=client)
        assert ran.returncode == 1 and "an OpenTelemetry Collector" in ran.stdout
        for pid in [command.process.pid, *(service["pid"] for service in services.values())]:
            assert PASSWORD not in Path(f"/proc/{pid}/cmdline").read_text()
        written = [path.read_text(errors="replace") for path in (*data.rglob("*.log"), *data.rglob("*.json"), tmp_path / "up.log")]
        assert not any(PASSWORD in text or "%2Fpass%3Aword" in text for text in written)
    assert naming(data) == []


def test_missing_requirements_of_the_collector_are_reported_before_the_start(tmp_path: Path) -> None:
    for flags, words in (
        (["--collector", str(tmp_path / "none")], "make otelcol"),
        (["--collector", sys.executable], "clickhouse://"),
    ):
        refused = run("up", "--data-dir", str(tmp_path / "data"), *FREE_PORTS, *flags, cwd=tmp_path)
        assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
    assert naming(tmp_path / "data") == []


def test_a_password_in_a_flag_causes_a_warning(tmp_path: Path) -> None:
    flags = ["--clickhouse", "clickhouse://me:very-secret@127.0.0.1:1/otel", "--collector", str(tmp_path / "none")]
    refused = run("up", "--data-dir", str(tmp_path / "data"), *flags, cwd=tmp_path)
    assert refused.returncode == 2
    assert "--clickhouse holds a password" in refused.stderr and "AGL_CLICKHOUSE_URL" in refused.stderr
    assert "very-secret" not in refused.stderr
