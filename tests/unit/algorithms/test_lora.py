"""LoRA: training of the adapter, merged weights, and checkpoints."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.checkpoint import Checkpoints
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.options import Objective
from agl_otel.algorithms.grpo.policy import Policy, load_weights, save_weights
from agl_otel.algorithms.run_folder import open_run
from agl_otel.errors import SettingsError, UsageError
from tests.unit.algorithms.test_checkpoint import ADVANTAGES, state
from tests.unit.algorithms.test_learner import make_batch

pytest.importorskip("peft", reason="needs the [lora] extra")

from peft import PeftModel

from agl_otel.algorithms.grpo import lora
from agl_otel.algorithms.grpo.lora import adapter, merged, save_adapter, with_lora
from agl_otel.algorithms.model_files import ADAPTER_CONFIG, ADAPTER_FILE, WEIGHTS_FILE

pytestmark = pytest.mark.full

RANK = 2


def learner(policy: Policy, *, seed: int = 3, **options: Any) -> Learner:
    torch.manual_seed(seed)
    return Learner(with_lora(copy.deepcopy(policy.model), RANK), learning_rate=1e-2, updates=2, objective=Objective(**options))


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.arange(8, 40).reshape(2, 16)).logits, -1)


def test_no_run_warns_of_a_kernel_that_only_4_bit_models_need() -> None:
    """bitsandbytes, which peft imports, warns of it on CPUs with bfloat16, and would warn of others still."""
    program = """
import logging, sys
logging.basicConfig()
from agl_otel.algorithms.grpo.optimizers import load_bitsandbytes
load_bitsandbytes()
import peft
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("of gemm_4bit_forward")
print("bitsandbytes" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "WARNING:bitsandbytes.backends.cpu.ops:of gemm_4bit_forward\n")


def test_only_the_adapter_is_trained_and_saved_weights_are_merged(policy: Policy, tmp_path: Path) -> None:
    trained = learner(policy)
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    assert torch.equal(logprobs(trained.model), logprobs(policy.model)), "until it is trained it changes nothing"
    parameters = [name for name, parameter in trained.model.named_parameters() if parameter.requires_grad]
    assert parameters and all(".lora_" in name for name in parameters)
    trained.update(make_batch(policy), ADVANTAGES)
    changed = {name for name, tensor in trained.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(parameters)

    plain = tiny.make_model(tiny.make_tokenizer(), seed=9, tied=policy.model.config.tie_word_embeddings).eval()
    load_weights(plain, save_weights(trained.model, tmp_path))
    assert torch.allclose(logprobs(plain), logprobs(trained.model), atol=1e-5)
    assert not torch.allclose(logprobs(plain), logprobs(policy.model), atol=1e-2)
    assert merged(policy.model).keys() == merged(trained.model).keys()


def test_the_kl_reference_is_the_model_without_its_adapter(policy: Policy) -> None:
    batch = make_batch(policy)
    first = learner(policy, kl=0.1)
    assert first.update(batch, ADVANTAGES).kl > 0
    full = Learner(first.model, learning_rate=0.0, objective=Objective(kl=0.1))
    plain = Learner(copy.deepcopy(policy.model), learning_rate=0.0, objective=Objective(kl=0.1))
    load_state = {name: weight().clone() for name, (_, weight) in merged(first.model).items()}
    plain.model.load_state_dict(load_state)
    assert full.update(batch, np.zeros_like(ADVANTAGES)).kl == pytest.approx(plain.update(batch, np.zeros_like(ADVANTAGES)).kl, abs=1e-5)


def test_a_checkpoint_restores_the_adapter_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    batch, first = make_batch(policy), learner(policy)
    first.update(batch, ADVANTAGES)
    checkpoints = Checkpoints(tmp_path, keep=1)
    place = checkpoints.save(state(1), first.model, first.optimizer)
    update = first.update(batch, ADVANTAGES)

    second = learner(policy, seed=4)
    checkpoints.load(place, "grpo-1", second.model, second.optimizer)
    assert second.update(batch, ADVANTAGES) == update
    one, other = adapter(first.model), adapter(second.model)
    assert one is not None and other is not None
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not (place / WEIGHTS_FILE).exists()
    other_base = Checkpoints(tmp_path, keep=1, base={"digest": "of another"})
    with pytest.raises(
        UsageError, match=r"is of another model: its adapter was trained on one of digest None, and the run's has of another"
    ):
        other_base.load(place, "grpo-1", second.model, second.optimizer)
    with pytest.raises(UsageError, match=r"is of another model: the adapter in .*step-000001 has 42 weights of other names or shapes"):
        wider = with_lora(copy.deepcopy(policy.model), RANK + 1)
        checkpoints.load(place, "grpo-1", wider, torch.optim.AdamW(wider.parameters()))


def test_an_adapter_has_the_alpha_and_the_layers_it_is_given(policy: Policy) -> None:
    model = with_lora(copy.deepcopy(policy.model), 2, alpha=3.0, targets=["q_proj", "v_proj"])
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapter(model) or {}} == {"q_proj", "v_proj"}
    assert model.base_model.model.model.layers[0].self_attn.q_proj.scaling == {"default": 1.5}
    part = with_lora(copy.deepcopy(policy.model), 2, targets=["layers.0.self_attn.q_proj"])
    assert len(adapter(part) or {}) == 2
    with pytest.raises(UsageError, match=r"lora_targets: no linear layer of the model has a name that ends in 'v_porj'; .*, v_proj"):
        with_lora(copy.deepcopy(policy.model), 2, targets=["q_proj", "v_porj"])


