from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_otel.adapters.records import IGNORED
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.grpo.logprobs import Scorer
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.algorithms.sft.algorithm import SFT, rows_of
from agl_otel.algorithms.sft.train import Row, Spec, fit, logprobs
from agl_otel.errors import DataError, UsageError
from agl_otel.types.columns import Reward, SpanColumns, Traces
from tests.unit.adapters.conftest import CallRow, TracesBuilder
from tests.unit.algorithms.test_learner import ROWS, make_batch

pytestmark = pytest.mark.full

SPEC = Spec(
    model_dir="", weights="", out="", learning_rate=1e-3, epochs=2, batch_rows=3, max_grad_norm=1e9, seed=0, device="cpu", threads=1
)


def odd_rows(source: random.Random) -> list[Row]:
    """Make rows of random lengths with special masks: all, none, one token, the first token of a row."""
    rows: list[Row] = []
    for _ in range(source.randrange(1, 6)):
        ids = [source.randrange(8, 90) for _ in range(source.randrange(1, 9))]
        share = source.choice([0.0, 0.3, 1.0])
        rows.append(Row(input_ids=ids, labels=[token if source.random() < share else IGNORED for token in ids]))
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_the_gradient_equals_that_of_a_sum_over_the_labelled_tokens(policy: Policy, seed: int) -> None:
    rows = odd_rows(random.Random(seed))
    ours, plain = copy.deepcopy(policy.model).double(), copy.deepcopy(policy.model).double()
    found = logprobs(Scorer(ours), rows)
    loss = -found.sum()
    terms = [
        -torch.log_softmax(plain(input_ids=torch.tensor([row.input_ids])).logits[0, place - 1], -1)[label]
        for row in rows
        for place, label in enumerate(row.labels)
        if place and label != IGNORED
    ]
    assert len(found) == len(terms)
    if not terms:
        assert loss.item() == 0.0
        return
    expected = torch.stack(terms).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for (name, one), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-4), name  # the model's norms and rotations are float32 in any case


def test_rows_have_a_loss_on_the_models_tokens_only(policy: Policy) -> None:
    rows = rows_of(make_batch(policy))
    assert [row.input_ids for row in rows] == [prompt + response for prompt, response, _ in ROWS]
    assert rows[1].labels == [IGNORED, IGNORED, 40, IGNORED, IGNORED, 43, 44]
    assert json.loads(json.dumps(asdict(rows[0])))["labels"] == [IGNORED] * 3 + [30, 31, 9]
    batch = make_batch(policy)
    assert [(row.rollout_id, row.reward) for row in rows] == list(zip(batch.rollout_id, batch.reward.tolist(), strict=True))


def test_the_same_seed_gives_the_same_weights_and_a_lower_loss(policy: Policy) -> None:
    models = [copy.deepcopy(policy.model) for _ in range(2)]
    first, second = (fit(model, rows_of(make_batch(policy)), SPEC) for model in models)
    assert first == second
    assert (first.tokens, first.updates) == (10, 4)
    assert first.loss < first.loss_before
    assert all(torch.equal(one, other) for one, other in zip(*(m.state_dict().values() for m in models), strict=True))


def test_tokens_count_by_their_weights(policy: Policy) -> None:
    rows = rows_of(make_batch(policy))
    weighed = [
        replace(row, weights=[2.0] * len(row.logprobs) if place == 1 else [0.0] * len(row.logprobs)) for place, row in enumerate(rows)
    ]
    models = [copy.deepcopy(policy.model) for _ in range(3)]
    spec = replace(SPEC, batch_rows=len(rows))
    alone, only, plain = (fit(model, given, spec) for model, given in zip(models, ([rows[1]], weighed, rows), strict=True))
    assert only.loss_before == pytest.approx(alone.loss_before) and only.loss_before != pytest.approx(plain.loss_before)
    assert only.loss == pytest.approx(alone.loss, rel=1e-3) and only.loss < only.loss_before
    with pytest.raises(DataError, match="or weights all 0"):
        fit(models[0], [replace(rows[0], weights=[0.0] * len(rows[0].logprobs))], spec)


