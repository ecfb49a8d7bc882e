"""Stands for the `tinker` package, with the part of its interface that algorithm.py uses. The model is a table that really learns.

It knows the moves of game.py and has a row of weights for each last line of a prompt. Tokens are code points; 0 ends a reply.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOVES = "123abcd"
END = 0


@dataclass(frozen=True)
class ModelInput:
    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(list(tokens))


@dataclass(frozen=True)
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, Any]


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class AdamParams:
    learning_rate: float = 1.5


@dataclass(frozen=True)
class SampledSequence:
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class SampleResponse:
    sequences: list[SampledSequence]


class Tokenizer:
    eos_token_id = END

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != END)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}\n" for message in messages))


class Table:
    def __init__(self, rows: dict[str, np.ndarray] | None = None) -> None:
        self.rows = rows or {}

    def logprobs(self, prompt: Sequence[int]) -> np.ndarray:
        weights = self.rows.get(state_of(prompt), np.zeros(len(MOVES)))
        return weights - np.log(np.exp(weights).sum())


def state_of(prompt: Sequence[int]) -> str:
    return "".join(map(chr, prompt)).rstrip("\n").rpartition("\n")[2]


class SamplingClient:
    """Samples with a snapshot of the weights."""

    def __init__(self, table: Table, seed: int) -> None:
        self._table, self._source = table, random.Random(seed)

    async def sample_async(self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams) -> SampleResponse:
        logprobs = self._table.logprobs(prompt.tokens) / max(sampling_params.temperature, 1e-6)
        logprobs -= np.log(np.exp(logprobs).sum())
        source = self._source if sampling_params.seed is None else random.Random(sampling_params.seed)
        drawn = source.choices(range(len(MOVES)), np.exp(logprobs), k=num_samples)
        return SampleResponse([SampledSequence([ord(MOVES[place]), END], [float(logprobs[place]), 0.0]) for place in drawn])


class TrainingClient:
    def __init__(self, seed: int) -> None:
        self._table, self._gradient, self._seed = Table(), {}, seed

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    async def save_weights_and_get_sampling_client_async(self, name: str) -> SamplingClient:
        self._seed += 1
        return SamplingClient(Table({state: row.copy() for state, row in self._table.rows.items()}), self._seed)

    async def forward_backward_async(self, data: Sequence[Datum], loss_fn: str) -> None:
        """Compute `importance_sampling`: the sum over all target tokens of the advantage times the probability ratio (new / old)."""
        assert loss_fn == "importance_sampling"
        for datum in data:
            tokens, targets = datum.model_input.tokens, datum.loss_fn_inputs["target_tokens"]
            for place, advantage in enumerate(datum.loss_fn_inputs["advantages"]):
                if not advantage or targets[place] == END:
                    continue
                prompt = tokens[: place + 1]
                new, move = self._table.logprobs(prompt), MOVES.index(chr(targets[place]))
                ratio = np.exp(new[move] - datum.loss_fn_inputs["logprobs"][place])
                row = self._gradient.setdefault(state_of(prompt), np.zeros(len(MOVES)))
                row += advantage * ratio * (np.eye(len(MOVES))[move] - np.exp(new))

    async def optim_step_async(self, adam_params: AdamParams) -> None:
        for state, gradient in self._gradient.items():
            size = np.abs(gradient).max()
            row = self._table.rows.setdefault(state, np.zeros(len(MOVES)))
            row += adam_params.learning_rate * gradient / (size or 1.0)
        self._gradient = {}


class ServiceClient:
    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    async def create_lora_training_client_async(self, base_model: str, rank: int = 32) -> TrainingClient:
        return TrainingClient(self._seed)
