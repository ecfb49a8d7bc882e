# What __init__.py loads when it is first used.
from .base import Algorithm
from .decorator import FunctionalAlgorithm, algo
from .fast import Baseline, FastAlgorithm
from .prompts import APO, GEPA, RandomSearch
from .utils import batch_iter_over_dataset, with_llm_proxy, with_store
from .verl import VERL

__all__ = [
    "APO",
    "GEPA",
    "VERL",
    "Algorithm",
    "Baseline",
    "FastAlgorithm",
    "FunctionalAlgorithm",
    "RandomSearch",
    "algo",
    "batch_iter_over_dataset",
    "with_llm_proxy",
    "with_store",
]
