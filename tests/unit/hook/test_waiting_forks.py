"""Imports work in a fork, whatever the threads of its parent were doing."""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any

from agl_otel_hook import waiting


def test_a_fork_imports_while_a_thread_of_its_parent_holds_wrapts_lock() -> None:
    assert waiting.LIBRARIES  # its import has registered the fork handler
    importer: Any = import_module("wrapt.importer")
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with importer._post_import_hooks_lock:
            held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if (pid := os.fork()) == 0:
        os._exit(0 if importer._post_import_hooks_lock.acquire(blocking=False) else 1)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
