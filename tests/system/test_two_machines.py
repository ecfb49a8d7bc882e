"""One script on two machines, with a role set by the environment: the algorithm on one, its runners on the other."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_otel.service.processes import die_with_parent
from tests.authority import Authority
from tests.system.stack_process import ENVIRONMENT, naming, until
from tests.system.two_machines import Machine, two_machines

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
SCRIPT = """
import os
import signal
import agl_otel as agl

@agl.algo
async def algorithm(*, store: agl.LightningStore, train_dataset: agl.Dataset[str]) -> None:
    rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
    finished = await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts])
    traces = await store.traces(finished, deadline_seconds=60)
    for rollout in finished:
        spans = await store.query_spans(rollout.rollout_id)
        [where] = [text for span in spans if (text := agl.get_message_value(span))]
        verdict = traces.verdicts[rollout.rollout_id, rollout.attempt.attempt_id].kind
        print(rollout.input, rollout.status, agl.find_final_reward(spans), verdict, where, flush=True)

def agent(task: str) -> float:
    agl.emit_message(os.readlink("/proc/self/ns/net"))
    return float(len(task))

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it puts into the background
    agl.setup_logging()
    agl.Trainer(algorithm=algorithm, n_runners=2, strategy="cs").fit(agent, ["a", "bb", "ccc"])
"""


@contextmanager
def started(machine: Machine, folder: Path, name: str, env: dict[str, str]) -> Generator[tuple[subprocess.Popen[bytes], Path]]:
    """Run the script on a machine; yield it with its log. It is interrupted at the end of the block and must obey."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*machine.enter, *die_with_parent([sys.executable, "-u", str(script)])],
            stdout=out, stderr=subprocess.STDOUT, env={**ENVIRONMENT, "TMPDIR": str(folder), **env}, start_new_session=True,
        )  # fmt: skip
        try:
            yield process, log
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(300)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_one_script_is_the_algorithm_on_one_machine_and_the_runners_on_another(tmp_path: Path, secure: bool) -> None:
    if secure and shutil.which("openssl") is None:
        pytest.skip("the openssl command makes the certificates")
    with two_machines() as (here, there):
        common = {"AGL_SERVER_HOST": here.address, "AGL_SERVER_PORT": "4747", "AGL_TOKEN": "sesame"}
        serving, dialling = {"AGL_CURRENT_ROLE": "algorithm", **common}, {"AGL_CURRENT_ROLE": "runner", **common}
        if secure:
            authority = Authority(tmp_path / "authority", names=f"IP:{here.address}")
            serving, dialling = {**serving, **authority.serving()}, {**dialling, **authority.dialling()}
        with started(here, tmp_path, "algorithm", serving) as (algorithm, said):
            until(lambda: answers(there, here) or algorithm.poll() is not None, "the store is served")
            with started(there, tmp_path, "runner", dialling) as (runner, log):
                assert algorithm.wait(900) == 0, said.read_text()[-4000:] + log.read_text()[-4000:]
                assert runner.poll() is None, "runners of another machine stay when the algorithm has ended"
        found = re.findall(r"^(\w+) (\w+) ([\d.]+) (\w+) (\S+)$", said.read_text(), re.MULTILINE)
        assert found == [(task, "succeeded", f"{len(task)}.0", "complete", there.namespace) for task in ("a", "bb", "ccc")], (
            said.read_text()
        )
    until(lambda: naming(tmp_path) == [], "nothing is left")


def answers(from_machine: Machine, machine: Machine) -> bool:
    """Return whether something listens on the other machine's port 4747."""
    probe = f"import socket; socket.create_connection(({machine.address!r}, 4747), 5).close()"
    return subprocess.run([*from_machine.enter, sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0
