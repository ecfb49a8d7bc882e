"""Hooked agents with providers, distributions, configuration files and limits of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from agl_otel.runner.environment import Addresses, telemetry_environment
from agl_otel_hook import conventions
from agl_otel_hook.records import folder_of, key_of, read
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, KEY, Agent, sealed_completely

pytestmark = pytest.mark.full

CONFIGURATOR = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
class Configurator:
    def configure(self, **_):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        provider = TracerProvider(); provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
"""


def test_an_installed_distribution_keeps_its_provider_and_loses_nothing(receiver: OtlpReceiver, agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "their_distro.py").write_text(CONFIGURATOR)
    info = tmp_path / "their_distro-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-distro\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opentelemetry_configurator]\ntheirs = their_distro:Configurator\n")
    code = "print(type(trace.get_tracer_provider()._active_span_processor._span_processors[0]).__name__)\n"
    code += "for _ in range(5000): tracer.start_span('burst').end()\n"
    status, out, err = agent.run(code, {**IDS, "PYTHONPATH": str(tmp_path)})
    assert (status, out, err) == (0, "BatchSpanProcessor\n", "")
    assert [span.key for span in receiver.spans("burst")] == [KEY] * 5000 and sealed_completely(receiver)


OWN = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
own = TracerProvider()
trace.set_tracer_provider(own)
trace.set_tracer_provider(own)
"""
OWN_EXPORTERS = {
    "to the stack": "from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Exporter",
    "elsewhere": "Exporter = ConsoleSpanExporter",
}


@pytest.mark.parametrize("end", ["os._exit(0)", "own.shutdown(); os._exit(0)", "sys.exit(0)", "os.fork() or os._exit(0); os.wait()"])
@pytest.mark.parametrize("exporter", OWN_EXPORTERS)
def test_spans_of_an_additional_provider_of_the_agent_are_counted_and_exported(
    receiver: OtlpReceiver, agent: Agent, exporter: str, end: str
) -> None:
    exporting = f"{OWN_EXPORTERS[exporter]}\nown.add_span_processor(BatchSpanProcessor(Exporter()))\n"
    spans = "for _ in range(5): own.get_tracer('own').start_span('own').end()\ntracer.start_span('ours').end()\n"
    status, _, err = agent.run(f"{OWN}{exporting}{spans}{end}\n")
    assert (status, err) == (0, 2 * "Overriding of current TracerProvider is not allowed\n")
    distinct = {span.span_id: span for span in receiver.ours()}  # an own exporter to the stack sends them a second time
    assert sorted(span.name for span in distinct.values()) == ["ours", *5 * ["own"]]
    (marker,) = {span.marker for span in distinct.values()}
    assert receiver.seals() == {marker: (6, 0)} and {span.key for span in distinct.values()} == {KEY}


FILE = """
file_format: "1.0"
resource: {attributes: [{name: service.name, value: declared}]}
attribute_limits: {attribute_value_length_limit: 3}
tracer_provider:
  processors: [{simple: {exporter: {console: {}}}}]
  sampler: {always_off: {}}
"""
DISTRIBUTION = """
from opentelemetry.instrumentation.distro import BaseDistro
from opentelemetry.sdk._configuration import _OTelSDKConfigurator

class Distribution(BaseDistro):
    def _configure(self, **kwargs): ...

