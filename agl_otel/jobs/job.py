"""A job file: the agent, the tasks, the algorithm, and its initial resources. `agl-otel train JOB.toml` runs it.

Other modules run it, chosen by the algorithm's name: grpo.py, sft.py and verl.py train weights (torch), prompts.py searches for prompts,
custom.py runs the baseline and custom algorithms.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from agl_otel.algorithms.options import MONTH_SECONDS, STRICT, Seed, nearest, problems, shown
from agl_otel.algorithms.utils import retry_lost_runner
from agl_otel.errors import SettingsError, UsageError
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
    """Program and arguments, where `{field}` stands for a field of the task; each rollout has its own process."""
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
        if (rollouts := self.runners * self.concurrency) > MAX_CONCURRENT:
            raise ValueError(
                f"runners = {self.runners} and concurrency = {self.concurrency} make {rollouts} rollouts at a time: they must be at most "
                f"{MAX_CONCURRENT}, because they share this machine; give smaller ones"
            )
        return self


class DataSpec(_Strict):
    """[data]: tasks, as a .jsonl file or as `file.py:name`, a function that takes `options` and returns a list."""

    train: Annotated[str, Field(min_length=1, description="it names the tasks, as a .jsonl file or as file.py:name")]
    val: Annotated[str | None, Field(min_length=1, description="it names the tasks, as a .jsonl file or as file.py:name")] = None
    """Validation tasks, on which all algorithms but the baseline and custom ones score their results."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The functions' keyword arguments."""

    @model_validator(mode="after")
    def _options_of_functions(self) -> DataSpec:
        if self.options and not any(source and ":" in source for source in (self.train, self.val)):
            raise ValueError(f"options = {shown(self.options)} has no effect on files: name functions (file.py:name), or leave it out")
        return self


SET_BY_RUN: Final = (
    *("--model", "--host", "--port", "--served-model-name", "--seed", "--logprobs-mode", "--generation-config"),
    *("--gpu-memory-utilization", "--enable-sleep-mode", "--enable-lora", "--max-lora-rank", "--max-loras"),
)
"""Arguments of `vllm serve` that a run sets itself."""


