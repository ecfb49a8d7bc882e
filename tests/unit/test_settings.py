from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.cli import main
from agl_otel.errors import SettingsError
from agl_otel.service.ports import check_free, is_free
from agl_otel.settings import PORTS, Settings, free_port
from agl_otel.stack.supervisor import claim_data_dir


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("AGL_"):
            monkeypatch.delenv(name)


def test_flags_override_environment_override_file_override_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("agl.toml").write_text("queue_port = 1001\nproxy_port = 1002\nweb_port = 1003\n")
    monkeypatch.setenv("AGL_PROXY_PORT", "2002")
    monkeypatch.setenv("AGL_WEB_PORT", "2003")
    settings = Settings.load(web_port=3003)
    assert (settings.queue_port, settings.proxy_port, settings.web_port, settings.otlp_grpc_port) == (1001, 2002, 3003, 4317)


def test_a_wrong_value_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_PROXY_PORT", "many")
    with pytest.raises(SettingsError, match=r"AGL_PROXY_PORT: .*integer.*'many'"):
        Settings.load()
    monkeypatch.delenv("AGL_PROXY_PORT")
    with pytest.raises(SettingsError, match="--queue-port: "):
        Settings.load(queue_port=70000)


def test_an_unknown_key_in_the_file_is_named() -> None:
    Path("agl.toml").write_text("quue_port = 1\n")
    with pytest.raises(SettingsError, match=r"unknown keys: quue_port.*queue_port"):
        Settings.load()


@pytest.mark.parametrize("content", [b"queue_port = \n", b'data_dir = "caf\xe9"\n'])
def test_a_broken_file_is_a_settings_error(content: bytes) -> None:
    Path("agl.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"agl\.toml"):
        Settings.load()


def test_ports_of_zero_become_different_free_ones_and_the_others_stay() -> None:
    settings = Settings.load(**dict.fromkeys(PORTS, 0) | {"web_port": 4999}).with_ports()
    ports = [getattr(settings, name) for name in PORTS]
    assert 0 not in ports and len(set(ports)) == len(ports) and settings.web_port == 4999


LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_a_free_port_is_not_free_for_another_process_until_it_is_listened_on() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))  # as others look for free ones
    assert is_free("127.0.0.1", port)
    subprocess.run([sys.executable, "-c", LISTEN, str(port)], check=True)  # a server takes it all the same
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)


def test_environment_makes_a_child_load_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.load(data_dir=Path("somewhere"), queue_port=5005, token="secret")
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    child = Settings.load()
    assert child.data_dir == Path("somewhere").absolute()
    assert (child.queue_port, child.token.get_secret_value()) == (5005, "secret")


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Settings.load(token="secret"))


def test_an_unknown_variable_is_warned_of_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_QUEUE_PROT", "1")
    Settings.load()
    Settings.load()
    assert capfd.readouterr().err == "warning: AGL_QUEUE_PROT is no setting of agl-otel and is ignored; did you mean AGL_QUEUE_PORT?\n"
    monkeypatch.setenv("AGL_RESOLVED", "1")
    monkeypatch.setenv("AGL_TOKNE", "x")
    Settings.load()
    assert capfd.readouterr().err == "", "a child is not told"


def test_variables_of_other_parts_are_not_unknown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("AGL_ROLLOUT_ID", "AGL_TASK_FILE", "AGL_OTELCOL_FLUSH", "AGL_CURRENT_ROLE", "AGL_SOMETHING_ELSE"):
        monkeypatch.setenv(name, "1")
    Settings.load()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("url", ["not-a-url", "localhost:8000", "http://", "http://a/v1,b"])
def test_an_upstream_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AGL_UPSTREAM_URL", url)
    with pytest.raises(SettingsError, match=r"AGL_UPSTREAM_URL: .*http://HOST:PORT/v1"):
        Settings.load()


def test_an_empty_data_dir_flag_is_refused_by_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rollouts", "ls", "--data-dir", ""])
    assert ended.value.code == 2 and "path is empty: name a folder" in capsys.readouterr().err


def test_a_data_dir_flag_that_is_a_file_is_refused_by_commands(capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes").touch()
    with pytest.raises(SystemExit) as ended:
        main(["up", "--data-dir", "notes"])
    assert ended.value.code == 2 and "notes is a file: name a folder" in capsys.readouterr().err


def test_a_data_dir_variable_that_is_a_file_is_refused_by_the_stack() -> None:
    Path("notes").touch()
    with pytest.raises(SettingsError, match="notes is a file: choose a folder with --data-dir or AGL_DATA_DIR"):
        claim_data_dir(Path("notes"))


def test_an_empty_data_dir_in_the_file_is_refused() -> None:
    Path("agl.toml").write_text('data_dir = ""\n')
    with pytest.raises(SettingsError, match=r"data_dir in agl\.toml: .*the path is empty: name a folder"):
        Settings.load()


@pytest.mark.parametrize("host", ["192.0.2.55", "nosuchhost.invalid"])
def test_a_host_of_another_machine_is_named_with_the_remedy(host: str) -> None:
    remedy = rf"cannot listen on host '{re.escape(host)}' .*--host or AGL_HOST"
    with pytest.raises(SettingsError, match=remedy):
        Settings.load(host=host, **dict.fromkeys(PORTS, 0)).with_ports()
    with pytest.raises(SettingsError, match=remedy):
        check_free(host, 4747, "AGL_QUEUE_PORT")
