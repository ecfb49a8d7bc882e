from __future__ import annotations

import asyncio
import signal
import sys

from agl_otel.runner import groups


async def started(code: str, stdin: int | None = None) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", code, stdin=stdin, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_a_group_is_ended_by_sigterm() -> None:
    process = await started("import time; print('ready', flush=True); time.sleep(60)")
    await groups.end_group(process, 10.0)
    assert process.returncode == -signal.SIGTERM
    assert not groups.is_alive(process.pid)


async def test_a_group_that_ignores_sigterm_is_killed_with_its_children() -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = await started(code)
    await groups.end_group(process, 0.1)
    assert process.returncode == -signal.SIGKILL
    assert not groups.is_alive(process.pid)


async def test_processes_that_outlive_the_groups_leader_are_ended() -> None:
    code = "import os, time\nif os.fork(): print('ready', flush=True); os._exit(0)\nos.close(1); time.sleep(60)\n"
    process = await started(code)
    assert await process.wait() == 0
    assert groups.is_alive(process.pid)
    await groups.end_group(process, 10.0)
    assert not groups.is_alive(process.pid)


async def test_all_groups_can_be_ended_at_once() -> None:
    process = await started("import time; print('ready', flush=True); time.sleep(60)")
    groups.register(process.pid)
    groups.kill_all()
    assert await process.wait() == -signal.SIGKILL
    await groups.end_group(process, 1.0)


async def test_a_detached_process_is_killed_only_after_its_time_to_end() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (sys.stdin.read(), sys.exit(7)))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    process = await started(code, stdin=asyncio.subprocess.PIPE)
    loop, searches = asyncio.get_running_loop(), 0

    def find() -> set[int]:
        nonlocal searches
        searches += 1
        if searches == 3 and process.stdin is not None:
            loop.call_soon_threadsafe(process.stdin.close)
        return {process.pid} if groups.is_alive(process.pid) else set()

    await groups.end_detached(find, 300.0)
    assert await process.wait() == 7


async def test_a_detached_process_that_ignores_sigterm_is_killed() -> None:
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nwhile True: signal.pause()\n"
    process = await started(code)
    await groups.end_detached(lambda: {process.pid} if groups.is_alive(process.pid) else set(), 0.0)
    assert await process.wait() == -signal.SIGKILL
