"""A private stack uses no store that the environment names: every setting is set to another's value, and nothing of that may be touched.

The names come from the Settings model, so that new settings are included. Another's values are files and folders that must not be created,
and ports on which connections are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from agl_otel.compat.trainer import Trainer
from agl_otel.service.processes import Process
from agl_otel.settings import CONFIG_FILE, PREFIX, Settings
from agl_otel.store import InMemoryLightningStore, LightningStore
from agl_otel.types import Span
from tests.authority import Authority
from tests.model_server import ModelServer
from tests.system.stack_process import run, run_here, small_demo

pytestmark = [pytest.mark.full, pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")]


class Others:
    """Another stack's resources: a folder for every path and store that settings can name, and a port for every port and address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "others"
        self.folder.mkdir()
        self.connections = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        self.authority = Authority(folder / "authority")
        (folder / "mask.toml").write_text('[[rule]]\naction = "drop_text"\ntext = "secret"\n')
        (folder / "models.json").write_text("[]")
        self._fitting: dict[str, Any] = {
            **{name.removeprefix(PREFIX).lower(): path for name, path in self.authority.serving(mutual=True).items()},
            "host": "127.0.0.1",
            "queue_url": f"sqlite:///{self.folder / 'queue.db'}",
            "clickhouse_url": f"chdb:///{self.folder / 'traces'}",
            "cors_origins": "https://others.invalid",
            "mask": str(folder / "mask.toml"),
            "models": str(folder / "models.json"),
            "core": "python",
            "unidentified": "drop",
            "translate": "always",
            "log_level": "WARNING",
            "log_format": "json",
            "litellm": "",  # it would start LiteLLM, which the suite's interpreter does not have
            "proxy_client_certificates": False,  # the demo's agent has no certificate
            "attempt_max_calls": 1000,
            "attempt_max_tokens": 100_000,
            "forward_otlp": f"http://127.0.0.1:{self.port}",
            "metrics_otlp": f"127.0.0.1:{self.port}",
            "forward_headers": "name=value",
            "metrics_otlp_headers": "name=value",
            "metrics_otlp_seconds": 1.0,
            "upstream_url": "http://127.0.0.1:9/v1",
            "litellm_url": "http://127.0.0.1:9/v1",
        }

    def value(self, name: str) -> Any:
        """Return another's value of a setting: a valid one of the table, or one made from the setting's type."""
        if name in self._fitting:
            return self._fitting[name]
        default = Settings.model_fields[name].get_default()
        if name.endswith("_port"):
            return self.port
        if isinstance(default, bool):
            return not default
        if isinstance(default, (int, float)):
            return default + 1
        if isinstance(default, SecretStr):
            return "sesame"
        return f"127.0.0.1:{self.port}" if name == "store" else str(self.folder / name)

    def variables(self) -> dict[str, str]:
        """Return all settings as environment variables."""
        return {f"{PREFIX}{name.upper()}": str(self.value(name)) for name in Settings.model_fields}

    def toml(self) -> str:
        """Return all settings as agl.toml."""
        return "".join(f"{name} = {json.dumps(self.value(name))}\n" for name in Settings.model_fields)

    def untouched(self) -> None:
        """Check that no file was written and no connection was made."""
        assert list(self.folder.iterdir()) == []
        assert self.connections == 0

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                self._server.accept()[0].close()
            except OSError:
                return
            self.connections += 1


@pytest.fixture(params=["environment", "file"])
def others(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    """Another's settings, in the environment or in the agl.toml of the current folder."""
    made = Others(tmp_path)
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    if request.param == "environment":
        for name, value in made.variables().items():
            monkeypatch.setenv(name, value)
    else:
        (place / CONFIG_FILE).write_text(made.toml())
    try:
        yield made
        made.untouched()
    finally:
        made.close()


@pytest.fixture
def names_no_stack(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's settings without the address of a running stack, which a command would use."""
    monkeypatch.delenv("AGL_STORE", raising=False)
    if (file := Path(CONFIG_FILE)).exists():
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if not line.startswith("store = ")))


