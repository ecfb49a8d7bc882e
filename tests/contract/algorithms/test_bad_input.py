"""GRPO and SFT with unusable rollouts: the errors name the reasons, and no rollout is run twice.

The store and the model server are real; this file acts as the runner and the agents.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from agl_otel.adapters.losses import recorded_losses
from agl_otel.algorithms.checked_files import CHECKSUM, with_checksum
from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.learner import SampledOtherwiseError
from agl_otel.algorithms.grpo.policy import load_policy, save_weights
from agl_otel.algorithms.grpo.progress import TAKEN
from agl_otel.algorithms.grpo.sampler import Engine
from agl_otel.algorithms.grpo.server import make_app
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.errors import DataError, DiskFullError, ModelServerError, UsageError
from agl_otel.jobs.run import unless_failed
from agl_otel.net.http_server import listen, make_runner
from agl_otel.queue.client import AttemptUpdate
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout, Span
from agl_otel.types.sampling import Contract, all_parameters
from agl_otel_hook import conventions
from tests.contract.store.test_export import reward_of, span_of

LATE_SECONDS = 10.0  # for the other rollouts of the step, which end at once: on a busy machine within seconds
GONE = "the queue has no resources grpo-1 version 2, which rollout ro-1 asks for"


@dataclass(frozen=True)
class Did:
    """The outcome of an agent: a model call and a reward."""

    reward: float | None = 0.0
    prompt: int = 3
    """Length in tokens."""
    calls: int = 1
    error: str | None = None
    deleted: bool = False
    logprobs: tuple[float, float] = (-4.5, -4.25)
    """Near those of an untrained model, and made up."""
    late: bool = False
    """It does not end."""
    cut: bool = False
    """Its reply ends at the token limit."""
    version: str = ""
    """Of the weights that sampled, as its server says it."""
    constrained: bool = False
    """The agent had the reply sampled by a grammar."""
    contract: str = ""
    """As its span has it, instead of one that says so."""


def spans_of(rollout: AttemptedRollout, did: Did) -> list[Span]:
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    own = {"response_format": {"type": "json_object"}} if did.constrained else {}
    call: dict[str, Any] = {
        conventions.LLM_CALL: 1,
        conventions.LLM_CHOICE: 0,
        conventions.LLM_PROMPT_TOKEN_IDS: [9] * did.prompt,
        conventions.LLM_RESPONSE_TOKEN_IDS: [12, 13],
        conventions.LLM_RESPONSE_LOGPROBS: list(did.logprobs),
        conventions.LLM_SAMPLING: did.contract or Contract.of(own, all_parameters(1.0, 64), logprobs="processed").dumps(),
        **({conventions.LLM_MODEL_VERSION: did.version} if did.version else {}),
    }
    if did.cut:
        call["gen_ai.response.finish_reasons"] = ["length"]
    made = [span_of(*ids, 1, conventions.SPAN_LLM, call)] if did.calls else []
    return [*made, *([reward_of(*ids, 2, did.reward)] if did.reward is not None else [])]


async def act(store: LightningStore, decide: Callable[[AttemptedRollout], Did]) -> None:
    """Act as the runner and the agents until cancelled."""
    while True:
        for rollout in await store.queue.claim(64, wait_seconds=1):
            did = decide(rollout)
            if did.deleted:
                await store.queue.delete([rollout.rollout_id])
                continue
            if did.late:
                continue
            await store.add_many_spans(spans_of(rollout, did))
            status = "failed" if did.error else "succeeded"
            ended = AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, status=status, error=did.error)
            await store.queue.update_attempts([ended])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), seed=1)


def make_policy(place: Path, *, seed: int) -> Path:
    """Save an untrained tiny model."""
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, seed=seed)
    tokenizer.save_pretrained(place)
    model.config.save_pretrained(place)
    return save_weights(model, place)


@asynccontextmanager
async def serving(folder: Path, engine_of: type[Engine] = Engine) -> AsyncGenerator[str]:
    """Run this package's model server in this event loop; yields its address."""
    async with engine_of(load_policy(folder)) as engine:
        runner = make_runner(make_app(engine))
        await runner.setup()
        try:
            yield f"http://127.0.0.1:{await listen(runner, '127.0.0.1', 0, None)}"
        finally:
            await runner.cleanup()


