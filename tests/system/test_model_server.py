"""The model server as a process, called by a real OpenAI client; and GRPO that learns from its responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.objective import token_logprobs
from agl_otel.algorithms.grpo.policy import Policy, load_policy, save_weights
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.errors import DataError, ModelServerError, NotFoundError
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutQuery,
    RolloutStatus,
    Span,
    TrainingStep,
    Verdict,
)
from agl_otel.types.columns import CallColumns, Ragged, Reward, Traces
from agl_otel.types.sampling import NEUTRAL, Contract
from agl_otel.types.selections import Gone, Selection
from agl_otel_hook.conventions import HEADER_MODEL_VERSION, HEADER_SAMPLING

pytestmark = pytest.mark.full
QUESTION: list[Any] = [{"role": "user", "content": tiny.question(437)}]
MODEL = "agl_otel.algorithms.grpo.server"


@dataclass
class Server:
    url: str
    record: Path
    folder: Path
    process: subprocess.Popen[str]

    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextlib.contextmanager
def serving(base: Path, policy: Path) -> Generator[Server]:
    """Run a server of a copy of this policy."""
    torch.set_num_threads(1)
    folder = Path(shutil.copytree(policy, base / "policy"))
    command = [sys.executable, "-m", MODEL, "--model", str(folder), "--port", "0", "--record", str(base / "record.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        yield Server(url, base / "record.jsonl", folder, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), tiny_policy) as running:
        yield running


@pytest.fixture(scope="module")
def tied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose head is its embedding."""
    base = tmp_path_factory.mktemp("tied")
    with serving(base, tiny.make_policy(base / "made", tied=True)) as running:
        yield running


@pytest.fixture(scope="module")
def policy(server: Server) -> Policy:
    return load_policy(server.folder)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def plain_logprobs(policy: Policy, prompt: list[int], response: list[int]) -> list[float]:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, torch.tensor(response)).tolist()


def test_a_plain_response_has_the_sampled_tokens(server: Server, policy: Policy) -> None:
    with server.client() as client:
        raw = client.chat.completions.with_raw_response.create(
            model="policy", messages=QUESTION, n=2, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}
        )
    answer = json.loads(raw.text)
    assert raw.headers[HEADER_MODEL_VERSION] == "0"
    assert answer["prompt_token_ids"] == tiny.prompt_ids(policy.tokenizer, [437])[0]
    recorded = [line for line in server.recorded() if line["id"] == answer["id"]]
    assert [line["choice"] for line in recorded] == [0, 1]
    for choice, line in zip(answer["choices"], recorded, strict=True):
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert choice["token_ids"] == line["response_token_ids"]
        assert logprobs == line["logprobs"]
        assert (line["prompt_token_ids"], line["model_version"]) == (answer["prompt_token_ids"], "0")
        assert logprobs == pytest.approx(plain_logprobs(policy, answer["prompt_token_ids"], choice["token_ids"]), abs=1e-5)
        assert choice["message"]["content"] == policy.decode(choice["token_ids"])
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 3


