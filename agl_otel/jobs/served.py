"""A run with its own model server for its policy: the common part of grpo.py and sft.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, get_args

import aiohttp

from agl_otel.algorithms.checked_files import digest_of
from agl_otel.algorithms.grpo.groups import cancel_all
from agl_otel.algorithms.grpo.options import ALL_LINEAR, Sampling
from agl_otel.algorithms.grpo.serving import MODEL_NAME, RESOURCE_NAME, check_context
from agl_otel.algorithms.grpo.vllm import vllm_command
from agl_otel.algorithms.grpo.vllm_options import max_model_len
from agl_otel.algorithms.hub import HubModel, find_model, is_hub_id, model_folder, origin_of
from agl_otel.algorithms.model_files import CONFIG_FILE, POLICY, WEIGHTS_FILE
from agl_otel.algorithms.options import has_torch
from agl_otel.algorithms.run_folder import Fingerprint, RunFolder, lock_run
from agl_otel.algorithms.validation import Validation, best_of, note_validation, validations
from agl_otel.errors import AglError, ModelServerError, SettingsError
from agl_otel.jobs.algorithm_table import Need, of_table
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import Findings
from agl_otel.jobs.policy_server import PolicyServer, gpu_share, is_shared
from agl_otel.jobs.run import JobRun, TaskResults, unless_failed
from agl_otel.service.forkserver import ForkServer
from agl_otel.service.processes import Process
from agl_otel.settings import Settings
from agl_otel.store import Store
from agl_otel.types import LLM, TERMINAL_STATUSES, RolloutQuery, RolloutStatus

if TYPE_CHECKING:
    from agl_otel.jobs.model_check import ModelFacts

_AGENT: Final = {"function", "command", "grader"}
"""The fields of [agent] that belong to a run's fingerprint; the numbers of processes and rollouts may change on resuming."""
SMALL_PARAMETERS: Final = 10_000_000
"""Up to this size a model counts as a toy, for which a CPU and the default learning rate are meant."""
VLLM_TOLERANCE: Final = 0.1  # its weights are usually bfloat16


def validation_name(step: int) -> str:
    """Return the name of the evaluation after `step` (0: before the training). The score after the training is that of the last step."""
    return f"step-{step:06d}" if step else "before"


def policy_of(job: Job, *, run: Path | None = None) -> Path | None:
    """Return the folder of the job's model; a model of the hub is downloaded. None for `tiny`, which is created later.

    `run`: the folder of a run; where that exists, the commit in its run.json is taken. Raises SettingsError if the folder holds no model,
    UnavailableError.
    """
    if job.policy.model == "tiny":
        return None
    with of_table("policy"):
        folder = model_folder(job.policy.model, job.folder, run=run)
    if not (folder / "config.json").exists():
        raise SettingsError(
            f"[policy] model = {job.policy.model!r}: {folder} holds no config.json of a transformers model; "
            'name a folder that does, a model of the hub (owner/name or owner/name@revision), or "tiny"'
        )
    return folder


def _find_policy(job: Job) -> HubModel | Path | None:
    """Return the job's model: its folder, or one of the hub that is not in the cache; None for `tiny`. Raises what `policy_of` raises."""
    model = job.policy.model
    with of_table("policy"):
        found = find_model(model) if is_hub_id(model, job.folder) else None
    return found if isinstance(found, HubModel) and not found.is_cached else policy_of(job)


def _facts_of(model: HubModel | Path | None, attention: str | None) -> ModelFacts:
    """Return the facts of the model of `_find_policy`; of one of the hub without its weights, of which only the headers are read."""
    from agl_otel.jobs.model_check import model_facts, tiny_facts

    if model is None:
        return tiny_facts(attention=attention)
    if isinstance(model, Path):
        return model_facts(model, attention=attention)
    return model_facts(model.fetch(weights=False), attention=attention, stored=model.tensors())


def needs_of_policy(job: Job, look_at: Callable[[ModelFacts], Findings]) -> list[Need]:
    """Return the checks for the job's model, with what `look_at` finds about it, and for the program that serves it."""

    def looked_at(facts: ModelFacts) -> Findings:
        check_room(job, facts)
        return look_at(facts)

    return [
        lambda: check_policy(job, looked_at),
        lambda: check_devices(job),
        lambda: check_sleep(job),
        lambda: vllm_command(job.policy.vllm) if job.policy.server == "vllm" else None,
    ]


