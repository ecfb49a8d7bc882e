"""Algorithm, runners and store in one call: Trainer (trainer.py) for Python programs, Training (job.py) for job files.

Names are loaded when they are first used: a Trainer needs no torch, which a job does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agl_otel.trainer.job import AlgorithmSpec, Evaluation, Job, Report, Runners, Training
    from agl_otel.trainer.registry import build_component
    from agl_otel.trainer.trainer import Trainer

__all__ = ["AlgorithmSpec", "Evaluation", "Job", "Report", "Runners", "Trainer", "Training", "build_component"]
_MODULE_OF: Final = {"Trainer": "trainer", "build_component": "registry"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'job')}"), name)
