from __future__ import annotations

import socket

import pytest

from agl_otel.errors import InUseError, SettingsError
from agl_otel.service.ports import check_free, is_free, port_beside
from agl_otel.settings import free_port


def test_a_port_that_is_listened_on_is_not_free() -> None:
    port = free_port()
    assert is_free("127.0.0.1", port)
    check_free("127.0.0.1", port, "AGL_WEB_PORT")
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)
        assert port_beside("127.0.0.1", port - 1) == 0
        with pytest.raises(InUseError, match=rf"127.0.0.1:{port} \(Address already in use\): .* AGL_WEB_PORT"):
            check_free("127.0.0.1", port, "AGL_WEB_PORT")


def test_a_port_that_a_server_has_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # its side waits in TIME_WAIT
            assert client.recv(1) == b""
    assert is_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_stand_in_brackets(host: str) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert not is_free(host, server.getsockname()[1])


def test_an_invalid_port_is_not_free() -> None:
    assert not is_free("127.0.0.1", 65_536)
    assert port_beside("127.0.0.1", 65_535) == 0
    with pytest.raises(InUseError, match="65536"):
        check_free("127.0.0.1", 65_536, "--port")


def test_a_foreign_host_is_named_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"'192.0.2.1' \(.*assign.*\).* --host or AGL_HOST"):
        check_free("192.0.2.1", 80, "--port")
