"""A job whose model's files have a fault is refused with the file, the fault and a remedy; the facts that are read from good files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

import torch
from safetensors.torch import load_file, save_file
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from agl_otel.jobs.check import check_job
from agl_otel.jobs.model_check import Linear, ModelFacts, model_facts, tiny_facts
from tests.unit.jobs.test_faulty_jobs import problems_of, write_job

MODEL = Path(__file__).parents[2] / "tiny_policy"


def change_json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return a function that changes keys of a JSON file of a model; None removes the key."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return change


def change_weights(**changes: Any) -> Callable[[Path], None]:
    """Return a function that replaces tensors of a model; None removes the tensor."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        for name, take in changes.items():
            tensor = weights.pop(name.replace("__", "."))
            if take is not None:
                weights[name.replace("__", ".")] = take(tensor).contiguous()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes()[:400_000])


def split(folder: Path, lost: str = "") -> None:
    """Split the weights over two files with an index, without the file `lost`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: f"model-{number % 2 + 1:05d}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(place.values()) - {lost}:
        save_file({name: tensor for name, tensor in weights.items() if place[name] == file}, folder / file, metadata={"format": "pt"})
    more = {} if lost else {"x.weight": place["lm_head.weight"]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place | more}))


HEAD = "lm_head__weight"


def change_all(name: Callable[[str], str] = str, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    """Return a function that renames and converts all tensors of a model."""

    def change(folder: Path) -> None:
        weights = {name(key): tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def without_vocabulary(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


TEMPLATE = (MODEL / "chat_template.jinja").read_text()
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"holds no config\.json.*name a folder that does"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: transformers cannot read it"),
    "unknown type": (change_json("config.json", model_type="llamma"), r"config\.json: transformers cannot read it \(.*llamma"),
    "classifier": (
        change_json("config.json", architectures=["LlamaForSequenceClassification"]),
        r"it is of a LlamaForSequenceClassification, not of a causal language model; name a model …ForCausalLM",
    ),
    "encoder": (
        change_json("config.json", architectures=["T5ForConditionalGeneration"], model_type="t5"),
        r"it is of a T5ForConditionalGeneration, not of a causal language model",
    ),
    "no context": (change_json("config.json", max_position_embeddings=0), r"max_position_embeddings is 0: it must be at least 1"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"it holds no weights, model\.safetensors or .*copy them"),
    "cut weights": (cut, r"model\.safetensors: it cannot be read, or was cut .*copy it again"),
    "a pointer of LFS": (
        lambda folder: (folder / "model.safetensors").write_text("version 1\n"),
        r"cannot be read, or was cut.*copy it again",
    ),
    "no head": (change_weights(**{HEAD: None}), r"its weights lack 1 of the model's tensors, first lm_head\.weight.*copy all files"),
    "another head": (
        change_weights(**{HEAD: lambda tensor: tensor[:50]}),
        r"the tensor lm_head\.weight has shape \[50, 64\], and config\.json makes it \[104, 64\]; take both from one model",
    ),
    "more layers": (change_json("config.json", num_hidden_layers=4), r"its weights lack 9 of the model's tensors, first model\.layers\.3"),
    "a lost file": (
        lambda folder: split(folder, "model-00002-of-00002.safetensors"),
        r"model-00002-of-00002\.safetensors: it is missing; copy it",
    ),
    "an index of numbers": (
        lambda folder: (
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
            and (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": 3}}')
        ),
        r"model\.safetensors\.index\.json: it is no index of weights .*copy it again",
    ),
    "a lost tensor": (split, r"it lacks 1 tensors of model\.safetensors\.index\.json, first x\.weight; copy the file again"),
    "no tokenizer": (
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        r"transformers cannot load its tokenizer .*copy the tokenizer's files",
    ),
    "no chat template": (lambda folder: (folder / "chat_template.jinja").unlink(), r"no chat template; take an instruct model"),
    "a broken template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}"),
        r"its chat template fails on two messages .*correct the template",
    ),
    "a template that refuses": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('one message only') }}"),
        r"its chat template fails on two messages \(one message only\)",
    ),
    "a silent template": (
        lambda folder: (folder / "chat_template.jinja").write_text("hi"),
        r"its chat template leaves out the user's message",
    ),
    "no end": (change_json("tokenizer_config.json", eos_token=None), r"no eos_token, so that no reply ends; name it"),
    "gptq": (
        change_json("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        r"config\.json: it has a quantization_config \(gptq\), and quantised weights cannot be trained; name the model in float32",
    ),
    "int8": (
        change_json("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        r"it has a quantization_config \(bitsandbytes",
    ),
    "integers": (change_all(dtype=torch.int8), r"the tensor .* is I8, and quantised weights cannot be trained"),
    "float8": (change_all(dtype=torch.float8_e4m3fn), r"the tensor .* is float8_e4m3fn, and quantised weights cannot be trained"),
    "fewer layers": (
        change_json("config.json", num_hidden_layers=2),
        r"its weights have 9 tensors that the model of config\.json lacks, first model\.layers\.2\..*correct config\.json",
    ),
    "a wrapper's names": (
        change_all(lambda name: f"module.{name}"),
        r"its weights lack 30 of the model's tensors, first lm_head\.weight, .*: their names begin with module\., .*save the weights",
    ),
    "no generation config": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        r"generation_config\.json: transformers cannot read it .*copy it again, or remove it",
    ),
    "an end beyond the vocabulary": (
        change_json("config.json", eos_token_id=5000),
        r"config\.json: eos_token_id is 5000: it must be at least 0 and less than 104, the size of the vocabulary",
    ),
    "an end that is none": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5000]}'),
        r"generation_config\.json: eos_token_id is 5000: it must be",
    ),
    **{
        f"a wrong {key}": (
            lambda folder, key=key, value=value: (folder / "generation_config.json").write_text(json.dumps({key: value})),
            rf"generation_config\.json: {key} = {re.escape(json.dumps(value))}: it must be {must}.*; give such a value, or leave it out",
        )
        for key, value, must in [
            ("temperature", "warm", "a number, at least 0"),
            ("top_p", "half", "a number, at least 0 and at most 1"),
            ("top_p", 3.0, "at least 0 and at most 1"),
            ("top_k", 2.5, "an integer"),
            ("do_sample", "yes", "true or false"),
        ]
    },
    "too many layers": (
        change_json("config.json", num_hidden_layers=100_000),
        r"config\.json: num_hidden_layers is 100000: it must be at least 1 and at most 1000, .*; take it from the model's origin",
    ),
    "a tokenizer without a vocabulary": (
        without_vocabulary,
        r"tokenizer\.json: the vocabulary of its tokenizer has \d special or added tokens, and none of text: .* copy the file again",
    ),
    **{
        f"a pipe as {name}": (
            lambda folder, name=name: ((folder / name).unlink(), os.mkfifo(folder / name)),
            rf"{re.escape(name)}: it is a named pipe, and must be a file; copy the model's file there",
        )
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    },
    "a head beside tied embeddings": (
        change_json("config.json", tie_word_embeddings=True),
        r"config\.json: its weights hold lm_head\.weight, which differs from model\.embed_tokens\.weight, .*set it to false, or save",
    ),
    "a template of the last message": (
        lambda folder: (folder / "chat_template.jinja").write_text("<|user|>{{ messages[-1].content }}"),
        r"its chat template leaves out the user's message, once it is answered; correct the template",
    ),
    "no generation prompt": (
        lambda folder: (folder / "chat_template.jinja").write_text(TEMPLATE.replace("add_generation_prompt", "false")),
        r"its chat template ends a prompt without '<\|assistant\|>', .*write it under \{% if add_generation_prompt %\}",
    ),
    **{
        key: (change_json("config.json", **{key: value}), r"config\.json: transformers cannot (build its model|read it) \(.*; ")
        for key, value in {
            "hidden_act": "nope",
            "num_key_value_heads": 0,
            "head_dim": 0,
            "pad_token_id": 5000,
            "rope_parameters": {"rope_type": "nope"},
        }.items()
    },
}


@pytest.mark.parametrize(("algorithm", "damage"), [*(("grpo", damage) for damage in DAMAGES), ("sft", "no head"), ("verl", "cut weights")])
async def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, algorithm: str, damage: str) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    harm, says = DAMAGES[damage]
    harm(tmp_path / "model")
    (problem,) = await problems_of(write_job(tmp_path, algorithm, "policy", 'model = "model"'))
    assert problem.startswith("[policy] model") and re.search(says, problem), problem


async def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    change_json("config.json", vocab_size=90)(tmp_path / "model")
    small = {name: lambda tensor: tensor[:90] for name in (HEAD, "model__embed_tokens__weight")}
    change_weights(**small)(tmp_path / "model")
    (problem,) = await problems_of(write_job(tmp_path, "grpo", "policy", 'model = "model"'))
    assert re.search(r"its tokenizer has the token id 103: it must be less than 90.*take both from one model", problem), problem


async def test_limits_are_those_of_the_jobs_model(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    change_json("config.json", max_position_embeddings=50)(tmp_path / "model")
    job = write_job(tmp_path, "grpo", "policy", 'model = "model"')
    job.write_text(job.read_text().replace("[algorithm]", "[algorithm]\nmax_tokens = 50"))
    (problem,) = await problems_of(job)
    assert "max_tokens = 50: it must be less than 50, because the context of model holds" in problem


async def test_activations_of_a_model_whose_layers_are_not_computed_again_are_refused(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    config = OpenAIGPTConfig(vocab_size=104, n_embd=32, n_layer=1, n_head=2, architectures=["OpenAIGPTLMHeadModel"])
    OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "model")
    job = write_job(tmp_path, "grpo", "policy", 'model = "model"')
    job.write_text(job.read_text().replace("[algorithm]", "[algorithm]\ngradient_checkpointing = true"))
    (problem,) = await problems_of(job)
    assert problem == "[algorithm] gradient_checkpointing = true: model has no layers that transformers computes again; leave it out"


def test_the_facts_of_a_model_are_read_from_its_files(tmp_path: Path) -> None:
    attention, mlp = Linear(widths=2 * 64, parameters=64 * 64), Linear(widths=64 + 256, parameters=64 * 256)
    ends = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), attention)
    ends |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), mlp)
    linear = {f"model.layers.{layer}.{end}": kind for layer in range(3) for end, kind in ends.items()}
    facts = ModelFacts(
        parameters=210368,
        layers=3,
        hidden=64,
        vocabulary=104,
        context=1024,
        tied=False,
        dtype="float32",
        heads=2,
        kv_heads=2,
        head_size=32,
        intermediate=256,
        linear=linear,
        whole_logits=False,
    )
    assert model_facts(MODEL) == facts == tiny_facts()
    tied = shutil.copytree(MODEL, tmp_path / "tied")
    change_json("config.json", tie_word_embeddings=True)(tied)
    change_weights(**{HEAD: None, "model__norm__weight": lambda tensor: tensor})(tied)
    found = model_facts(tied)
    assert found.tied and found.parameters == facts.parameters - 104 * 64


def change_nothing(folder: Path) -> None:
    """Leave a model as it is."""


def store_head_of_tied_embeddings(folder: Path) -> None:
    """Tie the embeddings, and store them as the head, too."""
    change_json("config.json", tie_word_embeddings=True)(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(**{HEAD: lambda _: embedding.clone()})(folder)


GOOD_MODELS: dict[str, Callable[[Path], object]] = {
    "as it is": change_nothing,
    "in bfloat16": change_all(dtype=torch.bfloat16),
    "with a stored head that is the embedding": store_head_of_tied_embeddings,
    "with sampling parameters": lambda folder: (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 1, "top_k": 20, "do_sample": true, "repetition_penalty": 1.05, "eos_token_id": [1], "_from": "x"}'
    ),
    "saved as a base model": change_all(lambda name: name.removeprefix("model.")),
    "a template without a generation prompt that needs none": lambda folder: (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("kind", GOOD_MODELS)
async def test_models_that_transformers_loads_whole_are_accepted(tmp_path: Path, kind: str) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    GOOD_MODELS[kind](tmp_path / "model")
    found = await check_job(write_job(tmp_path, "grpo", "policy", 'model = "model"'))
    assert (found.problems, found.warnings) == ([], [])


@pytest.mark.parametrize("message", ["{{ m.content }}", "{{ m.content }}\n", "<|turn|>{{ m.content }}"])
async def test_a_template_without_roles_is_warned_of(tmp_path: Path, message: str) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        f"{{% for m in messages %}}{message}{{% endfor %}}{{% if add_generation_prompt %}}{message.partition('{')[0]}{{% endif %}}"
    )
    found = await check_job(write_job(tmp_path, "grpo", "policy", 'model = "model"'))
    (warning,) = found.warnings
    assert found.problems == [] and "its chat template writes all roles alike" in warning, found
