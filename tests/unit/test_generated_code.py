"""What `make proto` writes is that of the .proto files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from agl_otel.queue.proto import queue_pb2, queue_pb2_grpc
from tests.command import ROOT
from tests.environments import AbsentError, installed
from tests.lowest import lowest

MAKEFILE = (ROOT / "Makefile").read_text()
TOOLS = re.findall(r"(?:grpcio-tools|mypy-protobuf)==[\d.]+", MAKEFILE)


def test_the_generated_code_works_with_the_lowest_versions_that_the_package_allows() -> None:
    written = re.search(r"# Protobuf Python Version: (.+)", Path(str(queue_pb2.__file__)).read_text())
    assert written is not None and numbers(written[1]) <= numbers(lowest()["protobuf"])
    assert numbers(queue_pb2_grpc.GRPC_GENERATED_VERSION) <= numbers(lowest()["grpcio"])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize(
    ("proto", "outputs", "count"),
    [
        ("agl_otel/queue/proto/queue.proto", ("--python_out=", "--grpc_python_out=", "--mypy_out=quiet:", "--mypy_grpc_out=quiet:"), 4),
        ("agl_otel/web/jaeger/proto/storage.proto", ("--python_out=", "--mypy_out=quiet:"), 2),
    ],
)
def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path, proto: str, outputs: tuple[str, ...], count: int) -> None:
    try:
        programs = installed("-".join(TOOLS).replace("==", "-"), TOOLS) / "bin"
    except AbsentError as absent:
        pytest.skip(str(absent))
    plugins = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [programs / "python", "-m", "grpc_tools.protoc", "-I.", *(f"{output}{tmp_path}" for output in outputs), proto]
    subprocess.run(command, cwd=ROOT, env=plugins, check=True)
    written = [path for path in tmp_path.rglob("*_pb2*") if path.is_file()]
    assert len(written) == count
    for path in written:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), f"{path.name} is out of date: make proto"
