"""A job file: the agent, the tasks, the algorithm, and its initial resources. `agl-otel train JOB.toml` runs it.

Other modules run it, chosen by the algorithm's name: grpo.py, sft.py and verl.py train weights (torch), prompts.py searches for prompts,
custom.py runs the baseline and custom algorithms.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from agl_otel.algorithms.grpo.vllm_options import check_options
from agl_otel.algorithms.options import MONTH_SECONDS, STRICT, Seed, nearest, problems, shown
from agl_otel.algorithms.utils import retry_lost_runner
from agl_otel.errors import SettingsError, UsageError
from agl_otel.jobs.improve_options import ImproveSpec
from agl_otel.runner.agents import load_function
from agl_otel.types import UNRESPONSIVE_SECONDS, NamedResources, PromptTemplate, RolloutConfig
from agl_otel.types.strict import check_json, strict_lines

OPTIONS_OF: Final = {
    "grpo": "agl_otel.jobs.grpo",
    "sft": "agl_otel.jobs.sft",
    "verl": "agl_otel.jobs.verl",
    "apo": "agl_otel.jobs.prompts",
    "gepa": "agl_otel.jobs.prompts",
    "random_search": "agl_otel.jobs.prompts",
    "baseline": "agl_otel.jobs.custom",
}
"""{algorithm: the module that runs it, whose `options_model(name)` is the model of its options}."""

KEYS_PAGE: Final = "docs/job-options.md"


def page_of(algorithm: object) -> str:
    """Return the page of the docs that has all options of this algorithm."""
    return {"grpo": "docs/grpo-options.md", "sft": "docs/sft-options.md", "verl": "docs/verl.md"}.get(str(algorithm), KEYS_PAGE)


class _Strict(BaseModel):
    model_config = STRICT


Seconds = Annotated[float, Field(ge=0.1, le=MONTH_SECONDS, description="it is a time in seconds; less is over before a call has been made")]
Reference = Annotated[str, Field(min_length=1, description="it names a function, as file.py:name or package.module:name")]


MAX_CONCURRENT: Final = 100_000  # rollouts at a time, of all runners


class AgentSpec(_Strict):
    """[agent]: the agent and its grader. Paths are relative to the job file."""

    function: Reference | None = None
    """`file.py:name` or `package.module:name`; many rollouts share a process."""
    command: Annotated[list[str] | None, Field(min_length=1, description="its first word is the program")] = None
    """Program and arguments, where `{field}` stands for a field of the task; each rollout has its own process. `AGL_HOOK=inject` in the
    environment of `agl-otel train` brings OpenTelemetry into a Python without it, as `--inject` of `run` does (zero-code.md)."""
    grader: Reference | None = None
    """`file.py:name`, called with (task, answer); returns the reward."""
    runners: Annotated[int, Field(ge=1, le=1000, description="each is a process of this machine, and without one nothing runs")] = 1
    """Number of runner processes."""
    concurrency: Annotated[int, Field(ge=1, le=10_000, description="a runner runs so many rollouts at a time")] = 32
    """Concurrent rollouts in each process."""
    timeout_seconds: Seconds = 120.0
    """Time limit of one attempt."""
    unresponsive_seconds: Annotated[
        float, Field(ge=10, le=MONTH_SECONDS, description="heartbeats come every 5 s, and living runners would count as dead")
    ] = UNRESPONSIVE_SECONDS
    """Silence after which a runner is considered dead and its rollout run again; heartbeats come every 5 s."""

    @property
    def rollout_config(self) -> RolloutConfig:
        """The config of every rollout of the job."""
        return retry_lost_runner(self.timeout_seconds, self.unresponsive_seconds)

    @model_validator(mode="after")
    def _runs_something(self) -> AgentSpec:
        if not (self.function or self.command):
            raise ValueError("give `function` or `command`")
        if self.command and not self.command[0].strip():
            raise ValueError('command[0] = "": it must be non-empty, because it is the program; give the program')
        for place, word in enumerate(self.command or ()):
            if "\0" in word:
                raise ValueError(f"command[{place}] = {shown(word)}: it must have no NUL, which ends a program's arguments; leave it out")
        if (rollouts := self.runners * self.concurrency) > MAX_CONCURRENT:
            raise ValueError(
                f"runners = {self.runners} and concurrency = {self.concurrency} make {rollouts} rollouts at a time: they must be at most "
                f"{MAX_CONCURRENT}, because they share this machine; give smaller ones"
            )
        return self


class DataSpec(_Strict):
    """[data]: tasks, as a .jsonl file or as `file.py:name`, a function that takes `options` and returns a list."""

    train: Annotated[str, Field(min_length=1, description="it names the tasks, as a .jsonl file or as file.py:name")]
    """Training tasks."""
    val: Annotated[str | None, Field(min_length=1, description="it names the tasks, as a .jsonl file or as file.py:name")] = None
    """Validation tasks, on which all algorithms but the baseline and custom ones score their results."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The functions' keyword arguments."""

    @model_validator(mode="after")
    def _options_of_functions(self) -> DataSpec:
        if self.options and not any(source and ":" in source for source in (self.train, self.val)):
            raise ValueError(f"options = {shown(self.options)} has no effect on files: name functions (file.py:name), or leave it out")
        return self


