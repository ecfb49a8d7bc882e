"""Improve resources: enqueue rollouts, read their traces through an adapter, publish."""

from __future__ import annotations

from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.decorator import FunctionalAlgorithm, algo
from agl_otel.algorithms.fast import Baseline, FastAlgorithm
from agl_otel.algorithms.prompts import APO, GEPA, RandomSearch
from agl_otel.algorithms.utils import batch_iter_over_dataset, with_llm_proxy, with_store
from agl_otel.algorithms.verl import VERL

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
