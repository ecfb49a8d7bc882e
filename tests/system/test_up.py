"""`agl-otel up` as a user runs it: real processes, real ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agl_otel.settings import PORTS, free_ports
from tests.contract.queue.conftest import postgres  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a fixture
from tests.postgres_server import Postgres
from tests.system.stack_process import Command, alive, listening, naming, run, until

pytestmark = pytest.mark.full

FREE_PORTS = [argument for port in PORTS for argument in (f"--{port.replace('_', '-')}", "0")]


def stack_file(data: Path) -> dict[str, dict[str, Any]]:
    return json.loads((data / "stack.json").read_text())


def up(tmp_path: Path, data: Path, *arguments: str) -> Command:
    return Command("up", "--data-dir", str(data), *FREE_PORTS, *arguments, log=tmp_path / "up.log", cwd=tmp_path)


@pytest.mark.smoke
def test_up_serves_on_every_port_and_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, data, "--json") as command:
        until((data / "stack.json").exists, "stack.json is written")
        services = stack_file(data)
        assert list(services) == ["queue", "collector", "proxy", "web", "maintain"]
        described = json.loads(urllib.request.urlopen(services["web"]["address"] + "/v1/agl/describe").read())
        assert described["queue"] == services["queue"]["address"]
        for name in ("collector_http", "proxy", "web"):
            assert urllib.request.urlopen(described[name] + "/health").status == 200
        assert urllib.request.urlopen(described["clickhouse"] + "/?query=SELECT%201").read() == b"1\n"
        bound = listening([service["pid"] for service in services.values()] + [command.process.pid])
        assert len(bound) >= len(PORTS) and set(bound) == {"127.0.0.1"}, "nothing listens beyond loopback unless AGL_HOST says so"
        listed = run("rollouts", "--json", "--store", services["web"]["address"], cwd=tmp_path)
        assert json.loads(listed.stdout) == {"total": 0, "items": []}, listed.stderr
        command.process.send_signal(signal.SIGINT)
        assert command.wait(300) == 0 and command.output.splitlines()[-1] == "stopped", command.output
        assert alive([service["pid"] for service in services.values()]) == []
    assert naming(data) == []
    assert not (data / "stack.json").exists()


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, data) as command:
        until((data / "stack.json").exists, "stack.json is written")
        os.kill(stack_file(data)["collector"]["pid"], signal.SIGSTOP)  # it will not stop cleanly
        command.process.send_signal(signal.SIGINT)
        until(lambda: "once more" in command.output, "it says that it stops")
        command.process.send_signal(signal.SIGINT)
        assert command.wait(300) == 130
    until(lambda: naming(data) == [], "nothing is left")


def test_the_queue_may_be_in_postgresql(tmp_path: Path, postgres: Postgres) -> None:  # noqa: F811 - the fixture
    data, tasks, url = tmp_path / "data", tmp_path / "tasks.jsonl", postgres.new_schema()
    tasks.write_text("1\n2\n")
    for total in (2, 4):  # the second stack finds the rollouts of the first
        with up(tmp_path, data, "--queue", url):
            until((data / "stack.json").exists, "stack.json is written")
            store = ("--store", stack_file(data)["web"]["address"])
            added = run("rollouts", "enqueue", "--file", str(tasks), *store, cwd=tmp_path)
            assert added.returncode == 0, added.stderr
            found = json.loads(run("queue", "stats", "--json", *store, cwd=tmp_path).stdout)
            assert (found["name"], found["total_rollouts"]) == ("postgresql", total)
    assert not (data / "queue.db").exists()


def test_sigterm_is_no_failure_and_a_degraded_collector_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (tmp_path / "agl.toml").write_text(f"disk_reserve_bytes = {1 << 60}\n")
    with up(tmp_path, data) as command:
        until(lambda: "warning: the collector is degraded: " in command.output, "it says that the disk is full")
        assert "AGL_DISK_RESERVE_BYTES" in command.output or "free" in command.output
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(300) == 0
    assert naming(data) == []


@pytest.mark.smoke
def test_kill_9_of_the_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, data) as command:
        until((data / "stack.json").exists, "stack.json is written")
        command.process.kill()
        command.wait(300)
    until(lambda: naming(data) == [], "the services have ended")


STARTER = """
import sys
from pathlib import Path
from tests.system.stack_process import Command

