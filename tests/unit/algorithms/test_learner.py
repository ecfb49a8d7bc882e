from __future__ import annotations

import copy
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agl_otel.adapters.lengths import pick
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.groups import TaskOrder
from agl_otel.algorithms.grpo.learner import Learner, SampledOtherwiseError
from agl_otel.algorithms.grpo.objective import policy_loss, token_logprobs, worst_ratio_error
from agl_otel.algorithms.grpo.options import Average, Objective, Updates
from agl_otel.algorithms.grpo.policy import Policy, checkpoint_activations, load_weights, save_weights
from agl_otel.errors import DataError, UsageError
from agl_otel.types.columns import Ragged

ROWS = [
    ([1, 4, 20], [30, 31, 9], [1, 1, 1]),
    ([1, 4], [40, 41, 42, 43, 44], [1, 0, 0, 1, 1]),
    ([1, 4, 20, 21], [50], [1]),
    ([1, 4, 20], [30, 31, 9], [1, 1, 1]),
]


def make_batch(policy: Policy, shift: float = 0.0, temperature: float = 1.0) -> TrajectoryBatch:
    """Make a batch of ROWS with the model's log-probs at this temperature, plus `shift`."""
    logprobs: list[list[float]] = []
    for prompt, response, mask in ROWS:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        plain = token_logprobs(logits, torch.tensor(response), temperature=temperature)
        logprobs.append([value + shift if written else 0.0 for value, written in zip(plain.tolist(), mask, strict=True)])
    return TrajectoryBatch(
        prompt=Ragged.from_rows([r[0] for r in ROWS], np.int32),
        response=Ragged.from_rows([r[1] for r in ROWS], np.int32),
        response_mask=Ragged.from_rows([r[2] for r in ROWS], np.int8),
        logprobs=Ragged.from_rows(logprobs, np.float32),
        reward=np.ones(len(ROWS), np.float32),
        rollout_id=["a", "b", "c", "d"],
        attempt_id=["1"] * 4,
        agent=[""] * 4,
        calls=np.ones(len(ROWS), np.int64),
        model_version=["1"] * 4,
        verdict=["complete"] * 4,
        images=[[] for _ in ROWS],
        rows=Ragged.from_rows([[row] for row in range(len(ROWS))], np.int64),
        refused=Counter(),
        breaks=Counter(),
    )


@pytest.mark.parametrize("micro_batch_tokens", [1, 14, 16384])
def test_update_is_one_step_on_the_mean_over_model_tokens(policy: Policy, micro_batch_tokens: int) -> None:
    advantages = np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    batch = make_batch(policy)
    model = copy.deepcopy(policy.model)
    learner = Learner(model, learning_rate=1e-3, max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens)
    update = learner.update(batch, advantages)
    assert update.max_ratio_error < 1e-5
    assert update.tokens == 10

    plain = copy.deepcopy(policy.model)
    terms: list[torch.Tensor] = []
    for (prompt, response, mask), advantage in zip(ROWS, advantages.tolist(), strict=True):
        logits = plain(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = token_logprobs(logits, torch.tensor(response))
        for place, written in enumerate(mask):
            if written:
                one = logprobs[place : place + 1]
                terms.append(-torch.exp(one - one.detach()) * advantage)
    loss = torch.stack(terms).mean()
    loss.backward()
    assert update.loss == pytest.approx(loss.item(), abs=1e-5)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), name


def test_a_forward_pass_has_as_many_real_tokens_as_it_may(policy: Policy) -> None:
    """ROWS have 5, 6, 6 and 7 tokens: 24 end to end, 28 with padding."""
    for limit, passes in ((24, 1), (23, 2), (11, 3), (1, 4)):
        model, seen = copy.deepcopy(policy.model), list[int]()
        learner = Learner(model, learning_rate=1e-3, micro_batch_tokens=limit)
        model.model.embed_tokens.register_forward_hook(lambda _, given, __, seen=seen: seen.append(given[0].numel()))
        learner.update(make_batch(policy), np.ones(len(ROWS), np.float32))
        assert len(seen) == passes, limit
        assert sum(seen) == (24 if passes > 2 else 18), "the first and the last row are equal: in one pass they are computed once"


def test_logprobs_of_another_model_are_reported_as_drift(policy: Policy) -> None:
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3)
    update = learner.update(make_batch(policy, shift=0.1), np.ones(len(ROWS), np.float32))
    assert update.max_ratio_error == pytest.approx(1 - math.exp(-0.1), abs=1e-4)


