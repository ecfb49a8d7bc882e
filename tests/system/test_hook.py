"""`opentelemetry-instrument python agent.py` as users type it: a real process, and what a collector receives from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_otel.runner.environment import Addresses, telemetry_environment
from agl_otel_hook import conventions
from agl_otel_hook.records import folder_of, key_of, read
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.full
INSTRUMENT = Path(sys.executable).with_name("opentelemetry-instrument")
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
IDS = {
    conventions.ENV_ROLLOUT_ID: "ro-1",
    conventions.ENV_ATTEMPT_ID: "at-1",
    "TRACEPARENT": f"00-{TRACE_ID}-{SPAN_ID}-01",
    "OTEL_RESOURCE_ATTRIBUTES": "team=blue,agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1",
}
KEY = ("ro-1", "at-1")
HEAD = "import os, sys, signal, threading, time\nfrom opentelemetry import trace\ntracer = trace.get_tracer('agent')\n"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


class Agent:
    """Runner of agent code under the hook."""

    def __init__(self, receiver: OtlpReceiver, directory: Path, protocol: str = "http/protobuf") -> None:
        self._directory = directory
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "AGL_", "PYTHON"))},
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url if protocol != "grpc" else f"http://{receiver.grpc_address}",
        }

    def start(self, code: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        script = self._directory / "agent.py"
        script.write_text(HEAD + textwrap.dedent(code))
        return subprocess.Popen(
            [INSTRUMENT, sys.executable, str(script)],
            env={**self._environment, **(IDS if environment is None else environment)},
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
        with self.start(code, environment) as process:
            out, err = process.communicate(timeout=300)
            return process.returncode, out, err


@pytest.fixture
def agent(receiver: OtlpReceiver, tmp_path: Path) -> Agent:
    return Agent(receiver, tmp_path)


def sealed_completely(receiver: OtlpReceiver) -> bool:
    """Return whether each marker's largest seal counts exactly the received spans (none: a process terminated in its first span)."""
    counts, seals = Counter(span.marker for span in receiver.ours()), receiver.seals()
    return bool(counts) and seals == {marker: (counts[marker], 0) for marker in {*counts, *seals}}


def test_a_second_sigterm_does_not_interrupt_sealing(receiver: OtlpReceiver, agent: Agent) -> None:
    receiver.go.clear()
    terminate = "os.kill(os.getpid(), signal.SIGTERM)\n"  # the handler runs before the next line
    code = "tracer.start_span('work').end()\n" + 3 * terminate + "print('alive', flush=True)\ntime.sleep(120)\n"
    with agent.start(code) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        receiver.go.set()
        assert (said, process.wait(300)) == ("alive\n", -signal.SIGTERM)
    assert sealed_completely(receiver)


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


POOL = """
import multiprocessing as mp
def work(n): tracer.start_span('pooled').end()
if __name__ == '__main__':
    with mp.get_context({how!r}).Pool(2) as pool: pool.map(work, range(8))
"""
ENDS = {
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('the agent broke')", 1),
    "os._exit": ("os._exit(4)", 4),
    "sigterm": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
    "own sigterm handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
        5,
    ),
    "sigterm in asyncio": (
        "import asyncio\nasync def main():\n    os.kill(os.getpid(), signal.SIGTERM)\n    await asyncio.sleep(30)\nasyncio.run(main())",
        -signal.SIGTERM,
    ),
    "multiprocessing": (
        "import multiprocessing as mp\np = mp.Process(target=lambda: tracer.start_span('c').end())\np.start()\np.join()",
        0,
    ),
    **{f"pool of {how}": (POOL.format(how=how), 0) for how in ("fork", "forkserver")},  # `with` terminates its workers by SIGTERM
    "daemon thread": (
        "done = threading.Event()\n"
        "def work():\n    for _ in range(3000): tracer.start_span('t').end()\n    done.set(); time.sleep(60)\n"
        "threading.Thread(target=work, daemon=True).start(); done.wait()",
        0,
    ),
    "bursts in forks": (
        "for _ in range(4):\n    if os.fork() == 0:\n        for _ in range(2500): tracer.start_span('c').end()\n        os._exit(0)\n"
        "for _ in range(4): os.wait()",
        0,
    ),
}


