"""Prompt optimisation: APO (beam search with textual gradients), GEPA (reflective evolution with a Pareto front), RandomSearch.

The three share evaluate.py (scores candidates by rollouts), editor.py (a model that criticises and edits prompts, with its prompts in
wording/*.poml) and journal.py (results on disk). Selection is pure: beam.py and pareto.py. Training of weights does not belong here.
"""

from __future__ import annotations

from agl_otel.algorithms.prompts.apo import APO
from agl_otel.algorithms.prompts.candidates import Candidate
from agl_otel.algorithms.prompts.gepa import GEPA
from agl_otel.algorithms.prompts.random_search import RandomSearch
from agl_otel.algorithms.prompts.search import PromptSearch

__all__ = ["APO", "GEPA", "Candidate", "PromptSearch", "RandomSearch"]
