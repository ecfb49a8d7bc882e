"""The estimated policy gradient is that of the policy as sampled, whatever agents and model servers do to its distribution.

The vocabulary is so small that the exact gradient is the sum over all replies. A pretended model server, which shares no code with the
package, draws 200,000 replies with the parameters of its requests; contracts, trajectories and the gradient are the package's. A joint χ²
test of the gradient along 20 random directions must accept it (p > 1e-3) in every mode that takes the calls, and reject (p < 1e-9) what
comes out if contracts are ignored.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from agl_otel.adapters.exported import ASSUMED
from agl_otel.adapters.sampling import Assumed, token_temperatures, unlike
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.options import Objective
from agl_otel.types import Attempt, AttemptedRollout, Verdict
from agl_otel.types.columns import CallColumns, Ragged, Reward, Traces
from agl_otel.types.sampling import Contract, LogProbs, all_parameters, overridden

pytestmark = pytest.mark.full

VOCABULARY, LENGTH, PROMPT = 6, 3, (2, 0)
REPLIES: Final = tuple(itertools.product(range(VOCABULARY), repeat=LENGTH))
SAMPLES: Final = 200_000
CALLS: Final = int(os.environ.get("SAMPLING_CALLS", "20000"))
"""Random contracts; 1,000,000 take some minutes."""
DIRECTIONS, SEED = 20, 24
BASELINE: Final = 0.4
RUN: Final = all_parameters(1.0, LENGTH)
ENGINE: Final[Mapping[str, Any]] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "logit_bias": {}, "allowed_token_ids": None, "tool_choice": "auto", "response_format": None,
}  # fmt: skip
"""The pretended server's fields, and what it takes for a field that neither a request nor its model's generation_config.json has."""


def distribution(logits: NDArray[np.float64], written: tuple[int, ...], fields: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the probabilities of the next token, as a model server has them: penalties, bias, masks, temperature, min_p, top_k, top_p."""
    values = logits.copy()
    seen = np.isin(np.arange(VOCABULARY), [*PROMPT, *written])
    counts = np.bincount(np.array(written, np.int64), minlength=VOCABULARY)
    values[seen] = np.where(values[seen] > 0, values[seen] / fields["repetition_penalty"], values[seen] * fields["repetition_penalty"])
    values -= fields["frequency_penalty"] * counts + fields["presence_penalty"] * (counts > 0)
    for token, bias in fields["logit_bias"].items():
        values[int(token)] += bias
    if fields["allowed_token_ids"]:
        values[~np.isin(np.arange(VOCABULARY), fields["allowed_token_ids"])] = -np.inf
    if fields["tool_choice"] not in ("auto", "none") or fields["response_format"]:  # a grammar that knows the lower half alone
        values[VOCABULARY // 2 :] = -np.inf
    if fields["temperature"] < 0.01:
        return (np.arange(VOCABULARY) == values.argmax()).astype(np.float64)
    chances = np.exp((values - values.max()) / fields["temperature"])
    chances[chances < fields["min_p"] * chances.max()] = 0
    if fields["top_k"] > 0:
        chances[np.argsort(-chances)[fields["top_k"] :]] = 0
    chances /= chances.sum()
    order = np.argsort(-chances)
    before = np.cumsum(chances[order]) - chances[order]
    chances[order[before >= fields["top_p"]]] = 0
    return chances / chances.sum()


@dataclass(frozen=True)
class Kind:
    """Calls of one kind: what the agent asks, and what the model server does."""

    asked: Mapping[str, Any]
    told: Mapping[str, Any] = field(default_factory=lambda: dict(RUN))
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the model's generation_config.json."""
    says: str | None = "*"
    """The server's header agl-sampling."""
    raw: bool = False
    """Whether the server's log-probs are of the unchanged logits."""
    probed: LogProbs = ""


@dataclass
class World:
    """A policy, and all that can be said of it exactly."""

    model: Any
    rewards: NDArray[np.float64]
    """Of each of REPLIES."""
    directions: NDArray[np.float64]
    """Orthonormal, [DIRECTIONS, parameters]."""

    def scores(self, temperature: float) -> NDArray[np.float64]:
        """Return the gradient of log π(reply) at this temperature for each reply, along the directions: [replies, DIRECTIONS]."""
        model = copy.deepcopy(self.model).double()
        rows = torch.tensor([[*PROMPT, *reply] for reply in REPLIES])
        logits = model(input_ids=rows).logits[:, len(PROMPT) - 1 : -1] / temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, rows[:, len(PROMPT) :, None]).sum((1, 2))
        parameters = list(model.parameters())
        found = [
            torch.cat([each.flatten() for each in torch.autograd.grad(value, parameters, retain_graph=True)]).numpy() @ self.directions.T
            for value in chosen
        ]
        return np.stack(found)

    def chances(self, fields: Mapping[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the probability of each reply under a server's fields, and the raw log-prob of each of its tokens."""
        with torch.no_grad():
            rows = torch.tensor([[*PROMPT, *reply] for reply in REPLIES])
            logits = copy.deepcopy(self.model).double()(input_ids=rows).logits[:, len(PROMPT) - 1 : -1].numpy()
        steps, raw = np.empty((len(REPLIES), LENGTH)), np.empty((len(REPLIES), LENGTH))
        for number, reply in enumerate(REPLIES):
            for place, token in enumerate(reply):
                steps[number, place] = distribution(logits[number, place], reply[:place], fields)[token]
                raw[number, place] = distribution(logits[number, place], (), ENGINE)[token]
        return steps, np.log(raw)


@pytest.fixture(scope="module")
def world() -> World:
    torch.manual_seed(SEED)
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, initializer_range=0.6, **shape)).eval()
    generator = np.random.default_rng(SEED)
    count = sum(each.numel() for each in model.parameters())
    directions = np.linalg.qr(generator.standard_normal((count, DIRECTIONS)))[0].T
    return World(model, generator.random(len(REPLIES)), directions)