command = Command("up", "--data-dir", *sys.argv[1:], log=Path(sys.argv[1]).with_name("up.log"))
print(command.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_tests_stack_ends_when_its_pytest_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    program = [sys.executable, "-c", STARTER, str(data), *FREE_PORTS]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as tests:
        assert tests.stdout is not None
        stack = int(tests.stdout.readline())
        try:
            until((data / "stack.json").exists, "stack.json is written")
            tests.kill()
            tests.wait()
            until(lambda: naming(data) == [], "nothing is left", seconds=60.0)
        finally:
            if alive([stack]):
                os.kill(stack, signal.SIGTERM)
                until(lambda: naming(data) == [], "nothing is left")


def test_up_waits_until_the_services_of_a_killed_one_have_ended(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ports = [f"{given}" for name, port in zip(FREE_PORTS[::2], free_ports(len(PORTS)), strict=True) for given in (name, port)]
    with up(tmp_path, data, *ports) as first:
        until((data / "stack.json").exists, "stack.json is written")
        before = stack_file(data)
        os.kill(before["collector"]["pid"], signal.SIGSTOP)  # it keeps its port
        first.process.kill()
        first.wait(300)
    (tmp_path / "second").mkdir()
    with up(tmp_path / "second", data, *ports) as second:
        try:
            until(lambda: f"collector (process {before['collector']['pid']})" in second.output, "it says what it waits for")
        finally:
            os.kill(before["collector"]["pid"], signal.SIGCONT)
        until(lambda: stack_file(data)["collector"]["pid"] != before["collector"]["pid"], "the second stack is up")
        assert stack_file(data)["collector"]["address"] == before["collector"]["address"]


def test_a_crashed_service_is_restarted_on_its_port(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, data):
        until((data / "stack.json").exists, "stack.json is written")
        before = stack_file(data)["collector"]
        os.kill(before["pid"], signal.SIGKILL)
        until(lambda: stack_file(data)["collector"]["pid"] != before["pid"], "the collector is restarted")
        assert stack_file(data)["collector"]["address"] == before["address"]
        assert urllib.request.urlopen(before["address"] + "/health").status == 200


def test_a_data_directory_in_use_is_refused_with_its_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, data):
        until((data / "stack.json").exists, "stack.json is written")
        second = run("up", "--data-dir", str(data), *FREE_PORTS, cwd=tmp_path)
        assert second.returncode == 1
        assert str(data) in second.stderr and "in use" in second.stderr and "--data-dir" in second.stderr
        assert (data / "stack.json").exists(), "the first one goes on"


def test_a_port_in_use_is_named_with_its_setting_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = [*FREE_PORTS[:-1], str(port)]
        refused = run("up", "--data-dir", str(tmp_path / "data"), *arguments, cwd=tmp_path)
    assert refused.returncode == 1
    for part in (str(port), "--web-port", "AGL_WEB_PORT", "in use"):
        assert part in refused.stderr
    assert "Traceback" not in refused.stderr and naming(tmp_path / "data") == []


def test_a_data_directory_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "VERSION").write_text("99\n")
    refused = run("up", "--data-dir", str(data), *FREE_PORTS, cwd=tmp_path)
    assert refused.returncode == 2
    assert "version 99" in refused.stderr and "Upgrade" in refused.stderr
    assert (data / "VERSION").read_text() == "99\n"


def test_a_data_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused = run("up", "--data-dir", str(blocked / "data"), *FREE_PORTS, cwd=tmp_path)
    assert refused.returncode == 2
    assert str(blocked) in refused.stderr and "--data-dir" in refused.stderr


@pytest.mark.parametrize("arguments", [("rollouts",), ("traces", "sql", "SELECT 1")])
def test_commands_that_read_report_a_missing_data_directory(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    refused = run(*arguments, "--data-dir", str(tmp_path / "none"), cwd=tmp_path)
    assert refused.returncode == 2
    assert "no stack and no data" in refused.stderr
    assert not (tmp_path / "none").exists(), "looking creates nothing"


def test_an_unreachable_address_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"):
        refused = run("rollouts", "--store", address, cwd=tmp_path)
        assert refused.returncode == 1 and str(port) in refused.stderr, refused.stderr
