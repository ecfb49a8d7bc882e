"""What is in deploy/ is taken by the tools that will read it: Docker Compose's own loader, helm, Kubernetes' schemas, systemd.

`make compose-check` builds the first; helm is a package of ours on Linux (x86-64), elsewhere the one on the PATH. What is missing makes its
tests skip. The schemas are those of the package kubernetes-validate.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agl_otel.runner.agents.kubernetes import job_body, secret_body
from tests.environments import ROOT, AbsentError, installed

DEPLOY = ROOT / "deploy"
CHART = str(DEPLOY / "helm" / "agl-otel")
KUBERNETES = "1.31"
SERVICES = {"queue", "collector", "maintain", "proxy", "web"}
EVERYTHING = {
    "runner": {"enabled": True, "image": "team/agent:1", "command": ["python", "agent.py", "{question}"], "grader": "team.grade:exact",
               "pod": {"nodeSelector": {"pool": "agents"}, "containers": [{"resources": {"limits": {"memory": "1Gi"}}}]}},
    "secrets": {"token": "agl-otel", "databases": "agl-otel", "tls": "agl-tls", "upstream": "agl-upstream"},
    "proxy": {"upstreamUrl": "http://vllm:8000/v1"}, "web": {"jaegerPort": 17271}, "settings": {"AGL_RETENTION_DAYS": "30"},
    "networkPolicy": {"agentsOnlyToStack": True}, "collector": {"autoscaling": {"enabled": False}},
}  # fmt: skip


def tool(name: str, remedy: str) -> str:
    ours = [str(ROOT / "build" / "tools"), str(Path(sys.executable).parent)]
    found = shutil.which(name, path=os.pathsep.join([*ours, os.environ.get("PATH", os.defpath)]))
    if found is None:
        pytest.skip(f"{name} is not here: {remedy}")
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [tool("helm", "https://helm.sh/docs/intro/install"), *arguments, "--kube-version", f"{KUBERNETES}.0"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def loaded(tmp_path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """compose.yaml as Docker Compose's loader understands it; its variables are put in here, as `docker compose` does."""
    text = (DEPLOY / "compose" / "compose.yaml").read_text()

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if not environment.get(name) and kind == "?":
            pytest.fail(f"{name} is missing: {rest}")
        return environment.get(name) or rest

    (tmp_path / "compose.yaml").write_text(re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text))
    loader = tool("compose-load", "`make compose-check` builds it")
    done = subprocess.run([loader, "-format", "json", "compose.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def example() -> dict[str, str]:
    """The variables of .env.example, the secrets filled in."""
    lines = (DEPLOY / "compose" / ".env.example").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: value or ("s3cret" if name.endswith(("TOKEN", "PASSWORD")) else "") for name, value in pairs.items()}


def test_the_example_of_secrets_holds_none_and_names_all_that_are_needed() -> None:
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    assert re.findall(r"^(?:\w*(?:TOKEN|PASSWORD|KEY))=(.+)$", (DEPLOY / "compose" / ".env.example").read_text(), flags=re.MULTILINE) == []
    assert set(re.findall(r"\$\{(\w+):", text)) == set(example())


def test_compose_is_loaded_and_keeps_to_its_bounds(tmp_path: Path) -> None:
    services = loaded(tmp_path, example())["services"]
    assert set(services) >= SERVICES | {"postgres", "clickhouse", "jaeger", "grafana", "prometheus"}
    for name, service in services.items():
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", [])), name
        if name in SERVICES:
            assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["restart"] == "unless-stopped"
            assert "healthcheck" in service or name == "maintain"
            assert service["environment"]["AGL_TOKEN"] == "s3cret"
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                where = mount["source"].replace(str(tmp_path), str(DEPLOY / "compose")).replace(str(tmp_path.parent), str(DEPLOY))
                assert Path(where).exists(), where
    assert "stack" not in services["postgres"]["networks"] and "stack" not in services["clickhouse"]["networks"]


def test_modules_that_deployments_start_exist() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.suffix in (".yaml", ".service", "")]
    modules = {name for text in texts for name in re.findall(r"agl_otel(?:\.\w+)+", text)}
    assert len(modules) >= 6
    for name in modules:
        place = ROOT / name.replace(".", "/")
        assert (place / "__main__.py").exists() or place.with_suffix(".py").exists(), name


