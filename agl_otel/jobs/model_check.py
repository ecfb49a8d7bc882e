"""What a model's files say before it is loaded: its size and shape, and whether it can be trained on conversations.

Reads config.json, the headers of the weights and the tokenizer, and builds the model without memory for its weights. Nothing is started.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.lora import is_target, linear_layers
from agl_otel.algorithms.grpo.policy import checkpointed_layers
from agl_otel.algorithms.model_files import DTYPES, INDEX_FILE, WEIGHTS_FILE
from agl_otel.algorithms.options import problems, shown
from agl_otel.errors import SettingsError

_TRAINED: Final = frozenset({"F64", "F32", "F16", "BF16"})  # dtypes of safetensors
_WEIGHT_MAP: Final = TypeAdapter(dict[str, str])
PROBE: Final = "hello"
REPLY: Final = "yes"
"""The user's and the assistant's message of the conversation that the chat template must render."""
BLOCK_ROWS: Final = 1024  # of matrices that are compared


@dataclass(frozen=True)
class Linear:
    """A linear layer."""

    widths: int
    """Sum of its input and output widths."""
    parameters: int
    """Number of its weights."""


@dataclass(frozen=True)
class ModelFacts:
    """The size and shape of a model."""

    parameters: int
    """A tied head counts once."""
    layers: int
    hidden: int
    vocabulary: int
    """Number of token ids of the embedding; may exceed the tokenizer's."""
    context: int
    """Greatest number of tokens of a prompt and its reply."""
    tied: bool
    """Whether the head's weights are those of the embedding."""
    dtype: str
    """Of most of the stored weights, as torch names it: "float32", "bfloat16"."""
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Width of the MLP; of a mixture of experts, of all experts that a token uses."""
    linear: Mapping[str, Linear]
    """{name: a linear layer}, without the head."""
    whole_logits: bool
    """Whether logits are more than a linear head of the last hidden states (logprobs.Scorer)."""
    checkpoints: bool = True
    """Whether its layers' activations can be computed again (policy.checkpoint_activations)."""
    warnings: tuple[str, ...] = ()
    """What can be trained, but probably should not be."""

    @property
    def linear_parameters(self) -> int:
        """Number of weights of all linear layers but the head."""
        return sum(each.parameters for each in self.linear.values())

    def adapter_inputs(self, targets: Sequence[str] | str) -> int:
        """Return the parameters of an adapter of rank 1 of these layers, as lora.with_lora selects them."""
        return sum(layer.widths for name, layer in self.linear.items() if is_target(name, targets))


class _Generation(BaseModel):
    """The sampling parameters of generation_config.json; a run sets all of them itself, but servers and exports read the file."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    temperature: Annotated[float | None, Field(ge=0, description="logits are divided by it")] = None
    top_p: Annotated[float | None, Field(ge=0, le=1, description="it is a share of the probability")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, description="it is a share of the greatest probability")] = None
    typical_p: Annotated[float | None, Field(ge=0, le=1, description="it is a share of the probability")] = None
    top_k: Annotated[int | None, Field(ge=-1, description="it is a number of tokens")] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, description="logits are divided by it")] = None
    do_sample: bool | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None


_LOGIT_OPTIONS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Options of a config that change logits after the head; 1 and 0 do not."""


_MOST: Final = {"max_position_embeddings": 1 << 30, "hidden_size": 1 << 18, "num_hidden_layers": 1000, "vocab_size": 1 << 23}
"""{size in config.json: a bound, above which building the model would take hours}"""


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: str