@pytest.mark.usefixtures("others")
def test_another_stacks_settings_differ_from_the_defaults() -> None:
    loaded = Settings.load()
    same = {name for name, field in Settings.model_fields.items() if getattr(loaded, name) == field.get_default()}
    assert same == {"host", "litellm", "proxy_client_certificates"}


@pytest.mark.usefixtures("others")
def test_a_child_has_only_the_settings_that_its_parent_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_ROLLOUT_ID", "ro-of-somebody")
    resolved = Settings.private(data_dir=tmp_path, token="", mask="", tls_client_ca="", metrics=True)
    code = "import os\nfrom agl_otel.settings import Settings\nprint(Settings.load().environment() == dict(line.split('=', 1) for line in "
    code += "open('expected').read().split('\\0')), sorted(name for name in os.environ if name.startswith('AGL_RO')))"
    Path("expected").write_text("\0".join(f"{name}={value}" for name, value in resolved.environment().items()))
    Path("child.py").write_text(code)
    process = Process.python_module("child", "child", log=tmp_path / "log", settings=resolved)

    async def ended() -> int:
        await process.start()
        return await process.wait()

    assert asyncio.run(ended()) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == "True []\n"


async def work_with(store: LightningStore) -> None:
    """Write to both stores, and read it back."""
    async with store:
        rollout = await store.start_rollout("task")
        span = Span.from_attributes(
            rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, sequence_id=1, name="work", attributes={}
        )
        await store.add_many_spans([span])
        assert [found.name for found in await store.query_spans(rollout.rollout_id)] == ["work"]


@pytest.mark.usefixtures("others")
async def test_a_store_in_memory_does_not_touch_another_stack() -> None:
    await work_with(InMemoryLightningStore())


@pytest.mark.usefixtures("others")
async def test_an_embedded_store_does_not_touch_another_stack(tmp_path: Path) -> None:
    await work_with(LightningStore.embedded(tmp_path / "mine"))
    assert (tmp_path / "mine" / "queue.db").exists() and (tmp_path / "mine" / "traces").exists()


@pytest.mark.usefixtures("others")
async def test_the_store_of_a_trainer_does_not_touch_another_stack() -> None:
    await work_with(Trainer(n_runners=1).store)


@pytest.mark.usefixtures("others")
async def test_a_served_store_in_memory_does_not_touch_another_stack(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agl_otel", "store", "--backend", "memory", "--port", "0", "--queue-port", "0", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    address = json.loads(await process.stdout.readline())["addresses"]["queue"]
    await work_with(LightningStore(address))
    process.terminate()
    await process.wait()


@pytest.mark.usefixtures("names_no_stack")
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_command_with_its_own_stack_does_not_touch_another(command: str, model_server: ModelServer, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)} | {"OPENAI_BASE_URL": model_server.url}
    done = run(
        command, "--json", "--data-dir", str(tmp_path / "mine"), "--", sys.executable, "-c", "print(4)", cwd=Path.cwd(), env=environment
    )
    assert "AGL_QUEUE_URL and AGL_CLICKHOUSE_URL" in done.stderr and done.returncode == {"run": 0, "doctor": 3}[command], done.stderr
    assert (tmp_path / "mine" / "queue.db").exists() and (tmp_path / "mine" / "traces").exists()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("others", ["environment"], indirect=True)
@pytest.mark.usefixtures("others")
def test_the_demo_does_not_touch_another_stack(tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs the [train] extra")
    data = tmp_path / "data"
    shutil.copytree(tiny_policy, data / "run" / "policy")
    small_demo(Path(), prompts=1, members=2, val=1)
    done = run_here(capsys, "demo", "--json", "--max-steps", "1", "--data-dir", str(data), cwd=Path())
    assert done.returncode == 0, done.stderr
    assert (data / "queue.db").exists() and (data / "traces").exists()