def sent(kind: Kind, policy: str | None) -> tuple[dict[str, Any], Contract]:
    """Return the fields that the server samples with, and the contract that the proxy writes down."""
    own = overridden(policy, kind.asked, kind.told)
    asked = {name: value for name, value in kind.asked.items() if name not in own}
    fields = {**ENGINE, **kind.defaults, **kind.told, **without_none(asked)}
    known: LogProbs = "processed" if kind.says is not None else kind.probed
    return fields, Contract.of(asked, kind.told, kind.says, own, known)


def drawn(world: World, kinds: list[Kind], policy: str | None, seed: int) -> tuple[Traces, NDArray[np.int64], list[float]]:
    """Draw SAMPLES replies of these kinds in equal parts: one call for each distinct one, and how often it was drawn."""
    generator = np.random.default_rng(seed)
    rows: list[tuple[int, int]] = []
    counts, contracts, logprobs, temperatures = list[int](), list[str](), list[NDArray[Any]](), list[float]()
    for place, kind in enumerate(kinds):
        fields, contract = sent(kind, policy)
        steps, raw = world.chances(fields)
        temperatures.append(fields["temperature"])
        for reply, count in enumerate(generator.multinomial(SAMPLES // len(kinds), steps.prod(1) / steps.prod(1).sum())):
            if count:
                rows.append((place, reply))
                counts.append(int(count))
                contracts.append(contract.dumps())
                logprobs.append(raw[reply] if kind.raw else np.log(steps[reply]))
    ids = [f"ro-{place}-{reply:03d}" for place, reply in rows]
    none, empty = np.zeros(len(ids), np.int64), [""] * len(ids)
    held = {text: contract for text in set(contracts) if (contract := Contract.loads(text)) is not None}
    calls = CallColumns(
        rollout_id=ids, attempt_id=["at-1"] * len(ids), process=["m"] * len(ids), span_id=ids, parent_span_id=empty, call=none + 1,
        choice=none, sequence=(none + 1).astype(np.uint64), prefix_call=none, prefix_choice=none,
        prompt=Ragged.from_rows([PROMPT] * len(ids), np.int32),
        response=Ragged.from_rows([REPLIES[reply] for _, reply in rows], np.int32), logprobs=Ragged.from_rows(logprobs, np.float32),
        model_version=["1"] * len(ids), agent=empty, incomplete=empty, contract=contracts,
        temperature=np.array([held[text].temperature for text in contracts]),
    )  # fmt: skip
    attempt: dict[str, Any] = {"attempt_id": "at-1", "sequence_id": 1, "start_time": 1, "status": "succeeded"}
    rollouts = [
        AttemptedRollout(rollout_id=each, input={}, start_time=1, status="succeeded", attempt=Attempt(rollout_id=each, **attempt))
        for each in ids
    ]
    rewards = {
        (each, "at-1"): [Reward(2, "s", 0, "primary", float(world.rewards[reply]))] for each, (_, reply) in zip(ids, rows, strict=True)
    }
    verdicts = {key: Verdict(rollout_id=key[0], attempt_id=key[1], kind="complete") for key in rewards}
    return Traces(list(rollouts), calls, rewards, verdicts, spans=len(ids), digest="d"), np.array(counts), temperatures


def estimated(
    world: World, traces: Traces, counts: NDArray[np.int64], assumed: Assumed | None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the learner's gradient along the directions, and the rows of the calls that it takes; `assumed` None: as without contracts."""
    batch = to_trajectories(traces, sampling=assumed)
    taken = batch.rows.values.astype(np.int64)
    share = counts[taken] / counts[taken].sum()
    model = copy.deepcopy(world.model)
    learner = Learner(model, learning_rate=0.0, objective=Objective(average="constant", constant_tokens=1), max_grad_norm=math.inf)
    advantages = ((batch.reward - BASELINE) * share * len(taken)).astype(np.float32)
    temperatures = token_temperatures(traces.calls, batch.rows, default=1.0) if assumed is not None else None
    learner.update(batch, advantages, temperatures=temperatures)
    gradient = torch.cat([each.grad.flatten() for each in model.parameters()]).double().numpy()
    return -(gradient @ world.directions.T), taken


def chance(
    world: World, kinds: list[Kind], policy: str | None, temperatures: list[float], gradient: NDArray[np.float64], weight: NDArray[np.int64]
) -> float:
    """Return the p-value of a gradient of so many calls of each kind, against the exact one of the policy as it was sampled."""
    mean, covariance = np.zeros(DIRECTIONS), np.zeros((DIRECTIONS, DIRECTIONS))
    for kind, temperature, count in zip(kinds, temperatures, weight, strict=True):
        if not count:
            continue
        steps, _ = world.chances(sent(kind, policy)[0])
        chances = steps.prod(1) / steps.prod(1).sum()
        terms = (world.rewards - BASELINE)[:, None] * world.scores(temperature)
        center = chances @ terms
        mean += count / weight.sum() * center
        covariance += count / weight.sum() * ((terms - center).T @ ((terms - center) * chances[:, None]))
    off = gradient - mean
    statistic = weight.sum() * float(off @ np.linalg.solve(covariance, off))
    return float(
        torch.special.gammaincc(torch.tensor(DIRECTIONS / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64))
    )


PLAIN: Final = Kind({})
CASES: Final[dict[str, tuple[dict[str, Any], list[Kind], list[int]]]] = {
    "cold": ({}, [Kind({"temperature": 0.2})], [0]),
    "hot": ({}, [Kind({"temperature": 1.5})], [0]),
    "several": ({"mix_temperatures": True}, [Kind({"temperature": 0.2}), PLAIN, Kind({"temperature": 1.5})], [0, 1, 2]),
    "one of several": ({}, [Kind({"temperature": 0.2}), PLAIN, Kind({"temperature": 1.5})], [1]),
    "refuse": ({"sampling_policy": "refuse"}, [Kind({"temperature": 1.5}), PLAIN], [1]),
    "greedy": ({}, [Kind({"temperature": 0}), PLAIN], [1]),
    "top_p": ({}, [Kind({"top_p": 0.9}), PLAIN], [1]),
    "penalties": ({}, [Kind({"repetition_penalty": 1.3, "presence_penalty": 0.5}), PLAIN], [1]),
    "a server's defaults": (
        {}, [Kind({}, {"temperature": 1.0}, {"top_k": 3, "repetition_penalty": 1.1}, None), Kind({}, RUN, {"top_k": 3}, None)], [1],
    ),
    "raw log-probs": ({}, [Kind({"temperature": 1.2}, RUN, {}, None, raw=True, probed="raw"), Kind({}, RUN, {}, None, raw=True)], [1]),
    "log-probs not proven": ({}, [Kind({"temperature": 1.2}, RUN, {}, None, raw=True), Kind({}, RUN, {}, None, raw=True)], [1]),
    "probed": ({}, [Kind({"temperature": 1.5}, RUN, {}, None, probed="processed")], [0]),
    "grammar": ({}, [Kind({"response_format": {"type": "json_object"}}), PLAIN], [1]),
    "enforce": (
        {"sampling_policy": "enforce"}, [Kind({"temperature": 1.5, "top_p": 0.5, "logit_bias": {"1": 2}}), Kind({"temperature": 0})], [0],
    ),
    "enforce_all": ({"sampling_policy": "enforce_all"}, [Kind({"temperature": 0}), Kind({"tool_choice": "required"})], [0]),
}  # fmt: skip
"""{name: (options of GRPO, the kinds of calls, those of which are trained on)}."""


def test_an_export_tells_what_grpo_refuses_by_default() -> None:
    grpo = GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1")
    assumed = grpo._assumed  # pyright: ignore[reportPrivateUsage]  # as below
    assert assumed.temperatures == "one" and replace(assumed, temperatures="any") == ASSUMED, "at any one temperature"


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_policy_as_it_was_sampled(world: World, name: str) -> None:
    options, kinds, taken_kinds = CASES[name]
    grpo = GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", **options)
    policy = options.get("sampling_policy")
    traces, counts, temperatures = drawn(world, kinds, policy, seed=SEED)
    gradient, taken = estimated(world, traces, counts, grpo._assumed)  # pyright: ignore[reportPrivateUsage]  # what its steps assume
    weight = np.bincount(kinds_of(traces)[taken], counts[taken], len(kinds)).astype(np.int64)
    assert np.flatnonzero(weight).tolist() == taken_kinds
    assert chance(world, kinds, policy, temperatures, gradient, weight) > 1e-3

    traces, counts, _ = drawn(world, kinds, None, seed=SEED)
    gradient, taken = estimated(world, traces, counts, None)
    assert counts[taken].sum() == counts.sum(), "without contracts all calls are taken for samples of the run's distribution"
    assert chance(world, [PLAIN], None, [1.0], gradient, np.array([counts.sum()])) < 1e-9


def kinds_of(traces: Traces) -> NDArray[np.int64]:
    return np.array([int(each.split("-")[1]) for each in traces.calls.rollout_id])


def random_kind(chance: random.Random) -> Kind:
    """Return a request that some agent might make to some server."""
    fields: dict[str, list[Any]] = {
        "temperature": [None, 0, 0.005, 0.2, 0.7, 1, 1.0, "1.0", 1.5],
        "top_p": [None, 1, 0.9, 0.1, "1"],
        "top_k": [None, -1, 0, 1, 3, 20],
        "min_p": [None, 0, 0.1],
        "repetition_penalty": [None, 1, 1.2],
        "frequency_penalty": [None, 0, 0.5],
        "presence_penalty": [None, 0.0, -0.5],
        "logit_bias": [None, {}, {"1": 2}],
        "allowed_token_ids": [None, [], [1, 2]],
        "tool_choice": ["auto", "none", "required"],
        "response_format": [None, {"type": "json_object"}],
        "stop": [None, ["x"]],
        "n": [1, 2],
    }

    def some(of: dict[str, list[Any]], share: float) -> dict[str, Any]:
        return {name: chance.choice(values) for name, values in of.items() if chance.random() < share}

    filled = {name: fields[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    told = {**RUN, "temperature": chance.choice([1.0, 1.0, 0.7])} if chance.random() < 0.8 else without_none(some(filled, 0.5))
    defaults = {name: value for name, value in without_none(some(filled, 0.3)).items() if not isinstance(value, str)}
    says = chance.choice([None, None, "*"])
    raw = says is None and chance.random() < 0.5
    probed: LogProbs = chance.choice(["", "raw" if raw else "processed"])
    return Kind(some(fields, chance.choice([0.0, 0.1, 0.3])), told, {} if says else defaults, says, raw, probed)


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def test_no_call_is_taken_that_was_sampled_from_another_distribution() -> None:
    """Each random contract is held against what the server does with its request, on logits of its own."""
    generator = random.Random(SEED)
    taken = 0
    for number in range(CALLS):
        policy = generator.choice([None, "refuse", "correct", "enforce", "enforce_all"])
        kind, temperature = random_kind(generator), generator.choice([1.0, 1.0, 0.7])
        fields, contract = sent(kind, policy)
        found = unlike(one_call(contract.dumps()), Assumed(temperature, temperatures="any" if policy == "correct" else "run"))
        if found.greedy[0] or found.differs[0]:
            continue
        taken += 1
        at = {**fields, "temperature": float(fields["temperature"]), "top_p": float(fields["top_p"])}
        logits, written = np.random.default_rng(number).standard_normal(VOCABULARY) * 2, (1, 1, 4)
        sampled = distribution(logits, written, at)
        wanted = distribution(logits, written, {**ENGINE, "temperature": at["temperature"] if policy == "correct" else temperature})
        assert np.abs(sampled - wanted).max() < 1e-9, (kind, policy)
        shown = distribution(logits, written, ENGINE) if kind.raw else sampled
        assert np.abs(shown - wanted).max() < 1e-9, (kind, policy, "its log-probs are of another distribution")
    assert taken > CALLS / 20, "the others are all refused"


def one_call(contract: str) -> CallColumns:
    held = Contract.loads(contract)
    none, empty = np.zeros(1, np.int64), Ragged.from_rows([[1]], np.int32)
    return CallColumns(
        rollout_id=["r"], attempt_id=["a"], process=["m"], span_id=["s"], parent_span_id=[""], call=none, choice=none,
        sequence=none.astype(np.uint64), prefix_call=none, prefix_choice=none, prompt=empty, response=empty,
        logprobs=Ragged.from_rows([[0.0]], np.float32), model_version=["1"], agent=[""], incomplete=[""], contract=[contract],
        temperature=np.array([held.temperature if held is not None else math.nan]),
    )  # fmt: skip
