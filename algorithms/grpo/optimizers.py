"""The optimizers of a trainer: AdamW (arXiv:1711.05101), and with 8-bit states by the library bitsandbytes (extra [bitsandbytes]).

AdamW keeps two float32 numbers for each trained weight, 8 bytes. With states quantised in blocks (arXiv:2110.02861) they take 2 bytes;
bitsandbytes keeps tensors of fewer than 4096 weights in float32. The paged one holds its states in memory that CUDA moves to the host
where the device's is full. Weight decay is 0 in all: it would pull a policy from the model that it started as.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

from agl_otel.errors import SettingsError, UsageError

if TYPE_CHECKING:
    import torch

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
PLAIN: Final = "adamw"


def load_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, without its warning that a kernel for 4-bit models on the CPU is missing.

    No policy here is such a model. peft imports it, too, whatever the model.
    """
    if find_spec("bitsandbytes") is None:
        return
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.addFilter(_concerns_policies)
    try:
        import_module("bitsandbytes")
    finally:
        log.removeFilter(_concerns_policies)


def _concerns_policies(record: logging.LogRecord) -> bool:
    return "gemm_4bit_forward" not in record.msg


def require_optimizer(name: OptimizerName, device: str) -> None:
    """Raise SettingsError, naming the extra, where bitsandbytes is missing; UsageError for a paged optimizer on the CPU."""
    if name != PLAIN and find_spec("bitsandbytes") is None:
        raise SettingsError(
            f"optimizer = \"{name}\" needs the [bitsandbytes] extra (bitsandbytes is missing): pip install 'agl-otel[bitsandbytes]'"
        )
    if name.startswith("paged") and device.startswith("cpu"):
        raise UsageError(
            f'optimizer = "{name}": it must not be paged on device = "{device}", because its states would be moved from a GPU\'s memory to '
            'this one; give "adamw_8bit"'
        )


def make_optimizer(name: OptimizerName, weights: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Create the optimizer of these weights. Raises SettingsError where bitsandbytes is missing."""
    if name == PLAIN:
        import torch

        return torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    require_optimizer(name, "cuda")
    load_bitsandbytes()
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

    kind = AdamW8bit if name == "adamw_8bit" else PagedAdamW8bit
    return kind(weights, lr=learning_rate, weight_decay=0.0)
