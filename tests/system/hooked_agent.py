"""Agents with the hook, under `opentelemetry-instrument` or by their environment alone, as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

from agl_otel.runner.injection import injection
from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver

INSTRUMENT = Path(sys.executable).with_name("opentelemetry-instrument")
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
IDS = {
    conventions.ENV_ROLLOUT_ID: "ro-1",
    conventions.ENV_ATTEMPT_ID: "at-1",
    "TRACEPARENT": f"00-{TRACE_ID}-{SPAN_ID}-01",
    "OTEL_RESOURCE_ATTRIBUTES": "team=blue,agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1",
}
KEY = ("ro-1", "at-1")
IMPORTS = "import os, sys, signal, threading, time\n"
HEAD = IMPORTS + "from opentelemetry import trace\ntracer = trace.get_tracer('agent')\n"


class Agent:
    """Runner of agent code under the hook. `injected`: the hook waits for the code's first import of OpenTelemetry or another library."""

    def __init__(
        self,
        receiver: OtlpReceiver,
        directory: Path,
        protocol: str = "http/protobuf",
        python: str = sys.executable,
        *,
        injected: bool = False,
    ) -> None:
        self._directory = directory
        self._command = [python] if injected else [str(Path(python).with_name(INSTRUMENT.name)), python]
        self._head = IMPORTS if injected else HEAD
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "AGL_", "PYTHON"))},
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url if protocol != "grpc" else f"http://{receiver.grpc_address}",
            **(injection({}, self._command, inject=False) if injected else {}),
        }

    def start(self, code: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        script = self._directory / "agent.py"
        script.write_text(self._head + textwrap.dedent(code))
        return subprocess.Popen(
            [*self._command, str(script)],
            env={**self._environment, **(IDS if environment is None else environment)},
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
        with self.start(code, environment) as process:
            out, err = process.communicate(timeout=300)
            return process.returncode, out, err


def sealed_completely(receiver: OtlpReceiver) -> bool:
    """Return whether each marker's largest seal counts exactly the received spans (none: a process terminated in its first span)."""
    counts, seals = Counter(span.marker for span in receiver.ours()), receiver.seals()
    return bool(counts) and seals == {marker: (counts[marker], 0) for marker in {*counts, *seals}}
