"""What `make proto` writes is that of the .proto files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT


@pytest.mark.parametrize(
    ("proto", "outputs", "count"),
    [
        ("agl_otel/queue/proto/queue.proto", ("--python_out=", "--grpc_python_out=", "--mypy_out=quiet:", "--mypy_grpc_out=quiet:"), 4),
        ("agl_otel/web/jaeger/proto/storage.proto", ("--python_out=", "--mypy_out=quiet:"), 2),
    ],
)
def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path, proto: str, outputs: tuple[str, ...], count: int) -> None:
    plugins = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *(f"{output}{tmp_path}" for output in outputs), proto]
    subprocess.run(command, cwd=ROOT, env=plugins, check=True)
    written = [path for path in tmp_path.rglob("*_pb2*") if path.is_file()]
    assert len(written) == count
    for path in written:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), f"{path.name} is out of date: make proto"
