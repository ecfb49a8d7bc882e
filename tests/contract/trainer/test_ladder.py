"""How runners that do not end are ended. Each program is a process of its own, because it forks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.system.stack_process import ENVIRONMENT, alive, until

HEAD = """
import asyncio, logging, multiprocessing, os, signal, sys, threading
from agl_otel.errors import AgentError
from agl_otel.compat.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agl_otel.store import LightningStoreClient
logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
ready = multiprocessing.Event()
async def algorithm(store, stop):
    ready.wait()
def say_pid():
    os.write(1, f"pid {os.getpid()}\\n".encode())  # one write: with PYTHONUNBUFFERED, print makes four, which two processes mix
def stuck(*ignored):
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    say_pid()
    ready.set()
    while True:
        threading.Event().wait()
store = LightningStoreClient("127.0.0.1:1")
"""


def ran(tmp_path: Path, program: str) -> str:
    """What a program printed; its processes are gone."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)]
    assert pids and alive(pids) == []
    return done.stdout


def test_a_runner_that_ignores_everything_is_killed_and_named(tmp_path: Path) -> None:
    said = ran(
        tmp_path,
        """
        async def runner(store, number, stop):
            stuck(signal.SIGINT, signal.SIGTERM)
        strategy = ClientServerExecutionStrategy(graceful_timeout=0.1, terminate_timeout=0.1, managed_store=False)
        try:
            strategy.execute(algorithm, runner, store)
        except AgentError as error:
            print("raised", error)
        """,
    )
    assert re.findall(r"runner-0 \(process \d+\) has not ended within 0.1 s: (\w+)", said) == ["SIGINT", "SIGTERM", "SIGKILL"]
    assert "raised processes ended in an error: runner-0 with exit code -9" in said


@pytest.mark.parametrize("started", ["default_int_handler", "SIG_IGN"], ids=["in front", "in the background of a shell"])
def test_a_runner_that_ends_at_a_step_is_asked_no_further(tmp_path: Path, started: str) -> None:
    said = ran(
        tmp_path,
        f"signal.signal(signal.SIGINT, signal.{started})\n"
        + textwrap.dedent(
            """
        async def until_interrupted(store, number, stop):
            say_pid()
            ready.set()
            await asyncio.Event().wait()
        strategy = ClientServerExecutionStrategy(graceful_timeout=5.0, terminate_timeout=90.0, managed_store=False)
        strategy.execute(algorithm, until_interrupted, store)
        ready.clear()
        async def until_stopped(store, number, stop):
            say_pid()
            ready.set()
            stop.wait()
        ClientServerExecutionStrategy(graceful_timeout=90.0, managed_store=False).execute(algorithm, until_stopped, store)
        """
        ),
    )
    assert [line.rpartition(" ")[2] for line in said.splitlines() if "has not ended" in line] == ["SIGINT"]


@pytest.mark.parametrize("whole_group", [True, False], ids=["of a terminal", "sent to the parent"])
@pytest.mark.parametrize("runners", [1, 2])
def test_ctrl_c_ends_a_machine_of_runners_quietly_and_completely(tmp_path: Path, runners: int, whole_group: bool) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        HEAD
        + textwrap.dedent(
            f"""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        async def runner(store, number, stop):
            say_pid()
            while not stop.is_set():
                await asyncio.sleep(0.05)
        strategy = ClientServerExecutionStrategy(role="runner", n_runners={runners}, managed_store=False, graceful_timeout=90.0)
        strategy.execute(algorithm, runner, store)
        print("returned")
        """
        )
    )
    log = tmp_path / "log"
    with log.open("wb") as out:
        started = subprocess.Popen([sys.executable, str(script)], stdout=out, stderr=out, env=ENVIRONMENT, start_new_session=True)
        try:
            until(lambda: log.read_text().count("pid ") == runners or started.poll() is not None, "the runners run")
            (os.killpg if whole_group else os.kill)(started.pid, signal.SIGINT)
            assert started.wait(300) == 0, log.read_text()
        finally:
            started.kill()
            started.wait()
    said = log.read_text()
    assert "Traceback" not in said and said.splitlines()[-1] == "returned", said
    assert alive([int(pid) for pid in re.findall(r"pid (\d+)", said)]) == []


def test_an_algorithm_does_not_wait_for_runners_that_are_gone(tmp_path: Path) -> None:
    said = ran(
        tmp_path,
        """
        async def waits(store, stop):
            await asyncio.Event().wait()
        async def runner(store, number, stop):
            say_pid()
            os._exit(7)
        try:
            ClientServerExecutionStrategy(n_runners=2, managed_store=False).execute(waits, runner, store)
        except AgentError as error:
            print("raised", error)
        """,
    )
    assert "raised every runner process has ended in an error (exit codes [7, 7])" in said


def test_a_thread_that_does_not_end_is_left_behind_with_an_error(tmp_path: Path) -> None:
    said = ran(
        tmp_path,
        """
        async def runner(store, number, stop):
            say_pid()
            ready.set()
            threading.Event().wait()
        strategy = SharedMemoryExecutionStrategy(main_thread="algorithm", graceful_delay=0.1, join_timeout=0.1)
        strategy.execute(algorithm, runner, store)
        """,
    )
    assert "is abandoned" in said