@dataclass(frozen=True)
class Kind:
    """An algorithm, with four tasks of two rollouts each in a step."""

    name: str
    make: Callable[..., Any]
    run: Callable[..., Any]
    options: dict[str, Any]


KINDS = (
    Kind("grpo", GRPO.from_options, GRPO.train, {"updates_per_step": 1, "ratio_error_limit": None}),
    Kind("sft", SFT, SFT.train, {"top_fraction": 0.5, "epochs": 1}),
)
BOTH = [pytest.param(KINDS[0], id="grpo"), pytest.param(KINDS[1], id="sft", marks=pytest.mark.full)]
SFT_LONG = [BOTH[0], pytest.param(KINDS[1], id="sft", marks=[pytest.mark.full, pytest.mark.long])]
"""Where SFT's code is GRPO's, too."""
"""`make test` plays one: most of what is tested here is code of both."""


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


async def trained(
    kind: Kind,
    store: LightningStore,
    folder: Path,
    run_dir: Path | RunFolder | None,
    decide: Callable[[AttemptedRollout], Did],
    *,
    max_steps: int = 1,
    engine_of: type[Engine] = Engine,
    **given: Any,
) -> list[Any]:
    await store.open()
    async with serving(folder, engine_of) as url:
        algorithm = kind.make(
            model_dir=folder, model_server_url=url, run_dir=run_dir, max_steps=max_steps, prompts_per_step=4, group_size=2,
            **{"metrics": [], **kind.options, **given},
        )  # fmt: skip
        failed = asyncio.ensure_future(act(store, decide))  # it only ends with an error
        try:
            return await unless_failed(failed, kind.run(algorithm, store, [{"n": number} for number in range(4)]))
        finally:
            failed.cancel()
            await asyncio.gather(failed, return_exceptions=True)


async def of_run(store: LightningStore, run_dir: Path) -> dict[str, int]:
    """Return {rollout id: number of attempts} of a run."""
    name = json.loads((run_dir / "run.json").read_text())["run_id"]
    ids = [rollout.rollout_id for rollout in await store.query_rollouts() if f"-{name}-" in rollout.rollout_id]
    tried = [attempt.rollout_id for attempt in await store.queue.query_attempts(ids)]
    return {rollout_id: tried.count(rollout_id) for rollout_id in ids}


def member(rollout: AttemptedRollout) -> int:
    """Return the rollout's index within its task: 0 or 1."""
    return int(rollout.rollout_id[-1])


def by_place(rollout: AttemptedRollout) -> Did:
    return Did(reward=float(member(rollout)))


def as_good(rollout: AttemptedRollout) -> Did:
    """Give equal rewards, so that nothing is trained, for speed."""
    return Did(reward=1.0)


NOTHING: Sequence[tuple[Did, str]] = (
    (Did(calls=0, reward=None), "verdict_empty"),
    (Did(calls=0), r"\w+"),
    (Did(reward=None), "no_reward"),
    (Did(reward=math.nan), "no_reward"),
    (Did(prompt=tiny.CONTEXT_TOKENS), "beyond_context"),
)


@pytest.mark.parametrize(("did", "reason"), NOTHING, ids=["no spans", "no calls", "no reward", "nan", "too long"])
async def test_a_step_without_usable_rollouts_names_the_reason_and_repeats_none(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path, did: Did, reason: str
) -> None:
    for _ in range(2):  # the second time, the results are read and nothing is run
        with pytest.raises(DataError, match=rf"has nothing to .* refused ({reason}) 8\n\1: .* Remedy: "):
            await trained(kind, store, folder, tmp_path / "run", lambda rollout: did)
    assert list((await of_run(store, tmp_path / "run")).values()) == [1] * 8


async def test_an_error_names_why_all_rollouts_failed_and_a_resume_retries_them(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path
) -> None:
    """The runner's error names a missing resource."""
    with pytest.raises(DataError, match=rf"refused not_succeeded 8\n[\s\S]*8 × {GONE}"):
        await trained(kind, store, folder, tmp_path / "run", lambda rollout: Did(error=GONE))
    (report,) = await trained(kind, store, folder, tmp_path / "run", as_good)
    assert (report.refused.get("not_succeeded"), report.rollouts, report.reward_mean) == (None, 8, 1.0)
    assert list((await of_run(store, tmp_path / "run")).values()) == [2] * 8


