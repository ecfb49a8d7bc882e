"""Searches for a better prompt: APO (beam search by textual gradients), GEPA (a Pareto front of candidates), RandomSearch.

All three are policies over the same few parts, and hold nothing else: rollouts that score a candidate (evaluate.py), a model that
criticises and edits prompts (editor.py, with its wording in wording/*.poml), and a journal of everything that was paid for (journal.py).
What chooses is pure: beam.py and pareto.py. Training of weights does not belong here.
"""

from __future__ import annotations

from agl_otel.algorithms.prompts.apo import APO
from agl_otel.algorithms.prompts.candidates import Candidate
from agl_otel.algorithms.prompts.gepa import GEPA
from agl_otel.algorithms.prompts.random_search import RandomSearch
from agl_otel.algorithms.prompts.search import PromptSearch

__all__ = ["APO", "GEPA", "Candidate", "PromptSearch", "RandomSearch"]
