"""The check that a port is free, before something is started on it. `settings.free_ports` chooses ports where none are named."""

from __future__ import annotations

import socket

from agl_otel.errors import InUseError


def trouble(host: str, port: int) -> OSError | OverflowError | None:
    """Why this process could not listen there at this moment; None where it could. An IPv6 address may stand in brackets."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port that was closed a moment ago is free
        try:
            probe.bind((host.strip("[]"), port))
        except (OSError, OverflowError) as error:
            return error
        return None


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there at this moment."""
    return trouble(host, port) is None


def check_free(host: str, port: int, setting: str) -> None:
    """Raise InUseError where this process could not listen there; it names the port, the reason and the `setting` to change."""
    if (why := trouble(host, port)) is not None:
        raise InUseError.of_port(host, port, why if isinstance(why, OSError) else str(why), setting) from why


def port_beside(host: str, port: int) -> int:
    """The port after `port` where nobody listens there, so that it is the same after a restart; else 0, a free one."""
    return port + 1 if port and is_free(host, port + 1) else 0