def tiny_facts(*, attention: str | None = None) -> ModelFacts:
    """Return the facts of the tiny model, which a run creates. Raises SettingsError for an `attention` that transformers does not have."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        config = tiny.make_model(tiny.make_tokenizer()).config
    return _facts(_model_without_weights(config, attention), {})


def model_facts(
    folder: Path, *, attention: str | None = None, stored: Mapping[str, tuple[tuple[int, ...], str]] | None = None
) -> ModelFacts:
    """Return the facts of the model in a folder of transformers' format, with `attention` as its attn_implementation.

    `stored`: {name: (shape, safetensors' dtype)} of weights that are not in the folder; None: they are read from it.
    Raises SettingsError, which names the file and the remedy, where a file is a pipe or device, it is no causal language model, its
    weights are missing, damaged or of another shape than its config says, or its tokenizer has no usable chat template.
    """
    _check_files(folder)
    model = _model_without_weights(_config(folder), attention, folder / "config.json")
    tensors = _stored_tensors(folder) if stored is None else {name: _Tensor(*each) for name, each in stored.items()}
    _check_weights(folder, model, tensors)
    facts = _facts(model, tensors)
    if facts.tied and stored is None:
        _check_tied_head(folder, model, tensors)
    warnings = _check_tokenizer(folder, facts)
    _check_ends(folder, model.config, facts)
    return replace(facts, warnings=warnings)


def _check_files(folder: Path) -> None:
    """Raise SettingsError for what is neither file nor folder: reading a named pipe would wait for ever."""
    for place in sorted(folder.iterdir()):
        if place.exists() and not (place.is_file() or place.is_dir()):
            kind = "a named pipe" if place.is_fifo() else "a socket or device"
            raise _wrong(place, f"it is {kind}, and must be a file", "copy the model's file there, or remove it")


def _model_without_weights(config: Any, attention: str | None, file: Path | None = None) -> Any:
    """Build the model of a config, which is of `file`. Raises SettingsError where transformers cannot, or not with this attention."""
    given = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), **given)  # which it changes
    except Exception as error:  # transformers raises what its lookups and layers raise
        why = _first_line(error)
        if attention is not None:
            _model_without_weights(config, None, file)  # whose error comes first, where it is the config's
            raise SettingsError(f"[algorithm] attention = {shown(attention)}: transformers refuses it ({why}); leave it out") from error
        if file is None:
            raise
        why = f"transformers cannot build its model ({type(error).__name__}: {why})"
        raise _wrong(file, why, "correct it, or take it from the model's origin") from error


def _facts(model: Any, stored: Mapping[str, _Tensor]) -> ModelFacts:
    config = model.config.get_text_config()
    sizes = Counter[str]()
    for tensor in stored.values():
        sizes[tensor.dtype] += max(1, torch.Size(tensor.shape).numel())
    most = sizes.most_common(1)[0][0] if sizes else "F32"
    head = model.get_output_embeddings()
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        context=int(config.max_position_embeddings),
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
        dtype=DTYPES.get(most, most.lower()),
        heads=heads,
        kv_heads=int(_of(config, "num_key_value_heads") or heads),
        head_size=int(_of(config, "head_dim") or hidden // heads),
        intermediate=_intermediate(config),
        linear={name: Linear(inputs + outputs, inputs * outputs) for name, inputs, outputs in linear_layers(model)},
        checkpoints=bool(checkpointed_layers(model)),
        whole_logits=any(_of(config, name) not in (None, 0, 1) for name in _LOGIT_OPTIONS),
    )


def _of(config: Any, name: str) -> Any:
    """Return an option that not every architecture has."""
    return getattr(config, name, None)


def _intermediate(config: Any) -> int:
    experts, width = _of(config, "num_experts_per_tok"), _of(config, "moe_intermediate_size")
    if experts and width:
        return int(experts) * int(width)
    return int(_of(config, "intermediate_size") or _of(config, "n_inner") or 4 * config.hidden_size)


def _config(folder: Path) -> Any:
    """Load config.json. Raises SettingsError where it is not that of a causal language model."""
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a config of the wrong shape
        raise _wrong(folder / "config.json", f"transformers cannot read it ({_first_line(error)})", "save the model again") from error
    quantised: Any = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", quantised)
        why = f"it has a quantization_config ({getattr(method, 'value', method)}), and quantised weights cannot be trained"
        raise _wrong(folder / "config.json", why, "name the model in float32 or bfloat16 that it was made of")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = config.architectures or []
    if kind is None or (names and not any("CausalLM" in name or "LMHead" in name or name == kind.__name__ for name in names)):
        is_a = ", ".join(names) or config.model_type
        raise _wrong(folder / "config.json", f"it is of a {is_a}, not of a causal language model", "name a model …ForCausalLM")
    for name, most in _MOST.items():
        value = getattr(config.get_text_config(), name, None)
        if not isinstance(value, int) or not 1 <= value <= most:
            why = f"{name} is {shown(value)}: it must be at least 1 and at most {most}, several times that of any published model"
            raise _wrong(folder / "config.json", why, "take it from the model's origin")
    return config


def _stored_tensors(folder: Path) -> dict[str, _Tensor]:
    """Read the headers of the weights. Returns {} for weights that are not in safetensors' format, which are not looked at."""
    index, wanted = folder / INDEX_FILE, dict[str, str]()
    if (folder / WEIGHTS_FILE).exists():
        files = [WEIGHTS_FILE]
    elif index.exists():
        try:
            wanted = _WEIGHT_MAP.validate_python(json.loads(index.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _wrong(index, f"it is no index of weights ({_first_line(error)})", "copy it again") from error
        files = sorted(set(wanted.values()))
    elif any(folder.glob("*.bin")):
        return {}
    else:
        raise _wrong(folder, f"it holds no weights, {WEIGHTS_FILE} or {INDEX_FILE}", "copy them beside config.json")
    found: dict[str, _Tensor] = {}
    for file in files:
        held = _header(folder / file)
        if lost := sorted(name for name, place in wanted.items() if place == file and name not in held):
            raise _wrong(folder / file, f"it lacks {len(lost)} tensors of {INDEX_FILE}, first {lost[0]}", "copy the file again")
        found |= held
    return found


def _header(file: Path) -> dict[str, _Tensor]:
    """Read names and shapes of a file's tensors; safetensors compares the file's length with them."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices: dict[str, Any] = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
            return {name: _Tensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except FileNotFoundError as error:
        raise _wrong(file, "it is missing", "copy it beside config.json") from error
    except (OSError, SafetensorError) as error:
        raise _wrong(file, f"it cannot be read, or was cut ({_first_line(error)})", "copy it again") from error


def _check_weights(folder: Path, model: Any, stored: Mapping[str, _Tensor]) -> None:
    """Raise SettingsError where the stored weights do not fit the model of the config."""
    if not stored:
        return
    for name, tensor in stored.items():
        if tensor.dtype not in _TRAINED and name in model.state_dict() and model.state_dict()[name].is_floating_point():
            why = f"the tensor {name} is {DTYPES.get(tensor.dtype, tensor.dtype)}, and quantised weights cannot be trained"
            raise _wrong(folder, why, "name the model in float32 or bfloat16 that it was made of")
    loaded = _loading_info(folder, model, stored)
    for name, held, wanted in sorted(loaded["mismatched_keys"]):
        why = f"the tensor {name} has shape {list(held)}, and config.json makes it {list(wanted)}"
        raise _wrong(folder, why, "take both from one model")
    missing, unexpected = sorted(loaded["missing_keys"]), sorted(loaded["unexpected_keys"])
    if missing:
        why = f"its weights lack {len(missing)} of the model's tensors, first {missing[0]}, which would be drawn at random"
        if prefix := next((name.removesuffix(missing[0]) for name in unexpected if name.endswith("." + missing[0])), ""):
            raise _wrong(folder, f"{why}: their names begin with {prefix}, and the model's do not", "save the weights without it")
        raise _wrong(folder, why, "copy all files of the model, or correct config.json")
    if unexpected:
        why = f"its weights have {len(unexpected)} tensors that the model of config.json lacks, first {unexpected[0]}, and would be cut"
        raise _wrong(folder, why, "correct config.json (num_hidden_layers), or save the model without them")


def _loading_info(folder: Path, model: Any, stored: Mapping[str, _Tensor]) -> dict[str, Any]:
    """Return which tensors transformers would not find, not use, or find of another shape; it loads the headers, without weights."""
    headers = {name: torch.empty(tensor.shape, dtype=_dtype(tensor), device="meta") for name, tensor in stored.items()}
    verbosity, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            return type(model).from_pretrained(
                None, config=model.config, state_dict=headers, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
            )[1]
    except Exception as error:  # of transformers' conversions of names and shapes
        raise _wrong(folder, f"transformers cannot load its weights ({_first_line(error)})", "take them from the model's origin") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


def _dtype(tensor: _Tensor) -> torch.dtype:
    return getattr(torch, DTYPES.get(tensor.dtype, ""), torch.float32)


def _check_tied_head(folder: Path, model: Any, stored: Mapping[str, _Tensor]) -> None:
    """Raise SettingsError where the weights hold a head of their own, which a model with tied embeddings would not use."""
    modules: dict[Any, str] = {module: name for name, module in model.named_modules()}
    head, embedding = (f"{modules[module]}.weight" for module in (model.get_output_embeddings(), model.get_input_embeddings()))
    names = [next((name for name in stored if name == wanted or wanted.endswith(f".{name}")), None) for wanted in (head, embedding)]
    if None not in names and not all(
        torch.equal(one, other) for one, other in zip(*(_rows(folder, str(name)) for name in names), strict=True)
    ):
        why = f"its weights hold {names[0]}, which differs from {names[1]}, and tie_word_embeddings is true, so that it would not be used"
        raise _wrong(folder / "config.json", why, "set it to false, or save the model without its head")


def _rows(folder: Path, name: str) -> Iterator[torch.Tensor]:
    """Yield a stored matrix in blocks of rows, so that it is never whole in memory."""
    index = folder / INDEX_FILE
    file = WEIGHTS_FILE if (folder / WEIGHTS_FILE).exists() else json.loads(index.read_text())["weight_map"][name]
    with safe_open(folder / file, framework="pt") as opened:
        matrix: Any = opened.get_slice(name)
        for start in range(0, matrix.get_shape()[0], BLOCK_ROWS):
            yield matrix[start : start + BLOCK_ROWS]


def _check_tokenizer(folder: Path, facts: ModelFacts) -> tuple[str, ...]:
    """Return warnings. Raises SettingsError where the tokenizer does not fit the model, or has no chat template that renders a
    conversation."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds for missing and damaged files
        raise _wrong(folder, f"transformers cannot load its tokenizer ({_first_line(error)})", "copy the tokenizer's files") from error
    vocabulary = tokenizer.get_vocab()
    if not vocabulary.keys() - tokenizer.get_added_vocab().keys():
        why = f"the vocabulary of its tokenizer has {len(vocabulary)} special or added tokens, and none of text: it must have at least 1"
        raise _wrong(folder / "tokenizer.json", why, "copy the file again, from the model's origin")
    if (greatest := max(vocabulary.values())) >= facts.vocabulary:
        why = f"its tokenizer has the token id {greatest}: it must be less than {facts.vocabulary}, the size of the model's vocabulary"
        raise _wrong(folder, why, "take both from one model")
    if not tokenizer.chat_template:
        raise _wrong(folder, "its tokenizer has no chat template", "take an instruct model, or add chat_template.jinja")
    if tokenizer.eos_token_id is None:
        raise _wrong(folder, "its tokenizer has no eos_token, so that no reply ends", "name it in tokenizer_config.json")
    conversation = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": REPLY}]
    try:
        tokenizer.apply_chat_template(conversation, tokenize=False)
        prompt: str = tokenizer.apply_chat_template(conversation[:1], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # jinja2 templates may raise anything
        raise _wrong(folder, f"its chat template fails on two messages ({_first_line(error)})", "correct the template") from error
    if PROBE not in prompt:
        raise _wrong(folder, "its chat template leaves out the user's message", "correct the template")

    renderings = [tokenizer.apply_chat_template(conversation[:many], tokenize=False) for many in (1, 2)]
    between = renderings[1].removeprefix(prompt).partition(REPLY)[0].strip()
    if prompt == renderings[0] and renderings[1].startswith(prompt) and between:
        why = f"its chat template ends a prompt without {between!r}, by which an assistant's message begins"
        raise _wrong(folder, why, "write it under {% if add_generation_prompt %}")
    if lost := [text for text in (PROBE, REPLY) if text not in renderings[1]]:
        whose = "user's message, once it is answered" if PROBE in lost else "assistant's message"
        raise _wrong(folder, f"its chat template leaves out the {whose}", "correct the template")
    return _without_roles(folder, tokenizer, renderings[1])


def _without_roles(folder: Path, tokenizer: Any, rendered: str) -> tuple[str, ...]:
    """Return a warning where the conversation of which `rendered` is the text is the same with its roles exchanged."""
    exchanged = [{"role": "assistant", "content": PROBE}, {"role": "user", "content": REPLY}]
    try:
        if tokenizer.apply_chat_template(exchanged, tokenize=False) != rendered:
            return ()
    except Exception:  # noqa: BLE001  # jinja2 templates may raise anything, as on an order of roles that they do not know
        return ()
    return (
        f"[policy] model: {folder}: its chat template writes all roles alike, so that the model cannot tell its own turns from the user's: "
        "take the template of an instruct model, unless each task is one message",
    )


def _check_ends(folder: Path, config: Any, facts: ModelFacts) -> None:
    """Raise SettingsError where generation_config.json cannot be read, or a reply's end is a token that the model does not have."""
    ends = {"config.json": getattr(config.get_text_config(), "eos_token_id", None)}
    file = folder / "generation_config.json"
    if file.exists():
        try:
            ends[file.name] = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        except Exception as error:  # transformers raises many kinds for a file of the wrong shape
            raise _wrong(file, f"transformers cannot read it ({_first_line(error)})", "copy it again, or remove it") from error
        try:
            _Generation.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise SettingsError(f"[policy] model: {file}: {'; '.join(problems(error.errors(), _Generation))}") from error
    for name, given in ends.items():
        for end in cast("list[Any]", given if isinstance(given, list) else [given]):
            if end is not None and not (isinstance(end, int) and 0 <= end < facts.vocabulary):
                why = f"eos_token_id is {shown(end)}: it must be at least 0 and less than {facts.vocabulary}, the size of the vocabulary"
                raise _wrong(folder / name, why, "take both from one model")


def _wrong(place: Path, why: str, remedy: str) -> SettingsError:
    return SettingsError(f"[policy] model: {place}: {why}; {remedy}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
