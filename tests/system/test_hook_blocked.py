"""A SIGTERM that comes between Python's last check for signals and a blocking call into C, where its handler waits for that call."""

from __future__ import annotations

import signal

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, Agent, sealed_completely

pytestmark = pytest.mark.full

MISSED = """
import asyncio, ctypes, functools, multiprocessing
from collections import deque
def terminated(block):  # no bytecode between the two calls, so no check for signals
    calls = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGTERM), block
    deque(map(functools.partial.__call__, calls), 0)
held = threading.Lock()
held.acquire()
def pause(): terminated(functools.partial(time.sleep, 120))
"""
SPAN = "tracer.start_span('work').end()\n"
BLOCKED = {
    "in a lock": "terminated(functools.partial(held.acquire, True, 120))",
    "in a semaphore": "terminated(functools.partial(multiprocessing.Semaphore(0).acquire, True, 120))",
    "in a sleep": "pause()",
    "after asyncio has had signals": (
        "async def main():\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)\n"
        "asyncio.run(main())\n"
        "pause()"
    ),
    "after a handler of its own": (
        "signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "pause()"
    ),
    "after its files were closed": (
        "def high(): return [number for number in os.listdir('/proc/self/fd') if int(number) >= 256]\n"  # as wakeup.py makes them
        "assert len(high()) == 2\n"
        "os.closerange(256, 1 << 16)\n"
        "while len(high()) < 2: pass\n"
        "pause()"
    ),
}


@pytest.mark.parametrize("blocked", BLOCKED)
def test_the_process_is_sealed_and_ends(receiver: OtlpReceiver, agent: Agent, blocked: str) -> None:
    status, _, err = agent.run(f"{MISSED}{SPAN}{BLOCKED[blocked]}\nsys.exit(7)\n")
    assert (status, err) == (-signal.SIGTERM, "")
    assert receiver.spans("work") and sealed_completely(receiver)


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_a_child_of_multiprocessing_ends_before_its_first_span(receiver: OtlpReceiver, agent: Agent, how: str) -> None:
    """As a worker of a pool does to which no task has come: the pool waits for its end."""
    code = f"""
if __name__ == '__main__':
    child = multiprocessing.get_context({how!r}).Process(target=pause)
    child.start()
    child.join()
    {SPAN}
    sys.exit(child.exitcode)
"""
    status, _, err = agent.run(MISSED + code)
    assert (status, err) == (256 - signal.SIGTERM, "")
    assert sealed_completely(receiver)


def test_a_fork_ends_after_its_first_span(receiver: OtlpReceiver, agent: Agent) -> None:
    code = f"{MISSED}{SPAN}child = os.fork()\nif child == 0:\n    {SPAN}    pause()\n    os._exit(7)\n"
    status, _, err = agent.run(code + "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))")
    assert (status, err) == (256 - signal.SIGTERM, "")
    assert len(receiver.spans("work")) == 2 and sealed_completely(receiver)


def test_a_handler_that_restores_the_default_action_and_goes_on_is_not_cut_short(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
    tracer.start_span('work').end()
    begun = []
    def stop(*_):
        begun.append(signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.signal(signal.SIGTERM, stop)
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(200): tracer.start_span('left to do').end(); time.sleep(0.005)
    sys.exit(5 if begun else 7)
    """
    status, _, err = agent.run(code)
    assert (status, err) == (5, "")
    assert len(receiver.spans("left to do")) == 200


def test_a_fork_made_outside_python_does_not_end_its_parent(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
    import ctypes
    tracer.start_span('work').end()
    trace.get_tracer_provider().force_flush()
    libc = ctypes.PyDLL(None)
    child = libc.fork()
    if child == 0:
        libc.kill(libc.getpid(), signal.SIGTERM)  # Python notes it, and the child ends before a handler runs
        libc._exit(3)
    ended = os.waitpid(child, 0)[1]
    time.sleep(1)
    sys.exit(os.waitstatus_to_exitcode(ended) + 2)
    """
    status, _, err = agent.run(code)
    assert (status, err) == (5, "")


def test_the_agent_sees_no_wakeup_descriptor_but_its_own(receiver: OtlpReceiver, agent: Agent) -> None:
    code = """
    import socket
    tracer.start_span('work').end()
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    seen = [signal.set_wakeup_fd(write.fileno())]
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGUSR1)
    seen += [read.recv(9)[0], signal.set_wakeup_fd(-1), signal.set_wakeup_fd(-1)]
    print(seen == [-1, signal.SIGUSR1, write.fileno(), -1])
    """
    assert agent.run(code) == (0, "True\n", "")


def test_a_process_without_spans_has_no_thread_of_ours(receiver: OtlpReceiver, agent: Agent) -> None:
    """Only a process of one thread may enter a user namespace, as sandboxes do."""
    environment = {**IDS, "OTEL_LOGS_EXPORTER": "none"}  # the SDK's processor of logs has a thread from the start
    assert agent.run("print(len(os.listdir('/proc/self/task')))", environment) == (0, "1\n", "")