def notes_of_policy(job: Job) -> list[str]:
    """Return what a user should know of how the job's policy is served."""
    if any(job.has_wrong(place) for place in ("[policy]", "[algorithm] device")):
        return []  # its values are not those that the user meant
    spec, trainer = job.policy, _place(job.options.get("device", "cpu"))
    if spec.server == "ours":
        where = _place("cpu") if spec.devices is None else _gpus(spec.devices)
        does = f"sampled and trained on {where}" if where == trainer else f"sampled on {where}, and trained on {trainer}"
        hint = (
            f'; beyond {SMALL_PARAMETERS / 1e6:.0f} million parameters that is slow: take a GPU by devices = [0], or server = "vllm"'
            if spec.devices is None
            else ""
        )
        return [f'the policy is {does} ([policy] server = "ours"{hint})']
    share = gpu_share(job)
    shared = f"; they share a GPU, of which vLLM takes {share:.0%}" if is_shared(job) and share is not None else ""
    asleep = ", and none of it during updates" if shared and spec.sleep else ""
    return [f"the policy is sampled by vLLM on {_gpus(spec.devices or [0])}, and trained on {trainer}{shared}{asleep}"]


def _place(device: str) -> str:
    """Return a device of torch in words."""
    kind, _, number = device.partition(":")
    return {"cpu": "the CPU", "cuda": f"GPU {number or 0}"}.get(kind, device)


def _gpus(numbers: Sequence[int]) -> str:
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def check_devices(job: Job) -> Findings:
    """Raise SettingsError for GPUs of [policy] that this machine lacks; algorithms/options.py checks the `device` of [algorithm]."""
    devices, trainer = job.policy.devices or [], job.options.get("device", "cpu")
    if not has_torch():
        named = [*(["`devices` of [policy]"] if devices else []), *(["`device` of [algorithm]"] if trainer != "cpu" else [])]
        return Findings(notes=[f"not checked without torch: whether this machine has the {' and the '.join(named)}"] if named else [])
    import torch

    count = torch.cuda.device_count()
    if lacking := [number for number in devices if number >= count]:
        raise SettingsError(
            f"[policy] devices = {devices}: this machine has {count or 'no'} GPU{'s' if count > 1 else ''}, so there is none with the "
            f"number {lacking[0]}; name others, or leave it out"
        )
    return Findings()


def check_sleep(job: Job) -> None:
    """Raise SettingsError for `sleep` where nothing is won by it."""
    if job.policy.sleep and job.options.get("groups_in_flight") is not None:
        raise SettingsError(
            "[policy] sleep = true: rollouts in flight would wait while vLLM sleeps, and groups_in_flight is there to keep them running; "
            "leave out one of both"
        )


def check_policy(job: Job, look_at: Callable[[ModelFacts], Findings]) -> Findings:
    """Check the job's model: that it is there and, with torch, that it can be trained with the job's options; add what `look_at` finds.

    Raises SettingsError if one of this fails, and what `policy_of` raises.
    """
    model = _find_policy(job)
    if not has_torch():
        return Findings(notes=["not checked without torch: whether the model of [policy] can be trained, and with these options"])
    facts = _facts_of(model, job.options.get("attention"))
    _check_fit(job, facts)
    found = look_at(facts)
    return replace(found, warnings=[*facts.warnings, *found.warnings])


def _check_fit(job: Job, facts: ModelFacts) -> None:
    """Raise SettingsError if the job's model cannot be trained with the job's options."""
    from agl_otel.algorithms.grpo.lora import check_targets
    from agl_otel.algorithms.grpo.policy import NOT_CHECKPOINTED

    given, name = job.options, job.policy.model
    served = max_model_len(job.policy.vllm_options) or facts.context
    if served > facts.context:
        raise SettingsError(
            f"[policy] vllm_options has --max-model-len {served}: it must be at most {facts.context}, the context of {name}; "
            "give such a value, or leave it out"
        )
    if (rank := given.get("lora_rank") or 0) > facts.hidden:
        raise SettingsError(
            f"[algorithm] lora_rank = {rank}: it must be at most {facts.hidden}, because that is the hidden size of {name}; "
            "give such a value (8 to 64 are usual), or leave it out"
        )
    if given.get("gradient_checkpointing") and not facts.checkpoints:
        raise SettingsError(f"[algorithm] {NOT_CHECKPOINTED.format(name)}")
    if rank:
        with of_table("algorithm"):
            check_targets(given.get("lora_targets", ALL_LINEAR), facts.linear, name)


def check_room(job: Job, facts: ModelFacts) -> None:
    """Raise SettingsError where replies leave no room for a prompt."""
    context = min(max_model_len(job.policy.vllm_options) or facts.context, facts.context)
    if (most := job.options.get("max_tokens", Sampling.max_tokens)) >= context:
        whose = job.policy.model if context == facts.context else "the model server (--max-model-len)"
        raise SettingsError(
            f"[algorithm] max_tokens = {most}: it must be less than {context}, because the context of {whose} holds the "
            "prompt, too; give such a value, or leave it out"
        )


