"""Algorithm, runners and store in one call: Trainer (trainer.py) for Python programs, job files (job.py) for the command line.

A job trains weights (training.py, tuning.py, verl.py), searches for prompts (prompts.py), or runs any other algorithm (own.py). Names are
loaded when they are first used: only training needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agl_otel.trainer.job import Job
    from agl_otel.trainer.own import OwnRun
    from agl_otel.trainer.prompts import PromptSearching
    from agl_otel.trainer.registry import build_component
    from agl_otel.trainer.run import Evaluation, JobRun, Runners
    from agl_otel.trainer.trainer import Trainer
    from agl_otel.trainer.training import AlgorithmSpec, Report, Training
    from agl_otel.trainer.tuning import Tuning
    from agl_otel.trainer.verl import VerlRun

__all__ = [
    "AlgorithmSpec",
    "Evaluation",
    "Job",
    "JobRun",
    "OwnRun",
    "PromptSearching",
    "Report",
    "Runners",
    "Trainer",
    "Training",
    "Tuning",
    "VerlRun",
    "build_component",
]
_MODULE_OF: Final = {
    "AlgorithmSpec": "training",
    "Evaluation": "run",
    "Job": "job",
    "JobRun": "run",
    "OwnRun": "own",
    "PromptSearching": "prompts",
    "Report": "training",
    "Runners": "run",
    "Trainer": "trainer",
    "Training": "training",
    "Tuning": "tuning",
    "VerlRun": "verl",
    "build_component": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