class PolicySpec(_Strict):
    """[policy]: the model to train."""

    model: Annotated[str, Field(min_length=1, description="it is a folder, a model of the hub, or tiny")] = "tiny"
    """A folder in transformers' format, or a model of the Hugging Face hub as owner/name or owner/name@revision; a folder that exists is
    taken first. `tiny` is created on the spot."""
    seed: Seed = 0
    """Of the initial weights of `tiny` and of the model server; of the run, unless [algorithm] has a `seed`."""
    server: Literal["ours", "vllm"] = "ours"
    """The model server during the run: grpo/server.py, for models small enough for a CPU, or vLLM (grpo/vllm.py)."""
    vllm: Annotated[str | None, Field(min_length=1, description="it is the program's path")] = None
    """vLLM's program, if it is not in this environment or on the PATH."""
    vllm_options: list[str] = Field(default_factory=list[str])
    """Further arguments of `vllm serve`, such as ["--dtype", "float32"]."""
    devices: Annotated[list[int] | None, Field(min_length=1, description="these are GPUs, by their numbers: [0]")] = None
    """The GPUs of the model server, numbered as in `device` of [algorithm], which is the trainer's ("cuda:1" is 1). vLLM shards the model
    over several. None: vLLM takes the first one, and ours samples on the CPU."""
    gpu_memory_utilization: Annotated[
        float | None, Field(ge=0.01, le=1, description="it is the share of a GPU's memory that vLLM takes")
    ] = None
    """None: 0.4 beside a trainer on the same GPU, else vLLM's default (0.9)."""
    sleep: bool = False
    """Have vLLM free its GPU memory while weights are updated, for a trainer on the same GPU; its weights move to the machine's memory."""
    adapters: bool = True
    """With `lora_rank` and vLLM: load the adapter alone after each step, without waiting for calls in flight. False: merged weights."""

    @model_validator(mode="after")
    def _options_of_vllm(self) -> PolicySpec:
        of_vllm = {name: getattr(self, name) for name in ("vllm", "vllm_options", "gpu_memory_utilization", "sleep")}
        of_vllm |= {"adapters": self.adapters} if not self.adapters else {}
        for name, given in of_vllm.items():
            if (given or name == "adapters") and self.server != "vllm":
                raise ValueError(f'{name} = {shown(given)} has no effect with server = "ours": give server = "vllm", or leave it out')
        if self.server == "ours" and len(self.devices or ()) > 1:
            raise ValueError(f'devices = {shown(self.devices)}: server = "ours" samples on one GPU; name one, or give server = "vllm"')
        if min(self.devices or [0]) < 0:
            raise ValueError(f"devices = {shown(self.devices)}: GPUs are numbered from 0; name them so")
        if len(set(self.devices or ())) < len(self.devices or ()):
            raise ValueError(f"devices = {shown(self.devices)} names a GPU twice: name each once")
        check_options(self.vllm_options, gpus=len(self.devices or [0]))
        return self


def _address(given: str) -> str:
    parts = urlsplit(given)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", given)
    except ValueError:  # of a port beyond 65535
        known = False
    if not known:
        raise ValueError("it must be an address such as https://api.openai.com/v1")
    return given


def _variable(given: str) -> str:
    if not given.isidentifier():
        raise ValueError("it must be the name of an environment variable (letters, digits and _), not the key itself")
    return given


class EditorSpec(_Strict):
    """[editor]: access by OpenAI's API to the models that criticise and edit prompts; the algorithm's options name the models."""

    base_url: Annotated[str, AfterValidator(_address)] | None = None
    """None: OPENAI_BASE_URL, else OpenAI's own."""
    api_key_env: Annotated[str, AfterValidator(_variable)] = "OPENAI_API_KEY"
    """The environment variable that holds the API key."""
    timeout_seconds: Seconds = 600.0
    """Time limit of one call."""


class _Named(BaseModel):
    name: Annotated[
        Literal["grpo", "sft", "verl", "apo", "gepa", "random_search", "baseline"],
        Field(description="these are built in; an algorithm of your own is file.py:name"),
    ] = "grpo"


