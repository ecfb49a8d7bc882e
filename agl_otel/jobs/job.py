"""A job file: the agent, the tasks, the algorithm, and its initial resources. `agl-otel train JOB.toml` runs it.

Other modules run it, chosen by the algorithm's name: grpo.py, sft.py and verl.py train weights (torch), prompts.py searches for prompts,
custom.py runs the baseline and custom algorithms.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agl_otel.algorithms.utils import retry_lost_runner
from agl_otel.errors import SettingsError
from agl_otel.runner.agents import load_function
from agl_otel.types import UNRESPONSIVE_SECONDS, NamedResources, PromptTemplate, RolloutConfig
from agl_otel.types.strict import strict_lines

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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentSpec(_Strict):
    """[agent]: the agent and its grader. Paths are relative to the job file."""

    function: str | None = None
    """`file.py:name` or `package.module:name`; many rollouts share a process."""
    command: list[str] | None = None
    """Program and arguments, where `{field}` stands for a field of the task; each rollout has its own process."""
    grader: str | None = None
    """`file.py:name`, called with (task, answer); returns the reward."""
    runners: int = Field(default=1, ge=1)
    """Number of runner processes."""
    concurrency: int = Field(default=32, ge=1)
    """Concurrent rollouts in each process."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Time limit of one attempt."""
    unresponsive_seconds: float = Field(default=UNRESPONSIVE_SECONDS, gt=0)
    """Silence after which a runner is considered dead and its rollout run again; heartbeats come every 5 s."""

    @property
    def rollout_config(self) -> RolloutConfig:
        """The config of every rollout of the job."""
        return retry_lost_runner(self.timeout_seconds, self.unresponsive_seconds)

    @model_validator(mode="after")
    def _exactly_one_kind(self) -> AgentSpec:
        if not (self.function or self.command):
            raise ValueError("give `function` or `command`")
        return self


class DataSpec(_Strict):
    """[data]: tasks, as a .jsonl file or as `file.py:name`, a function that takes `options` and returns a list."""

    train: str
    val: str | None = None
    """Validation tasks, on which all algorithms but the baseline and custom ones score their results."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class PolicySpec(_Strict):
    """[policy]: the model to train. `tiny` is created on the spot; anything else is a folder in transformers' format."""

    model: str = "tiny"
    seed: int = 0
    server: Literal["ours", "vllm"] = "ours"
    """The model server during the run: grpo/server.py, for models small enough for a CPU, or vLLM (grpo/vllm.py)."""
    vllm: str | None = None
    """vLLM's program, if it is not in this environment or on the PATH."""
    vllm_options: list[str] = Field(default_factory=list[str])
    """Further arguments of `vllm serve`, such as ["--dtype", "float32"]."""


class EditorSpec(_Strict):
    """[editor]: access by OpenAI's API to the models that criticise and edit prompts; the algorithm's options name the models."""

    base_url: str | None = None
    """None: OPENAI_BASE_URL, else OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the API key."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one call."""


class _Named(BaseModel):
    name: Literal["grpo", "sft", "verl", "apo", "gepa", "random_search", "baseline"] = "grpo"


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
    folder: Path = Field(default=Path(), exclude=True)
    """The job file's folder; set by `load`."""

    @field_validator("algorithm")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if _is_custom(options.get("name")):
            return options  # checked against its arguments when it is loaded
        name = _Named.model_validate(options).name
        known: type[BaseModel] = import_module(OPTIONS_OF[name]).options_model(name)
        return {"name": name, **known.model_validate(options).model_dump(exclude={"name"}, exclude_unset=True)}

    @field_validator("resources", mode="before")
    @classmethod
    def _templates(cls, resources: dict[str, Any]) -> dict[str, Any]:
        return {
            name: PromptTemplate(template=given, engine="f-string") if isinstance(given, str) else given
            for name, given in resources.items()
        }

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
        for table, values in (overrides or {}).items():
            content[table] = _merged(content.get(table, {}), values)
        wrong: list[str] = []
        try:
            job = cls.model_validate(content)
        except ValidationError as error:
            wrong = [_words(each) for each in error.errors()]
            for each in error.errors():
                _drop(content, each["loc"])
            try:
                job = cls.model_validate(content)
            except ValidationError:
                return None, wrong
        return job.model_copy(update={"folder": path.absolute().parent}), wrong

    def tasks(self, which: Literal["train", "val"]) -> list[Any]:
        """Return the tasks of one split. Raises SettingsError if there are none."""
        source: str | None = getattr(self.data, which)
        if source is None:
            raise SettingsError(f"[data] {which} is missing: {self.algorithm.get('name', 'grpo')} scores what it made on those tasks")
        if ":" in source:
            give = load_function(self.located(source))
            try:
                tasks = list(give(**self.data.options))
            except Exception as error:  # user code: any error becomes a message that names it
                raise SettingsError(f"[data] {which} = {source!r} gives no tasks: {type(error).__name__}: {error}") from error
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


def _words(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}"
    return f"{where}: {error['msg']}"