def test_with_credit_the_tokens_of_a_call_weigh_what_it_earned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = [
        CallRow(response=(7, 8)),
        CallRow(call=2, prompt=(5,), prefix=(1, 0), response=(6,)),
        CallRow(call=3, prompt=(9,), response=(4,)),
    ]

    def rewarded(*values: float) -> Traces:
        given = [Reward(20 + place, f"note{place}", 0, "primary", value) for place, value in enumerate(values)]
        traces = TracesBuilder(rewards={("ro-1", "at-1"): given}).build(*calls)
        notes = [f"note{place}" for place in range(len(values))]
        return replace(
            traces,
            tree=SpanColumns(
                rollout_id=["ro-1"] * (3 + len(notes)),
                attempt_id=["at-1"] * (3 + len(notes)),
                span_id=["s0", "s1", "s2", *notes],
                parent_span_id=["", "", "", "s0", "s1", "s2"],
                name=["llm"] * 3 + ["agentlightning.annotation"] * len(notes),
                sequence=np.arange(1, 4 + len(notes), dtype=np.uint64),
            ),
        )

    sft = SFT(model_dir=tmp_path, model_server_url="http://127.0.0.1:1", credit="to_go", discount=0.5, top_fraction=1.0)
    traces = rewarded(1.0, 2.0, -8.0)
    rows = sft._rows(traces, to_trajectories(traces))  # pyright: ignore[reportPrivateUsage]
    assert rows == [] and "changes no weights: no call has a return above 0" in caplog.text  # 1 + 2/2 - 8/4 = 0, 2 - 8/2, -8
    traces = rewarded(1.0, 2.0, -2.0)
    rows = sft._rows(traces, to_trajectories(traces))  # pyright: ignore[reportPrivateUsage]
    assert sorted(row.weights for row in rows) == [[0.0], [1.5, 1.5, 1.0]], "1 + 2/2 - 2/4 for both tokens, 2 - 2/2, and -2"


def test_logprob_drift_is_reported_only_for_rows_of_the_initial_weights(policy: Policy) -> None:
    batch = make_batch(policy, temperature=0.5)
    drifts = [fit(copy.deepcopy(policy.model), rows_of(batch), replace(SPEC, temperature=at)).logprob_drift for at in (0.5, 1.0, None)]
    assert drifts[2] is None
    assert (drifts[0] or 0) < 1e-4 < 0.1 < (drifts[1] or 0), "the trainer takes another temperature than the sampler"
    unknown = [replace(row, logprobs=[]) for row in rows_of(batch)]
    assert fit(copy.deepcopy(policy.model), unknown, replace(SPEC, temperature=0.5)).logprob_drift is None


def test_batches_that_are_not_finite_are_left_out_and_three_in_a_row_are_an_error(policy: Policy) -> None:
    rows, spoiled = rows_of(make_batch(policy)), iter([math.nan, 1.0, 1.0])
    model = copy.deepcopy(policy.model)
    hook = model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * next(spoiled, 1.0))
    trained = fit(model, rows, SPEC)
    assert (trained.updates, trained.not_finite) == (3, 1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    hook.remove()
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DataError, match=r"3 batches in a row were not finite \(of the last, the gradient is nan\): lower learning_rate"):
        fit(model, rows, SPEC)


def test_rows_without_a_loss_are_refused(policy: Policy) -> None:
    with pytest.raises(DataError, match="none of the 1 rows has a token to learn"):
        fit(policy.model, [Row(input_ids=[1, 2], labels=[1, IGNORED])], SPEC)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_fraction": 2.0}, "top_fraction = 2.0"),
        ({"top_fraction": None}, "all that its own model wrote"),
        ({"group_size": 0}, "group_size = 0"),
        ({"discount": 0.5}, 'discount = 0.5: it is of returns; set credit = "to_go"'),
    ],
)
def test_invalid_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SFT(model_dir=tmp_path, model_server_url="http://127.0.0.1:1", **options)
