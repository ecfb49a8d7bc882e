"""How a job's policy is served: its GPUs, its share of them, adapters, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.algorithms.run_folder import lock_run
from agl_otel.errors import InUseError, SettingsError
from agl_otel.jobs.check import check_job
from agl_otel.jobs.grpo import GRPORun
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import Findings
from agl_otel.jobs.model_check import tiny_facts
from agl_otel.jobs.policy_server import SHARED_UTILIZATION, adapter_rank, visible, vllm_arguments
from agl_otel.jobs.served import check_policy, check_room, check_sleep, notes_of_policy
from agl_otel.jobs.sft import SFTRun
from agl_otel.store import Store


def job(*, device: str = "cpu", options: dict[str, Any] | None = None, **policy: Any) -> Job:
    made = Job.model_validate({"agent": {"function": "a.py:b"}, "data": {"train": "a.py:c"}, "policy": policy, "algorithm": options or {}})
    made.algorithm["device"] = device  # not validated: this machine may have no GPU
    return made


def test_vllm_takes_a_share_of_a_gpu_only_where_the_trainer_is_on_it() -> None:
    alone: list[dict[str, Any]] = [{"device": "cpu"}, {"device": "cuda:1"}, {"device": "cuda", "devices": [1]}]
    for given in alone:
        assert vllm_arguments(job(server="vllm", **given)) == ["--"], given
    shared: list[dict[str, Any]] = [{"device": "cuda"}, {"device": "cuda:0", "devices": [0]}, {"device": "cuda:2", "devices": [1, 2]}]
    for given in shared:
        assert vllm_arguments(job(server="vllm", **given))[1:3] == ["--gpu-memory-utilization", str(SHARED_UTILIZATION)], given
    own = vllm_arguments(job(server="vllm", device="cuda", gpu_memory_utilization=0.6, sleep=True, vllm_options=["--max-num-seqs", "8"]))
    assert own == ["--sleep", "--", "--gpu-memory-utilization", "0.6", "--max-num-seqs", "8"]
    assert vllm_arguments(job(server="vllm", devices=[3, 1])) == ["--", "--tensor-parallel-size", "2"]


def test_gpus_are_numbered_as_this_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible([1, 0]) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8a")
    assert visible([1]) == {"CUDA_VISIBLE_DEVICES": "GPU-8a"} and visible([0, 1]) == {"CUDA_VISIBLE_DEVICES": "4,GPU-8a"}


def test_adapters_are_pushed_alone_to_vllm_unless_the_job_says_otherwise() -> None:
    assert adapter_rank(job(server="vllm", options={"lora_rank": 6})) == 6
    assert vllm_arguments(job(server="vllm", options={"lora_rank": 6})) == ["--lora-rank", "6", "--"]
    assert (adapter_rank(job(options={"lora_rank": 6})), adapter_rank(job(server="vllm"))) == (0, 0)
    assert adapter_rank(job(server="vllm", adapters=False, options={"lora_rank": 6})) == 0
    assert adapter_rank(job(server="vllm", options={"lora_rank": 513})) == 0, "more than vLLM takes"


def test_a_server_that_sleeps_excludes_rollouts_in_flight() -> None:
    with pytest.raises(SettingsError, match=r"\[policy\] sleep = true: rollouts in flight would wait .*leave out one of both"):
        check_sleep(job(server="vllm", sleep=True, options={"groups_in_flight": 32}))


def test_max_tokens_are_held_against_the_context_that_vllm_is_given() -> None:
    for given in (["--max-model-len", "64"], ["--max-model-len=64"], ["--max-model-len", "900", "--max-model-len", "64"]):
        with pytest.raises(SettingsError, match=r"max_tokens = 64: it must be less than 64, because the context of the model server"):
            check_room(job(server="vllm", vllm_options=given), tiny_facts())
    for given in (["--max-model-len", "auto"], ["--max-model-len", "65"], []):
        check_room(job(server="vllm", vllm_options=given), tiny_facts())
    with pytest.raises(SettingsError, match=r"--max-model-len 4096: it must be at most 1024, the context of tiny"):
        check_policy(job(server="vllm", vllm_options=["--max-model-len", "4096"], options={"max_tokens": 1024}), lambda _: Findings())


async def test_a_check_says_where_the_policy_is_sampled_and_trained(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def agent(task): return 1.0\ndef tasks(): return [1]\n")
    (tmp_path / "job.toml").write_text('[agent]\nfunction = "mine.py:agent"\n[data]\ntrain = "mine.py:tasks"\nval = "mine.py:tasks"\n')
    found = await check_job(tmp_path / "job.toml")
    assert found.problems == [] and [note for note in found.notes if "policy" in note] == [
        'the policy is sampled and trained on the CPU ([policy] server = "ours"; beyond 10 million parameters that is slow: take a GPU by '
        'devices = [0], or server = "vllm")'
    ]
    (note,) = notes_of_policy(job(server="vllm", device="cuda:1", devices=[0, 1], sleep=True))
    assert note == (
        "the policy is sampled by vLLM on GPUs 0, 1, and trained on GPU 1; they share a GPU, of which vLLM takes 40%, and none of it "
        "during updates"
    )
    assert notes_of_policy(job(devices=[1])) == ['the policy is sampled on GPU 1, and trained on the CPU ([policy] server = "ours")']


@pytest.mark.parametrize("kind", [GRPORun, SFTRun])
async def test_a_run_writes_nothing_to_a_folder_that_another_process_works_in(tmp_path: Path, kind: type[GRPORun] | type[SFTRun]) -> None:
    (tmp_path / "mine.py").write_text("def agent(task): return 1.0\n")
    made = job()
    made.agent.function = str(tmp_path / "mine.py:agent")
    store = Store("127.0.0.1:1")  # the folder is locked before it is asked
    with lock_run(folder := tmp_path / "run"), pytest.raises(InUseError, match=r"another process works on the run in .* wait for its end"):
        async with kind(made, store, folder):
            pass
    assert [path.name for path in folder.iterdir()] == ["lock"]
