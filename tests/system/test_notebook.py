"""The notebook of the demo, cell by cell as Jupyter's kernel runs it, with a smaller job."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.stack_process import DEMO, ENVIRONMENT, naming, small_demo

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
NOTEBOOK = Path(__file__).parents[2] / DEMO / "demo.ipynb"
PORTS = {f"AGL_{name}_PORT": "0" for name in ("QUEUE", "OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY", "WEB")}


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_without_outputs() -> None:
    assert [cell["id"] for cell in code_cells() if cell["outputs"] or cell["execution_count"] is not None] == []


def test_the_notebook_trains_and_shows_what_it_trained_on(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_demo(tmp_path, val=4) / DEMO
    job = folder / "job.toml"
    job.write_text(job.read_text().replace('model = "tiny"', f'model = "{tiny_policy}"'))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    environment = {**ENVIRONMENT, **PORTS, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    names: dict[str, Any] = {"__name__": "__main__"}

    async def play() -> None:
        for cell in code_cells():
            source = "".join(cell["source"]).replace("STEPS = 30", "STEPS = 2")
            if source.startswith("!"):
                done = await asyncio.to_thread(
                    subprocess.run, source[1:], shell=True, env=environment, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stdout + done.stderr
                print(done.stdout)
                continue
            made = eval(compile(source, cell["id"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.isawaitable(made):
                await made

    asyncio.run(play())
    for module in ("tasks", "grade"):
        sys.modules.pop(module, None)
    said = capsys.readouterr().out
    assert len(names["steps"]) == 2 and len(names["axes"].lines[0].get_xdata()) == 2
    assert names["rollout"].mode == "train" and "agentlightning.llm [" in said
    assert naming(folder) == []
