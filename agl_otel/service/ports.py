"""Checks that a port is free before a service starts on it. (`settings.free_ports` chooses ports where none are named.)"""

from __future__ import annotations

import socket

from agl_otel.errors import InUseError
from agl_otel.settings import check_host


def port_error(host: str, port: int) -> OSError | OverflowError | None:
    """Return why this process cannot listen there at the moment; None if it can. An IPv6 address may be in brackets."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a recently closed port counts as free
        try:
            probe.bind((host.strip("[]"), port))
        except (OSError, OverflowError) as error:
            return error
        return None


def is_free(host: str, port: int) -> bool:
    """Whether this process can listen there at the moment."""
    return port_error(host, port) is None


def check_free(host: str, port: int, setting: str) -> None:
    """Raise InUseError if this process cannot listen there; the message names the port, the reason and the `setting` to change.

    Raises SettingsError for a host that is not of this machine.
    """
    check_host(host)
    if (why := port_error(host, port)) is not None:
        raise InUseError.of_port(host, port, why if isinstance(why, OSError) else str(why), setting) from why


def port_beside(host: str, port: int) -> int:
    """Return the port after `port` if it is free, so that it stays the same across restarts; else 0, for any free port."""
    return port + 1 if port and is_free(host, port + 1) else 0