NOT_THE_POLICY: Final = {
    **dict.fromkeys(("--load-format", "--model-loader-extra-config"), "the server must load the weights that the run writes"),
    **dict.fromkeys(("--quantization", "-q"), "quantised weights sample other tokens than those that are trained"),
    **dict.fromkeys(
        ("--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--skip-tokenizer-init"), "the trainer has the model's own tokenizer"
    ),
    **dict.fromkeys(
        ("--hf-overrides", "--hf-config-path", "--revision", "--code-revision", "--rope-scaling", "--rope-theta"),
        "the trainer reads the model's own config.json",
    ),
    "--disable-sliding-window": "the trainer's attention has the window of the model's own config.json",
    **dict.fromkeys(("--runner", "--task", "--convert"), "the policy generates text"),
    **dict.fromkeys(
        ("--override-generation-config", "--logits-processors", "--logits-processor-pattern"),
        "the trainer assumes samples of the model's own distribution",
    ),
    "--max-logprobs": "the run asks for the log-prob of each sampled token",
    "--lora-modules": "the run loads its own adapters",
    **dict.fromkeys(("--help", "-h", "--version", "-v"), "vLLM would print and end"),
    **dict.fromkeys(("--api-key", "--config"), "the run sets the server's arguments and its access, and knows nothing of those in there"),
    **dict.fromkeys(
        ("--uds", "--root-path", "--ssl-keyfile", "--ssl-certfile", "--headless"), "the run calls the server at an address of its own"
    ),
}
"""{argument of `vllm serve`: why it is refused: the server would sample from another model than is trained, or not be reached}."""
_KV_OF_MODEL: Final = frozenset({"auto", "bfloat16", "float16", "float32", "half", "float"})
SAMPLES_OTHERWISE: Final[Mapping[str, tuple[str, Collection[str]]]] = {
    "--kv-cache-dtype": ("keys and values are rounded to fewer bits than the trainer's", _KV_OF_MODEL),
    "--calculate-kv-scales": ("keys and values are scaled, which the trainer does not do", ()),
    **dict.fromkeys(("--speculative-config", "-sc"), ("not every release gives the log-probs of tokens that a draft proposed", ())),
    "--model-impl": ("vLLM then computes with another implementation of the model", ("auto", "vllm")),
    "--dtype": ("its range is smaller than that of the trainer's bfloat16 or float32", ("auto", "bfloat16", "float", "float32")),
}
"""{argument of `vllm serve`: why the sampler's probabilities may differ from the trainer's, and the values with which they do not}."""
_COUNTS: Final = ("--max-num-seqs", "--max-num-batched-tokens", "--block-size")
_SPLITS: Final = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_DTYPES_OF_VLLM: Final = ("auto", "half", "float16", "bfloat16", "float", "float32")
_CONTEXT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""As vLLM reads --max-model-len."""
_KEYS_OF_POLICY: Final = "model, seed, gpu_memory_utilization, sleep and adapters"


class PolicySpec(_Strict):
    """[policy]: the model to train."""

    model: Annotated[str, Field(min_length=1, description="it is a folder, a model of the hub, or tiny")] = "tiny"
    """A folder in transformers' format, or a model of the Hugging Face hub as owner/name or owner/name@revision; a folder that exists is
    taken first. `tiny` is created on the spot."""
    seed: Seed = 0
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
    """None: SHARED_UTILIZATION beside a trainer on the same GPU, else vLLM's default (0.9)."""
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
        if self.vllm_options and not self.vllm_options[0].startswith("-"):
            raise ValueError(f'vllm_options = {shown(self.vllm_options)}: the first must begin with "--", as in ["--dtype", "float32"]')
        if any(not option.strip() for option in self.vllm_options):
            raise ValueError(f"vllm_options = {shown(self.vllm_options)}: an argument is empty; leave it out")
        for option in self.vllm_options:
            name = option.partition("=")[0].replace("_", "-")  # vLLM takes both
            if name in SET_BY_RUN or name.replace("--no-", "--", 1) in SET_BY_RUN:
                raise ValueError(
                    f"vllm_options has {name}, which the run sets itself: leave it out ({_KEYS_OF_POLICY} are keys of [policy])"
                )
            whole = name.partition(".")[0]  # --hf-overrides.rope_theta
            if why := NOT_THE_POLICY.get(whole) or NOT_THE_POLICY.get(whole.replace("--no-", "--", 1)):
                raise ValueError(f"vllm_options has {whole}, but {why}: leave it out")
        self._check_values_of_vllm()
        return self

    def _check_values_of_vllm(self) -> None:
        context = self._vllm_value("--max-model-len")
        if context is not None and context not in ("auto", "-1") and self.max_model_len() is None:
            raise ValueError(
                f"vllm_options has --max-model-len {context}: it must be a number of tokens, at least 1, such as 4096 or 4k; "
                "give one, or leave it out for the model's own"
            )
        dtype = self._vllm_value("--dtype")
        if dtype is not None and dtype not in _DTYPES_OF_VLLM:
            raise ValueError(f"vllm_options has --dtype {dtype}: it must be one of {', '.join(_DTYPES_OF_VLLM)}; give one, or leave it out")
        for name in _COUNTS:
            if (value := self._vllm_value(name)) is not None and not (value.isdecimal() and int(value) > 0):
                raise ValueError(
                    f"vllm_options has {name} {value}: it must be at least 1, because it counts calls or tokens; give such a value, "
                    "or leave it out"
                )
        split = {name: self._vllm_value(name, short) for short, name in _SPLITS.items()}
        given, gpus = {name: value for name, value in split.items() if value is not None}, len(self.devices or [0])
        sizes = [int(value) if value.isdecimal() else 0 for value in given.values()]
        if given and math.prod(sizes) * (1 if "--tensor-parallel-size" in given else gpus) != gpus:
            listed = " ".join(f"{name} {value}" for name, value in given.items())
            raise ValueError(
                f"vllm_options has {listed}: the product must be {gpus}, the number of GPUs in devices (without --tensor-parallel-size the "
                "run gives it that value); name as many devices, or leave it out"
            )

    def _vllm_value(self, *names: str) -> str | None:
        """Return the last value of an argument of `vllm serve`, "" where it is missing; None where the argument is not given."""
        options = [option.partition("=") for option in self.vllm_options]
        words = [word for name, equals, value in options for word in ((name.replace("_", "-"), value) if equals else (name,))]
        found = [value for name, value in pairwise([*words, ""]) if name.replace("_", "-") in names]
        return found[-1] if found else None

    def samples_otherwise(self) -> list[str]:
        """Return a warning for each of `vllm_options` by which the sampler's probabilities may differ from the trainer's."""
        given = {
            name: (value, why) for name, (why, same) in SAMPLES_OTHERWISE.items() if (value := self._vllm_value(name)) not in (None, *same)
        }
        return [
            f"[policy] vllm_options has {name}{f' {value}' if value and not value.startswith('-') else ''}: {why}; the run ends at the "
            "first step whose worst ratios differ by more than ratio_error_limit of [algorithm]"
            for name, (value, why) in given.items()
        ]

    def max_model_len(self) -> int | None:
        """Return the context that `vllm_options` set; None where they set none, or vLLM computes it."""
        match = _CONTEXT.fullmatch(self._vllm_value("--max-model-len") or "")
        return (int(float(match[1]) * _UNITS[match[2]]) or None) if match else None


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
    _folder: Path = PrivateAttr(default=Path())
    _wrong: list[str] = PrivateAttr(default_factory=list[str])
    _tasks: dict[str, list[Any]] = PrivateAttr(default_factory=dict[str, list[Any]])

    @field_validator("algorithm")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if _is_custom(options.get("name")):
            return options  # checked against its arguments when it is loaded
        name = _Named.model_validate(options).name
        known = _model_of_options(name)
        return {"name": name, **known.model_validate(options).model_dump(exclude={"name"}, exclude_unset=True)}

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


