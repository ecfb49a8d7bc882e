"""Load a model and its tokenizer from a folder, and save its weights.

Folders have transformers' layout: `model.safetensors` beside config and tokenizer.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from agl_otel.algorithms.grpo.lora import has_lora, merged, with_saved_adapter
from agl_otel.algorithms.hub import model_folder
from agl_otel.algorithms.model_files import DTYPES, WEIGHTS_FILE, replacing_files
from agl_otel.errors import DataError, UsageError

_NAMES: Final[dict[torch.dtype, str]] = {getattr(torch, name): short for short, name in DTYPES.items()}
NOT_CHECKPOINTED: Final = "gradient_checkpointing = true: {} has no layers that transformers computes again; leave it out"


@dataclass(frozen=True)
class Policy:
    """A causal language model, its tokenizer, and the tokens that end a reply."""

    model: Any
    tokenizer: Any
    stop_ids: frozenset[int]
    context_tokens: int

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model; may exceed the tokenizer's, where the embedding is padded."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def decode(self) -> Callable[..., str]:
        """A function from token ids to text that omits special tokens unless `skip_special_tokens=False`."""
        tokenizer = self.tokenizer

        def decode(token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return decode

    def prompt_ids(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, generation_prompt: bool = True
    ) -> list[int]:
        """Render `messages` and `tools` by the chat template, with the generation prompt or without, and return token ids.

        Raises UsageError where the template fails or does not support tools.
        """
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise UsageError("the model's chat template does not support tools: use a model whose template does")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=generation_prompt, tokenize=False
            )
        except Exception as error:  # jinja2 templates may raise anything
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def load_policy(folder: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str | None = None) -> Policy:
    """Load model and tokenizer from `folder`, or from the hub by their id. Raises UsageError where there is none, UnavailableError.

    `attention`: transformers' attn_implementation.
    """
    folder = model_folder(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: name one that holds a model, or a model of the hub by its id (owner/name)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no model that transformers can load: {error}") from error
    model: Any = loaded[0]
    _check_loaded(folder, model, sorted(loaded[1]["missing_keys"]), sorted(loaded[1]["unexpected_keys"]))
    stop = model.generation_config.eos_token_id
    stops = [tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])]
    model.to(device).eval()
    return Policy(model, tokenizer, frozenset(s for s in stops if s is not None), model.config.max_position_embeddings)


def _check_loaded(folder: Path, model: Any, missing: list[str], unexpected: list[str]) -> None:
    """Raise UsageError where weights were drawn at random, because the folder lacks them, were left out, or are no finite numbers."""
    if missing:
        raise UsageError(
            f"the weights in {folder} lack {len(missing)} of the model's tensors, first {missing[0]}, which would be drawn at random: copy "
            "all files of the model, or correct config.json"
        )
    if unexpected:
        raise UsageError(
            f"the weights in {folder} have {len(unexpected)} tensors that the model of config.json lacks, first {unexpected[0]}: correct "
            "config.json (num_hidden_layers), or save the model without them"
        )
    if damaged := _first_not_finite(model.named_parameters()):
        raise UsageError(f"the weights in {folder} are damaged: {damaged} is not finite; copy the model again")


def check_finite(model: Any) -> None:
    """Raise DataError where a trained weight is not a finite number."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    if damaged := _first_not_finite(trained):
        raise DataError(f"{damaged} is not finite after an update: lower learning_rate, and go on from the last checkpoint")


def _first_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    return next((name for name, weight in weights if not bool(torch.isfinite(weight.detach()).all())), None)


def checkpoint_activations(model: Any) -> None:
    """Keep each layer's input only, and compute its activations again in the backward pass (arXiv:1604.06174). Gradients are the same.

    The model stays in evaluation mode: in training mode, which transformers' own way needs, models also drop units and whole layers, and
    add noise to a router, which no policy is sampled with. Raises UsageError for a model that has no such layers.
    """
    if not (layers := checkpointed_layers(model)):
        raise UsageError(NOT_CHECKPOINTED.format(type(model).__name__))
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    model.config.use_cache = False  # which a layer would extend a second time


