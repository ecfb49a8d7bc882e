"""A private stack of a store: a supervisor process (agl_otel/stack/embedded.py) that starts on first use and ends with this process.

Its queue runs first; the other services start when they are needed, which the supervisor is told by a line on its standard input. It ends
with that input, so also when this process is killed, but not before the last one that uses the same data directory. Several can run side
by side: all ports are chosen freely.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agl_otel.errors import SettingsError, UnavailableError
from agl_otel.service.private import make_folder, open_file, original_umask
from agl_otel.service.processes import how_ended
from agl_otel.settings import Settings, without_settings

SHARED_LINE: Final = b'{"shared": true}\n'
"""What the supervisor prints when it goes on for others that use the stack."""
SUPERVISOR: Final = "agl_otel.stack.embedded"
LOG: Final = "embedded.log"
LOG_TAIL: Final = 2000
STOP_SECONDS: Final = 60.0  # includes the time for the collector to flush its log


class EmbeddedStack:
    """The stack of `data_dir`; None: a temporary folder that is removed at the end. `services` are names of stack/services.py.

    `settings` override fields of the private stack's Settings (`Settings.private`).
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        services: Sequence[str] = ("queue", "collector"),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.token = Settings.load().token.get_secret_value()
        self.settings: dict[str, Any] = dict(settings or {})
        self._data_dir = data_dir
        self._services = tuple(services)
        self._lock = threading.Lock()
        self._queue_address = self._address = ""
        self.directory = data_dir
        """The data directory; None before the first use of a temporary one."""
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[..., EmbeddedStack] | None = None

    def queue_address(self) -> str:
        """Return the queue's address; the first call starts the queue and waits until it is healthy. Raises UnavailableError."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._queue_address

    def check(self) -> None:
        """Raise UnavailableError if the stack has ended by itself."""
        process = self._process
        if process is not None and (code := process.poll()) is not None and self._stop is not None:
            raise UnavailableError(f"the private stack of this store {how_ended(code)}: make a new store")

    def address(self) -> str:
        """Return the queue's address when all services are healthy; the first call starts them. Raises UnavailableError."""
        self.queue_address()
        with self._lock:
            if not self._address:
                self._address = self._ask()
            return self._address

    @property
    def running(self) -> bool:
        """Whether the stack has been started."""
        return self._process is not None

    def configure(self, *, services: Sequence[str], **settings: Any) -> None:
        """Set the services to run, and settings, before the first use."""
        self._services = tuple(services)
        self.settings.update(settings)

    def stop(self) -> None:
        """Stop the stack and wait for its end, unless others use it; a later use starts it again."""
        with self._lock:
            if self._stop is not None:
                self._stop()
            self._stop, self._process, self._queue_address, self._address = None, None, "", ""

    def _start(self) -> None:
        temporary = self._data_dir is None
        directory = Path(tempfile.mkdtemp(prefix="agl-otel-")) if self._data_dir is None else self._data_dir
        self.directory = directory
        command = [sys.executable, "-m", SUPERVISOR, *self._services, *(["--discard"] if temporary else [])]
        environment = without_settings(os.environ) | Settings.private(data_dir=directory, **self.settings).environment()
        try:
            make_folder(directory)
            with open_file(directory / LOG, "ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, stderr=log, env=environment,
                    start_new_session=True, umask=original_umask(),
                )  # fmt: skip
        except OSError as error:
            raise SettingsError(f"data directory {directory} cannot be written: {error.strerror}") from error
        self._stop = weakref.finalize(self, _end, process, directory if temporary else None, os.getpid())  # also at the interpreter's exit
        self._process = process
        try:
            self._queue_address = self._told()
        except UnavailableError:
            self._stop()
            self._stop = self._process = None
            raise

    def _ask(self) -> str:
        """Have all services started; return the stack's address. Raises UnavailableError, again on each call."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and _told says why
            self._process.stdin.write(b"\n")
        return self._told()

    def _told(self) -> str:
        """Return the address in the supervisor's next line. Raises UnavailableError."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self.directory is not None
        line = self._process.stdout.readline()
        answer: dict[str, str] = json.loads(line) if line else {"error": (self.directory / LOG).read_text()[-LOG_TAIL:]}
        if "address" not in answer:
            raise UnavailableError(f"the embedded stack in {self.directory} did not start: {answer['error']}")
        return answer["address"]


def _end(process: subprocess.Popen[bytes], discard: Path | None, owner: int) -> None:
    if os.getpid() != owner:  # in a fork of the process that started it
        return
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    with selectors.DefaultSelector() as selector:  # select() refuses file numbers from 1024
        selector.register(process.stdout, selectors.EVENT_READ)
        while line := selector.select(STOP_SECONDS) and process.stdout.readline():
            if line == SHARED_LINE:
                break
    if line:
        process.stdout.close()
        process.returncode = 0  # it goes on for others that use the stack, so it is not waited for
        return
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    if discard is not None:
        shutil.rmtree(discard, ignore_errors=True)
