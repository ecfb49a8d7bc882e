"""Checks of an agent's environment name what blocks telemetry, with remedies, and nothing else."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agl_otel.cli.environment_checks import (
    FRAMEWORKS,
    VARIABLES,
    Environment,
    check_environment,
    important,
    inspect_environment,
    packages_of,
)
from agl_otel.cli.findings import Finding
from agl_otel.runner.injection import install_line
from agl_otel.service.lock import FileLock
from agl_otel.service.processes import began
from agl_otel.settings import Settings, free_port
from agl_otel.stack.supervisor import LOCK_FILE, STACK_FILE

BARE = {"openai": "3.52.0", "python": "3.12.1"}
SDK = {**BARE, "opentelemetry-api": "1.45.0", "opentelemetry-sdk": "1.45.0"}
GOOD = {**SDK, "agl-otel-hook": "0.1.0", "opentelemetry-instrumentation": "0.66b0", "wrapt": "1.17.0"}


def of(findings: list[Finding], part: str) -> Finding:
    (found,) = [finding for finding in findings if part in finding.what]
    return found


def test_a_clean_environment_has_no_findings() -> None:
    found = check_environment(Environment({"PATH": "/bin", "OTEL_TRACES_EXPORTER": "otlp"}, GOOD, GOOD))
    assert all(finding.state == "good" for finding in found), found


@pytest.mark.parametrize(
    ("name", "value", "blocks"),
    [
        ("OTEL_SDK_DISABLED", "true", False),
        ("OTEL_CONFIG_FILE", "otel.yaml", False),
        ("OTEL_EXPERIMENTAL_CONFIG_FILE", "otel.yaml", False),
        ("OTEL_TRACES_EXPORTER", "none", False),
        ("OTEL_LOGS_EXPORTER", "console", False),
        ("OTEL_TRACES_SAMPLER", "traceidratio", False),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://vendor.example", False),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://vendor.example", False),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret", False),
        ("PHOENIX_COLLECTOR_ENDPOINT", "http://phoenix.example:6006", False),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "*", True),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis, openai", False),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "200", True),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "16", True),
        ("TRACELOOP_TRACE_CONTENT", "false", False),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "no_content", False),
        ("OPENINFERENCE_HIDE_INPUTS", "true", False),
        ("OPENAI_AGENTS_DISABLE_TRACING", "1", True),
    ],
)
def test_a_variable_that_disables_or_redirects_telemetry_is_named(name: str, value: str, blocks: bool) -> None:
    finding = of(check_environment(Environment({name: value}, GOOD, GOOD)), name)
    assert (finding.state, bool(finding.remedy)) == ("wrong" if blocks else "advice", True)
    assert "secret" not in finding.what + finding.detail
    assert any(re.fullmatch(variable.pattern, name) for variable in VARIABLES)


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_SDK_DISABLED", "false"), ("OTEL_TRACES_SAMPLER", "parentbased_always_on"), ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis")],
)
def test_a_harmless_value_is_not_named(name: str, value: str) -> None:
    assert not any(finding.remedy for finding in check_environment(Environment({name: value}, GOOD, GOOD)))


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.packages[0])
def test_a_framework_with_its_own_telemetry_is_named_until_configured(framework: object) -> None:
    (each,) = [one for one in FRAMEWORKS if one is framework]
    installed = GOOD | {each.packages[-1]: "1.2.3"}
    found = of(check_environment(Environment({}, installed, GOOD)), f"{each.packages[-1]} 1.2.3")
    assert (found.state, found.detail, found.remedy) == (
        "advice",
        each.does,
        each.remedy.replace("{where}", "into the agent's own environment"),
    )
    cures = [Environment({}, installed | {package: "1"}, GOOD) for package in each.good_with]
    cures += [Environment({name: "true"}, installed, GOOD) for name in each.good_if]
    cures += [Environment({}, installed, GOOD, scopes=frozenset([each.scope]))] if each.scope else []
    assert not any(of(check_environment(cure), each.packages[-1] + " 1.2.3").remedy for cure in cures)


def test_incompatible_versions_are_named() -> None:
    def bad(**versions: str) -> list[str]:
        packages = GOOD | {name.replace("_", "-"): version for name, version in versions.items()}
        return [finding.what for finding in check_environment(Environment({}, packages, GOOD)) if finding.remedy]

    assert bad() == []
    assert bad(opentelemetry_instrumentation="0.60b1") == ["their versions go together"]
    assert bad(opentelemetry_sdk="1.28.0", opentelemetry_instrumentation="0.49b0") == []
    assert bad(agl_otel_hook="0.0.9") == ["the hook has the version of this package"]


def test_an_instrumentation_belongs_where_opentelemetry_comes_from() -> None:
    brought = Environment({}, {**BARE, "agno": "1"}, GOOD, inject=True)
    assert f"pip install openinference-instrumentation-agno beside agl-otel ({sys.prefix})" in of(check_environment(brought), "agno").remedy
    beside = replace(brought, own={**GOOD, "openinference-instrumentation-agno": "1"})
    assert of(check_environment(beside), "agno").state == "good"


NO_SPANS = "missing: opentelemetry-sdk, opentelemetry-instrumentation: its model calls are recorded at the proxy, its own spans are not"


@pytest.mark.parametrize(
    ("packages", "inject", "state", "text"),
    [
        (GOOD, False, "good", "opentelemetry-sdk 1.45.0, opentelemetry-instrumentation 0.66b0"),
        (SDK, False, "good", "opentelemetry-sdk 1.45.0, opentelemetry-instrumentation brought; agl-otel-hook is brought"),
        (BARE, True, "good", "brought: opentelemetry-sdk 1.45.0 and what agl-otel's environment has beside it"),
        (BARE, False, "advice", f"{NO_SPANS} → to see them, give --inject, which brings OpenTelemetry, or {install_line()}"),
        (
            {**SDK, "opentelemetry-sdk": "1.20.0"},
            True,
            "advice",
            f"1.20.0: its model calls are recorded at the proxy, its own spans are not → to see them, {install_line()} into",
        ),
        ({**BARE, "opentelemetry-api": "1.46.0"}, True, "advice", "missing: opentelemetry-sdk"),
        ({**SDK, "python": "3.9.18"}, True, "advice", "its own spans are not → to see them, use one of 3.10 to 3.13"),
    ],
)
def test_whether_the_hook_can_be_brought_is_told(packages: dict[str, str], inject: bool, state: str, text: str) -> None:
    found = of(check_environment(Environment({}, packages, GOOD, inject=inject)), "has OpenTelemetry for the hook")
    assert (found.state, text in f"{found.detail} → {found.remedy}") == (state, True), found


def test_an_http_proxy_between_agent_and_stack_is_named() -> None:
    assert of(check_environment(Environment({"HTTPS_PROXY": "http://p:1"}, GOOD, GOOD)), "directly").state == "wrong"
    assert (
        of(check_environment(Environment({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a, 127.0.0.1"}, GOOD, GOOD)), "directly").state
        == "good"
    )


def test_taken_ports_are_advice(tmp_path: Path) -> None:
    found = check_environment(Environment({}, GOOD, GOOD, (("queue_port", 4747),)))
    assert "AGL_QUEUE_PORT" in of(found, "port 4747 is taken").remedy
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port"), 0)
    settings = Settings.load(data_dir=tmp_path, **{**ports, "queue_port": free_port()})
    assert inspect_environment([sys.executable], os.environ, settings).taken == ()


def test_a_stack_of_ours_on_another_folder_is_named(tmp_path: Path) -> None:
    ports = dict.fromkeys(("otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port"), 0)
    theirs = tmp_path / "a b"
    theirs.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as queue, FileLock.take(theirs / LOCK_FILE):
        port: int = queue.getsockname()[1]
        running = {"queue": {"pid": os.getpid(), "began": began(os.getpid()), "address": f"127.0.0.1:{port}"}}
        (theirs / STACK_FILE).write_text(json.dumps(running))
        ours = Settings.load(data_dir=tmp_path / "ours", **ports, queue_port=port)
        seen = inspect_environment([sys.executable], {}, ours, with_packages=False)
        queue.settimeout(0)
        with pytest.raises(BlockingIOError):  # the port may be another's: nobody has connected
            queue.accept()
    assert seen.taken == (("queue_port", ours.queue_port),) and seen.packages is None
    finding = of(check_environment(seen), "the stack that runs is used")
    assert (finding.state, finding.detail, finding.remedy) == (
        "advice",
        f"no: it runs on {theirs}, and this command starts one of its own on another folder",
        f"to use it, give --data-dir '{theirs}'",
    )
    assert finding in important(seen) and not any("is taken" in each.what for each in check_environment(seen))


def test_an_endpoint_that_gets_no_telemetry_any_more_is_named_with_the_way_to_keep_the_copy() -> None:
    where = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://me:hunter2@vendor.example/otlp/v1/traces"}
    (finding,) = important(Environment(where))
    assert "hunter2" not in finding.what + finding.remedy
    assert finding.detail == "no longer gets the agent's telemetry: attempts send it to this stack instead"
    assert finding.remedy.startswith("to keep the copy, start the stack (`agl-otel up`) with AGL_FORWARD_OTLP=https://")
    assert finding.remedy.endswith("vendor.example/otlp")
    assert important(Environment(where | {"AGL_FORWARD_OTLP": "https://vendor.example/otlp"})) == []


def test_packages_are_read_from_the_commands_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    for program in (sys.executable, str(script)):
        packages = packages_of([program], os.environ)
        assert packages is not None and "opentelemetry-sdk" in packages
    assert packages_of(["/bin/sh"], os.environ) is None
    assert packages_of([str(tmp_path / "nothing")], os.environ) is None
