"""LoRA: train low-rank adapters of the linear layers, and export weights with the adapters merged in.

Low-rank adaptation (arXiv:2106.09685) by the library peft (extra [lora]). Model servers load `merged` weights, W + (alpha / r) B A in
place of each W, so that any server can read them. The base weights are never changed, so no rounding errors accumulate.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch

from agl_otel.errors import SettingsError, UsageError

ALPHA_OVER_RANK: Final = 2.0  # the usual scale of an adapter
ALL_LINEAR: Final = "all-linear"
_ADAPTER: Final = "default"
_PREFIX: Final = "base_model.model."


def require_lora() -> None:
    """Raise SettingsError, naming the extra, where peft is missing."""
    if find_spec("peft") is None:
        raise SettingsError("lora_rank needs the [lora] extra (peft is missing): pip install 'agl-otel[lora]'")


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
    from peft import LoraConfig, get_peft_model

    scale: Any = ALPHA_OVER_RANK * rank if alpha is None else alpha  # a number; peft annotates int
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules=targets if isinstance(targets, str) else [*targets])
    with warnings.catch_warnings():  # peft uses a deprecated attribute of transformers
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        try:
            return get_peft_model(model, config, adapter_name=_ADAPTER).eval()
        except ValueError as error:
            raise UsageError(f"lora_targets = {targets!r}: {error}") from None


def has_lora(model: Any) -> bool:
    """Return whether the model has an adapter."""
    return hasattr(model, "peft_config")


def merged(model: Any) -> dict[str, torch.Tensor]:
    """Return {name in the plain model: weight}, with an adapter's part added."""
    if not has_lora(model):
        return model.state_dict()
    found: dict[str, torch.Tensor] = {}
    layers: dict[str, Any] = dict(model.named_modules())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if ".lora_" in name:
                continue
            layer = layers[name.rpartition(".base_layer.")[0]] if ".base_layer.weight" in name else None
            plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
            found[plain] = tensor + layer.get_delta_weight(_ADAPTER).to(tensor.dtype) if layer is not None else tensor
    return found


def adapter(model: Any) -> dict[str, torch.Tensor] | None:
    """Return the adapter's weights by name; None where there is none."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name} if has_lora(model) else None


def load_adapter(model: Any, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Restore an adapter's weights. Raises UsageError that names `source` where names or shapes differ."""
    own = adapter(model) or {}
    if own.keys() != weights.keys() or any(own[name].shape != tensor.shape for name, tensor in weights.items()):
        raise UsageError(f"the adapter in {source} has {len(weights)} weights of other names or shapes than the model's {len(own)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
