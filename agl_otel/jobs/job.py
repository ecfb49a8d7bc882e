"""A job file: which agent, which tasks, which algorithm, and what it begins with. `agl-otel train JOB.toml` runs it.

What runs it is in other modules, chosen by the algorithm's name: training.py, tuning.py and verl.py train weights (torch), prompts.py
searches for prompts, own.py runs the baseline and algorithms of the user's own.
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
"""{name of an algorithm: the module that runs it, whose `options_model(name)` knows its options}."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentSpec(_Strict):
    """[agent]: what runs, and who grades it. Paths are relative to the job file."""

    function: str | None = None
    """`file.py:name` or `package.module:name`: many rollouts share a process."""
    command: list[str] | None = None
    """Program and arguments, `{field}` standing for a field of the task: a process for each rollout."""
    grader: str | None = None
    """`file.py:name`, called with (task, answer); returns the reward."""
    runners: int = Field(default=1, ge=1)
    """Processes."""
    concurrency: int = Field(default=32, ge=1)
    """Rollouts at a time in each."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Of one attempt."""
    unresponsive_seconds: float = Field(default=UNRESPONSIVE_SECONDS, gt=0)
    """After so long without a sign of life a runner is taken for dead, and its rollout is run again; heartbeats come every 5 s."""

    @property
    def rollout_config(self) -> RolloutConfig:
        """Of every rollout of the job."""
        return retry_lost_runner(self.timeout_seconds, self.unresponsive_seconds)

    @model_validator(mode="after")
    def _one_way_to_run(self) -> AgentSpec:
        if not (self.function or self.command):
            raise ValueError("give `function` or `command`")
        return self


class DataSpec(_Strict):
    """[data]: tasks, as a .jsonl file or as `file.py:name`, a function that takes `options` and returns a list."""

    train: str
    val: str | None = None
    """All algorithms but the baseline and your own score what they made on it."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class PolicySpec(_Strict):
    """[policy]: the model that is trained. `tiny` is made on the spot; anything else is a folder in transformers' format."""

    model: str = "tiny"
    seed: int = 0
    server: Literal["ours", "vllm"] = "ours"
    """What serves it while the run lasts: grpo/server.py, for models that a CPU can do, or vLLM (grpo/vllm.py)."""
    vllm: str | None = None
    """The program, where it is not in this environment or on the PATH."""
    vllm_options: list[str] = Field(default_factory=list[str])
    """More of `vllm serve`, such as ["--dtype", "float32"]."""


class EditorSpec(_Strict):
    """[editor]: the models that criticise and edit prompts, behind OpenAI's API; which ones is the algorithm's business."""

    base_url: str | None = None
    """None: what OPENAI_BASE_URL says, or OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that has the key."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Of one call."""


class _Named(BaseModel):
    name: Literal["grpo", "sft", "verl", "apo", "gepa", "random_search", "baseline"] = "grpo"


class Job(_Strict):
    """One job file."""

    agent: AgentSpec
    data: DataSpec
    policy: PolicySpec = PolicySpec()
    editor: EditorSpec = EditorSpec()
    resources: NamedResources = Field(default_factory=dict)
    """[resources]: what a search for prompts begins with, and what else its agent needs. A text is an f-string template."""
    algorithm: dict[str, Any] = Field(default_factory=dict[str, Any])
    """[algorithm]: `name` (one of OPTIONS_OF, or `file.py:name` of your own), and options: the algorithm's own keyword arguments."""
    folder: Path = Field(default=Path(), exclude=True)
    """Where the file lies; set by `load`."""

    @field_validator("algorithm")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if _is_own(options.get("name")):
            return options  # held against its arguments once it is loaded
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
        return OPTIONS_OF["baseline" if _is_own(name) else name]

    @property
    def options(self) -> dict[str, Any]:
        """The algorithm's options that the file gives."""
        return {name: value for name, value in self.algorithm.items() if name != "name"}

    @classmethod
    def load(cls, path: Path, *, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Job:
        """Read a job file; `overrides` ({table: {key: value}}) win over it.

        Raises SettingsError that names the file and each wrong or unknown key.
        """
        job, wrong = cls.read(path, overrides=overrides)
        if job is None or wrong:
            raise SettingsError(f"job file {path}: {'; '.join(wrong)}")
        return job

    @classmethod
    def read(cls, path: Path, *, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Job | None, list[str]]:
        """The job without its wrong and unknown keys, None where too little is left; and each of those keys, with what is wrong.

        Raises SettingsError where the file cannot be read, or is not TOML.
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
        """The tasks of one split. Raises SettingsError where there are none."""
        source: str | None = getattr(self.data, which)
        if source is None:
            raise SettingsError(f"[data] {which} is missing: {self.algorithm.get('name', 'grpo')} scores what it made on those tasks")
        if ":" in source:
            give = load_function(self.located(source))
            try:
                tasks = list(give(**self.data.options))
            except Exception as error:  # somebody else's code: whatever it raises becomes a message that names it
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
        """`file.py:name` with the file's path made absolute; `package.module:name` as it is."""
        where, _, name = reference.rpartition(":")
        return f"{self.folder / where}:{name}" if where.endswith(".py") else reference


def _merged(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(table)
    for key, value in values.items():
        result[key] = _merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result


def _drop(content: dict[str, Any], where: Sequence[int | str]) -> None:
    """Take the key at `where` out; where the path ends in something else than tables, the last key that is there."""
    table: Any = content
    for key in where[:-1]:
        if not isinstance(table.get(key), dict):
            break
        table = table[key]
    else:
        key = where[-1]
    table.pop(key, None)


def _is_own(name: object) -> bool:
    """Whether an algorithm's name is a reference to one of the user's own."""
    return isinstance(name, str) and ":" in name


def _words(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}"
    return f"{where}: {error['msg']}"