def test_logprobs_are_computed_at_the_sampling_temperature(policy: Policy) -> None:
    batch = make_batch(policy, temperature=0.5)
    found = [
        Learner(copy.deepcopy(policy.model), learning_rate=1e-3, temperature=at)
        .update(batch, np.ones(len(ROWS), np.float32))
        .max_ratio_error
        for at in (0.5, 1.0)
    ]
    assert found[0] < 1e-4 < 0.1 < found[1]


@pytest.mark.parametrize("cap", [None, 2.0])
def test_all_updates_of_a_batch_use_the_same_old_logprobs(policy: Policy, cap: float | None) -> None:
    """The sampler's, or with importance_cap those of the initial weights. The SGD steps are so large that terms are clipped."""
    advantages, options = np.array([1.0, -0.5, 2.0, -3.0], np.float32), Objective(clip=0.05, importance_cap=cap)
    batch = make_batch(policy, shift=0.1)
    ours, plain = copy.deepcopy(policy.model), copy.deepcopy(policy.model)
    learner = Learner(ours, learning_rate=0.0, objective=options, updates=3, max_grad_norm=1e9)
    changed: Any = learner
    changed.optimizer, optimizer = (torch.optim.SGD(model.parameters(), lr=0.02) for model in (ours, plain))
    learner.update(batch, advantages)

    captured = torch.from_numpy(batch.logprobs.values[batch.response_mask.values == 1])
    spread = torch.from_numpy(np.repeat(advantages, [sum(mask) for *_, mask in ROWS]))
    sequence = torch.from_numpy(np.repeat(np.arange(len(ROWS)), [sum(mask) for *_, mask in ROWS]))
    frozen: torch.Tensor | None = None
    moved = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        now = torch.cat([written_logprobs(plain, *row) for row in ROWS])
        frozen = now.detach() if frozen is None else frozen
        moved = float((now.detach() - frozen).abs().max())
        old, weights = captured if cap is None else frozen, torch.full(now.shape, 1 / len(now))
        policy_loss(now, old, spread, weights, sequence, options, behaviour_logprobs=captured).backward()
        optimizer.step()
    assert moved > math.log(1.05), "later updates go beyond the clip"
    for (name, one), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4), name


