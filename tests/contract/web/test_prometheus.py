"""Every metric that deploy/ configures for Prometheus and Grafana is on /metrics, and the example alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.algorithms.grpo.report import StepReport
from tests.contract.web.conftest import Web

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
ALERTS: Final = DEPLOY / "prometheus" / "alerts.yaml"


def test_every_metric_that_alerts_and_panels_read_is_there(web: Web) -> None:
    exposed = {line.split()[2] for line in web.call("GET", "/metrics").body.decode().splitlines() if line.startswith("# TYPE")}
    panels = [panel for path in (DEPLOY / "grafana" / "dashboards").glob("*.json") for panel in json.loads(path.read_text())["panels"]]
    texts = [ALERTS.read_text(), *(target["expr"] for panel in panels for target in panel["targets"] if "expr" in target)]
    read = {name for text in texts for name in re.findall(r"\bagl_\w+", text)}
    kinds = {field.name: str(field.type) for field in fields(StepReport)}
    empty: dict[str, Any] = {name: {} if kind.startswith("dict") else [] if kind.startswith("list") else 0 for name, kind in kinds.items()}
    exposed |= {f"agl_training_{name}" for name in StepReport(**empty).figures}  # shown once a trainer has recorded them
    assert len(read) >= 8
    assert read <= exposed


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing: install Debian's `prometheus`")
    return found


def test_the_configuration_is_valid_for_prometheus(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_only_when_something_is_wrong(promtool: str, tmp_path: Path) -> None:
    cases = tmp_path / "alerts_test.yaml"
    cases.write_text((Path(__file__).parent / "alerts_test.yaml").read_text().replace("RULES", str(ALERTS)))
    done = subprocess.run([promtool, "test", "rules", cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
