"""Signals between the services on one database what a commit made claimable or settled: LISTEN and NOTIFY, one connection and thread.

A NOTIFY inside a transaction would make all commits of all services wait for each other, so it is sent just after the commit, for all
commits since the last one together. What may get lost that way (a kill in between, a connection that broke) is made good: a service
that (re)connects, or has received nothing for a while, wakes its waiting calls, which look for themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg

from agl_otel.errors import AglError
from agl_otel.queue.engine import Signals
from agl_otel.queue.postgres.address import Address

LOOK_SECONDS: Final = 5.0  # how late a notification that was lost is made good
RECONNECT_SECONDS: Final = 0.5
PAYLOAD_IDS: Final = 50  # of at most 128 characters each: PostgreSQL takes 8000 bytes
_log = logging.getLogger(__name__)


class Exchange:
    """Sends the signals of this service, hears those of others. `hear` is called on this object's thread."""

    def __init__(self, address: Address, channel: str, hear: Callable[[Signals], None], clock_ahead: float = 0.0) -> None:
        self.clock_ahead = clock_ahead
        """Seconds by which the server's clock is ahead of ours; asked again with every look."""
        self._address = address
        self._channel = channel
        self._hear = hear
        self._lock = threading.Lock()
        self._unsent = Signals()
        self._stopping = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._wake_reader.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="queue-signals", daemon=True)
        self._thread.start()

    def tell(self, signals: Signals) -> None:
        """Send to the other services, soon. From any thread."""
        with self._lock:
            self._unsent.add(signals)
        self._wake()

    def close(self) -> None:
        """Send what is waiting and end."""
        self._stopping.set()
        self._wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the thread has plenty of reasons to wake up already
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        away = False
        while not self._stopping.is_set():
            try:
                with self._address.connect() as connection:
                    connection.execute(b"SET synchronous_commit = off")  # a notification need not survive a crash
                    connection.execute(f'LISTEN "{self._channel}"'.encode())
                    away = False
                    self.clock_ahead = server_clock_ahead(connection)
                    self._hear(Signals(missed=True))
                    self._serve(connection)
            except (AglError, psycopg.Error) as error:
                if not away:
                    _log.warning("no signals from other queue services: %s", self._address.words(error))
                away = True
                self._stopping.wait(RECONNECT_SECONDS)

    def _serve(self, connection: psycopg.Connection[Any]) -> None:
        while True:
            self._send(connection)
            heard = False
            for notification in connection.notifies(timeout=0):
                if notification.pid != connection.info.backend_pid:
                    heard = True
                    self._hear(_read(notification.payload))
            if self._stopping.is_set():
                return
            ready, _, _ = select.select([connection.fileno(), self._wake_reader], [], [], 0 if heard else LOOK_SECONDS)
            if self._wake_reader in ready:
                self._wake_reader.recv(4096)
            if not ready and not heard:
                self.clock_ahead = server_clock_ahead(connection)  # and a connection that is dead without a word is noticed
                self._hear(Signals(missed=True))

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            unsent, self._unsent = self._unsent, Signals()
        if unsent:
            payloads = [*_write(unsent)]
            try:
                connection.cursor().executemany(b"SELECT pg_notify(%s, %s)", [(self._channel, payload) for payload in payloads])
            except psycopg.Error:
                with self._lock:
                    self._unsent.add(unsent)  # heard twice is harmless
                raise


def server_clock_ahead(connection: psycopg.Connection[Any]) -> float:
    """Seconds by which the server's clock is ahead of ours, give or take half the time of the question."""
    asked = time.time()
    row = connection.execute(b"SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    return row[0] - (asked + time.time()) / 2


def _write(signals: Signals) -> Iterator[str]:
    settled = signals.settled
    for start in range(0, max(len(settled), 1), PAYLOAD_IDS):
        yield json.dumps({"claimable": 0 if start else signals.claimable, "settled": settled[start : start + PAYLOAD_IDS]})


def _read(payload: str) -> Signals:
    try:
        data = json.loads(payload)
        return Signals(int(data["claimable"]), [str(rollout_id) for rollout_id in data["settled"]])
    except (ValueError, TypeError, KeyError):  # of another release or program: something has happened
        return Signals(missed=True)
