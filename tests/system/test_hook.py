"""`opentelemetry-instrument python agent.py` as users type it: a real process, and what a collector receives from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, KEY, SPAN_ID, TRACE_ID, Agent, sealed_completely

pytestmark = pytest.mark.full


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_spans_of_a_plain_agent_have_ids_marker_and_parent_and_are_sealed(receiver: OtlpReceiver, tmp_path: Path, protocol: str) -> None:
    code = "with tracer.start_as_current_span('outer'):\n    with tracer.start_as_current_span('inner'): pass\n"
    status, _, err = Agent(receiver, tmp_path, protocol).run(code)
    assert (status, err) == (0, "")
    outer, inner = receiver.spans("outer")[0], receiver.spans("inner")[0]
    assert outer.key == inner.key == KEY and outer.marker == inner.marker
    assert (outer.trace_id, outer.parent_id, inner.parent_id) == (TRACE_ID, SPAN_ID, outer.span_id)
    assert outer.resource["team"] == "blue"
    assert sealed_completely(receiver)


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_export_imports_nothing(receiver: OtlpReceiver, tmp_path: Path, protocol: str, refuse: bool) -> None:
    """A fork during an import would wait for ever for the import lock, held by a thread of its parent, and lose its spans."""
    receiver.refuse = refuse
    code = """
        from opentelemetry import _logs
        before = set(sys.modules)
        tracer.start_span('work').end()
        _logs.get_logger('agent').emit(_logs.LogRecord(body='said'))
        trace.get_tracer_provider().force_flush()
        _logs.get_logger_provider().force_flush()
        print(sorted(set(sys.modules) - before))
    """
    status, out, _ = Agent(receiver, tmp_path, protocol).run(code, {**IDS, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"})
    assert (status, out) == (0, "[]\n")


def test_the_start_of_a_span_waits_for_nothing(receiver: OtlpReceiver, agent: Agent) -> None:
    """Its process has no ledger and is announced, to a collector that does not answer."""
    receiver.go.clear()
    code = """
    waits = []
    def watch(frame, event, called):
        if event == 'c_call' and called.__name__ in ('sleep', 'connect', 'sendall', 'recv_into', 'poll', 'select'):
            waits.append(called.__name__)
        elif event == 'call' and frame.f_code.co_qualname in ('Condition.wait', 'Thread.join'):
            callers = []
            while frame := frame.f_back: callers.append(frame.f_code.co_qualname)
            if 'Thread.start' not in callers: waits.append(callers)  # which waits for the new thread
    sys.setprofile(watch)
    span = tracer.start_span('work')
    sys.setprofile(None)
    print(waits, flush=True)
    span.end()
    """
    with agent.start(code) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        receiver.go.set()
        assert (line, process.wait(300)) == ("[]\n", 0)
    (work,) = receiver.ours()
    assert [seal.marker for seal in receiver.spans(conventions.SPAN_SEAL) if conventions.SEAL_SPANS not in seal.attributes] == [work.marker]
    assert sealed_completely(receiver)


def test_spans_of_a_thread_have_the_ids_and_the_parent_of_its_start(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
        with tracer.start_as_current_span('outer'):
            threads = [threading.Thread(target=lambda: tracer.start_span('thread').end()) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
    """
    assert agent.run(code)[0] == 0
    [outer] = receiver.spans("outer")
    assert [(span.key, span.parent_id) for span in receiver.spans("thread")] == [(KEY, outer.span_id)] * 4
    assert sealed_completely(receiver)


def test_nothing_is_added_without_ids(receiver: OtlpReceiver, agent: Agent) -> None:
    status, _, err = agent.run("tracer.start_span('work').end()\n", {})
    assert (status, err) == (0, "")
    assert [(span.name, span.attributes) for span in receiver.spans()] == [("work", {})]


def test_an_agent_succeeds_while_the_collector_is_unavailable(receiver: OtlpReceiver, agent: Agent) -> None:
    receiver.refuse = True
    status, out, err = agent.run("tracer.start_span('work').end(); print('done')\n", {**IDS, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"})
    assert (status, out) == (0, "done\n")
    assert "spans were given up" in err


def test_a_burst_is_exported_without_loss(receiver: OtlpReceiver, agent: Agent) -> None:
    assert agent.run("for _ in range(10_000): tracer.start_span('burst').end()\n")[0] == 0
    assert len(receiver.spans("burst")) == 10_000 and sealed_completely(receiver)


def test_a_long_conversation_does_not_evict_the_ids_of_its_span(receiver: OtlpReceiver, agent: Agent) -> None:
    code = "with tracer.start_as_current_span('long') as span:\n    for i in range(500): span.set_attribute(f'gen_ai.prompt.{i}', 'x')\n"
    assert agent.run(code)[0] == 0
    (span,) = receiver.spans("long")
    assert span.key == KEY and len(span.attributes) == 503


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_values_that_otlp_cannot_encode_are_exported_as_text_and_logged_once(receiver: OtlpReceiver, tmp_path: Path, protocol: str) -> None:
    code = """
        for name in ("first", "second", "cut \\ud83d"):
            tracer.start_span(name, attributes={"half": "\\ud83d", "huge": 2**64, "good": 1}).end()
    """
    status, _, err = Agent(receiver, tmp_path, protocol).run(code)
    assert status == 0 and err.count("\n") == 1 and "is exported as text" in err, err
    spans = receiver.ours()
    assert [span.name for span in spans] == ["first", "second", "cut \N{REPLACEMENT CHARACTER}"]
    for span in spans:
        assert [span.attributes.get(name) for name in ("half", "huge", "good")] == ["\N{REPLACEMENT CHARACTER}", str(2**64), 1]
    assert sealed_completely(receiver)


def test_baggage_and_trace_context_propagate_whatever_otel_propagators_has(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
        import http.server, httpx2
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                print(self.headers['baggage'], self.headers['traceparent'][3:35])
                self.send_response(204); self.end_headers()
            def log_message(self, *_): pass
        server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
        threading.Thread(target=server.handle_request).start()
        httpx2.get(f'http://127.0.0.1:{server.server_port}/', trust_env=False)
    """
    status, out, err = agent.run(code, {**IDS, "OTEL_PROPAGATORS": "tracecontext"})
    assert status == 0, err
    (marker,) = {span.marker for span in receiver.ours()}
    assert out.strip() == f"agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1,agentlightning.process={marker} {TRACE_ID}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, agl_otel_hook; print([m for m in ('chdb', 'aiohttp', 'numpy', 'grpc', 'pydantic') if m in sys.modules])"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