@dataclass(frozen=True)
class Report:
    """The results of a run."""

    steps: Sequence[Any]
    """StepReports of GRPO or RoundReports of SFT, earlier ones of a resumed run included."""
    stopped_because: str


class ServedRun(JobRun):
    """Base of runs with a model server; a subclass defines `name` and `algorithm`. A folder that already holds the run resumes it.

    Args:
        job: what to train.
        store: a connected store.
        folder: the run's folder: run.json, policy, weights, metrics.jsonl, the model server's record and port, logs.
        stack_failed: a future that fails when the stack ends; the run then ends with its error.
        settings: the stack's, for runner processes; None: as this process loads them.
        force: as in JobRun.
        forks: as for PolicyServer.
    """

    name: ClassVar[str]
    """The algorithm's name."""

    def __init__(
        self,
        job: Job,
        store: Store,
        folder: Path,
        *,
        stack_failed: asyncio.Future[None] | None = None,
        settings: Settings | None = None,
        force: bool = False,
        forks: ForkServer | None = None,
    ) -> None:
        super().__init__(job, store, folder, stack_failed=stack_failed, settings=settings, force=force)
        self._forks = forks
        self.record = folder / "model_server.jsonl"
        """The model server's own record of its samples, one line per choice."""
        self._server: PolicyServer | None = None
        self.server_url = ""
        self.context: int | None = None
        """The greatest number of tokens of a prompt and its reply that the model server takes."""
        self.on_validation: Callable[[Validation], object] | None = None
        """Receives each validation that `val_every` names."""

    async def _start(self) -> None:
        self._exit.callback((lock := lock_run(self.folder)).close)  # before the folder gets a policy
        self.model_dir = await prepare_policy(self.job, self.folder)
        algorithm, self.val_tasks = self.algorithm(), self.job.tasks("val")
        begun, model = fingerprint_of(self.job, algorithm, self.name), origin_of(self.model_dir)
        self.run = RunFolder(self.folder, algorithm=begun.algorithm, options=begun.options, seed=begun.seed, model=model, lock=lock)
        await self._cancel_unfinished()
        weights, version = await asyncio.to_thread(self._weights_to_serve, algorithm)
        self._server = PolicyServer(self.job, self.model_dir, self.folder, record=self.record, forks=self._forks)
        await self._run(await self._server.prepare(weights=weights, version=version), grace_seconds=self._server.stop_seconds)
        await self._server.ready()
        self.server_url = self._server.url
        async with aiohttp.ClientSession() as session:
            self.context = await check_context(session, self.server_url, algorithm.sampling_parameters["max_tokens"])

    async def _cancel_unfinished(self) -> None:
        """Cancel the run's unfinished rollouts, evaluations included: they may belong to a later step than the weights now served.

        The algorithm and `evaluate` run cancelled rollouts again when they need them.
        """
        unfinished = [status for status in get_args(RolloutStatus) if status not in TERMINAL_STATUSES]
        left = await self.store.rollouts(RolloutQuery(status_in=unfinished, rollout_id_contains=f"ro-{self.run.run_id}-"))
        await cancel_all(self.store, [rollout.rollout_id for rollout in left])

    async def fit(
        self,
        tasks: Sequence[Any],
        *,
        on_step: Callable[[Any], object] | None = None,
        on_validation: Callable[[Validation], object] | None = None,
    ) -> Report:
        """Train until the algorithm is done. Raises what its `train` raises.

        `on_step` receives the report of every step done now, `on_validation` each validation; the result includes earlier steps, too.
        """
        self.on_validation = on_validation
        self.resources_id = self.run.run_id  # later evaluations use what the algorithm publishes
        algorithm = self.algorithm(run=self.run, on_step=on_step)
        return Report(await unless_failed(self.failed, algorithm.train(self.store, tasks)), algorithm.stopped_because)

    async def evaluate_once(self, tasks: Sequence[Any], *, name: str, step: int | None = None, retry: bool = True) -> TaskResults:
        """Evaluate under a name of this run; an earlier evaluation under that name is read again."""
        return await self.evaluate(tasks, run_id=self.run.run_id, name=name, seed=self.run.seed, step=step, retry=retry)

    async def validate(self, step: int, weights: Path) -> None:
        """Validate the weights after a step of the training, which are in the folder `weights`."""
        done, _ = await self._validated(step, weights)
        every = served_options(self.job).get("val_every")
        if self.on_validation is not None and every and step % every == 0:  # otherwise the last step, which `validate_after` reads again
            self.on_validation(done)

    async def validate_before(self) -> TaskResults:
        """Validate the weights that the run begins with."""
        return (await self._validated(0, None))[1]

    async def validate_after(self, steps: int) -> TaskResults:
        """Return the validation of the weights after the last step, which the training has done; without any step, do it."""
        weights, _ = await asyncio.to_thread(self.algorithm().last_weights, self.run)
        return (await self._validated(steps, weights))[1]

    async def _validated(self, step: int, weights: Path | None) -> tuple[Validation, TaskResults]:
        name = validation_name(step)
        is_new = all(each.step != step for each in validations(self.folder))  # a score, once recorded, does not change
        found = await self.evaluate_once(self.val_tasks, name=name, step=step, retry=is_new)
        kept = str(weights.relative_to(self.folder)) if weights is not None else None
        done = Validation(step, name, found.score, found.scored.asked, found.scored.missing, kept)
        note_validation(self.folder, done)
        return done, found

    @property
    def best(self) -> Validation | None:
        """The best validation of weights that the run made; None where there is none."""
        return best_of(validations(self.folder))

    def _weights_to_serve(self, algorithm: Any) -> tuple[Path | None, int]:
        """Return folder (None: the model's) and version of the weights with which the server of a resumed run starts."""
        return algorithm.last_weights(self.run)

    @property
    def described(self) -> list[str]:
        """What a user should know of how the policy is served, for the start of the run."""
        most: int = self.algorithm().sampling_parameters["max_tokens"]
        fits = f"the model server's context is {self.context} tokens: prompts of up to {(self.context or 0) - most} fit beside "
        return [*notes_of_policy(self.job), *([f"{fits}replies of max_tokens = {most}"] if self.context is not None else [])]

    def _ended(self, process: Process) -> type[AglError]:
        return ModelServerError if self._server is not None and process is self._server.process else super()._ended(process)

    async def publish_policy(self) -> None:
        """Publish the policy's address for rollouts before the training; the algorithm publishes its own versions."""
        sampling = self.algorithm().sampling_parameters
        of_calls = {name: self.job.options[name] for name in ("bridge", "strict_tools") if name in self.job.options}
        served = {RESOURCE_NAME: LLM(endpoint=f"{self.server_url}/v1", model=MODEL_NAME, sampling_parameters=sampling, **of_calls)}
        self.resources_id = f"{self.run.run_id}-before"
        await self.store.publish(served, resources_id=self.resources_id, aside=True)

    def algorithm(self, *, run: RunFolder | None = None, on_step: Callable[[Any], object] | None = None) -> Any:
        """Create the job's algorithm over this run's policy and model server."""
        raise NotImplementedError