def test_a_streamed_response_equals_the_plain_one(server: Server) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": QUESTION, "seed": 5, "logprobs": True}
    extra = {"return_token_ids": True}
    with server.client() as client:
        plain = client.chat.completions.create(**asked, extra_body=extra)
        chunks = list(client.chat.completions.create(**asked, extra_body=extra, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == plain.choices[0].message.content
    streamed = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids", [])]
    assert streamed == (plain.choices[0].model_extra or {})["token_ids"]
    entries = [entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert plain.choices[0].logprobs is not None
    assert entries == pytest.approx([entry.logprob for entry in plain.choices[0].logprobs.content or []], abs=1e-5)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage == plain.usage
    assert server.recorded()[-1]["id"] == chunks[0].id


def test_a_stop_string_cuts_the_text_and_not_the_tokens(server: Server, policy: Policy) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": QUESTION, "seed": 5, "logprobs": True, "max_tokens": 20, "temperature": 5}
    extra = {"return_token_ids": True}
    with server.client() as client:
        free = client.chat.completions.create(**asked, extra_body=extra).choices[0].message.content or ""
        stop = free[2:4]
        plain = client.chat.completions.create(**asked, extra_body=extra, stop=stop).choices[0]
        recorded = server.recorded()[-1]
        chunks = list(client.chat.completions.create(**asked, extra_body=extra, stop=["not there", stop], stream=True))
    assert len(stop) == 2 and (plain.message.content, plain.finish_reason) == (free[: free.find(stop)], "stop")
    ids = (plain.model_extra or {})["token_ids"]
    assert stop in policy.decode(ids) and stop not in policy.decode(ids[:-1])
    assert plain.logprobs is not None and len(plain.logprobs.content or []) == len(ids)
    assert (recorded["response_token_ids"], recorded["sampling"]["stop"]) == (ids, [stop])
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == plain.message.content
    assert [token for choice in choices for token in (choice.model_extra or {}).get("token_ids", [])] == ids
    assert choices[-1].finish_reason == "stop"


def test_a_wrong_request_gets_a_400_that_names_the_error(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="unknown fields: top_kk"):
            client.chat.completions.create(model="policy", messages=QUESTION, extra_body={"top_kk": 1})
        with pytest.raises(openai.BadRequestError, match="context"):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 2000}])
        assert [model.id for model in client.models.list()] == ["policy"]


async def test_pushed_weights_are_served_with_their_version_and_wrong_ones_refused(server: Server, tmp_path: Path) -> None:
    other = tiny.make_model(tiny.make_tokenizer(), seed=9)
    async with aiohttp.ClientSession() as session:

        async def push(path: Path, version: Any) -> tuple[int, Any]:
            async with session.post(f"{server.url}/weights", json={"path": str(path), "version": version}) as answer:
                return answer.status, await answer.json()

        async def ask() -> tuple[str, Any]:
            body = {"messages": QUESTION, "logprobs": True, "return_token_ids": True, "max_tokens": 3}
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
                return answer.headers[HEADER_MODEL_VERSION], await answer.json()

        status, error = await push(tmp_path, 4)
        assert (status, "model.safetensors" in error["error"]["message"]) == (400, True)
        assert (await ask())[0] == "0"
        assert await push(save_weights(other, tmp_path / "w"), 5) == (200, {"version": "5"})
        version, body = await ask()
        assert version == "5"
        choice = body["choices"][0]
        wanted = plain_logprobs(Policy(other.eval(), None, frozenset(), 0), body["prompt_token_ids"], choice["token_ids"])
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(wanted, abs=1e-5)

        answers = await asyncio.gather(*(ask() for _ in range(50)), push(server.folder, 0))
        assert {answer[0] for answer in answers} <= {"5", "0", 200}
        assert (await ask())[0] == "0"


# --- GRPO over the server ---------------------------------------------------------------------------------------


