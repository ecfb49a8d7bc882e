"""`agl-otel runs export`: the trained model opens with transformers, peft, the package's own server and as the model of another run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agl_otel.algorithms.checked_files import digest_of
from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.checkpoint import Checkpoints, State
from agl_otel.algorithms.grpo.lora import load_adapter, with_lora
from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE, load_policy, load_weights, save_weights
from agl_otel.algorithms.model_export import export_model
from agl_otel.algorithms.model_files import keep_small_files
from agl_otel.algorithms.run_result import result_of
from agl_otel.algorithms.validation import Validation, note_validation
from agl_otel.algorithms.verl.checkpoints import note_checkpoint
from agl_otel.algorithms.verl.defaults import environment as usual_environment
from agl_otel.cli import main
from agl_otel.errors import UsageError
from agl_otel.jobs.model_check import model_facts
from agl_otel.store import LightningStore
from tests.contract.algorithms.test_bad_input import BOTH, KINDS, SFT_LONG, Kind, as_good, by_place, serving, trained
from tests.environments import ROOT, AbsentError, over_ours
from tests.small_disk import no_file_over
from tests.unit.algorithms.test_metrics import Recorded

IDS = torch.arange(8, 40).reshape(2, 16)
LORA_TOLERANCE = 1e-5  # of merged weights: W + BA is rounded once, and (W + BA)x in another order than Wx + B(Ax)


def make_policy(place: Path, *, tied: bool = False) -> Path:
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, seed=1, tied=tied)
    tokenizer.save_pretrained(place)
    model.config.save_pretrained(place)
    GenerationConfig(temperature=0.6, do_sample=True).save_pretrained(place)
    return save_weights(model, place)


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model.eval()(input_ids=IDS).logits.float(), -1)


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["runs", "export", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured
    return json.loads(captured.out)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["runs", "export", *map(str, arguments)])
    assert ended.value.code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
async def test_an_exported_model_is_the_runs_own_to_the_bit(
    store: LightningStore, tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_policy(tmp_path / "policy", tied=tied)
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, max_steps=2, checkpoint_every_steps=1)
    ours = load_policy(folder).model
    load_weights(ours, tmp_path / "run" / "checkpoints" / "step-000002")
    shutil.move(folder, tmp_path / "elsewhere")  # the run's folder is enough
    done = export(capsys, tmp_path / "run", out := tmp_path / "new" / "out")
    assert (done["which"], done["step"], done["dtype"]) == ("last", 2, "float32")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and torch.equal(logprobs(model), logprobs(ours))
    assert not torch.equal(logprobs(model), logprobs(load_policy(tmp_path / "elsewhere").model)), "it has learnt something"
    chat = [{"role": "user", "content": "digit 437"}]
    texts = [AutoTokenizer.from_pretrained(each).apply_chat_template(chat, tokenize=False) for each in (out, tmp_path / "elsewhere")]
    assert texts[0] == texts[1] == "<|bos|><|user|>digit 437<|end|>"
    assert GenerationConfig.from_pretrained(out).temperature == 0.6
    assert names_in(out.parent) == ["out"], "nothing is left of its writing"

    earlier = export(capsys, tmp_path / "run", tmp_path / "first", "--step", 1)
    assert (earlier["which"], earlier["step"]) == ("chosen", 1)
    assert not torch.equal(logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "first")), logprobs(model))
    half = export(capsys, tmp_path / "run", tmp_path / "half", "--dtype", "bfloat16")
    assert half["dtype"] == "bfloat16" and half["bytes"] < 0.6 * done["bytes"]
    assert stat.S_IMODE((tmp_path / "half" / WEIGHTS_FILE).stat().st_mode) == stat.S_IMODE((out / WEIGHTS_FILE).stat().st_mode)
    low = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert low.dtype == torch.bfloat16
    assert all(torch.equal(tensor, ours.state_dict()[name].bfloat16()) for name, tensor in low.state_dict().items())


async def test_an_export_to_a_full_disk_leaves_nothing_and_says_why(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await trained(KINDS[0], store, make_policy(tmp_path / "policy"), tmp_path / "run", by_place)
    size = next((tmp_path / "run").rglob("step-*/model.safetensors")).stat().st_size
    out = tmp_path / "new" / "out"
    with no_file_over(size // 2):
        assert f"{out} cannot be written: File too large" in refused(capsys, tmp_path / "run", out)
    assert names_in(out.parent) == []
    with no_file_over(size):
        assert export(capsys, tmp_path / "run", out)["bytes"] >= size


async def test_an_exported_model_is_served_and_trained_further(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await trained(KINDS[0], store, make_policy(tmp_path / "policy"), tmp_path / "run", by_place)
    export(capsys, tmp_path / "run", out := tmp_path / "out")
    assert model_facts(out).dtype == "float32"
    (report,) = await trained(KINDS[0], store, out, tmp_path / "again", by_place)
    assert report.next_version == "2"
    async with serving(out) as url, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "digit 437"}], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            reply = await answer.json()
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([reply["prompt_token_ids"]])
    best = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert reply["choices"][0]["token_ids"] == best[: len(reply["choices"][0]["token_ids"])]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses a deprecated attribute of transformers
async def test_a_lora_run_is_exported_merged_or_as_its_adapter(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft", reason="needs the [lora] extra")
    folder = make_policy(tmp_path / "policy")
    await trained(KINDS[0], store, folder, tmp_path / "run", by_place, lora_rank=2, learning_rate=1e-2)
    ours = with_lora(load_policy(folder).model, 2)
    place = tmp_path / "run" / "checkpoints" / "step-000001"
    load_adapter(ours, load_file(place / "adapter" / "adapter_model.safetensors"), str(place))

    export(capsys, tmp_path / "run", tmp_path / "merged")
    pushed = tmp_path / "run" / "weights" / "2" / WEIGHTS_FILE
    assert (tmp_path / "merged" / WEIGHTS_FILE).read_bytes() == pushed.read_bytes()
    merged = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (merged - logprobs(ours)).abs().max() < LORA_TOLERANCE
    assert (merged - logprobs(load_policy(folder).model)).abs().max() > 100 * LORA_TOLERANCE

    done = export(capsys, tmp_path / "run", tmp_path / "adapter", "--adapter")
    assert done["adapter"] and {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    opened = peft.PeftModel.from_pretrained(load_policy(folder).model, tmp_path / "adapter")
    assert torch.equal(logprobs(opened), logprobs(ours))

    half = export(capsys, tmp_path / "run", tmp_path / "half", "--dtype", "bfloat16")
    low = load_file(tmp_path / "half" / WEIGHTS_FILE)
    assert half["dtype"] == "bfloat16" and all(torch.equal(low[name], each.bfloat16()) for name, each in load_file(pushed).items())


async def test_a_lora_run_is_exported_with_the_model_that_it_began_with_wherever_that_is(
    store: LightningStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="needs the [lora] extra")
    folder, run, out = make_policy(tmp_path / "policy"), tmp_path / "run", tmp_path / "out"
    await trained(KINDS[0], store, folder, run, by_place, lora_rank=2, learning_rate=1e-2)
    pushed = (run / "weights" / "2" / WEIGHTS_FILE).read_bytes()
    shutil.move(folder, moved := tmp_path / "elsewhere")
    assert f"{folder} holds no model that transformers can load" in (error := refused(capsys, run, out))
    assert "name the folder of the model that the run began with by --base" in error
    other = make_policy(tmp_path / "other", tied=True)
    assert f"{other} is another model, of digest " in refused(capsys, run, out, "--base", other)
    assert not out.exists() and names_in(tmp_path) == ["elsewhere", "other", "run"], "nothing is left"
    export(capsys, run, out, "--base", moved)
    assert (out / WEIGHTS_FILE).read_bytes() == pushed
    export(capsys, run, tmp_path / "adapter", "--adapter")

    file = run / "checkpoints" / "step-000001" / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert f"{file} is damaged (it has changed since it was written)" in refused(capsys, run, tmp_path / "more", "--base", moved)


@pytest.mark.parametrize("kind", BOTH)
async def test_metric_sinks_get_the_validations_of_a_run_to_its_last_step(store: LightningStore, tmp_path: Path, kind: Kind) -> None:
    run, folder, sink = tmp_path / "run", make_policy(tmp_path / "policy"), Recorded()

    async def validator(step: int, weights: Path) -> None:
        note_validation(run, Validation(step, f"step-{step}", step / 4, 4, 1, str(weights.relative_to(run))))

    def scored(step: int) -> dict[str, float]:
        return {"val_reward": step / 4, "val_rollouts": 4, "val_without_reward": 1}

    options: dict[str, Any] = {"max_steps": 3, "val_every": 2, "validator": validator, "metrics": [sink]}
    await trained(kind, store, folder, run, as_good, **options)
    assert sink.got == [(1, None), (2, None), (2, scored(2)), (3, None), (3, scored(3)), (-1, None)]
    seen, sink.got = sink.got, []
    await trained(kind, store, folder, run, as_good, **options)
    assert sink.got == seen, "the same when a run that has ended is started again"


@pytest.mark.parametrize("kind", SFT_LONG)
async def test_the_best_validation_is_exported_unless_others_are_asked_for(
    store: LightningStore, tmp_path: Path, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", make_policy(tmp_path / "policy")

    async def validator(step: int, weights: Path) -> None:
        note_validation(run, Validation(step, f"step-{step}", 1.0 / step, 4, 0, str(weights.relative_to(run))))

    await trained(kind, store, folder, run, by_place, max_steps=4, val_every=1, validator=validator)
    best, last = (export(capsys, run, tmp_path / name, *more) for name, more in (("best", ()), ("last", ("--last",))))
    assert [(each["which"], each["step"]) for each in (best, last)] == [("best", 1), ("last", 4)]
    places = {"grpo": "checkpoints/step-{:06d}", "sft": "weights/{}"}[kind.name]
    for name, step in (("best", 1), ("last", 4)):
        assert (tmp_path / name / WEIGHTS_FILE).read_bytes() == (run / places.format(step) / WEIGHTS_FILE).read_bytes()
    assert "has no weights after step 2: it keeps those after 1, 3, 4" in refused(capsys, run, tmp_path / "out", "--step", 2)
    assert "trained all weights and has no adapter (lora_rank): leave out --adapter" in refused(capsys, run, tmp_path / "out", "--adapter")

    place = run / places.format(4) / WEIGHTS_FILE
    content = place.read_bytes()
    place.unlink()  # a push may have linked it
    place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{place} is damaged (it has changed since it was written): export others with --step 3" in refused(
        capsys, run, tmp_path / "out", "--last"
    )
    assert not any("out" in name for name in names_in(tmp_path)), "nothing is left"

    place.write_bytes(content)
    shutil.rmtree(run / places.format(1))
    with pytest.raises(SystemExit):
        main(["runs", "export", str(run), str(tmp_path / "instead")])
    told = capsys.readouterr()
    assert "instead: the last weights, after step 4" in told.out
    assert f"warning: the weights of the run's best validation are gone, {run / places.format(1)} is not there: " in told.err
    assert result_of(run).lines()[0] in told.err and export(capsys, run, tmp_path / "again", "--last")["best_missing"] is None


def test_a_folder_that_is_not_empty_and_a_run_without_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "full is not empty: name an empty folder, or a new one" in refused(capsys, tmp_path / "run", tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert "is not the folder of a run, it holds no run.json" in refused(capsys, tmp_path / "run", tmp_path / "out")
    (tmp_path / "run").mkdir()
    fields = {"run_id": "grpo-1", "algorithm": "grpo", "seed": 0, "options": {}}
    (tmp_path / "run" / "run.json").write_text(json.dumps({**fields, "checksum": digest_of(fields)}))
    assert "keeps nothing yet: wait for its first checkpoint" in refused(capsys, tmp_path / "run", tmp_path / "out")
    assert "--step and --last exclude each other" in refused(capsys, tmp_path / "run", tmp_path / "out", "--step", 1, "--last")


def test_a_run_that_removes_checkpoints_meanwhile_is_exported_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = tmp_path / "run", make_policy(tmp_path / "policy")
    model = load_policy(folder).model
    optimizer = torch.optim.AdamW(model.parameters())
    fields = {"run_id": "grpo-1", "algorithm": "grpo", "seed": 0, "options": {}}
    run.mkdir()
    (run / "run.json").write_text(json.dumps({**fields, "checksum": digest_of(fields)}))
    keep_small_files(folder, run)
    checkpoints, ended = Checkpoints(run, keep=1), Event()

    def save(step: int) -> None:
        checkpoints.save(State("grpo-1", step, "r", step, {}, 0), model, optimizer)

    def train() -> None:
        for step in itertools.count(2):
            if ended.is_set():
                return
            save(step)

    save(1)
    with ThreadPoolExecutor(1) as trainer:
        training = trainer.submit(train)
        try:
            steps = [export(capsys, run, tmp_path / f"out-{number}")["step"] for number in range(12)]
        finally:
            ended.set()
        training.result()
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert len({(tmp_path / f"out-{number}" / WEIGHTS_FILE).read_bytes() for number in range(12)}) == 1


def test_of_exports_to_one_folder_at_once_one_writes_it_and_the_others_are_refused(tmp_path: Path) -> None:
    run, folder, out, together = tmp_path / "run", make_policy(tmp_path / "policy"), tmp_path / "new" / "out", 6
    model = load_policy(folder).model
    fields = {"run_id": "grpo-1", "algorithm": "grpo", "seed": 0, "options": {}}
    run.mkdir()
    (run / "run.json").write_text(json.dumps({**fields, "checksum": digest_of(fields)}))
    keep_small_files(folder, run)
    Checkpoints(run, keep=1).save(State("grpo-1", 1, "r", 1, {}, 0), model, torch.optim.AdamW(model.parameters()))
    begin = Barrier(together)
    (out.parent / ".out.agl-otel-abandoned").mkdir(parents=True)

    def written(_: int) -> str:
        begin.wait()
        try:
            return export_model(run, out).folder
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(together) as exporters:
        told = sorted(exporters.map(written, range(together)))
    assert told == [str(out), *[f"{out} is not empty: name an empty folder, or a new one"] * (together - 1)]
    assert names_in(out.parent) == ["out"] and (out / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()


VERL_SAVES = """
import sys
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2

