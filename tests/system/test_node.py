"""An agent in another language, with OpenTelemetry's own instrumentation and none of our code: examples/node."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agl_otel_hook import conventions
from tests.one_certificate import downloading
from tests.system.test_runner import World, rewards, store, verdicts, world  # noqa: F401  # pyright: ignore[reportUnusedImport]  # fixtures

pytestmark = pytest.mark.full
EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
INSTALL_SECONDS = 400.0


@pytest.fixture(scope="module")
def installed() -> Path:
    """The example with its packages, installed once for each package-lock.json."""
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("npm and node are not installed")
    lock = hashlib.sha256((EXAMPLE / "package-lock.json").read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel" / f"node-{lock}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "agent.js", "grade.py"):
        shutil.copy(EXAMPLE / name, folder)
    if not (folder / ".complete").exists():
        try:
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(
                command, cwd=folder, env=downloading(), capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm ci did not end within {INSTALL_SECONDS:.0f} s")
        if done.returncode != 0:
            pytest.skip(f"npm ci fails, perhaps for want of a network: {done.stderr[-300:]}")
        (folder / ".complete").touch()
    return folder


def test_the_lock_file_names_no_address_of_a_registry() -> None:
    assert '"resolved"' not in (EXAMPLE / "package-lock.json").read_text()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(INSTALL_SECONDS + 120)
async def test_a_node_agents_spans_ids_tokens_and_verdict_are_right(world: World, installed: Path) -> None:  # noqa: F811 - the fixture
    rollouts = await world.enqueue("abc", "de")
    command = ("node", "--require", "@opentelemetry/auto-instrumentations-node/register", "agent.js")
    process = await world.runner("--grader", f"{installed}/grade.py:grade", "--max-rollouts", "2", "--", *command, cwd=installed)
    traces = await world.finished(rollouts, timeout_seconds=300)
    assert await process.wait() == 0
    assert verdicts(traces) == {("complete", ())}
    assert rewards(traces) == [1.0, 1.0]
    assert sorted(traces.calls.rollout_id) == sorted(rollout.rollout_id for rollout in rollouts)
    for rollout in rollouts:
        spans = await world.store.spans(rollout.rollout_id)
        root = next(span for span in spans if span.name == conventions.SPAN_ATTEMPT)
        node = [span for span in spans if span.resource.attributes.get("telemetry.sdk.language") == "nodejs"]
        assert {(span.rollout_id, span.attempt_id) for span in node} == {(rollout.rollout_id, root.attempt_id)}
        assert [span.name for span in node if "gen_ai.request.model" in span.attributes], sorted(span.name for span in spans)
