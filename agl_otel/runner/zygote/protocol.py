"""What runner and warm parent say to each other: one small JSON message a packet, over a Unix socket of type SEQPACKET.

A request to fork carries file descriptors: the agent's stdout and stderr, and a memory file with everything of any size (program,
environment, folder), because a packet is bounded and an environment is not.

    runner → parent   {"op": "fork", "id": n} + 3 descriptors      {"op": "release", "pid": p}
    parent → runner   {"op": "ready", "unfit": why or null}        {"op": "forked", "id": n, "pid": p}
                      {"op": "refused", "id": n, "why": …}         {"op": "exited", "pid": p, "status": s}

`status` is negative for a signal, as subprocess has it. The parent keeps an ended child's id until it is released, so that nobody
signals a stranger's process group.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

MAX_PACKET_BYTES: Final = 32 * 1024
CONTROL_FD: Final = "AGL_ZYGOTE_FD"
"""Environment variable of the warm parent: which descriptor is the socket."""
SETUP_FD: Final = "AGL_ZYGOTE_SETUP_FD"
"""Environment variable of the warm parent: a memory file with {"imports": […], "preload": […], "learn_all": …}."""


def encode(**message: Any) -> bytes:
    """One packet; long texts in it are cut."""
    return json.dumps({key: value[-4000:] if isinstance(value, str) else value for key, value in message.items()}).encode()


def decode(packet: bytes) -> dict[str, Any]:
    """The message in a packet."""
    return json.loads(packet)


def memory_file(data: object) -> int:
    """A descriptor of an anonymous file that holds `data` as JSON. The caller closes it."""
    fd = os.memfd_create("agl-otel")
    write_memory_file(fd, data)
    return fd


def write_memory_file(fd: int, data: object) -> None:
    """Write `data` as JSON into an empty memory file."""
    rest = memoryview(json.dumps(data).encode())
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_memory_file(fd: int) -> Any:
    """What a memory file holds; None where it is empty. Closes it."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        data = file.read()
    return json.loads(data) if data else None