def rendered(tmp_path: Path, values: Mapping[str, Any]) -> str:
    (tmp_path / "values.json").write_text(json.dumps(values))
    done = helm("template", "agl", CHART, "-f", str(tmp_path / "values.json"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def validate(path: Path) -> int:
    """How many objects of a file Kubernetes' schemas take; fails where they refuse one."""
    try:
        place = installed("kubernetes-validate", ["kubernetes-validate==1.37.0"])
    except AbsentError as reason:
        pytest.skip(str(reason))
    command = [str(place / "bin" / "kubernetes-validate"), "--strict", "-k", KUBERNETES, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "ERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
    return (done.stdout + done.stderr).count(" passed for resource ")


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_renders_to_objects_that_kubernetes_takes(values: Mapping[str, Any], tmp_path: Path) -> None:
    text = rendered(tmp_path, values)
    (tmp_path / "rendered.yaml").write_text(text)
    assert validate(tmp_path / "rendered.yaml") == len(re.findall(r"^kind: ", text, flags=re.MULTILINE)) >= 24
    assert "value: s3cret" not in text and "privileged" not in text


def test_the_chart_has_every_service_scraped_where_its_metrics_are(tmp_path: Path) -> None:
    text = rendered(tmp_path, EVERYTHING | {"metrics": {"podMonitors": True}})
    objects = text.split("\n---\n")
    monitors = {re.findall(r"name: agl-(\w+)", each)[0]: each for each in objects if "kind: PodMonitor" in each}
    assert {*monitors} == {*SERVICES, "runner"} - {"maintain"}
    for component, monitor in monitors.items():
        port = re.findall(r"port: ([\w-]+)", monitor)[0]
        pod = next(each for each in objects if re.search(rf"kind: (Deployment|StatefulSet)\nmetadata:\n  name: agl-{component}\n", each))
        assert f"{{name: {port}, containerPort:" in pod, component
        assert "key: token" in monitor and "scheme: https" in monitor
    assert text.count('_METRICS_PORT, value: "9464"') == 2
    assert "kind: PodMonitor" not in rendered(tmp_path, EVERYTHING), "they need the Prometheus Operator"
    policies = [each for each in objects if "kind: NetworkPolicy" in each]
    assert sum("port: 9464" in each for each in policies) == 2


def test_the_chart_is_clean_and_refuses_secrets_in_settings(tmp_path: Path) -> None:
    linted = helm("lint", "--strict", CHART)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    for wrong in ("settings.AGL_TOKEN=x", "nosuch.value=1", "queue.replicas=-1"):
        done = helm("template", "agl", CHART, "--set", wrong)
        assert done.returncode != 0 and "values don't meet the specifications" in done.stderr, wrong


def test_kubernetes_takes_the_jobs_that_runners_make(tmp_path: Path) -> None:
    files = {"a.pem": "x"}
    job = job_body(
        "agl-a", "team/agent:1", ["run", "$x"], rollout_id="ro-1", attempt_id="at-1", owner="runner-0", owner_uid="u", files=files,
        pod={"nodeSelector": {"a": "b"}, "containers": [{"resources": {"limits": {"cpu": "1"}}}]}, deadline_seconds=60,
    )  # fmt: skip
    job["metadata"]["uid"] = "u-1"
    for number, body in enumerate((job, secret_body("agl-a", job, {"AGL_TASK": "1"}), secret_body("agl-a-files", job, files))):
        (tmp_path / f"{number}.yaml").write_text(json.dumps(body))
        assert validate(tmp_path / f"{number}.yaml") == 1


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    for unit in ("agl-otel.service", "agl-otel@.service"):
        text = (DEPLOY / "systemd" / unit).read_text()
        (tmp_path / unit).write_text(re.sub(r"/opt/agl-otel/bin/[\w-]+", "/usr/bin/env", text))  # verify wants the program to be there
    where = [str(tmp_path / unit) for unit in ("agl-otel.service", "agl-otel@queue.service", "agl-otel@maintain.service")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *where], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0 and str(tmp_path) not in done.stderr, done.stderr