@dataclass
class CallingStore:
    """A store that runs each rollout when it is enqueued: one call of the model server, graded, and kept as columns.

    With `order` the rollouts finish in random order.
    """

    session: aiohttp.ClientSession
    target: int
    lose_logprobs: bool = False
    own_temperature: float | None = None
    """The temperature that every second agent requests itself."""
    order: random.Random | None = None
    version: int = 0
    endpoint: str = ""
    requests: list[EnqueueRolloutRequest] = field(default_factory=list[EnqueueRolloutRequest])
    published: list[NamedResources] = field(default_factory=list[NamedResources])
    calls: list[asyncio.Task[tuple[str, Any]]] = field(default_factory=list[asyncio.Task[tuple[str, Any]]])
    cancelled: list[str] = field(default_factory=list[str])
    reads: Counter[str] = field(default_factory=Counter[str])
    figures: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    steps: list[TrainingStep] = field(default_factory=list[TrainingStep])

    async def rewarded(self, rollout_ids: Sequence[str], sources: Collection[str] | None = None) -> set[str]:
        return {*rollout_ids}

    async def spans(self, rollout_ids: str | Sequence[str]) -> list[Span]:
        return []

    async def rollouts(self, query: RolloutQuery) -> list[Rollout | AttemptedRollout]:
        return []

    async def resources(self, resources_id: str | None = None) -> ResourcesUpdate | None:
        return None

    async def selection(self, named: str) -> Selection:
        raise NotFoundError(named)

    async def gone(self, selection: Selection) -> list[Gone]:
        return []

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        self.figures.append(figures)

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        self.steps += steps
        return len(steps)

    async def record_outcome(self, run_id: str, outcome: str, *, algorithm: str) -> None:
        pass

    async def publish(self, resources: NamedResources, *, resources_id: str | None = None, aside: bool = False) -> ResourcesUpdate:
        self.version += 1
        self.published.append(resources)
        self.endpoint = resources["main_llm"].endpoint  # type: ignore[union-attr]  # GRPO publishes an LLM
        return ResourcesUpdate(resources_id="rs-1", create_time=1, update_time=1, version=self.version, resources=resources)

    async def enqueue(self, tasks: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        start = len(self.requests)
        self.requests += tasks
        self.calls += [asyncio.create_task(self.ask(task)) for task in tasks]
        return [Rollout(rollout_id=f"ro-{start + i:06}", input=task.input, start_time=1) for i, task in enumerate(tasks)]

    async def watch(
        self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Rollout | AttemptedRollout, None]:
        attempt: dict[str, Any] = {"attempt_id": "at-1", "sequence_id": 1, "start_time": 1, "status": "succeeded"}
        for r in self.order.sample(list(rollout_ids), len(rollout_ids)) if self.order else rollout_ids:
            await self.calls[int(r[3:])]
            yield AttemptedRollout(rollout_id=r, input={}, start_time=1, status="succeeded", attempt=Attempt(rollout_id=r, **attempt))

    async def set_status(self, rollout_ids: Sequence[str], status: RolloutStatus) -> list[Rollout]:
        self.cancelled += rollout_ids
        return [Rollout(rollout_id=rollout_id, input={}, start_time=1, status=status) for rollout_id in rollout_ids]

    async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str], *, tree: bool = False) -> Traces:
        finished = [rollout for rollout in rollouts if not isinstance(rollout, str)]
        ids = [rollout.rollout_id for rollout in finished]
        self.reads.update(ids)
        numbers: list[int] = [self.requests[int(rollout_id[3:])].input for rollout_id in ids]
        answers = await asyncio.gather(*(self.calls[int(rollout_id[3:])] for rollout_id in ids))
        choices = [body["choices"][0] for _, body in answers]
        right = [str(tiny.BEHAVIOURS[self.target](number % 10)) for number in numbers]
        values = [float(c["message"]["content"] == wanted) for c, wanted in zip(choices, right, strict=True)]
        logprobs = [[] if self.lose_logprobs else [e["logprob"] for e in c["logprobs"]["content"]] for c in choices]
        contracts: list[Contract] = [body["contract"] for _, body in answers]
        one, none, empty = np.ones(len(ids), np.int64), np.zeros(len(ids), np.int64), [""] * len(ids)
        calls = CallColumns(
            rollout_id=ids,
            attempt_id=["at-1"] * len(ids),
            process=["m"] * len(ids),
            span_id=ids,
            parent_span_id=empty,
            call=one,
            choice=none,
            sequence=one.astype(np.uint64),
            prefix_call=none,
            prefix_choice=none,
            prompt=Ragged.from_rows([body["prompt_token_ids"] for _, body in answers], np.int32),
            response=Ragged.from_rows([c["token_ids"] for c in choices], np.int32),
            logprobs=Ragged.from_rows(logprobs, np.float32),
            model_version=[version for version, _ in answers],
            agent=empty,
            incomplete=empty,
            temperature=np.array([contract.temperature for contract in contracts]),
            contract=[contract.dumps() for contract in contracts],
        )
        rewards = {(r, "at-1"): [Reward(2, "s", 0, "primary", value)] for r, value in zip(ids, values, strict=True)}
        verdicts = {key: Verdict(rollout_id=key[0], attempt_id=key[1], kind="complete") for key in rewards}
        return Traces(list(finished), calls, rewards, verdicts, spans=3 * len(ids), digest="d")

    async def ask(self, task: EnqueueRolloutRequest) -> tuple[str, Any]:
        body = {
            **self.published[-1]["main_llm"].sampling_parameters,  # type: ignore[union-attr]  # as above
            "messages": [{"role": "user", "content": tiny.question(task.input)}],
            "logprobs": True,
            "return_token_ids": True,
            "seed": (task.metadata or {})["sampling_seed"],
        }
        own: dict[str, float] = {}
        if self.own_temperature is not None and task.metadata and task.metadata["sampling_seed"] % 2:
            own = {"temperature": self.own_temperature}
        async with self.session.post(f"{self.endpoint}/chat/completions", json=body | own) as answer:
            contract = Contract.of(own, body, answer.headers[HEADER_SAMPLING])
            return answer.headers[HEADER_MODEL_VERSION], {**await answer.json(), "contract": contract}