def served_options(job: Job) -> dict[str, Any]:
    """Return the algorithm's options: the job's, over defaults that depend on its policy."""
    served = {"probe_tolerance": VLLM_TOLERANCE} if job.policy.server == "vllm" else {}
    return {"seed": job.policy.seed, **served, **job.options}


def fingerprint_of(job: Job, algorithm: Any, name: str) -> Fingerprint:
    """Return the fingerprint of a run of the job by `algorithm`, a GRPO or SFT over the job's policy. Raises UsageError without a model."""
    options = {
        **algorithm.run_fingerprint(job.tasks("train")),
        "val": digest_of(job.tasks("val")),
        "agent": job.agent.model_dump(include=set(_AGENT)),
    }
    return Fingerprint.of(name, options, served_options(job)["seed"])


def policy_made(job: Job, folder: Path) -> Path | None:
    """Return the folder of the job's policy for the run in `folder`; None if it is yet to be created. Raises what `policy_of` raises."""
    place = _policy_place(job, folder)
    return place if (place / CONFIG_FILE).exists() else None


def _policy_place(job: Job, folder: Path) -> Path:
    return policy_of(job, run=folder) or folder / POLICY


async def prepare_policy(job: Job, folder: Path) -> Path:
    """Return the folder of the job's policy; the tiny one is created in the run's `folder`, once. Raises SettingsError."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place = await asyncio.to_thread(_policy_place, job, folder)
    if job.policy.model == "tiny" and not (place / WEIGHTS_FILE).exists():  # its weights are written last
        await asyncio.to_thread(_make_tiny, place, job.policy.seed)
    return place


def _make_tiny(folder: Path, seed: int) -> None:
    import torch

    from agl_otel.algorithms.grpo.tiny import make_policy

    torch.set_num_threads(1)  # for so small a model a second thread costs ten times its use
    make_policy(folder, seed=seed)
