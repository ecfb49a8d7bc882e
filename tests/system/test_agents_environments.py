"""Agents in environments of their own, where of ours only agl-otel-hook is installed, or nothing: with old and new OpenTelemetry."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from agl_otel.runner.injection import injection
from agl_otel.spans.conversations import read_call
from agl_otel_hook import conventions
from tests.environments import AbsentError, hooked, other_python, unhooked
from tests.matrix.environments import Environment
from tests.matrix.frameworks import BY_NAME
from tests.matrix.play import ground, played
from tests.matrix.script import Message, Request, riddle
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, KEY, SPAN_ID, TRACE_ID, Agent, sealed_completely

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
    # The oldest instrumentation has no span that is current while the call is made, and no response id.
    play = dataclasses.replace(framework.plays[0], joined="time" if version == OLDEST else "traceparent")
    async with ground(tmp_path, rollouts=2, reply=reply) as on:
        (found,) = await played(on, framework, [play], Environment((str(agent), str(framework.folder / framework.program)), ""))
    assert found.problems == [] and killed
    assert found.verdicts == {"complete": 2} and found.exact == 6 and found.own_spans >= 6


def foreign_python(name: str, *more: str) -> Path:
    """The interpreter of an environment that has nothing of ours."""
    try:
        return unhooked(name, *more)
    except AbsentError as absent:
        pytest.skip(str(absent))


def foreign_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "AGL_", "PYTHON"))}


@pytest.mark.parametrize("name", ["sdk and instrumentation", "nothing"])
async def test_an_agent_below_a_shell_is_recorded_with_nothing_of_ours_installed(tmp_path: Path, name: str) -> None:
    agent, framework = foreign_python(name), BY_NAME["openai"]
    framework = dataclasses.replace(framework, environment={"AGL_HOOK": "inject"} if name == "nothing" else {})
    command = ("sh", "-c", f'{agent} {framework.folder / framework.program} "$@"; exit $?', "sh")
    async with ground(tmp_path, rollouts=2) as on:
        (found,) = await played(on, framework, framework.plays[:1], Environment(command, ""))
    assert found.problems == []
    assert (found.verdicts, found.exact, found.joined) == ({"complete": 2}, 6, {"traceparent": 6})


OFFICIAL = {
    "heeds the opt-in": ("openai==2.9.0", "opentelemetry-instrumentation-openai-v2==2.4b0", "opentelemetry-util-genai<1"),
    "has no other conventions": ("openai==3.52.0", "opentelemetry-instrumentation-genai-openai==1.3b0"),
}


@pytest.mark.parametrize("name", OFFICIAL)
async def test_the_official_instrumentations_write_the_latest_conventions(tmp_path: Path, name: str) -> None:
    packages = ("opentelemetry-sdk==1.45.2", *OFFICIAL[name])
    try:
        agent = str(hooked("official", packages, sys.executable))
    except AbsentError as absent:
        pytest.skip(str(absent))
    framework = dataclasses.replace(BY_NAME["openai"], environment={"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_only"})
    async with ground(tmp_path, rollouts=1) as on:
        (found,) = await played(on, framework, framework.plays[:1], Environment((agent, str(framework.folder / framework.program)), ""))
        rows = await on.store.reader.query("SELECT DISTINCT RolloutId FROM otel_traces WHERE RolloutId != ''")
        spans = await on.store.spans([row["RolloutId"] for row in rows])
    assert found.problems == [] and found.exact == found.calls == 3 and found.joined == {"traceparent": 3}
    own = [span for span in spans if span.name.startswith("chat ")]
    said = [read_call(span) for span in own]
    assert len(own) == 3 and all("gen_ai.input.messages" in span.attributes for span in own)
    assert all(call is not None and call.conversation.prompt and call.conversation.reply for call in said)


@pytest.mark.parametrize("command", ["python agent.py", "opentelemetry-instrument python agent.py"])
def test_spans_of_its_own_are_counted_and_passed_on_with_model_calls(receiver: OtlpReceiver, tmp_path: Path, command: str) -> None:
    wrapped = command.startswith("opentelemetry")
    python = foreign_python("sdk and instrumentation" if wrapped else "the oldest sdk")
    (tmp_path / "agent.py").write_text(ASKS)
    environment = {
        **foreign_environment(),
        **IDS,
        **injection({}, [], inject=False),
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url,
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(["sh", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    asking = receiver.spans("asking")[0]
    below = receiver.spans("openai.chat")[0] if wrapped else asking
    assert (asking.key, asking.parent_id, done.stderr) == (KEY, SPAN_ID, "") and sealed_completely(receiver)
    assert done.stdout.strip() == f"00-{TRACE_ID}-{below.span_id}-01"


ASKS = """
import openai
from opentelemetry import trace

with trace.get_tracer("agent").start_as_current_span("asking"):
    try:
        openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    except openai.APIConnectionError as error:
        print(error.request.headers["traceparent"])
"""


def test_other_peoples_tests_and_their_coverage_do_not_change(tmp_path: Path) -> None:
    python = foreign_python("sdk and instrumentation", "pytest", "coverage")
    (tmp_path / "sizes.py").write_text(THEIR_CODE)
    (tmp_path / "test_sizes.py").write_text(THEIR_TESTS)

    def results(environment: dict[str, str]) -> tuple[str, list[str], str]:
        """Whether the hook was loaded, how many tests passed, what coverage reports."""
        ran = subprocess.run(
            [str(python), "-m", "coverage", "run", "--branch", "--source=.", "-m", "pytest", "-s", "-p", "no:cacheprovider"],
            env=foreign_environment() | environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        report = subprocess.run(
            [str(python), "-m", "coverage", "report"],
            env=foreign_environment() | environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        (hook,) = re.findall(r"hook: (\w+)", ran.stdout)
        return hook, [*re.findall(r"\d+ (?:passed|failed|error)\w*", ran.stdout), ran.stderr], report.stdout + report.stderr

    _, counts, coverage = results({})
    assert counts == ["1 failed", "2 passed", ""]
    assert results(IDS | injection({}, [], inject=False)) == ("False", counts, coverage)
    assert results(IDS | injection({"AGL_HOOK_SKIP": ""}, [], inject=False)) == ("True", counts, coverage)


THEIR_CODE = """
import openai


def size(number):
    if number > 9:
        return "large"
    return "small"
"""
THEIR_TESTS = """
import sys
import textwrap

from sizes import size
from opentelemetry import trace


def test_small():
    print("hook:", "agl_otel_hook.hook" in sys.modules)
    assert size(1) == "small"


def test_wrong():
    assert size(2) == "large"


def test_spans():
    with trace.get_tracer("theirs").start_as_current_span("span"):
        pass
"""


def test_threads_that_import_at_once_do_not_wait_for_each_other_for_ever() -> None:
    """A finder is called with the lock of all imports held: one that imports waits for a thread that waits for that lock."""
    code = """
        import threading
        go = threading.Event()
        def first(): go.wait(); import openai
        def second(): go.wait(); import asyncio, urllib.request, http.client, concurrent.futures
        threads = [threading.Thread(target=each) for each in (first, second)]
        for each in threads: each.start()
        go.set()
        for each in threads: each.join()
        import sys
        print('agl_otel_hook.hook' in sys.modules, hasattr(sys.modules['openai'].resources.chat.Completions.create, '__wrapped__'))
    """
    environment = {**foreign_environment(), **IDS, **injection({}, [], inject=False), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    command = [str(foreign_python("sdk and instrumentation")), "-c", textwrap.dedent(code)]
    for _ in range(5):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert (done.stdout, done.stderr) == ("True True\n", "")