@pytest.mark.parametrize(("served", "best"), [("server", 0.7), ("tied_server", 0.5)])
async def test_grpo_learns_the_rewarded_behaviour_on_policy(
    served: str, best: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(served)
    async with aiohttp.ClientSession() as session:
        store = CallingStore(session, target=2)
        grpo = GRPO.from_options(
            model_dir=server.folder, model_server_url=server.url, weights_dir=tmp_path, max_steps=15, prompts_per_step=16, group_size=8,
            probe_tolerance=1e-3,
        )  # fmt: skip
        reports = await grpo.train(store, tiny.TRAIN_NUMBERS)
    assert [report.step for report in reports] == list(range(1, 16))
    assert reports[0].reward_mean < 0.45
    assert sum(report.reward_mean for report in reports[-3:]) / 3 > best
    assert max(report.max_ratio_error for report in reports) < 1e-4
    assert all(report.off_policy == 0 and report.trajectories == 128 for report in reports)
    assert [report.weights_version for report in reports] == [str(version) for version in range(1, 16)]
    assert store.version == 16
    assert [int(each["step"]) for each in store.figures] == list(range(1, 16))
    assert all(line["sampling"]["temperature"] == line["sampling"]["top_p"] == 1.0 for line in server.recorded()[-129:])
    assert server.recorded()[-2]["sampling"]["max_tokens"] == 64, "of an agent's call; the last one is the probe's"
    assert all(set(NEUTRAL) < set(each["main_llm"].sampling_parameters) for each in store.published)  # type: ignore[union-attr]  # as above
    assert all(each["stale_share"] == 0 and each["logprob_drift"] < 1e-4 for each in store.figures)
    assert [(step.step, step.version_before, step.version_after) for step in store.steps] == [(n, str(n), str(n + 1)) for n in range(1, 16)]
    assert all(len(step.attempts) == step.samples == 128 and step.refused == 0 for step in store.steps)
    assert all(step.metrics["tokens"] == report.tokens for step, report in zip(store.steps, reports, strict=True))
    assert names_in(tmp_path) == ["15", "16", "lock"]
    assert {request.resources_id for request in store.requests} == {"rs-1"}
    metadata = [request.metadata or {} for request in store.requests]
    assert (metadata[8]["step"], metadata[8]["group"]) == (1, 1)
    assert len({each["sampling_seed"] for each in metadata}) == len(metadata)


async def test_grpo_learns_nothing_from_shuffled_rewards_and_repeats_bit_for_bit(server: Server, tmp_path: Path) -> None:
    """The control: the same seeds, tasks and updates, but the rewards are shuffled. What remains is a random walk."""

    async def run(place: Path, **control: Any) -> list[StepReport]:
        async with aiohttp.ClientSession() as session:
            grpo = GRPO.from_options(
                model_dir=server.folder, model_server_url=server.url, weights_dir=place, max_steps=8, prompts_per_step=8, group_size=8,
                metrics=[], **control,
            )  # fmt: skip
            return await grpo.train(CallingStore(session, target=2), tiny.TRAIN_NUMBERS)

    def last(reports: Sequence[StepReport]) -> float:
        return sum(report.reward_mean for report in reports[-3:]) / 3

    true, again = [await run(tmp_path / name) for name in ("true", "again")]
    assert last(true) > 0.55 > 0.45 > true[0].reward_mean
    assert [(report.reward_mean, report.loss) for report in again] == [(report.reward_mean, report.loss) for report in true], "bit for bit"
    control = await run(tmp_path / "control", shuffle_rewards=True)
    assert control[0].reward_mean == true[0].reward_mean and all(report.tokens > 0 for report in control), "it is trained, too"
    assert last(control) < 0.45, [report.reward_mean for report in control]


async def test_grpo_learns_from_groups_that_it_carries_over(server: Server, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        store = CallingStore(session, target=1, order=random.Random(0))
        grpo = GRPO.from_options(
            model_dir=server.folder, model_server_url=server.url, weights_dir=tmp_path, max_steps=20, prompts_per_step=12, group_size=8,
            groups_in_flight=20, max_staleness=2, importance_cap=2.0, clip_high=0.28, average="rollout", resample_rounds=1, kl=0.001,
        )  # fmt: skip
        reports = await grpo.train(store, tiny.TRAIN_NUMBERS)
    assert sum(report.reward_mean for report in reports[-3:]) / 3 > sum(report.reward_mean for report in reports[:3]) / 3 + 0.2
    assert all(0 < report.carried < 20 and report.oldest <= 2 for report in reports)
    assert max(report.oldest for report in reports) > 0 < sum(report.off_policy for report in reports)
    assert sum(report.resampled for report in reports) > 0
    assert set(store.reads.values()) == {1}, "also in a step that resamples"
    assert any(report.model_calls > report.rollouts for report in reports), "which counts what it read of the groups it replaced"
    trained = [rollout_id for report in reports for rollout_id in report.rollout_ids]
    assert len(trained) == len(set(trained)) == sum(report.rollouts for report in reports)
    assert set(store.cancelled).isdisjoint(trained)


async def trained_at_two_temperatures(server: Server, folder: Path, **options: Any) -> tuple[CallingStore, list[StepReport]]:
    """Train while about half of the agents ask for a temperature of 0.5."""
    async with aiohttp.ClientSession() as session:
        store = CallingStore(session, target=1, own_temperature=0.5)
        grpo = GRPO.from_options(model_dir=server.folder, model_server_url=server.url, weights_dir=folder, prompts_per_step=4, **options)
        return store, await grpo.train(store, tiny.TRAIN_NUMBERS)


async def test_calls_at_the_agents_own_temperature_are_trained_on_at_it_if_asked_for(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, (report, later) = await trained_at_two_temperatures(server, tmp_path, max_steps=2, mix_temperatures=True)
    sampled = Counter(line["sampling"]["temperature"] for line in server.recorded()[-64:-32])
    assert sampled == {0.5: report.own_sampling, 1.0: 32 - report.own_sampling}, "as the model server tells"
    assert 0 < report.own_sampling < 32 == report.calls_trained
    assert store.figures[0]["own_sampling_share"] == report.own_sampling / 32
    assert report.max_ratio_error < 1e-4, "each call is scored at its own temperature"
    first, second = [record.message for record in caplog.records if "of the agent's own" in record.message]
    assert first.startswith(f"step 1: {report.own_sampling} of 32 model calls read for training") and first.endswith("how many they are")
    assert second.startswith(f"step 2: {later.own_sampling} of 32 model calls read for training") and second.endswith("of the agent's own")


async def test_a_step_trains_on_one_temperature_and_names_what_differs(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, (report,) = await trained_at_two_temperatures(server, tmp_path, max_steps=1)
    sampled = Counter(line["sampling"]["temperature"] for line in server.recorded()[-32:])
    assert sampled == {0.5: report.refused["sampling_differs"], 1.0: report.calls_trained}, "as the model server tells"
    assert report.differing == {"temperature": report.refused["sampling_differs"]}
    assert f"step 1: {report.refused['sampling_differs']} of 32 model calls are not trained on" in caplog.text


async def test_the_server_samples_with_the_adapter_that_grpo_trains(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the [lora] extra")
    async with aiohttp.ClientSession() as session:
        grpo = GRPO.from_options(
            model_dir=server.folder, model_server_url=server.url, weights_dir=tmp_path, lora_rank=4, learning_rate=1e-2, max_steps=4,
            prompts_per_step=8, kl=0.001,
        )  # fmt: skip
        reports = await grpo.train(CallingStore(session, target=2), tiny.TRAIN_NUMBERS)
    assert max(report.max_ratio_error for report in reports) < 1e-4, "what is served is what is trained"
    assert [report.off_policy for report in reports] == [0] * 4
    assert reports[-1].next_version == "5" and reports[-1].gradient_norm > 0


def always_one(traces: Traces) -> Traces:
    return replace(traces, rewards={key: [replace(each, value=1.0) for each in found] for key, found in traces.rewards.items()})


def nan_rewards_but_one_of_a_group(traces: Traces) -> Traces:
    rewards = {
        key: [replace(each, value=math.nan if number % 8 else each.value) for each in found]
        for number, (key, found) in enumerate(traces.rewards.items())
    }
    return replace(traces, rewards=rewards)


def nan_logprobs_but_those_of_one_of_a_group(traces: Traces) -> Traces:
    logprobs = [[math.nan] * len(row) if number % 8 else row.tolist() for number, row in enumerate(traces.calls.logprobs)]
    return replace(traces, calls=replace(traces.calls, logprobs=Ragged.from_rows(logprobs, np.float32)))


@pytest.mark.parametrize(
    ("spoil", "options", "refused", "groups", "version"),
    [
        (always_one, {}, {}, (2, 0), "1"),
        (nan_rewards_but_one_of_a_group, {}, {"no_reward": 14}, (2, 2), "1"),
        (nan_logprobs_but_those_of_one_of_a_group, {}, {"logprobs_not_finite": 14}, (2, 2), "1"),
        (None, {"learning_rate": 0.0}, {}, None, "2"),
    ],
)
async def test_a_control_without_signal_changes_no_bit_of_the_weights(
    server: Server,
    tmp_path: Path,
    spoil: Callable[[Traces], Traces] | None,
    options: dict[str, Any],
    refused: dict[str, int],
    groups: tuple[int, int] | None,
    version: str,
) -> None:
    """A grader that always gives 1, rewards and log-probs that are no numbers, a learning rate of 0. The second step is after a first."""

    class Spoilt(CallingStore):
        async def traces(self, rollouts: Sequence[Rollout | AttemptedRollout | str], *, tree: bool = False) -> Traces:
            traces = await super().traces(rollouts)
            return spoil(traces) if spoil is not None else traces

    async with aiohttp.ClientSession() as session:
        store = Spoilt(session, target=0)
        grpo = GRPO.from_options(
            model_dir=server.folder, model_server_url=server.url, weights_dir=tmp_path, max_steps=2, prompts_per_step=2, **options
        )
        reports = await grpo.train(store, tiny.TRAIN_NUMBERS)
    assert [report.refused for report in reports] == [refused] * 2
    assert reports[-1].weights_version == version
    if groups is not None:
        assert [(report.zero_variance_groups, report.singleton_groups) for report in reports] == [groups] * 2
        assert store.version == 1 and all(report.tokens == 0 for report in reports)
    else:
        assert all(report.tokens > 0 and report.gradient_norm > 0 for report in reports)
    before = load_policy(server.folder).model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in grpo.policy.model.state_dict().items())


async def test_a_step_without_training_data_is_an_error_with_the_counts(server: Server, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        grpo = GRPO.from_options(model_dir=server.folder, model_server_url=server.url, weights_dir=tmp_path, prompts_per_step=2)
        with pytest.raises(DataError, match="step 1 has nothing to train on: of 16 rollouts, refused no_logprobs 16\n"):
            await grpo.train(CallingStore(session, target=0, lose_logprobs=True), tiny.TRAIN_NUMBERS)


async def test_an_unreachable_model_server_is_an_error_that_names_it(server: Server, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        grpo = GRPO.from_options(model_dir=server.folder, model_server_url="http://127.0.0.1:9", weights_dir=tmp_path)
        with pytest.raises(ModelServerError, match=r"http://127\.0\.0\.1:9/weights"):
            await grpo.train(CallingStore(session, target=0), tiny.TRAIN_NUMBERS)