class Configurator(_OTelSDKConfigurator): ...
"""
SPEAKS = "with tracer.start_as_current_span('one', attributes={'said': 'hello'} | {f'a{n}': n for n in range(200)}): pass"


def with_file(directory: Path, text: str = FILE, *, package: bool = True, distribution: bool = False) -> dict[str, str]:
    """Return the environment that a runner passes to an agent whose user configures telemetry by a file."""
    (directory / "otel.yaml").write_text(text)
    path = directory / "path"
    path.mkdir()
    if not package:
        (path / "opentelemetry" / "configuration").mkdir(parents=True)
        (path / "opentelemetry" / "configuration" / "__init__.py").write_text("raise ImportError('not here')")
    if distribution:
        (path / "distribution.py").write_text(DISTRIBUTION)
        info = path / "distribution-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distribution\nVersion: 1\n")
        points = {"opentelemetry_distro": "distribution:Distribution", "opentelemetry_configurator": "distribution:Configurator"}
        (info / "entry_points.txt").write_text("".join(f"[{group}]\nthis = {value}\n" for group, value in points.items()))
    given = {**IDS, "PYTHONPATH": str(path), "OTEL_CONFIG_FILE": str(directory / "otel.yaml")}
    sent = telemetry_environment(given, Addresses("", ""))
    return {name: value for name, value in sent.items() if name in {*given, "OTEL_PYTHON_CONFIGURATOR"}}


@pytest.mark.parametrize("distribution", [False, True])
@pytest.mark.parametrize("package", [False, True])
def test_telemetry_configured_by_a_file_is_exported_to_the_stack_too(
    agent: Agent, receiver: OtlpReceiver, tmp_path: Path, package: bool, distribution: bool
) -> None:
    status, out, err = agent.run(SPEAKS, with_file(tmp_path, package=package, distribution=distribution))
    assert status == 0, err
    (span,) = receiver.ours()
    assert (span.name, span.attributes[conventions.ROLLOUT_ID], span.attributes["said"]) == ("one", "ro-1", "hello"), (
        "whole, whatever the file says"
    )
    assert len(span.attributes) > 200 and sealed_completely(receiver)
    assert ('"name": "one"' in out, "opentelemetry-configuration" in err) == (package, not package), "and the file's own exporter is served"


def test_a_provider_configured_by_a_file_before_the_hook_exports_to_the_stack(agent: Agent, receiver: OtlpReceiver, tmp_path: Path) -> None:
    environment = with_file(tmp_path, FILE.replace("attribute_limits: {attribute_value_length_limit: 3}", ""), distribution=True)
    del environment["OTEL_PYTHON_CONFIGURATOR"]  # not started by a runner: the distribution applies the file
    status, out, err = agent.run(SPEAKS, environment)
    assert status == 0 and '"name": "one"' in out, err
    assert [span.name for span in receiver.ours()] == ["one"] and sealed_completely(receiver)


@pytest.mark.parametrize("text", ['file_format: "1.0"\ndisabled: true\n', 'file_format: "1.0"\n', "{ no yaml"])
def test_a_file_without_tracing_is_skipped_and_named(agent: Agent, receiver: OtlpReceiver, tmp_path: Path, text: str) -> None:
    code = SPEAKS + "\nprint(os.environ['OTEL_CONFIG_FILE'])"
    status, out, err = agent.run(code, with_file(tmp_path, text))
    assert status == 0 and out.strip().endswith("otel.yaml"), "the agent's own code may read it"
    assert [span.name for span in receiver.ours()] == ["one"] and sealed_completely(receiver)
    assert "OTEL_CONFIG_FILE" in err and "left out" in err


def test_an_agent_that_applies_the_file_itself_is_traced(agent: Agent, receiver: OtlpReceiver, tmp_path: Path) -> None:
    code = """
        from opentelemetry.configuration import configure_sdk, load_config_file
        configure_sdk(load_config_file(os.environ["OTEL_CONFIG_FILE"]))
        with trace.get_tracer("own").start_as_current_span("own"): pass
    """
    status, _, err = agent.run(code, with_file(tmp_path))
    assert status == 0, err
    assert [span.name for span in receiver.ours()] == ["own"] and sealed_completely(receiver)


LIMITS = {
    "more than our limit": {},
    "a limit of the agent's on attributes": {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "128"},
    "on all attributes": {"OTEL_ATTRIBUTE_COUNT_LIMIT": "1", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1"},
    "on values": {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "2"},
    "on values of spans": {"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "3"},
}


@pytest.mark.parametrize("flush", ["", "trace.get_tracer_provider().force_flush()"])
@pytest.mark.parametrize("limits", LIMITS)
def test_a_killed_process_with_limits_on_attributes_has_abandoned_nothing(
    receiver: OtlpReceiver, agent: Agent, tmp_path: Path, limits: str, flush: str
) -> None:
    """What it has exported has its ids, what it has not is missing."""
    folder_of(tmp_path, *KEY).mkdir()
    code = f"""
with tracer.start_as_current_span('many') as span:
    for number in range(5000): span.set_attribute(f'number {{number}}', 'some text')
{flush}
os.kill(os.getpid(), signal.SIGKILL)
"""
    status, _, _ = agent.run(code, {**IDS, **LIMITS[limits], conventions.ENV_LEDGER: str(tmp_path)})
    assert status == -signal.SIGKILL
    (process,) = read(folder_of(tmp_path, *KEY), key_of(*KEY))
    slot = process.slot
    assert slot is not None and (slot.begun, slot.ended, slot.abandoned, slot.dropped) == (1, 1, 0, 0)
    assert [(span.key, span.marker) for span in receiver.spans("many")] == ([(KEY, slot.marker)] if flush else [])


@pytest.mark.parametrize("limits", [limits for limits in LIMITS if LIMITS[limits]])
def test_seals_have_their_ids_and_counts_whatever_the_limits_on_attributes(receiver: OtlpReceiver, agent: Agent, limits: str) -> None:
    status, _, err = agent.run("tracer.start_span('work').end()", {**IDS, **LIMITS[limits]})
    assert status == 0, err
    assert [span.key for span in receiver.spans("work")] == [KEY] and sealed_completely(receiver)