def save(rank, model_dir, checkpoints):
    torch.distributed.init_process_group("gloo", init_method=f"file://{checkpoints}/rendezvous", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))}, {})
    tokenizer, optimizer = AutoTokenizer.from_pretrained(model_dir), torch.optim.AdamW(model.parameters())
    for step, more in ((1, ["hf_model"]), (2, [])):
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2)
        contents = {"save_contents": ["model", "optimizer", "extra", *more]}
        manager = FSDPCheckpointManager(model, optimizer, processing_class=tokenizer, checkpoint_config=contents)
        manager.save_checkpoint(f"{checkpoints}/global_step_{step}/actor", global_step=step)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), LoraConfig(target_modules="all-linear"))
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))}, {})
    optimizer = torch.optim.AdamW(model.parameters())
    manager = FSDPCheckpointManager(model, optimizer, processing_class=tokenizer, checkpoint_config={"save_contents": ["model"]})
    manager.save_checkpoint(f"{checkpoints}/global_step_3/actor", global_step=3)
    torch.distributed.destroy_process_group()

start_processes(save, sys.argv[1:], nprocs=2, start_method="fork")
"""
"""verl's own manager of checkpoints, in two processes that share each weight: in each step every weight is twice that of the last.

Step 3 has an adapter."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_checkpoints_of_verl_are_copied_or_merged_by_verls_own_program(
    tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        python = over_ours("verl", ROOT / "tests" / "verl.txt")
    except AbsentError as error:
        pytest.skip(str(error))
    run = tmp_path / "run"
    checkpoints = run / "verl" / "checkpoints"
    checkpoints.mkdir(parents=True)
    fields = {"run_id": "verl-1", "algorithm": "verl", "seed": 0, "options": {}}
    (run / "run.json").write_text(json.dumps({**fields, "checksum": digest_of(fields)}))
    command = [str(python), "-c", VERL_SAVES, str(tiny_policy), str(checkpoints)]
    in_verls = {**os.environ, **usual_environment({"trainer.device": "cpu"}, tmp_path / "metrics.jsonl")}
    in_verls |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'hook'}"}
    saved = subprocess.run(command, capture_output=True, text=True, check=False, env=in_verls, timeout=600)
    assert saved.returncode == 0, saved.stderr[-3000:]
    for step in (1, 2, 3):
        (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
        note_checkpoint(run / "verl")
    last = checkpoints / "global_step_2"
    started = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).state_dict()

    done = export(capsys, run, tmp_path / "copied", "--step", 1)
    assert (done["which"], done["step"], done["dtype"]) == ("chosen", 1, "float32")
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copied")
    assert all(torch.equal(tensor, 2 * started[name]) for name, tensor in copied.state_dict().items())

    assert f"{last} is in verl's format, and its own program merges it, which needs the [verl] extra" in refused(
        capsys, run, tmp_path / "o", "--step", 2
    )
    words = [str(python), "-m", "agl_otel", "runs", "export", str(run), str(tmp_path / "merged"), "--json"]
    of_step_3 = subprocess.run(words, capture_output=True, text=True, check=False, env=in_verls, cwd=tmp_path, timeout=600)
    assert of_step_3.returncode == 2 and "holds a LoRA adapter, which verl's own program writes beside" in of_step_3.stderr, of_step_3
    shutil.rmtree(checkpoints / "global_step_3")
    words += ["--step", "2"]
    merged = subprocess.run(words, capture_output=True, text=True, check=False, env=in_verls, cwd=tmp_path, timeout=600)
    assert merged.returncode == 0, merged.stderr[-3000:]
    told = json.loads(merged.stdout)
    assert (told["which"], told["step"], told["dtype"]) == ("chosen", 2, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, (4 * started[name]).bfloat16()) for name, tensor in model.state_dict().items())
    chat = [{"role": "user", "content": "digit 437"}]
    texts = {
        AutoTokenizer.from_pretrained(each).apply_chat_template(chat, tokenize=False)
        for each in (tiny_policy, tmp_path / "copied", tmp_path / "merged")
    }
    assert texts == {"<|bos|><|user|>digit 437<|end|>"}

    assert "--adapter is for runs of grpo: verl's own program merges its checkpoints" in refused(capsys, run, tmp_path / "o", "--adapter")
    shard = last / "actor" / "model_world_size_2_rank_1.pt"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is damaged (it has changed since it was written): export others with --step 1" in refused(capsys, run, tmp_path / "o")
    assert not any(name.startswith((".", "o")) for name in names_in(tmp_path)), "nothing is left"


def test_the_help_of_export_does_not_import_torch() -> None:
    code = """
import sys
from agl_otel.cli import main
try:
    main(["runs", "export", "--help"])
except SystemExit:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.rstrip().endswith("False") and "--adapter" in done.stdout
