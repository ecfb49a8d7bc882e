"""`agl-otel store` with certificates prints a usable address."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path

import pytest

from tests.authority import Authority
from tests.system.stack_process import Command, naming, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")


@pytest.mark.full
def test_the_printed_address_is_https_and_answers(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    arguments = ("--port", "0", "--queue-port", "0", "--data-dir", str(tmp_path / "data"))
    with Command("store", *arguments, log=tmp_path / "store.log", cwd=tmp_path, env=authority.serving()) as command:
        until(lambda: "Ctrl+C" in command.output or command.process.poll() is not None, "it says where it is")
        assert command.process.poll() is None, command.output
        url = command.output.partition("the store is at ")[2].split()[0]
        assert url.startswith("https://") and f"LightningStoreClient('{url}')" in command.output, command.output
        with urllib.request.urlopen(f"{url}/v1/agl/describe", context=authority.context(), timeout=300) as answer:
            assert answer.status == 200
    assert naming(tmp_path / "data") == []
