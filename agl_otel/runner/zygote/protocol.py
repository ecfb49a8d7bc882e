"""The protocol between runner and warm parent: one JSON message per packet, over a Unix socket of type SEQPACKET.

A fork request carries file descriptors: the agent's stdout and stderr, and a memory file with program, environment and folder, which may
exceed the size limit of packets.

    runner → parent   {"op": "fork", "id": n} + 3 descriptors      {"op": "release", "pid": p}
    parent → runner   {"op": "ready", "unfit": reason or null}     {"op": "forked", "id": n, "pid": p}
                      {"op": "refused", "id": n, "why": reason}    {"op": "exited", "pid": p, "status": s}

`status` is negative for a signal, as in subprocess. An ended child is reaped only when it is released, so that its process id is not
reused while the runner may still signal its group.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any, Final

MAX_PACKET_BYTES: Final = 32 * 1024
CONTROL_FD: Final = "AGL_ZYGOTE_FD"
"""Environment variable of the warm parent: the socket's descriptor."""
SETUP_FD: Final = "AGL_ZYGOTE_SETUP_FD"
"""Environment variable of the warm parent: descriptor of a memory file with {"imports": […], "preload": […], "learn_all": …}."""


def encode(**message: Any) -> bytes:
    """Encode a message as a packet; strings over 4000 characters lose their beginning."""
    return json.dumps({key: value[-4000:] if isinstance(value, str) else value for key, value in message.items()}).encode()


def decode(packet: bytes) -> dict[str, Any]:
    """Decode the message of a packet."""
    return json.loads(packet)


def memory_file(data: object) -> int:
    """Create an anonymous file with `data` as JSON and return its descriptor, which the caller closes."""
    fd = empty_file()
    write_memory_file(fd, data)
    return fd


def empty_file() -> int:
    """Create an anonymous file, in memory where the system allows that, and return its descriptor, which the caller closes."""
    try:
        return os.memfd_create("agl-otel")
    except OSError:  # a kernel or a sandbox (seccomp) without it
        with tempfile.TemporaryFile(prefix="agl-otel-") as file:
            return os.dup(file.fileno())


def write_memory_file(fd: int, data: object) -> None:
    """Write `data` as JSON into an empty memory file."""
    rest = memoryview(json.dumps(data).encode())
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_memory_file(fd: int) -> Any:
    """Read the JSON of a memory file and close it; None where it is empty."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        data = file.read()
    return json.loads(data) if data else None