def checkpointed_layers(model: Any) -> list[Any]:
    """Return the layers of a model whose activations can be computed again."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def release_memory() -> None:
    """Give the GPU memory that torch caches back, for another process; without a GPU nothing happens."""
    gc.collect()
    torch.cuda.empty_cache()


def save_weights(model: Any, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the weights, an adapter merged in, to `folder`/model.safetensors, atomically; return the folder's absolute path.

    One weight at a time is copied. Tied weights are there once, under the name that transformers reads. `dtype`: of the floating-point
    ones; None: the model's.
    """
    return _write_atomically(_lazily(model, dtype), folder)


def save_merged(
    base: Path, adapter: Path, folder: Path, *, dtype: torch.dtype, device: str = "cpu", saved: torch.dtype | None = None
) -> Path:
    """Write what `save_weights` writes of the model in `base` with the LoRA adapter in the folder `adapter`.

    `dtype`: of the base weights beside the adapter; `saved`: of the files. Raises what `load_policy` raises.
    """
    return save_weights(with_saved_adapter(load_policy(base, device=device, dtype=dtype).model, adapter), folder, dtype=saved)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Copy what `save_weights` writes of a model without an adapter to memory of its own, on the CPU."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in _once(model.state_dict(), model).items()
    }


def write_weights(weights: Mapping[str, torch.Tensor], folder: str | Path) -> Path:
    """Write tensors to `folder`/model.safetensors, atomically; return the folder's absolute path."""
    return _write_atomically({name: (tensor, lambda tensor=tensor: tensor) for name, tensor in weights.items()}, folder)


_Lazy = Mapping[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]
"""{name: (a tensor of the shape and dtype, function that returns it on the CPU)}."""


def _lazily(model: Any, dtype: torch.dtype | None) -> _Lazy:
    weights = merged(model)

    def like(base: torch.Tensor) -> torch.Tensor:
        return base.to("meta", dtype if base.is_floating_point() else None)

    def on_cpu(name: str) -> torch.Tensor:
        tensor = weights[name][1]()
        return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()

    once = _once({name: base for name, (base, _) in weights.items()}, model)
    return {name: (like(base), partial(on_cpu, name)) for name, base in once.items()}


def _write_atomically(tensors: _Lazy, folder: str | Path) -> Path:
    path = Path(folder).absolute()
    with replacing_files(path) as new:
        _write(tensors, new / WEIGHTS_FILE)
    return path


def _write(tensors: _Lazy, file: Path) -> None:
    """Write a file of safetensors' format (https://github.com/huggingface/safetensors#format), with one tensor in memory at a time.

    The library's `save_file` takes all of them at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    order = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))  # each starts at a multiple of its item's size
    for name in order:
        like = tensors[name][0]
        start, end = end, end + like.numel() * like.dtype.itemsize
        header[name] = {"dtype": _NAMES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            out.write(tensors[name][1]().reshape(-1).view(torch.uint8).numpy().data)


def _once(weights: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Return the weights without the further names of tied ones."""
    return remove_tied_weights_from_state_dict(dict(weights), model.get_base_model() if has_lora(model) else model)


def load_weights(model: Any, folder: Path) -> None:
    """Copy `folder`'s weights into `model`, all or none. Raises UsageError that names the first mismatch."""
    file = folder / WEIGHTS_FILE
    try:
        new = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read weights from {file}: {error}") from error
    copy_weights(model, new, str(file))


def copy_weights(model: Any, new: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy weights by name into `model`, all or none; of tied ones only the first. Raises UsageError for the first mismatch in `source`."""
    everything: dict[str, torch.Tensor] = model.state_dict()
    current = _once(everything, model)
    if missing := sorted(current.keys() - new.keys()):
        raise UsageError(f"{source} lacks {len(missing)} weights of the model, first {missing[0]!r}")
    if extra := sorted(new.keys() - everything.keys()):
        raise UsageError(f"{source} has {len(extra)} weights that the model lacks, first {extra[0]!r}")
    for name, tensor in current.items():
        if new[name].shape != current[name].shape:
            raise UsageError(f"{source}: {name!r} has shape {list(new[name].shape)}, the model's has {list(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(new[name])
