"""A platform plug-in of verl for machines without a GPU, for tests and small models. verl supports CUDA, ROCm and NPUs only."""

from __future__ import annotations

import functools
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
import verl.utils.distributed  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
import verl.workers.rollout.base  # pyright: ignore[reportMissingImports] - of the [verl] extra
from verl.plugin.platform.platform_base import PlatformBase  # pyright: ignore[reportMissingImports] - of the [verl] extra
from verl.plugin.platform.platform_manager import PlatformRegistry  # pyright: ignore[reportMissingImports] - of the [verl] extra
from verl.workers.rollout.replica import RolloutReplicaRegistry  # pyright: ignore[reportMissingImports] - of the [verl] extra

BACKEND: Final = "agl_otel_cpu"
"""`actor_rollout_ref.rollout.name` of the model server in server.py."""
MEMORY_BYTES: Final = (1 << 33, 1 << 34)  # free and total, for verl's reports
_NUMBERS: Final = (
    *("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated"),
)


def _device_module() -> types.ModuleType:
    """Create a module with the functions of torch.cuda that verl uses, for the CPU."""
    module: Any = types.ModuleType("agl_otel_cpu_device")
    module.empty_cache = module.ipc_collect = module.synchronize = module.set_device = lambda *_: None
    for name in _NUMBERS:
        setattr(module, name, lambda *_, **__: 0)
    module.mem_get_info = lambda *_: MEMORY_BYTES
    module.current_device = lambda: "cpu"
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.get_device_name = lambda *_: "CPU"
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    for name in ("Stream", "stream", "current_stream"):
        setattr(module, name, getattr(torch.cpu, name))
    return module


@PlatformRegistry.register(platform="cpu")  # pyright: ignore[reportUntypedClassDecorator] - it is not in our own environment
class CpuPlatform(PlatformBase):
    """The CPU as an accelerator of verl. Each worker requests one `GPU` from Ray, and defaults.CPU declares one."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False, so that it is used only where VERL_PLATFORM names it."""
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "AGL_OTEL_CPU_VISIBLE"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        pass


def register() -> None:
    """Register the model server with verl, and make process groups use gloo only."""
    names: Any = verl.workers.rollout.base
    names._ROLLOUT_REGISTRY[BACKEND, "async"] = "agl_otel.algorithms.verl.server.Rollout"
    RolloutReplicaRegistry.register(BACKEND, _replica)
    groups: Any = verl.utils.distributed
    make = groups.initialize_global_process_group_ray

    @functools.wraps(make)
    def gloo(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return make(timeout_second, backend or "cpu:gloo")

    groups.initialize_global_process_group_ray = gloo


def _replica() -> Any:
    from agl_otel.algorithms.verl.server import Replica

    return Replica