def test_a_child_ends_by_a_sigterm_right_after_its_fork(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
    for _ in range(20):
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(7)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    """
    status, _, err = agent.run(code)
    assert status == 0, err


def test_a_sigterm_that_does_not_wake_the_main_thread_is_sent_again(receiver: OtlpReceiver, agent: Agent) -> None:
    """It arrives between the last check for signals and the blocking call: Python handles it only when that call returns."""
    code = """
    tracer.start_span('work').end()
    kill, sent = os.kill, []
    def missed(pid, number):
        sent.append(number)
        if len(sent) > 1:
            kill(pid, number)
    os.kill = missed
    kill(os.getpid(), signal.SIGTERM)
    time.sleep(120)
    sys.exit(7)
    """
    status, _, err = agent.run(code)
    assert status == -signal.SIGTERM, err
    assert sealed_completely(receiver)


def test_a_sigterm_during_a_fork_is_handled_after_it(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
    tracer.start_span('work').end()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # what it raised there would be lost
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    status, _, err = agent.run(code)
    assert status == 5, err
    assert "agl-otel:" not in err and sealed_completely(receiver)


def test_a_span_that_ends_while_the_process_ends_is_counted_and_exported(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
    from agl_otel_hook.export import ExportProcessor
    reached, export = threading.Event(), ExportProcessor.on_end
    def late(processor, span):
        if span.name == 'late':
            reached.set()
            time.sleep(0.2)
        export(processor, span)
    ExportProcessor.on_end = late
    threading.Thread(target=lambda: tracer.start_span('late').end(), daemon=True).start()
    reached.wait()
    """
    status, _, err = agent.run(code)
    assert (status, err) == (0, "")
    assert receiver.spans("late") and sealed_completely(receiver)


BUSY = {
    "without a pause": "while True: tracer.start_span('busy').end(); begun.set()",
    "with short spans": "while True:\n        with tracer.start_as_current_span('busy'): begun.set(); time.sleep(0.0005)",
}


@pytest.mark.parametrize("end", ["", "os._exit(0)"])
@pytest.mark.parametrize("busy", BUSY)
def test_a_daemon_thread_that_makes_spans_until_the_process_is_gone_makes_no_difference(
    receiver: OtlpReceiver, agent: Agent, tmp_path: Path, busy: str, end: str
) -> None:
    """What it had open when the process ended is abandoned, all else is counted and exported."""
    folder_of(tmp_path, *KEY).mkdir()
    code = f"""
def work():
    {BUSY[busy]}
begun = threading.Event()
threading.Thread(target=work, daemon=True).start()
begun.wait()
tracer.start_span('work').end()
{end}
"""
    status, _, err = agent.run(code, {**IDS, conventions.ENV_LEDGER: str(tmp_path)})
    assert (status, err) == (0, "")
    (process,) = read(folder_of(tmp_path, *KEY), key_of(*KEY))
    slot = process.slot
    assert slot is not None and slot.closed and (slot.begun - slot.ended, slot.dropped) == (slot.abandoned, 0)
    assert slot.abandoned <= 1 and len(receiver.ours()) == slot.ended


def test_what_the_main_thread_ends_after_a_sigterm_is_exported_or_missing(receiver: OtlpReceiver, agent: Agent, tmp_path: Path) -> None:
    folder_of(tmp_path, *KEY).mkdir()
    notes = tmp_path / "ended"
    code = f"""
with open({str(notes)!r}, 'w', buffering=1) as notes:
    for number in range(10**9):
        span = tracer.start_span('busy')
        if number == 9: os.kill(os.getpid(), signal.SIGTERM)
        span.end()
        print(format(span.get_span_context().span_id, '016x'), file=notes)
"""
    status, _, _ = agent.run(code, {**IDS, conventions.ENV_LEDGER: str(tmp_path)})
    assert status == -signal.SIGTERM
    (process,) = read(folder_of(tmp_path, *KEY), key_of(*KEY))
    ended, received = set(notes.read_text().split()), {span.span_id for span in receiver.ours()}
    assert len(ended) > 9 and process.slot is not None
    whole = process.slot.begun - process.slot.abandoned == process.slot.ended == len(received)
    assert not whole or ended <= received


LATE_ENDS = {
    "a global of the script": "left = Left()",
    "a global of a module": "import types\nsys.modules['holds'] = types.ModuleType('holds')\nsys.modules['holds'].left = Left()",
    "what a cycle holds": "left = Left(); left.itself = left",
    "an attribute of sys": "sys.left = Left()",
}


@pytest.mark.parametrize(
    ("where", "begins"),
    [*((where, False) for where in LATE_ENDS), ("a global of a module", True), ("what a cycle holds", True)],
)
def test_a_span_that_ends_at_interpreter_shutdown_is_abandoned(
    receiver: OtlpReceiver, agent: Agent, tmp_path: Path, where: str, begins: bool
) -> None:
    """No other thread runs that could export it or release a lock: nothing may block there."""
    folder_of(tmp_path, *KEY).mkdir()
    code = f"""
class Left:
    def __init__(self): self.span = tracer.start_span('left')
    def __del__(self):
        self.span.end()
        tracer.start_span('begun at the end').end() if {begins} else None
for _ in range(999 if {begins} else 1): tracer.start_span('work').end()
{LATE_ENDS[where]}
"""
    status, _, err = agent.run(code, {**IDS, conventions.ENV_LEDGER: str(tmp_path)})
    assert (status, err) == (0, "")
    (process,) = read(folder_of(tmp_path, *KEY), key_of(*KEY))
    slot = process.slot
    assert slot is not None and slot.marker == receiver.spans("work")[0].marker
    counted = slot.begun, slot.ended, slot.abandoned, slot.dropped, slot.closed
    assert counted == ((1001, 999, 1, 0, False) if begins else (2, 1, 1, 0, True))
    assert len(receiver.ours()) == slot.ended


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


def test_a_span_that_ends_while_the_last_seal_is_sent_is_counted(receiver: OtlpReceiver, agent: Agent) -> None:
    """As in a pool worker that is terminated while it imports the program; its spans are in no record."""
    code = """
    from agl_otel_hook.seal import Sealer
    span, seal = tracer.start_span('work'), Sealer.seal
    def slow(sealer, *keys, **how):
        if how.get('closing'):
            flush = sealer._flush
            sealer._flush = lambda seconds: ((span.end() if span.is_recording() else None), flush(seconds))[1]
        return seal(sealer, *keys, **how)
    Sealer.seal = slow
    """
    status, _, err = agent.run(code)
    assert (status, err) == (0, "")
    assert receiver.spans("work") and sealed_completely(receiver)


def test_a_span_that_is_open_during_an_exec_that_fails_stays_in_flight(receiver: OtlpReceiver, agent: Agent, tmp_path: Path) -> None:
    folder_of(tmp_path, *KEY).mkdir()
    code = """
    with tracer.start_as_current_span('work'):
        try: os.execv('/nowhere/at/all', ['all'])
        except FileNotFoundError: os.kill(os.getpid(), signal.SIGKILL)
    """
    status, _, _ = agent.run(code, {**IDS, conventions.ENV_LEDGER: str(tmp_path)})
    assert status == -signal.SIGKILL
    (process,) = read(folder_of(tmp_path, *KEY), key_of(*KEY))
    slot = process.slot
    assert slot is not None and (slot.begun, slot.ended, slot.abandoned, slot.closed) == (1, 0, 0, False)


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
        said = process.stdout.readline()
        receiver.go.set()
        assert (said, process.wait(300)) == ("[]\n", 0)
    (work,) = receiver.ours()
    assert [seal.marker for seal in receiver.spans(conventions.SPAN_SEAL) if conventions.SEAL_SPANS not in seal.attributes] == [work.marker]
    assert sealed_completely(receiver)


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_lost_however_the_process_ends(receiver: OtlpReceiver, agent: Agent, end: str) -> None:
    code, expected = ENDS[end]
    status, _, err = agent.run(f"tracer.start_span('work').end()\n{code}\n")
    assert status == expected, err
    assert "agl-otel:" not in err
    assert receiver.spans("work") and sealed_completely(receiver)


@pytest.mark.parametrize("child", ["os._exit(0)", "os.execv('/bin/true', ['true'])", "sys.exit(0)", "work.end(); os._exit(0)"])
def test_a_child_forked_by_a_library_writes_no_counts_of_its_parent(
    receiver: OtlpReceiver, agent: Agent, tmp_path: Path, child: str
) -> None:
    """Python does not know of such a fork. A parent killed in its span must not look complete because of how its child ended.

    The parent has ended no span yet, so that no other thread of it waits for the interpreter; otherwise the fork could wait for ever.
    """
    folder_of(tmp_path, *KEY).mkdir()
    code = f"""
    import ctypes
    work = tracer.start_span('work')
    if ctypes.PyDLL(None).fork() == 0:
        {child}
    os.wait()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert agent.run(code, {**IDS, conventions.ENV_LEDGER: str(tmp_path)})[0] == -signal.SIGKILL
    (process,) = read(folder_of(tmp_path, *KEY), key_of(*KEY))
    slot = process.slot
    assert slot is not None and (slot.begun, slot.ended, slot.abandoned, slot.closed) == (1, 0, 0, False)
    assert receiver.spans("work") == []


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_fork_counts_and_exports_after_the_environment_was_cleared(receiver: OtlpReceiver, tmp_path: Path, protocol: str) -> None:
    """Sandboxes clear the environment to hide keys from their workers."""
    folder_of(tmp_path, *KEY).mkdir()
    code = """
        tracer.start_span('parent').end()
        os.environ.clear()
        if os.fork() == 0:
            tracer.start_span('child').end()
            os._exit(len(os.environ))
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    status, _, err = Agent(receiver, tmp_path, protocol).run(code, {**IDS, conventions.ENV_LEDGER: str(tmp_path)})
    assert (status, err) == (0, "")
    (parent,), (child,) = receiver.spans("parent"), receiver.spans("child")
    slots = [process.slot for process in read(folder_of(tmp_path, *KEY), key_of(*KEY))]
    assert sorted((slot.marker, slot.begun, slot.ended, slot.dropped) for slot in slots if slot is not None) == sorted(
        (span.marker, 1, 1, 0) for span in (parent, child)
    )
    assert parent.marker != child.marker and child.key == KEY


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_spans_of_a_forked_child_have_their_own_marker(receiver: OtlpReceiver, tmp_path: Path, protocol: str) -> None:
    code = """
        with tracer.start_as_current_span('before'):
            trace.get_tracer_provider().force_flush()
            pid = os.fork()
            tracer.start_span('child' if pid == 0 else 'parent').end()
        if pid:
            os.waitpid(pid, 0)
    """
    status, _, err = Agent(receiver, tmp_path, protocol).run(code)
    assert status == 0, err
    (before,), (child,), (parent,) = (receiver.spans(name) for name in ("before", "child", "parent"))
    assert before.marker == parent.marker != child.marker
    assert child.key == KEY and child.parent_id == before.span_id
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


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, agl_otel_hook; print([m for m in ('chdb', 'aiohttp', 'numpy', 'grpc', 'pydantic') if m in sys.modules])"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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