def written_logprobs(model: Any, prompt: list[int], response: list[int], mask: list[int]) -> torch.Tensor:
    """Compute the log-probs of the model's tokens by a forward pass over one row."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, torch.tensor(response))[torch.tensor(mask) == 1]


@pytest.mark.parametrize("average", ["token", "sequence", "rollout", "constant"])
def test_micro_batches_do_not_change_the_gradient(policy: Policy, average: Average) -> None:
    options = Objective(average=average, constant_tokens=8 if average == "constant" else 0, sequence_ratio=True, importance_cap=2.0, kl=0.1)
    found: list[list[torch.Tensor]] = []
    for tokens in (1, 16384):
        model = copy.deepcopy(policy.model)
        learner = Learner(model, learning_rate=1e-2, objective=options, max_grad_norm=1e9, micro_batch_tokens=tokens)
        learner.update(make_batch(policy, shift=0.3), np.array([1.0, -0.5, 2.0, -3.0], np.float32))
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))


def test_the_kl_term_keeps_the_weights_near_the_initial_ones(policy: Policy) -> None:
    advantages = np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    drift: list[float] = []
    for kl in (0.001, 10.0):
        learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3, objective=Objective(kl=kl), updates=6)
        drift.append(learner.update(make_batch(policy), advantages).kl)
    assert 0 < drift[1] < drift[0]


def test_an_advantage_that_is_not_finite_is_refused(policy: Policy) -> None:
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3)
    with pytest.raises(DataError, match="1 of 4 advantages"):
        learner.update(make_batch(policy), np.array([1.0, math.nan, 0.0, 0.0], np.float32))
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), policy.model.parameters(), strict=True))


def test_weights_survive_a_round_trip(policy: Policy, tmp_path: Path) -> None:
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    folder = save_weights(model, tmp_path / "new")
    target = copy.deepcopy(policy.model)
    load_weights(target, folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), target.parameters(), strict=True))


def test_weights_of_another_shape_are_refused_without_changing_the_model(policy: Policy, tmp_path: Path) -> None:
    state = {name: tensor + 1 for name, tensor in policy.model.state_dict().items()}
    name = next(iter(state))
    before = policy.model.state_dict()[name].clone()
    with pytest.raises(UsageError, match="cannot read weights"):
        load_weights(policy.model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot read weights"):
        load_weights(policy.model, tmp_path)
    for wrong, words in (
        ({**state, name: state[name][:1].clone()}, "has shape"),
        ({key: value for key, value in state.items() if key != name}, "lacks 1 weights"),
        ({**state, "extra": torch.zeros(1)}, "has 1 weights that the model lacks"),
    ):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match=words):
            load_weights(policy.model, tmp_path)
    assert torch.equal(policy.model.state_dict()[name], before)


def test_every_task_is_used_once_before_any_is_repeated() -> None:
    drawn = list(islice(TaskOrder(5, random.Random(0)), 30))
    assert all(sorted(drawn[start : start + 5]) == list(range(5)) for start in range(0, 30, 5))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"group_size": 1}, "compared within a group"),
        ({"resample_rounds": -1}, "resample_rounds = -1"),
        ({"max_staleness": -1}, "max_staleness = -1"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps = 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints = 0"),
        ({"groups_in_flight": 16}, "greater than prompts_per_step"),
        ({"average": "constant"}, "constant_tokens"),
        ({"constant_tokens": 64}, 'constant_tokens = 64 has no effect with average = "token"'),
        ({"max_staleness": 1}, "max_staleness = 1 has no effect without groups_in_flight"),
        ({"warmup_steps": 6, "max_steps": 5}, "warmup_steps = 6: it must be at most max_steps"),
        ({"attention": "flex_attention"}, "no gradients on the CPU"),
    ],
)
def test_invalid_options_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", **wrong)


def test_what_is_compared_when_a_run_is_resumed_is_the_dtype_that_auto_comes_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def compared(device: str, dtype: str = "auto") -> str:
        grpo = GRPO.from_options(model_dir=tmp_path, model_server_url="http://127.0.0.1:1", dtype=dtype)
        object.__setattr__(grpo.updates, "device", device)  # as on a machine that has it
        return grpo.run_fingerprint([])["dtype"]

    assert compared("cpu") == compared("cuda", "float32") == "float32"
    assert compared("cuda") == compared("cpu", "bfloat16") == "bfloat16"


def with_temperatures(policy: Policy, temperatures: list[float]) -> tuple[TrajectoryBatch, Ragged]:
    """Make a batch whose rows were sampled at these temperatures, and the temperature of each of its tokens."""
    batches = [make_batch(policy, temperature=at) for at in temperatures]
    logprobs = Ragged.from_rows([batch.logprobs[row] for row, batch in enumerate(batches)], np.float32)
    of_tokens = [[at] * sum(mask) for at, (*_, mask) in zip(temperatures, ROWS, strict=True)]
    return replace(batches[0], logprobs=logprobs), Ragged.from_rows(of_tokens, np.float32)


def test_each_token_is_scored_at_the_temperature_of_its_call(policy: Policy) -> None:
    """The first and the last row are equal but for their temperatures."""
    batch, temperatures = with_temperatures(policy, [0.4, 1.0, 1.0, 0.7])
    advantages = np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    own = Learner(copy.deepcopy(policy.model), learning_rate=1e-3).update(batch, advantages, temperatures=temperatures)
    assert own.max_ratio_error < 1e-4
    with pytest.raises(SampledOtherwiseError, match=r"off by .*ratio_error_limit = 0\.1.*sampling .*weights differ.*tokenizer"):
        Learner(copy.deepcopy(policy.model), learning_rate=1e-3, ratio_error_limit=0.1).update(batch, advantages)


def test_the_ratio_limit_changes_no_weight_and_leaves_out_stale_tokens(policy: Policy) -> None:
    batch, advantages = make_batch(policy, shift=0.5), np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    model = copy.deepcopy(policy.model)
    learner = Learner(model, learning_rate=1e-3, ratio_error_limit=0.1)
    with pytest.raises(SampledOtherwiseError):
        learner.update(batch, advantages, current=np.array([True, False, False, False]))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), policy.model.parameters(), strict=True))
    stale = learner.update(batch, advantages, current=np.zeros(len(ROWS), np.bool_))
    assert stale.worst_ratio_error == 0.0 and stale.max_ratio_error > 0.1 and stale.made == 1


def test_a_few_tokens_far_off_do_not_exceed_the_limit() -> None:
    errors = torch.full((5000,), 0.002)
    errors[7] = 3.0
    assert worst_ratio_error(errors) == pytest.approx((3.0 + 49 * 0.002) / 50)
    assert worst_ratio_error(errors[:4]) == pytest.approx(0.002)
    assert worst_ratio_error(errors[:0]) == 0.0


@pytest.mark.parametrize(("where", "captured"), [("loss", -1e30), ("loss", math.nan), ("gradient", None)])
def test_an_update_that_is_not_finite_is_not_made(policy: Policy, where: str, captured: float | None) -> None:
    batch, advantages = make_batch(policy), np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    model = copy.deepcopy(policy.model)
    learner = Learner(model, learning_rate=1e-3, updates=3)
    learner.update(batch, advantages)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(learner.optimizer.state_dict())
    if captured is not None:
        damaged: Any = batch.logprobs.values.copy()
        damaged[3] = captured  # at -1e30 the ratio is infinite, the advantage negative
        batch = replace(batch, logprobs=Ragged(damaged, batch.logprobs.offsets))
    else:
        model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * float("nan"))
    update = learner.update(batch, advantages)
    assert update.made == 0 and update.not_finite.startswith(f"the {where} is ")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert str(learner.optimizer.state_dict()) == str(state)


def test_weights_that_are_not_finite_end_the_run(policy: Policy) -> None:
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3)
    learner.optimizer.register_step_post_hook(lambda *_: learner.model.model.norm.weight.data.fill_(math.inf))
    with pytest.raises(DataError, match=r"model\.norm\.weight is not finite after an update: lower learning_rate"):
        learner.update(make_batch(policy), np.array([1.0, -0.5, 2.0, -3.0], np.float32))


def test_tied_weights_are_written_once_and_read_by_transformers(policy: Policy, tmp_path: Path) -> None:
    changed = copy.deepcopy(policy.model)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(2.0)
    changed.config.save_pretrained(tmp_path)
    save_weights(changed, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert ("lm_head.weight" in names) is not policy.model.config.tie_word_embeddings
    ids = torch.tensor([[1, 4, 20]])
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(read(input_ids=ids).logits, changed(input_ids=ids).logits)
    ours = copy.deepcopy(policy.model)
    load_weights(ours, tmp_path)
    assert torch.equal(ours(input_ids=ids).logits, changed(input_ids=ids).logits)


ADVANTAGES = np.array([1.0, -0.5, 2.0, -3.0], np.float32)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_checkpointed_activations_give_the_same_gradients(policy: Policy) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for checkpointed in (False, True):
        model = copy.deepcopy(policy.model)
        if checkpointed:
            checkpoint_activations(model)
        Learner(model, learning_rate=1e-3, max_grad_norm=1e9).update(make_batch(policy), ADVANTAGES)
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_minibatches_take_a_step_each_on_every_trajectory_once(policy: Policy) -> None:
    """With SGD and a learning rate so small that log-probs stay the same, the steps add up to that of the whole batch."""
    batch, rate = make_batch(policy), 1e-7
    options = Objective(average="constant", constant_tokens=4)
    moved: list[torch.Tensor] = []
    for count in (1, 2, 9):
        torch.manual_seed(3)
        model = copy.deepcopy(policy.model).double()
        learner = Learner(model, learning_rate=rate, objective=options, minibatches=count, max_grad_norm=1e9)
        changed: Any = learner
        changed.optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        update = learner.update(batch, ADVANTAGES)
        assert (update.made, update.tokens) == (min(count, len(ROWS)), 10)
        assert update.max_ratio_error < 1e-4
        weight, before = model.model.embed_tokens.weight, policy.model.model.embed_tokens.weight
        moved.append((weight - before).detach() / min(count, len(ROWS)))  # "constant" divides by the trajectories of a minibatch
    assert all((one - moved[0]).norm() < 1e-3 * moved[0].norm() for one in moved[1:])


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


@pytest.mark.parametrize("count", [1, 4])
def test_without_a_gradient_the_moments_of_earlier_steps_move_no_weight(policy: Policy, count: int) -> None:
    """Of one batch whose advantages are all 0, and of the minibatches of another of which all but one are so."""
    batch = make_batch(policy)
    options = Objective(average="constant", constant_tokens=4)
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-4, objective=options, minibatches=count)
    assert learner.update(batch, ADVANTAGES).made == count
    before = weights_of(learner)
    update = learner.update(batch, np.zeros(len(ROWS), np.float32))
    assert (update.made, update.gradient_norm, update.tokens, update.learning_rate) == (0, 0.0, 10, None)
    assert all(map(torch.equal, before, weights_of(learner)))

    alone = copy.deepcopy(learner)
    alone.minibatches = 1
    one = np.array([0.0, 0.0, -2.0, 0.0], np.float32)  # further steps by the moments alone would be of about 1e-4
    if count > 1:
        assert learner.update(batch, one).made == alone.update(pick(batch, np.array([2])), one[[2]]).made == 1
        assert all(torch.allclose(ours, theirs, atol=2e-5) for ours, theirs in zip(weights_of(learner), weights_of(alone), strict=True))


def test_a_kl_term_has_a_gradient_where_all_advantages_are_0(policy: Policy) -> None:
    """It pulls the weights back to the initial ones, so a step is taken; with the moments of a step away from them forgotten."""
    batch = make_batch(policy)
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3, objective=Objective(kl=1.0))
    learner.update(batch, ADVANTAGES)
    learner.optimizer.state.clear()
    found = [learner.update(batch, np.zeros(len(ROWS), np.float32), learning_rate=1e-5) for _ in range(3)]
    assert [update.made for update in found] == [1, 1, 1]
    assert found[0].kl > found[1].kl > found[2].kl > 0


def test_minibatches_use_the_log_probs_before_the_first_step_with_a_cap(policy: Policy) -> None:
    """The ratio is against the weights before the batch: of the second minibatch too, which is scored after the weights have changed."""
    torch.manual_seed(0)
    learner = Learner(
        copy.deepcopy(policy.model), learning_rate=0.0, objective=Objective(importance_cap=2.0, kl=0.1), minibatches=2, updates=2
    )
    update = learner.update(make_batch(policy, shift=0.3), ADVANTAGES)
    assert update.made == 4
    assert update.max_ratio_error == pytest.approx(1 - math.exp(-0.3), abs=1e-4)
    assert update.kl == pytest.approx(0.0, abs=1e-6)


def test_mixed_precision_keeps_weights_and_gradients_in_float32(policy: Policy) -> None:
    """bfloat16 has 8 bits: log-probs of the tiny model are off by less than 0.05, the gradient by less than a tenth of its norm."""
    exact, low = (copy.deepcopy(policy.model) for _ in range(2))
    batch = make_batch(policy)
    Learner(exact, learning_rate=1e-3, max_grad_norm=1e9).update(batch, ADVANTAGES)
    update = Learner(low, learning_rate=1e-3, max_grad_norm=1e9, compute_dtype=torch.bfloat16).update(batch, ADVANTAGES)
    assert 1e-5 < update.max_ratio_error < 0.05
    assert {weight.dtype for weight in low.parameters()} == {torch.float32}
    for name, gradient in gradients(exact).items():
        other = gradients(low)[name]
        assert other.dtype is torch.float32
        assert (other - gradient).norm() < 0.1 * gradient.norm() + 1e-4, name


def test_servers_get_files_in_the_dtype_they_compute_in(policy: Policy, tmp_path: Path) -> None:
    save_weights(policy.model, tmp_path, dtype=torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118  # not a mapping


def test_the_learning_rate_warms_up_and_decays() -> None:
    def rates(**options: Any) -> list[float]:
        updates = Updates(learning_rate=1.0, **options)
        return [round(updates.learning_rate_at(step, 6), 4) for step in range(1, 7)]

    assert rates() == [1.0] * 6
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(warmup_steps=2, learning_rate_schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(learning_rate_schedule="cosine") == [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]


def test_an_update_uses_the_rate_it_is_given(policy: Policy) -> None:
    model = copy.deepcopy(policy.model)
    learner = Learner(model, learning_rate=1.0, objective=Objective(kl=0.1), updates=2, minibatches=2)
    update = learner.update(make_batch(policy), ADVANTAGES, learning_rate=0.0)
    assert (update.made, update.learning_rate) == (4, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), policy.model.parameters(), strict=True))
