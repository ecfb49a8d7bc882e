"""Selection of a command's store: flags take precedence over the environment."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agl_otel.cli import main
from agl_otel.cli.common import settings_for, warn_of_open_host
from agl_otel.settings import Settings

FOLDER = Path("elsewhere")


@pytest.mark.parametrize(
    ("data_dir", "store", "expected"),
    [(None, None, "env:1"), (FOLDER, None, ""), (None, "flag:2", "flag:2"), (FOLDER, "flag:2", "flag:2")],
)
def test_the_data_dir_flag_takes_precedence_over_agl_store(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path | None, store: str | None, expected: str
) -> None:
    monkeypatch.setenv("AGL_STORE", "env:1")
    settings = settings_for(data_dir, store)
    assert settings.store == expected
    assert settings.data_dir == (data_dir or Path(".agl"))


def test_a_command_with_data_dir_does_not_use_agl_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_STORE", "127.0.0.1:1")
    with pytest.raises(SystemExit):
        main(["queue", "stats", "--data-dir", str(tmp_path)])
    assert f"there is no stack and no data in {tmp_path}" in "".join(capsys.readouterr().err.splitlines())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("given", ["flag", "variable"])
def test_a_data_directory_of_another_user_is_refused_with_its_owner(given: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        name = f"{folder}/theirs"
        program = """
import os, pwd, sys
import agl_otel.cli.rollouts
from agl_otel.cli import main
os.chmod(os.path.dirname(sys.argv[1]), 0o755)
os.mkdir(sys.argv[1], 0o700)
os.setuid(65534)
if sys.argv[2] == "variable":
    os.environ["AGL_DATA_DIR"] = sys.argv[1]
main(["rollouts", "ls", *(["--data-dir", sys.argv[1]] if sys.argv[2] == "flag" else [])])
"""
        done = subprocess.run([sys.executable, "-c", program, name, given], capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in said, done.stderr
    assert f"{name} is closed to you: it belongs to {pwd.getpwuid(0).pw_name}, mode 700. Run this as that user" in said


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({"host": "0.0.0.0"}, "0.0.0.0 accepts connections from other machines, and there is no token.* Set AGL_TOKEN"),
        ({"host": "0.0.0.0", "token": "t"}, "there is no TLS.* Set AGL_TLS_CERT"),
        ({"host": "0.0.0.0", "token": "t", "tls_cert": "c.pem", "tls_key": "k.pem"}, "^$"),
        ({"host": "127.0.0.1"}, "^$"),
    ],
)
def test_a_host_that_others_reach_without_token_or_tls_is_warned_of(
    flags: dict[str, str], warned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_open_host(Settings.load(**flags))
    assert re.search(warned, capsys.readouterr().err)