class Job(_Strict):
    """One job file."""

    agent: AgentSpec
    data: DataSpec
    policy: PolicySpec = PolicySpec()
    editor: EditorSpec = EditorSpec()
    resources: NamedResources = Field(default_factory=dict)
    """[resources]: the initial prompts of a search, and whatever else its agent needs. A text is an f-string template."""
    algorithm: dict[str, Any] = Field(default_factory=dict[str, Any])
    """[algorithm]: `name` (a built-in one, or `file.py:name` of a custom one), and the algorithm's keyword arguments as options."""
    improve: ImproveSpec | None = None
    _folder: Path = PrivateAttr(default=Path())
    _wrong: list[str] = PrivateAttr(default_factory=list[str])
    _tasks: dict[str, list[Any]] = PrivateAttr(default_factory=dict[str, list[Any]])

    @field_validator("algorithm")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if _is_custom(options.get("name")):
            return options  # checked against its arguments when it is loaded
        name = _Named.model_validate(options).name
        return {"name": name, **options_model(name).model_validate(options).model_dump(exclude={"name"}, exclude_unset=True)}

    @field_validator("resources", mode="before")
    @classmethod
    def _templates(cls, resources: Any) -> Any:
        if not isinstance(resources, dict):
            return resources
        return {
            name: PromptTemplate(template=given, engine="f-string") if isinstance(given, str) else given
            for name, given in cast("dict[str, Any]", resources).items()
        }

    @property
    def folder(self) -> Path:
        """The job file's folder."""
        return self._folder

    def has_wrong(self, place: str) -> bool:
        """Whether `read` dropped a wrong key at `place`, as in "[data] val"."""
        return any(each.startswith(place) for each in self._wrong)

    @property
    def run_by(self) -> str:
        """The module that runs the algorithm."""
        name = self.algorithm.get("name", "grpo")
        return OPTIONS_OF["baseline" if _is_custom(name) else name]

    @property
    def options(self) -> dict[str, Any]:
        """The algorithm's options in the file."""
        return {name: value for name, value in self.algorithm.items() if name != "name"}

    @classmethod
    def load(cls, path: Path, *, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Job:
        """Read a job file; `overrides` ({table: {key: value}}) take precedence.

        Raises SettingsError, which names the file and each wrong or unknown key.
        """
        job, wrong = cls.read(path, overrides=overrides)
        if job is None or wrong:
            raise SettingsError(f"job file {path}: {'; '.join(wrong)}")
        return job

    @classmethod
    def read(cls, path: Path, *, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Job | None, list[str]]:
        """Read a job file, dropping wrong and unknown keys; return the job (None if too little is left) and each such key with its error.

        Raises SettingsError if the file cannot be read or is not TOML.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"job file {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"job file {path} is not TOML: {error}") from error
        except RecursionError:
            raise SettingsError(
                f"job file {path} holds arrays or tables within each other, too many to be read: look for `[[[[…`"
            ) from None
        for table, values in (overrides or {}).items():
            content[table] = _merged(content.get(table, {}), values)
        wrong: list[str] = []
        try:
            job = cls.model_validate(content)
        except ValidationError as error:
            wrong = _problems(error.errors(), content)
            for each in error.errors():
                _drop(content, each["loc"])
            try:
                job = cls.model_validate(content)
            except ValidationError:
                return None, wrong
        wrong += _unused_tables(job, content)
        job._folder, job._wrong = path.absolute().parent.resolve(), wrong
        return job, wrong

    def tasks(self, which: Literal["train", "val"]) -> list[Any]:
        """Return the tasks of one split, which are read once. Raises SettingsError if there are none."""
        if which not in self._tasks:
            self._tasks[which] = self._read_tasks(which)
        return list(self._tasks[which])

    def _read_tasks(self, which: Literal["train", "val"]) -> list[Any]:
        source: str | None = getattr(self.data, which)
        if source is None:
            raise SettingsError(f"[data] {which} is missing: {self.algorithm.get('name', 'grpo')} scores what it made on those tasks")
        if ":" in source:
            try:
                give = load_function(self.located(source))
            except UsageError as error:
                raise SettingsError(f"[data] {which}: {error}") from error
            try:
                given = give(**self.data.options)
                tasks = list(given)
            except Exception as error:  # user code: any error becomes a message that names it
                raise SettingsError(f"[data] {which} = {source!r} gives no tasks: {type(error).__name__}: {error}") from error
            if isinstance(given, str | bytes | Mapping):
                raise SettingsError(f"[data] {which} = {source!r} gives a {type(given).__name__}: it must be a list of tasks; return one")
            _check_tasks(tasks, f"[data] {which} = {source!r}")
        else:
            try:
                tasks = [task for _, task in strict_lines((self.folder / source).read_bytes())]
            except (OSError, ValueError) as error:
                raise SettingsError(f"[data] {which} = {source!r} cannot be read: {error}") from error
        if not tasks:
            raise SettingsError(f"[data] {which} = {source!r} holds no task")
        return tasks

    def located(self, reference: str) -> str:
        """Return `file.py:name` with an absolute path; `package.module:name` unchanged."""
        where, _, name = reference.rpartition(":")
        return f"{self.folder / where}:{name}" if where.endswith(".py") else reference


def _check_tasks(tasks: Sequence[Any], place: str) -> None:
    """Raise SettingsError for a task that cannot be enqueued."""
    for number, task in enumerate(tasks, 1):
        try:
            check_json(task)
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(
                f"{place}: task {number} is no JSON value: {error}; return tasks of tables, lists, texts, finite numbers and booleans"
            ) from error


def _unused_tables(job: Job, content: Mapping[str, Any]) -> list[str]:
    """Return one line for each table that the job's algorithm does not read."""
    name = job.algorithm.get("name", "grpo")
    whose = f"name = {shown(name)}" if name in OPTIONS_OF else "an algorithm of your own"
    return [
        f"[{table}] has no effect with {whose}, which does not read it: leave the table out (it is for {', '.join(algorithms)})"
        for table, algorithms in _USED_BY.items()
        if content.get(table) and name not in algorithms and not (table == "resources" and _is_custom(name))
    ]


def _merged(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(table)
    for key, value in values.items():
        result[key] = _merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result


def _drop(content: dict[str, Any], where: Sequence[int | str]) -> None:
    """Remove the key at `where`; if the path leads through something other than tables, the last key that exists."""
    table: Any = content
    for key in where[:-1]:
        if not isinstance(table.get(key), dict):
            break
        table = table[key]
    else:
        key = where[-1]
    table.pop(key, None)


def _is_custom(name: object) -> bool:
    """Whether an algorithm's name refers to a custom one."""
    return isinstance(name, str) and ":" in name


def options_model(name: str) -> type[BaseModel]:
    """Return the model of [algorithm] of a built-in algorithm."""
    return import_module(OPTIONS_OF[name]).options_model(name)


def _problems(errors: Sequence[Any], content: Mapping[str, Any]) -> list[str]:
    """Return one line for each wrong key of a job file: its table, its value, what it must be, why, and the remedy."""
    lines: list[str] = []
    for table in dict.fromkeys(str(error["loc"][0]) for error in errors):
        of_table = [error for error in errors if error["loc"][0] == table]
        inside = [{**error, "loc": error["loc"][1:]} for error in of_table]
        if of_table[0]["type"] == "extra_forbidden" and len(of_table[0]["loc"]) == 1:
            lines.append(f"unknown table [{table}]: {nearest(table, _TABLES, KEYS_PAGE)}")
        elif of_table[0]["type"] == "missing" and len(of_table[0]["loc"]) == 1:
            lines.append(f"the table [{table}] is missing: it must be given")
        elif not isinstance(content.get(table, {}), dict):
            lines.append(f"{table} = {shown(content[table])}: it must be a table; write [{table}] above its keys")
        elif table == "resources":
            lines += [f"[resources] {'.'.join(map(str, each['loc']))}: {_of_resource(each)}" for each in inside]
        else:
            name = content.get(table, {}).get("name", "grpo") if table == "algorithm" else None
            lines += problems(inside, _model_of_table(table, content), table, page_of(name))
    return lines


_USED_BY: Final = {
    "policy": ("grpo", "sft", "verl"),
    "editor": ("apo", "gepa"),
    "resources": ("apo", "gepa", "random_search", "baseline"),
    "improve": ("grpo", "sft", "apo", "gepa", "random_search"),
}
"""{table: the built-in algorithms that read it}; all read the others. [resources] are also those of an algorithm of the user's own."""
_TABLES: Final = ("agent", "data", "policy", "editor", "resources", "algorithm", "improve")


def _model_of_table(table: str, content: Mapping[str, Any]) -> type[BaseModel]:
    if table != "algorithm":
        return {"agent": AgentSpec, "data": DataSpec, "policy": PolicySpec, "editor": EditorSpec, "improve": ImproveSpec}[table]
    name = content.get(table, {}).get("name", "grpo")
    return options_model(name) if isinstance(name, str) and name in OPTIONS_OF else _Named


def _of_resource(error: Mapping[str, Any]) -> str:
    """What is wrong with a resource, without its value, which may hold a key."""
    match error["type"]:
        case "missing":
            return "it is missing, and must be given"
        case "extra_forbidden":
            return "the resource has no such key; leave it out"
        case _:
            return f'{error["msg"]}; write a text, or a table such as {{ resource_type = "llm", endpoint = "…", model = "…" }}'
