"""Agents in environments of their own, where of ours only agl-otel-hook is installed: with old and new versions of OpenTelemetry."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.environments import AbsentError, hooked, other_python
from tests.matrix.environments import Environment
from tests.matrix.frameworks import BY_NAME
from tests.matrix.play import ground, played
from tests.matrix.script import Message, Request, riddle

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
OLDEST, MIDDLE, NEWEST = "1.28.0", "1.38.0", "1.45.2"
ENVIRONMENTS = {
    OLDEST: ("3.10", "opentelemetry-instrumentation-openai==0.33.12", "openai==1.109.1"),
    MIDDLE: ("", "opentelemetry-instrumentation-openai==0.61.0", "openai==2.9.0"),
    NEWEST: ("", "opentelemetry-instrumentation-openai==0.62.4", "openai==3.52.0"),
}
"""{version of the SDK: (Python, empty for ours; packages)}."""


@pytest.mark.parametrize("version", ENVIRONMENTS)
async def test_calls_are_trained_on_as_sampled_although_the_collector_is_killed(tmp_path: Path, version: str) -> None:
    python, *packages = ENVIRONMENTS[version]
    try:
        interpreter = other_python(python) if python else sys.executable
        agent = hooked(f"hook-{version}", [f"opentelemetry-sdk=={version}", *packages], interpreter)
    except AbsentError as absent:
        pytest.skip(str(absent))
    killed: list[int] = []

    def reply(request: Request, call_id: str) -> Message:
        if not killed and any(message.role == "tool" for message in request.messages):  # between the first call and the second
            killed.append(json.loads((tmp_path / "stack.json").read_text())["collector"]["pid"])
            os.kill(killed[0], signal.SIGKILL)
        return riddle(request, call_id)

    framework = BY_NAME["openai"]
    play = dataclasses.replace(framework.plays[0], joined=False)  # without an instrumentation of HTTP clients
    async with ground(tmp_path, rollouts=2, reply=reply) as on:
        (found,) = await played(on, framework, [play], Environment((str(agent), str(framework.folder / framework.program)), ""))
    assert found.problems == [] and killed
    assert found.verdicts == {"complete": 2} and found.exact == 6 and found.own_spans >= 6
