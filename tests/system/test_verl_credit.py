"""The advantages that verl's own trainer hands to its update, in verl's environment: those of adapters/credit.py, token by token."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agl_otel.adapters.credit import Rule
from agl_otel.algorithms.verl.defaults import environment as usual_environment
from tests.system.test_verl import ROOT, environment
from tests.system.test_verl import python as python
from tests.unit.algorithms.test_verl_credit import VALUES, of_calls, stepwise

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

UPDATED = """
import asyncio, json, pickle, random, sys
from dataclasses import asdict, replace
from pathlib import Path
import ray, transfer_queue as tq
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from agl_otel import VERL
from agl_otel.algorithms.verl.compose import compose_config, verl_config
from agl_otel.algorithms.verl.loop import of_training, output_of
from agl_otel.algorithms.verl.samples import Rules, to_samples
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

def made(kind, **attributes):
    bare = object.__new__(kind)
    vars(bare).update(attributes)
    return bare

async def put(traces, config, rules):
    # as verl's worker does, with what our loop returns
    kind = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = made(kind, config=config, processor=None, reward_loop_worker_handles=None, distillation_enabled=False)
    for rollout_id, samples in to_samples(traces, rules)[0].items():
        row = {"uid": rollout_id[0], "session_id": int(rollout_id[1:]), "global_steps": 1}
        await worker._agent_loop_postprocess([output_of(sample, rollout_id) for sample in samples], False, **row)

def updated(traces, given, options):
    verl = VERL({"actor_rollout_ref.rollout.n": 3, **given}, **options)
    spec = verl.spec(store="", run_id="r", start=1)
    config = OmegaConf.create(compose_config(verl.config_of(Path("/run"), spec, validate=False)))
    asyncio.run(put(traces, config, replace(spec.sample_rules, **of_training(config))))
    rows = tq.kv_list(partition_id="train")["train"]
    keys = random.Random(1).sample(sorted(rows), len(rows))
    batch = KVBatchMeta(keys=keys, tags=[rows[key] for key in keys], partition_id="train")
    batch = upsample_batch_to_divisible_size(batch, 8, 0)
    got = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
    got["old_log_probs"] = got.pop("rollout_log_probs")
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=got)
    trainer = made(get_trainer_cls("agl_otel_sync"), config=config, _spec=spec)
    trainer._compute_advantage(batch, {})
    got = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages", "returns"])
    found = {key: [got[name][place].tolist() for name in ("advantages", "returns")] for place, key in enumerate(batch.keys)}
    tq.kv_clear(keys=batch.keys, partition_id="train")
    return found

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
queue = OmegaConf.create(verl_config()["transfer_queue"])
queue.backend.SimpleStorage.num_data_storage_units = 1
tq.init(queue)
print("FOUND", json.dumps([updated(*case) for case in pickle.load(sys.stdin.buffer)]))
ray.shutdown()
"""


def updated(python: Path, tmp_path: Path, *cases: tuple[dict[str, list[float]], dict[str, Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case, (rewards of the steps, verl's config, options), the advantages and returns of verl's rows, by their keys."""
    ours = usual_environment({"trainer.device": "cpu"}, tmp_path / "metrics.jsonl")
    env = {**environment(python), **ours, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "hook")))}
    command: list[str | Path] = [python, "-c", UPDATED]
    given = pickle.dumps([(stepwise(values), *more) for values, *more in cases])
    done = subprocess.run(command, input=given, capture_output=True, check=False, env=env, timeout=600)
    lines = [line.removeprefix(b"FOUND ") for line in done.stdout.splitlines() if line.startswith(b"FOUND ")]
    assert len(lines) == 1, (done.stdout[-2000:] + done.stderr[-4000:]).decode()
    return json.loads(lines[0])


def test_verls_update_gets_the_advantages_of_each_call(python: Path, tmp_path: Path) -> None:
    final = {name: [0.0, 0.0, sum(own)] for name, own in VALUES.items()}
    to_go, unscaled, ours, grpo = updated(
        python,
        tmp_path,
        (VALUES, {}, {"credit": "to_go", "discount": 0.5}),
        (VALUES, {"algorithm.norm_adv_by_std_in_grpo": False}, {"credit": "states"}),
        (final, {}, {"credit": "to_go"}),
        (final, {}, {}),
    )
    assert {"pad"} < {key[:3] for key in to_go}, "verl has padded its batch"
    cases = [(to_go, Rule("to_go", 0.5)), (unscaled, Rule(states=True, compare=lambda values, groups: relative(values, groups)))]
    for found, rule in cases:
        for name, (first, second, third) in of_calls(stepwise(VALUES), rule).items():
            for place, tokens in enumerate([[first, first, 0.0, second], [third] * 3]):
                assert found[f"{name[0]}_{name[1:]}_{place}"] == [pytest.approx(tokens, abs=1e-6)] * 2
        assert {value for key, both in found.items() if key.startswith("pad") for own in both for value in own} == {0.0}
    kept = {key: both for key, both in ours.items() if not key.startswith("pad")}
    assert len(kept) == 10 and any(value for both in kept.values() for value in both[0])
    assert {key: grpo[key] for key in kept} == {key: [pytest.approx(own, abs=1e-6) for own in both] for key, both in kept.items()}
    assert to_go["a_1_0"] != ours["a_1_0"], "the rewards of steps make a difference"


def relative(values: Any, groups: Any) -> Any:
    """The values less the mean of their group."""
    return values - [values[groups == group].mean() for group in groups]
