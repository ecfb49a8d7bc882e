"""How processes of a hooked agent end: by signals, forks, exec and interpreter shutdown. No span is lost, and none is counted twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from agl_otel_hook import conventions
from agl_otel_hook.records import folder_of, key_of, read
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, KEY, Agent, sealed_completely

pytestmark = pytest.mark.full


def test_a_second_sigterm_does_not_interrupt_sealing(receiver: OtlpReceiver, agent: Agent) -> None:
    receiver.go.clear()
    terminate = "os.kill(os.getpid(), signal.SIGTERM)\n"  # the handler runs before the next line
    code = "tracer.start_span('work').end()\n" + 3 * terminate + "print('alive', flush=True)\ntime.sleep(120)\n"
    with agent.start(code) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        receiver.go.set()
        assert (line, process.wait(300)) == ("alive\n", -signal.SIGTERM)
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
    "sigterm of its own, at its end": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "own sigterm handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
        5,
    ),
    "own sigterm handler that goes on to the one before": (
        "def bye(n, f):\n    if callable(before): before(n, f)\n    sys.exit(5)\n"
        "before = signal.signal(signal.SIGTERM, bye); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
        5,
    ),
    "own sigterm handler where there is none": (
        "if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL: signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
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
