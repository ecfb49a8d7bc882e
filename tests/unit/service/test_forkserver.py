"""Services in forks of one process: output, exit statuses, the end of the server and of the client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.errors import UnavailableError
from agl_otel.service import forkserver
from agl_otel.service.forkserver import ForkServer
from agl_otel.service.processes import is_alive

pytestmark = pytest.mark.skipif(not forkserver.CAN_FORK, reason="services are forked on Linux only")
PROGRAM = """
import os, random, signal, sys, threading
started_in = os.getpid()
def main():
    print(started_in, os.getppid(), os.getsid(0) == os.getpid(), os.environ["AGL_PLACE"], random.random(), sys.argv, sep="|", flush=True)
    if os.environ["AGL_PLACE"] == "waits":
        signal.pause()
    os.umask(0o022)
    open("made", "w").close()
    return 7
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def server_of(place: Path, kind: str, *modules: str) -> ForkServer:
    return ForkServer(modules or ["program"], environment={"AGL_PLACE": kind}, log=place / "forks.log")


def lines_of(log: Path) -> list[list[str]]:
    """Return the lines that the program has printed, each split."""
    return [line.split("|") for line in log.read_text().splitlines()] if log.exists() else []


async def printed(log: Path, count: int = 1) -> list[list[str]]:
    """Wait until so many lines are printed."""
    while len(found := lines_of(log)) < count:  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    return found


async def test_forks_run_main_in_sessions_of_their_own_and_report_their_status(place: Path) -> None:
    server = server_of(place, "ends")
    one, two = [await server.fork("program", name, log=place / f"{name}.log") for name in ("one", "two")]
    assert [await one.wait(), await two.wait()] == [7, 7] == [one.returncode, two.returncode]
    (first,), (second,) = await printed(place / "one.log"), await printed(place / "two.log")
    assert first[:2] == second[:2] == [first[0], first[0]], "both are forks of the process that has imported the module"
    assert first[2:4] == ["True", "ends"] and (first[5], second[5]) == ("['program', 'one']", "['program', 'two']")
    assert first[4] != second[4], "random numbers differ"
    assert (place / "one.log").stat().st_mode & 0o077 == 0
    await server.close()
    assert not is_alive(int(first[0])) and (place / "forks.log").read_text() == ""


async def test_forks_end_with_their_killed_server_and_the_next_fork_starts_another(place: Path) -> None:
    server = server_of(place, "waits")
    fork = await server.fork("program", log=place / "log")
    ((killed, *_),) = await printed(place / "log")
    os.kill(int(killed), signal.SIGKILL)
    assert await fork.wait() == -signal.SIGTERM
    assert not is_alive(fork.pid)
    again = await server.fork("program", log=place / "log")
    assert (await printed(place / "log", 2))[1][0] != killed
    await server.close()
    assert again.returncode == -signal.SIGTERM and not is_alive(again.pid)


async def test_a_module_that_cannot_be_imported_is_an_error_that_names_the_log(place: Path) -> None:
    server = server_of(place, "ends", "program", "no_such_module")
    with pytest.raises(UnavailableError, match=r"(?s)ended with exit code 1; its log is .*forks\.log\. .*no_such_module"):
        await server.fork("program", log=place / "log")
    assert "no_such_module" in (place / "forks.log").read_text()
    await server.close()


async def test_a_server_that_was_begun_ahead_forks_what_is_asked_for(place: Path) -> None:
    server = server_of(place, "ends")
    await server.begin()
    assert (place / "forks.log").exists()
    await server.begin()
    fork = await server.fork("program", "one", log=place / "log")
    assert await fork.wait() == 7 and len(await printed(place / "log")) == 1
    await server.close()


async def test_what_is_printed_by_an_import_is_no_report(place: Path) -> None:
    (place / "loud.py").write_text("print('hello')")
    server = server_of(place, "ends", "loud", "program")
    fork = await server.fork("program", "one", log=place / "log")
    assert await fork.wait() == 7 and (place / "forks.log").read_text() == "hello\n"
    await server.close()


async def test_a_server_that_imports_for_long_is_given_up_and_closed_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "slow.py").write_text("import time; time.sleep(300)")
    monkeypatch.setattr(forkserver, "FORK_SECONDS", 0.2)
    server = server_of(place, "ends", "slow")
    with pytest.raises(UnavailableError, match=r"did not begin within 0 s; its log is .*forks\.log"):
        await server.fork("slow", log=place / "log")
    await server.begin()
    await asyncio.wait_for(server.close(), 60)


async def test_the_end_of_a_server_is_told_before_that_of_its_forks(place: Path) -> None:
    server = server_of(place, "waits")
    told = list[tuple[str, int | None]]()
    fork = await server.fork("program", log=place / "log")
    server.on_lost = lambda error: told.append((str(error), fork.returncode))
    ((killed, *_),) = await printed(place / "log")
    os.kill(int(killed), signal.SIGKILL)
    await fork.wait()
    ((why, code),) = told
    assert code is None and "the process of which they are forks was killed by SIGKILL" in why and "forks.log" in why
    again = await server.fork("program", log=place / "log")
    await server.close()
    assert again.returncode is not None and len(told) == 1, "nothing is lost by close"


async def test_a_server_without_use_is_closed_at_once(place: Path) -> None:
    await server_of(place, "ends").close()
    assert not (place / "forks.log").exists()


PREFORKED = """
import asyncio, os, sys
from pathlib import Path
from agl_otel.service.forkserver import ForkServer

ends, used, killed = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
server = ForkServer(["program"], environment={"AGL_PLACE": ends}, log=Path("forks.log"))
server.prefork(2)
async def main():
    if killed:
        os.kill(server._waiting[0].pid, 9)
    forks = [await server.fork("program", log=Path(f"log{number}")) for number in range(used)]
    if ends == "ends":
        await asyncio.gather(*(fork.wait() for fork in forks))
    await server.close()
    print(os.getpid(), *(fork.returncode for fork in forks))
asyncio.run(main())
"""


def preforked(place: Path, *arguments: str) -> tuple[int, list[int], list[list[str]]]:
    """Run the client; return its process id, the exit statuses of its forks, and what they have printed."""
    (place / "client.py").write_text(PREFORKED)
    done = subprocess.run([sys.executable, "client.py", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    pid, *statuses = map(int, done.stdout.split())
    return pid, statuses, [line for log in sorted(place.glob("log*")) for line in lines_of(log)]


def test_preforked_processes_have_what_their_parent_has_imported_and_later_ones_come_from_a_server(place: Path) -> None:
    client, statuses, lines = preforked(place, "ends", "3")
    assert statuses == [7, 7, 7]
    parents = [(int(imported_in), int(parent)) for imported_in, parent, *_ in lines]
    assert [parent == client == imported_in for imported_in, parent in parents] == [True, True, False]
    assert all(line[2:4] == ["True", "ends"] for line in lines)
    assert not any(is_alive(parent) for _, parent in parents)


def test_preforked_processes_end_with_their_server_used_or_not(place: Path) -> None:
    assert preforked(place, "waits", "1")[1] == [-signal.SIGTERM]
    assert preforked(place, "waits", "0")[1] == []


def test_a_preforked_process_that_was_killed_is_reported(place: Path) -> None:
    assert preforked(place, "ends", "1", "killed")[1] == [-signal.SIGKILL]
