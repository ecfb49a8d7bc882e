"""Signals between the services on one database (rollouts made claimable or settled): LISTEN and NOTIFY on one connection and thread.

NOTIFY inside a transaction would serialize the commits of all services, so one is sent just after commits, for all since the last. Some
may get lost (a kill in between, a broken connection); therefore a service that (re)connects, or has received nothing for LOOK_SECONDS,
wakes its waiting calls, which query again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg

from agl_otel.errors import AglError
from agl_otel.queue.engine import Signals
from agl_otel.queue.postgres.address import Address

LOOK_SECONDS: Final = 5.0  # delay after which a lost notification is made up for
RECONNECT_SECONDS: Final = 0.5
PAYLOAD_IDS: Final = 50  # ids of at most 128 characters each: PostgreSQL limits a payload to 8000 bytes
_log = logging.getLogger(__name__)


class Exchange:
    """Sends the signals of this service and receives those of others; `receive` is called with them on this object's thread."""

    def __init__(self, address: Address, channel: str, receive: Callable[[Signals], None], clock_ahead: float = 0.0) -> None:
        self.clock_ahead = clock_ahead
        """Seconds by which the server's clock is ahead of this machine's; measured on connecting and every LOOK_SECONDS without signals."""
        self._address = address
        self._channel = channel
        self._receive = receive
        self._lock = threading.Lock()
        self._unsent = Signals()
        self._stopping = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._wake_reader.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="queue-signals", daemon=True)
        self._thread.start()

    def publish(self, signals: Signals) -> None:
        """Queue signals for the other services; callable from any thread."""
        with self._lock:
            self._unsent.add(signals)
        self._wake()

    def close(self) -> None:
        """Send queued signals and end the thread."""
        self._stopping.set()
        self._wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread already
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
                    self._receive(Signals(missed=True))
                    self._serve(connection)
            except (AglError, psycopg.Error) as error:
                if not away:
                    _log.warning("no signals from other queue services: %s", self._address.words(error))
                away = True
                self._stopping.wait(RECONNECT_SECONDS)

    def _serve(self, connection: psycopg.Connection[Any]) -> None:
        with selectors.DefaultSelector() as selector:  # select() refuses file numbers from 1024
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while True:
                self._send(connection)
                received = False
                for notification in connection.notifies(timeout=0):
                    if notification.pid != connection.info.backend_pid:
                        received = True
                        self._receive(_read(notification.payload))
                if self._stopping.is_set():
                    return
                ready = [key.fileobj for key, _ in selector.select(0 if received else LOOK_SECONDS)]
                if self._wake_reader in ready:
                    self._wake_reader.recv(4096)
                if not ready and not received:
                    self.clock_ahead = server_clock_ahead(connection)  # also detects a dead connection
                    self._receive(Signals(missed=True))

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            unsent, self._unsent = self._unsent, Signals()
        if unsent:
            payloads = [*_write(unsent)]
            try:
                connection.cursor().executemany(b"SELECT pg_notify(%s, %s)", [(self._channel, payload) for payload in payloads])
            except psycopg.Error:
                with self._lock:
                    self._unsent.add(unsent)  # a duplicate is harmless
                raise


def server_clock_ahead(connection: psycopg.Connection[Any]) -> float:
    """Measure by how many seconds the server's clock is ahead of this machine's, within half a round trip."""
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
    except (ValueError, TypeError, KeyError):  # from another release or program
        return Signals(missed=True)
