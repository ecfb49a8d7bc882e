"""Agents in environments of their own, where of ours only agl-otel-hook is installed: with old and new versions of OpenTelemetry."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from agl_otel_hook import conventions
from tests.environments import AbsentError, hooked, other_python
from tests.matrix.environments import Environment
from tests.matrix.frameworks import BY_NAME
from tests.matrix.play import ground, played
from tests.matrix.script import Message, Request, riddle
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, KEY, Agent, sealed_completely

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
OLDEST, MIDDLE, NEWEST = "1.28.0", "1.38.0", "1.45.2"
ENVIRONMENTS = {
    OLDEST: ("3.10", "opentelemetry-instrumentation-openai==0.33.12", "openai==1.109.1"),
    MIDDLE: ("", "opentelemetry-instrumentation-openai==0.61.0", "openai==2.9.0"),
    NEWEST: ("", "opentelemetry-instrumentation-openai==0.62.4", "openai==3.52.0"),
}
"""{version of the SDK: (Python, empty for ours; packages)}."""


def agents_python(version: str) -> Path:
    """The interpreter of an environment, which is made where it is missing."""
    python, *packages = ENVIRONMENTS[version]
    try:
        interpreter = other_python(python) if python else sys.executable
        return hooked(f"hook-{version}", [f"opentelemetry-sdk=={version}", *packages], interpreter)
    except AbsentError as absent:
        pytest.skip(str(absent))


@pytest.mark.parametrize("version", ENVIRONMENTS)
def test_ids_cannot_be_taken_and_log_records_arrive(receiver: OtlpReceiver, tmp_path: Path, version: str) -> None:
    code = f"""
        import logging
        with tracer.start_as_current_span('outer') as outer:
            outer.set_attribute({conventions.ROLLOUT_ID!r}, 'taken')
            logging.getLogger('agent').warning('said %s', 'this')
            for number in range(300): outer.set_attribute(str(number), number)
            with tracer.start_as_current_span('inner'): pass
    """
    settings = {"OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED": "true", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "100"}
    status, _, _ = Agent(receiver, tmp_path, python=str(agents_python(version))).run(code, {**IDS, **settings})
    outer, inner = receiver.spans("outer")[0], receiver.spans("inner")[0]
    assert (status, outer.key, inner.key, inner.parent_id) == (0, KEY, KEY, outer.span_id)
    assert outer.marker == inner.marker and sealed_completely(receiver)
    logs = [ExportLogsServiceRequest.FromString(body) for path, body, _ in receiver.bodies if path == "/v1/logs"]
    records = [record for request in logs for found in request.resource_logs for of in found.scope_logs for record in of.log_records]
    (said,) = [record for record in records if record.body.string_value == "said this"]  # the SDK logs what the limit drops
    assert (said.trace_id.hex(), said.span_id.hex()) == (outer.trace_id, outer.span_id)


@pytest.mark.parametrize("version", ENVIRONMENTS)
async def test_calls_are_trained_on_as_sampled_although_the_collector_is_killed(tmp_path: Path, version: str) -> None:
    agent = agents_python(version)
    killed: list[int] = []

    def reply(request: Request, call_id: str) -> Message:
        if not killed and any(message.role == "tool" for message in request.messages):  # between the first call and the second
            killed.append(json.loads((tmp_path / "stack.json").read_text())["collector"]["pid"])
            os.kill(killed[0], signal.SIGKILL)
        return riddle(request, call_id)

    protocol = "grpc" if version == MIDDLE else "http/protobuf"  # there is no exporter for gRPC: the hook uses HTTP
    framework = dataclasses.replace(BY_NAME["openai"], environment={"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    play = dataclasses.replace(framework.plays[0], joined=False)  # without an instrumentation of HTTP clients
    async with ground(tmp_path, rollouts=2, reply=reply) as on:
        (found,) = await played(on, framework, [play], Environment((str(agent), str(framework.folder / framework.program)), ""))
    assert found.problems == [] and killed
    assert found.verdicts == {"complete": 2} and found.exact == 6 and found.own_spans >= 6