def test_weights_are_merged_one_at_a_time(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    real = vars(lora)["_sum"]

    def counted(tensor: torch.Tensor, layer: Any) -> torch.Tensor:
        assert all(each() is None for each in made), "an earlier merged weight is still in memory"
        result = real(tensor, layer)
        made.extend([weakref.ref(result)] if layer is not None else [])
        return result

    monkeypatch.setattr(lora, "_sum", counted)
    save_weights(learner(policy).model, tmp_path)
    assert len(made) == 21, "7 linear layers in each of 3 blocks"


def test_a_server_starts_with_the_adapter_of_the_last_checkpoint_where_it_takes_one(policy: Policy, tmp_path: Path) -> None:
    trained = learner(policy)
    trained.update(make_batch(policy), ADVANTAGES)
    with open_run(tmp_path / "run", algorithm="grpo", options=dict, seed=0) as run:
        assert run is not None
        grpo = GRPO.from_options(model_dir=tmp_path, model_server_url="http://127.0.0.1:1", lora_rank=RANK, run_dir=run)
        assert grpo.weights_to_serve(run, adapter_rank=RANK) == (None, 1)
        Checkpoints(run.folder, keep=1).save(replace(state(1), run_id=run.run_id), trained.model, trained.optimizer)
        folder, _ = grpo.weights_to_serve(run, adapter_rank=RANK)
    assert folder is not None and json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] == 2 * RANK
    held = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(held[name], tensor) for name, tensor in (adapter(trained.model) or {}).items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses a deprecated attribute of transformers
def test_a_saved_adapter_opens_with_peft_and_gives_the_same_log_probs(policy: Policy, tmp_path: Path) -> None:
    trained = learner(policy)
    trained.update(make_batch(policy), ADVANTAGES)
    folder = save_adapter(trained.model, tmp_path / "adapter")
    assert {path.name for path in folder.iterdir()} == {ADAPTER_CONFIG, ADAPTER_FILE}
    opened = PeftModel.from_pretrained(copy.deepcopy(policy.model), folder).eval()
    assert torch.equal(logprobs(opened), logprobs(trained.model))
    assert not torch.equal(logprobs(opened), logprobs(policy.model))
    once = {path.name: path.read_bytes() for path in folder.iterdir()}
    save_adapter(opened, tmp_path / "again")
    assert (tmp_path / "again" / ADAPTER_FILE).read_bytes() == once[ADAPTER_FILE]


def test_an_invalid_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="lora_rank = 0: it must be at least 1"):
        GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", lora_rank=0)


def test_without_peft_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SettingsError, match=r"needs the \[lora\] extra \(peft is missing\): pip install 'agl-otel\[lora\]'"):
        GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", lora_rank=2)