async def test_a_full_disk_ends_the_run_before_the_step_is_taken_and_a_resume_repeats_it(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path
) -> None:
    """What failed for lack of room is no failure of the policy."""
    full = DiskFullError.of("the model server's record /data/model_server.jsonl", "No space left on device")
    failed = Did(error=f"InternalServerError: Error code: 507 - {{'error': {{'message': {str(full)!r}}}}}")

    def decide(rollout: AttemptedRollout) -> Did:
        return failed if rollout.input == {"n": 2} and member(rollout) else by_place(rollout)

    with pytest.raises(
        DiskFullError, match=r"1 rollouts failed because a disk is full.*model_server\.jsonl.*start the run again: it repeats"
    ):
        await trained(kind, store, folder, tmp_path / "run", decide)
    assert not (tmp_path / "run" / TAKEN).exists() and not (tmp_path / "run" / "metrics.jsonl").exists()
    (report,) = await trained(kind, store, folder, tmp_path / "run", by_place)
    assert (report.reward_mean, report.without_reward, report.refused.get("not_succeeded")) == (0.5, 0, None)
    assert sorted((await of_run(store, tmp_path / "run")).values()) == [1] * 7 + [2]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoints_of(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("checkpoints/step-*"))


async def test_log_probs_that_are_not_the_trainers_end_the_run_unchanged(store: LightningStore, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SampledOtherwiseError, match=r"the worst 1 % of 16 tokens is off by .*sampling differs.*weights.*tokenizer"):
        await trained(KINDS[0], store, folder, tmp_path / "run", by_place, ratio_error_limit=0.1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not checkpoints_of(tmp_path / "run"), "as it was before the step"


async def test_steps_that_are_not_finite_change_nothing_and_end_the_run_in_time(
    store: LightningStore, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probs of -1e30 make the ratio infinite, which the clip bounds only where the advantage is positive."""

    def decide(rollout: AttemptedRollout) -> Did:
        return replace(by_place(rollout), logprobs=(-1e30, -1e30))

    with pytest.raises(DataError, match=r"3 steps in a row were not finite \(the last: the loss is inf\).*learning_rate.*step-000003"):
        await trained(KINDS[0], store, folder, tmp_path / "run", decide, max_steps=9, ratio_error_limit=None)
    lines = steps_of(tmp_path / "run")
    assert [(line["step"], line["not_finite"], line["next_version"]) for line in lines] == [(n, "the loss is inf", "1") for n in (1, 2, 3)]
    assert "step 2: the loss is inf; optimizer steps: 0 of 1" in caplog.text
    begun, kept = (load_file(place / "model.safetensors") for place in (folder, checkpoints_of(tmp_path / "run")[-1]))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in begun.items())


@pytest.mark.parametrize("kind", SFT_LONG, indirect=True)
async def test_calls_that_the_agent_constrained_are_counted_and_said_and_refused_where_log_probs_matter(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their log-probs are of another distribution than the trainer's, by less than ratio_error_limit where a constraint is loose."""
    options: dict[str, Any] = {} if kind.name == "grpo" else {"top_fraction": 1.0}
    (report,) = await trained(
        kind, store, folder, tmp_path / "run", lambda rollout: replace(by_place(rollout), constrained=member(rollout) == 1), **options
    )
    if kind.name == "grpo":
        assert (report.calls_trained, report.refused, report.differing) == (4, {"sampling_differs": 4}, {"response_format": 4})
        assert "4 of 8 model calls are not trained on" in caplog.text and "sampling_differs: response_format 4" in caplog.text
        return
    assert (report.own_sampling, report.calls_trained, report.figures["own_sampling_share"]) == (4, 8, 0.5)
    assert (
        "step 1: 4 of 8 model calls read for training (50 %) were sampled with settings" in caplog.text
        and "a forced tool call" in caplog.text
    )


@pytest.mark.parametrize("text", ['{"agent": {"temperature": 1' + "0" * 400 + "}}", "[" * 200_000], ids=["huge", "deep"])
async def test_a_contract_that_is_malformed_costs_its_own_call_only(store: LightningStore, folder: Path, tmp_path: Path, text: str) -> None:
    def decide(rollout: AttemptedRollout) -> Did:
        return replace(by_place(rollout), contract=text if rollout.input == {"n": 2} and member(rollout) == 0 else "")

    (report,) = await trained(KINDS[0], store, folder, tmp_path / "run", decide)
    assert (report.calls_trained, report.refused) == (7, {"sampling_differs": 1})


async def test_how_a_run_ended_is_recorded_where_no_job_runs_it(kind: Kind, store: LightningStore, folder: Path, tmp_path: Path) -> None:
    async def outcome() -> str:
        (run,) = await store.training_runs(run_id=json.loads((tmp_path / "run" / "run.json").read_text())["run_id"])
        assert run.algorithm == kind.name
        return run.outcome

    with pytest.raises(DataError):
        await trained(kind, store, folder, tmp_path / "run", lambda rollout: Did(error=GONE))
    assert (await outcome()).startswith("error: ") and "refused not_succeeded 8\n" in await outcome()
    await trained(kind, store, folder, tmp_path / "run", as_good)
    assert await outcome() == "finished"


async def test_equal_rewards_change_no_weights(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (report,) = await trained(kind, store, folder, tmp_path / "run", as_good)
    assert (report.weights_version, report.next_version, report.tokens) == ("1", "1", 0)
    assert "1 changes no weights: the rewards are " in caplog.text


async def test_equal_rewards_change_weights_where_a_kl_term_pulls_them_back(store: LightningStore, folder: Path, tmp_path: Path) -> None:
    def differing_first(rollout: AttemptedRollout) -> Did:
        return by_place(rollout) if (rollout.metadata or {})["step"] == 1 else as_good(rollout)

    reports = await trained(KINDS[0], store, folder, tmp_path / "run", differing_first, max_steps=2, kl=1.0)
    assert [report.next_version for report in reports] == ["2", "3"] and reports[1].zero_variance_groups == 4 and reports[1].kl > 0


async def test_unusable_rollouts_are_counted_and_the_others_trained_on(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups: one with a NaN, one with a single finished rollout, one with a prompt that is too long, and a usable one."""
    bad = {0: Did(reward=math.nan), 1: Did(error="broke down"), 2: Did(prompt=tiny.CONTEXT_TOKENS)}

    def decide(rollout: AttemptedRollout) -> Did:
        number = (rollout.metadata or {})["group"]
        return bad[number] if member(rollout) == 0 and number in bad else by_place(rollout)

    (report,) = await trained(kind, store, folder, tmp_path / "run", decide)
    counted = {name: count for name, count in report.refused.items() if name != "not_in_top"}
    assert counted == {"no_reward": 1, "not_succeeded": 1, "beyond_context": 1}
    assert (report.rollouts, report.next_version) == (8, "2")
    assert report.tokens > 0 and math.isfinite(report.loss)
    if kind.name == "grpo":
        assert (report.trajectories, report.zero_variance_groups, report.singleton_groups) == (5, 3, 3), (
            "singleton groups have no comparison"
        )
        assert "step 1: 3 of 4 groups have one rollout left, which cannot be compared with others and is not trained on: ro-" in caplog.text
    assert (report.figures["refused_share"], report.figures["cut_share"], report.figures["stale_share"]) == (3 / 8, 0, 1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in load_file(latest_weights(tmp_path)).values())


def latest_weights(folder: Path) -> Path:
    return max(folder.rglob("model.safetensors"), key=lambda path: path.stat().st_mtime_ns)


async def test_rollouts_deleted_while_they_run_are_left_out(store: LightningStore, folder: Path, tmp_path: Path) -> None:
    def decide(rollout: AttemptedRollout) -> Did:
        return Did(deleted=True) if rollout.rollout_id.endswith("3-000") else as_good(rollout)

    grpo, sft = KINDS
    (report,) = await trained(sft, store, folder, tmp_path / "sft", decide)
    assert report.refused["not_finished"] == 1
    (report,) = await trained(grpo, store, folder, tmp_path / "grpo", decide)
    assert report.refused == {"not_finished": 1}
    (report,) = await trained(grpo, store, folder, tmp_path / "async", decide, groups_in_flight=6, step_timeout_seconds=300)
    assert report.carried == 2, "carried groups are cancelled at the end, except deleted rollouts"


@pytest.mark.parametrize("kind", SFT_LONG, indirect=True)
async def test_late_rollouts_are_cancelled_at_the_end_of_their_step(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path
) -> None:
    claimed: list[str] = []

    def decide(rollout: AttemptedRollout) -> Did:
        if (rollout.metadata or {})["group"] != 2 or member(rollout) != 0:
            return by_place(rollout)
        claimed.append(rollout.rollout_id)
        return Did(late=True)

    reports = await trained(kind, store, folder, tmp_path / "run", decide, max_steps=2, step_timeout_seconds=LATE_SECONDS)
    unfinished: list[str] = []
    for report in reports:
        found = [each for each in await store.query_rollouts(rollout_id_in=report.rollout_ids) if each.status != "succeeded"]
        assert {each.status for each in found} == {"cancelled"} and report.refused["not_finished"] == len(found)
        unfinished += [each.rollout_id for each in found]
    assert len(claimed) == 2 and set(claimed) <= set(unfinished), "others may be late, too, on a busy machine"
    late = [each for each in await store.query_rollouts(rollout_id_in=claimed) if isinstance(each, AttemptedRollout)]
    attempts = [each.attempt.attempt_id for each in late]
    assert sorted(await store.queue.heartbeat("slow", attempt_ids=attempts)) == sorted(attempts) != [], "their runner ends them"


@pytest.mark.parametrize("kind", SFT_LONG, indirect=True)
async def test_a_step_counts_what_it_lost_and_warns_where_mostly_survivors_are_left(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four groups: one without rewards, one with a failed rollout and a cut reply, and two whole ones."""

    def decide(rollout: AttemptedRollout) -> Did:
        group, place = (rollout.metadata or {})["group"], member(rollout)
        lost = {
            (0, 0): Did(reward=None),
            (0, 1): Did(reward=None),
            (1, 0): Did(error="broke down", reward=1.0),
            (1, 1): Did(reward=1.0, cut=True),
        }
        return lost.get((group, place), by_place(rollout))

    (report,) = await trained(kind, store, folder, tmp_path / "run", decide)
    assert (report.rollouts_without_sample, report.groups_gone, report.replies_cut) == (3, 1, 1)
    assert (report.reward_mean, report.without_reward) == (3 / 8, 3), "1 + 1 + 1 of all 8, and none for the one that failed"
    words = "3 of 8 rollouts gave no sample; refused no_reward 2, not_succeeded 1; 1 whole group gone"
    assert report.losses == words
    assert f"step 1: 38 % of the rollouts gave no sample, so that only survivors are trained on ({words})" in caplog.text
    assert "; what failed: 1 × broke down" in caplog.text
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    (step,) = await store.training_steps(run_id)
    assert recorded_losses(step.metrics) == words, "as `agl-otel runs show` and the dashboard show it"


async def test_a_run_is_said_to_have_reached_its_target_only_where_it_did(store: LightningStore, folder: Path, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"max_steps": 2, "score_window": 1}
    made: list[GRPO] = []

    def make(**given: Any) -> GRPO:
        made.append(GRPO.from_options(**given))
        return made[-1]

    grpo = replace(KINDS[0], make=make)
    for target, words in ((0.5, "the target score is reached"), (0.75, "max_steps are done"), (None, "max_steps are done")):
        reports = await trained(grpo, store, folder, tmp_path / str(target), by_place, target_score=target, **steps)
        assert (made[-1].stopped_because, len(reports)) == (words, 1 if target == 0.5 else 2)
    await trained(grpo, store, folder, tmp_path / "offline", by_place, offline_mode="test", **steps)
    assert made[-1].stopped_because == "there are no new rollouts of mode test"


async def test_a_run_with_another_model_or_store_is_refused_by_name(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path
) -> None:
    await trained(kind, store, folder, tmp_path / "run", as_good)
    other = make_policy(tmp_path / "other", seed=2)
    with pytest.raises(UsageError, match=r"begun with another model .*: use the value in .*, or a new folder"):
        await trained(kind, store, other, tmp_path / "run", as_good, max_steps=2)
    with renamed_run(tmp_path / "run"), pytest.raises(UsageError, match="the store does not have what run gone-1 published"):
        await trained(kind, store, folder, tmp_path / "run", as_good, max_steps=2)
    reports = await trained(kind, store, folder, tmp_path / "run", as_good, max_steps=2)
    assert [report.step for report in reports] == [1, 2], "nothing was lost"


@contextmanager
def renamed_run(folder: Path) -> Generator[None]:
    """Rename the run during the block, as if it had been started with another store."""
    name = json.loads((folder / "run.json").read_text())["run_id"]
    files = [folder / "run.json", *folder.glob("checkpoints/*/state.json")]
    before = {path: path.read_text() for path in files}
    for path, text in before.items():
        content = json.loads(text.replace(name, "gone-1"))
        del content[CHECKSUM]
        path.write_text(json.dumps(with_checksum(content)))
    yield
    for path, text in before.items():
        path.write_text(text)


async def test_samples_of_weights_that_the_run_had_not_pushed_are_refused(store: LightningStore, folder: Path, tmp_path: Path) -> None:
    """Versions before the step's, after it, and of no number at all: the ratio check would take them for stale, and let them pass."""

    def decide(rollout: AttemptedRollout) -> Did:
        step, task = (rollout.metadata or {})["step"], (rollout.metadata or {})["group"]
        return replace(by_place(rollout), version={(2, 0): "1", (2, 1): "3", (2, 2): "banana"}.get((step, task), str(step)))

    first, second = await trained(KINDS[0], store, folder, tmp_path / "run", decide, max_steps=2)
    assert (first.refused, first.trajectories, first.off_policy) == ({}, 8, 0)
    assert (second.refused, second.trajectories, second.off_policy) == ({"other_weights": 6}, 2, 0)
    assert "refused other_weights 6" in second.losses


class Shared(Engine):
    """Is given other weights under the same version, as by a second training that uses the server."""

    async def set_weights(self, folder: Path, version: str) -> None:
        await super().set_weights(folder, version)
        if version == "2":
            await super().set_weights(make_policy(folder.parent / "others", seed=3), version)


class Restarted(Engine):
    """Is at its start again after the second push, as a server is that is supervised."""

    async def set_weights(self, folder: Path, version: str) -> None:
        await super().set_weights(folder, version)
        self.version = "0" if version == "2" else version


@pytest.mark.parametrize("kind", SFT_LONG, indirect=True)
@pytest.mark.parametrize(("engine_of", "has"), [(Shared, "2 of the weights in .*others"), (Restarted, "0 of the weights in ")])
async def test_a_server_that_has_other_weights_than_the_pushed_ones_ends_the_run(
    kind: Kind, store: LightningStore, folder: Path, tmp_path: Path, engine_of: type[Engine], has: str
) -> None:
    with pytest.raises(ModelServerError, match=rf"has version {has}.*this run pushed version 2 from .*another training uses the server"):
        await trained(kind, store, folder, tmp_path / "run", by_place, max_steps=3, engine_of=engine_of)
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1], "nothing was trained on rollouts of other weights"


class Deaf(Engine):
    """Reports that it has loaded weights, but keeps the old ones."""

    async def set_weights(self, folder: Path, version: str) -> None:
        self.version = version


async def test_a_server_that_ignores_pushed_weights_is_detected(kind: Kind, store: LightningStore, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelServerError, match="does not sample with the weights that were pushed as version 2: the ratios of its tokens"):
        await trained(kind, store, folder, tmp_path / "deaf", by_place, probe_tolerance=1e-3, engine_of=Deaf)


async def test_a_role_that_the_chat_template_refuses_fails_its_rollouts_and_the_others_are_trained_on(
    kind: Kind, store: LightningStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_policy(tmp_path / "policy", seed=1)
    template = (folder / "chat_template.jinja").read_text()
    refuses = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no messages of tools here') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refuses + template)
    async with serving(folder) as url, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "digit 437"}, {"role": "tool", "content": "7", "tool_call_id": "c"}]}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            said = await answer.text()
            assert answer.status == 400 and "no messages of tools here" in said

    def decide(rollout: AttemptedRollout) -> Did:
        return Did(error=f"BadRequestError: {said}") if rollout.input == {"n": 2} else by_place(rollout)

    (report,) = await trained(kind, store, folder, tmp_path / "run", decide)
    assert (report.refused["not_succeeded"], report.rollouts_without_sample, report.samples > 0) == (2, 2, True)
    assert "2 × BadRequestError" in caplog.text and "no messages of tools here" in caplog.text


@pytest.mark.parametrize("kind", SFT_LONG)
async def test_a_chat_template_that_refuses_the_probe_is_quoted(kind: Kind, store: LightningStore, tmp_path: Path) -> None:
    """A template may raise anything for roles that it does not know, or misses."""
    folder = make_policy(tmp_path / "policy", seed=1)
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message must come first') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelServerError, match=r"HTTP 400 .*chat template refuses these messages: a system message must come first"):
        await trained(kind, store, folder, tmp_path / "run", by_place, probe_tolerance=1e-3)
    assert (await of_run(store, tmp_path / "run")) == {}