def _model_of_options(name: str) -> type[BaseModel]:
    return import_module(OPTIONS_OF[name]).options_model(name)


def _problems(errors: Sequence[Any], content: Mapping[str, Any]) -> list[str]:
    """Return one line for each wrong key of a job file: its table, its value, what it must be, why, and the remedy."""
    lines: list[str] = []
    for table in dict.fromkeys(str(error["loc"][0]) for error in errors):
        of_table = [error for error in errors if error["loc"][0] == table]
        inside = [{**error, "loc": error["loc"][1:]} for error in of_table]
        if of_table[0]["type"] == "extra_forbidden" and len(of_table[0]["loc"]) == 1:
            lines.append(f"unknown table [{table}]: {nearest(table, _TABLES)}")
        elif of_table[0]["type"] == "missing" and len(of_table[0]["loc"]) == 1:
            lines.append(f"the table [{table}] is missing: it must be given")
        elif not isinstance(content.get(table, {}), dict):
            lines.append(f"{table} = {shown(content[table])}: it must be a table; write [{table}] above its keys")
        elif table == "resources":
            lines += [f"[resources] {'.'.join(map(str, each['loc']))}: {_of_resource(each)}" for each in inside]
        else:
            lines += problems(inside, _model_of_table(table, content), table)
    return lines


_TABLES: Final = ("agent", "data", "policy", "editor", "resources", "algorithm")


def _model_of_table(table: str, content: Mapping[str, Any]) -> type[BaseModel]:
    if table != "algorithm":
        return {"agent": AgentSpec, "data": DataSpec, "policy": PolicySpec, "editor": EditorSpec}[table]
    name = content.get(table, {}).get("name", "grpo")
    return _model_of_options(name) if isinstance(name, str) and name in OPTIONS_OF else _Named


def _of_resource(error: Mapping[str, Any]) -> str:
    """What is wrong with a resource, without its value, which may hold a key."""
    match error["type"]:
        case "missing":
            return "it is missing, and must be given"
        case "extra_forbidden":
            return "the resource has no such key; leave it out"
        case _:
            return f'{error["msg"]}; write a text, or a table such as {{ resource_type = "llm", endpoint = "…", model = "…" }}'
