"""A tracer in a process that already has the hook: one ledger, one marker, and all spans in the stack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_otel_hook import conventions
from tests.contract.web.conftest import Web
from tests.otlp_receiver import OtlpReceiver
from tests.system.stack_process import ENVIRONMENT

PROGRAM = """
import asyncio, sys
import agl_otel as agl
from opentelemetry import trace

async def main(url):
    store = agl.LightningStoreClient(url)
    rollout = await store.start_rollout("hooked")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with agl.OtelTracer().trace_context("hooked", store=store, **ids):
        with trace.get_tracer("agent").start_as_current_span("work"):
            agl.emit_reward(0.25)
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    [finished] = await store.wait_for_rollouts([rollout.rollout_id])
    traces = await store.traces([finished])
    [verdict] = traces.verdicts.values()
    print(rollout.rollout_id, verdict.kind, *verdict.reasons)
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def vendor() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.mark.parametrize("exporter", ["otlp", "none"])
def test_spans_carry_one_marker_and_the_attempt_is_complete(web: Web, vendor: OtlpReceiver, tmp_path: Path, exporter: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    otel = {
        "OTEL_TRACES_EXPORTER": exporter,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": vendor.http_url,
    }
    instrument = Path(sys.executable).with_name("opentelemetry-instrument")
    done = subprocess.run(
        [instrument, sys.executable, str(script), web.url],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
        env={**ENVIRONMENT, **otel, "PATH": os.pathsep.join([str(instrument.parent), os.environ["PATH"]])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rollout_id, verdict, *reasons = done.stdout.split()
    assert verdict == "complete", reasons
    spans = web.rest("GET", "/spans", {"rollout_id": rollout_id}).json["items"]
    assert {"work", conventions.SPAN_ANNOTATION} <= {span["name"] for span in spans}
    assert len({span["attributes"][conventions.PROCESS] for span in spans if conventions.PROCESS in span["attributes"]}) == 1
    if exporter == "otlp":
        [seen] = vendor.spans("work")
        assert seen.marker in {span["attributes"].get(conventions.PROCESS) for span in spans}, "the user's own backend sees the same spans"
