"""LoRA: train low-rank adapters of the linear layers, and export them, alone or merged into the weights.

Low-rank adaptation (arXiv:2106.09685) by the library peft (extra [lora]). A model server that takes adapters loads the folder of
`save_adapter`, in peft's format; any other one `merged` weights, W + (alpha / r) B A in place of each W. The base weights are never
changed, so no rounding errors accumulate.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from agl_otel.algorithms.grpo.optimizers import load_bitsandbytes
from agl_otel.algorithms.grpo.options import ALL_LINEAR, require_lora
from agl_otel.algorithms.model_files import ADAPTER_CONFIG, ADAPTER_FILE, as_os_errors, replacing_files
from agl_otel.errors import UsageError

ALPHA_OVER_RANK: Final = 2.0  # the usual scale of an adapter
_ADAPTER: Final = "default"
_PREFIX: Final = "base_model.model."


def linear_layers(model: Any) -> Iterator[tuple[str, int, int]]:
    """Iterate over the linear layers of a model, except the head: name, and widths of input and output."""
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if layer is head:
            continue
        if isinstance(layer, torch.nn.Linear):
            yield name, layer.in_features, layer.out_features
        elif isinstance(layer, Conv1D):
            yield name, layer.nx, layer.nf


def is_target(name: str, targets: Sequence[str] | str) -> bool:
    """Return whether the linear layer of this name gets an adapter."""
    return targets == ALL_LINEAR or any(name == end or name.endswith(f".{end}") for end in targets)


def check_targets(targets: Sequence[str] | str, layers: Iterable[str], model: str) -> None:
    """Raise UsageError for a target that is the end of no linear layer's name. peft refuses targets only where none matches.

    Args:
        targets: the ends of layers' names, or ALL_LINEAR.
        layers: the names of the model's linear layers, except the head.
        model: the model's name, for the message.
    """
    names = [*layers]
    lost = [] if targets == ALL_LINEAR else [end for end in targets if not any(is_target(name, [end]) for name in names)]
    if lost:
        raise UsageError(
            f"lora_targets: no linear layer of {model} has a name that ends in {', '.join(map(repr, lost))}; their names end in "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in names}))}; give such ends, or leave it out for all of them"
        )


def with_lora(model: Any, rank: int, *, alpha: float | None = None, targets: str | Sequence[str] = ALL_LINEAR) -> Any:
    """Add an adapter to linear layers; only the adapter has gradients.

    The output is unchanged until training starts (B is 0). A is drawn from torch's generator.

    Args:
        model: a causal language model of transformers.
        rank: r, of A and B.
        alpha: the update is scaled by alpha / r; None: ALPHA_OVER_RANK times the rank.
        targets: the ends of layers' names, as "q_proj"; ALL_LINEAR: all linear layers except the head.

    Raises SettingsError without peft, UsageError for targets that the model lacks.
    """
    require_lora()
    load_bitsandbytes()
    from peft import LoraConfig, get_peft_model

    check_targets(targets, (name for name, _, _ in linear_layers(model)), "the model")
    scale: Any = ALPHA_OVER_RANK * rank if alpha is None else alpha  # a number; peft annotates int
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules=targets if isinstance(targets, str) else [*targets])
    with _without_peft_warning():
        return get_peft_model(model, config, adapter_name=_ADAPTER).eval()


@contextmanager
def _without_peft_warning() -> Generator[None]:
    """Leave out the warning that peft uses a deprecated attribute of transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def has_lora(model: Any) -> bool:
    """Return whether the model has an adapter."""
    return hasattr(model, "peft_config")


def merged(model: Any) -> dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
    """Return {name in the plain model: (base weight, function that returns the weight with an adapter's part added)}.

    Only a call of the function takes memory, so that callers can merge one weight at a time.
    """
    layers: dict[str, Any] = dict(model.named_modules()) if has_lora(model) else {}
    found: dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
    for name, tensor in model.state_dict().items():
        if not layers:
            found[name] = tensor, lambda tensor=tensor: tensor
        elif ".lora_" not in name:
            layer = layers[name.rpartition(".base_layer.")[0]] if ".base_layer.weight" in name else None
            found[name.removeprefix(_PREFIX).replace(".base_layer.", ".")] = tensor, lambda tensor=tensor, layer=layer: _sum(tensor, layer)
    return found


def _sum(tensor: torch.Tensor, layer: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor + layer.get_delta_weight(_ADAPTER).to(tensor.dtype) if layer is not None else tensor


def adapter(model: Any) -> dict[str, torch.Tensor] | None:
    """Return the adapter's weights, which share memory with the model's, by PEFT's names; None where there is none."""
    if not has_lora(model):
        return None
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)


def adapter_config(model: Any) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json for a model with an adapter, as JSON values."""
    config: dict[str, Any] = model.peft_config[_ADAPTER].to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}  # equal bytes in every process
    return json.loads(json.dumps({**plain, "task_type": "CAUSAL_LM", "inference_mode": True}))


def save_adapter(model: Any, folder: Path) -> Path:
    """Write the adapter to `folder` in PEFT's format, as PeftModel.from_pretrained and vLLM load it; return the folder's absolute path."""
    weights = {name: tensor.detach().to("cpu") for name, tensor in (adapter(model) or {}).items()}
    return write_adapter(weights, adapter_config(model), folder)


def write_adapter(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path) -> Path:
    """Write `adapter` and `adapter_config` of a model as `save_adapter` does, from tensors on the CPU."""
    path = folder.absolute()
    with replacing_files(path) as new:
        (new / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        with as_os_errors(new / ADAPTER_FILE):
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, new / ADAPTER_FILE, metadata={"format": "pt"})
    return path


def with_saved_adapter(model: Any, folder: Path) -> Any:
    """Add the adapter in `folder`, in PEFT's format, to a model without one. Raises SettingsError without peft."""
    require_lora("merging an adapter")
    load_bitsandbytes()
    from peft import PeftModel

    with _without_peft_warning():
        return PeftModel.from_pretrained(model, folder, adapter_name=_ADAPTER).eval()


def load_adapter(model: Any, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Restore an adapter's weights, by PEFT's names. Raises UsageError that names `source` where names or shapes differ."""
    own = adapter(model) or {}
    if own.keys() != weights.keys() or any(own[name].shape != tensor.shape for name, tensor in weights.items()):
        raise UsageError(f"the adapter in {source} has {len(weights)} weights of other names or shapes than the model's {len(own)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
