"""Validate options where they are declared: by the annotations of a class's arguments, which hold the bounds and the reason for them.

An option is declared once, as `name: Annotated[int, Field(ge=1, description="why it has this bound")] = default`. `checked` validates the
arguments of a class by these annotations, with pydantic, and a job file's [algorithm] is validated by the same (`model_of`). Values are
not converted: "3" is no number, true is no integer, and numbers must be finite. The options that several algorithms share are below.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from agl_otel.errors import UsageError
from agl_otel.types.patterns import checked_pattern
from agl_otel.types.sampling import LEAST_TEMPERATURE
from agl_otel.types.scores import MAX_REWARD
from agl_otel.types.selections import NAMED

Kind = TypeVar("Kind", bound=type[Any])
STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
SHOWN_CHARACTERS: Final = 80  # of a wrong value in a message
MONTH_SECONDS: Final = 30 * 86400.0
MAX_ROLLOUTS: Final = 1_000_000  # of a step
_TYPES: Final[Mapping[str, str]] = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "list_type": "a list",
    "sequence_type": "a list",
    "sequence_str": "a list",
    "dict_type": "a table",
    "mapping_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
    "callable_type": "a function",
}
"""{type of pydantic's error: what the value must be}."""
_BOUNDS: Final[Mapping[str, str]] = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


# --- validation


@dataclass(frozen=True)
class ZeroOr:
    """Accepts 0, which is "off" where the option's text says so, and numbers of at least `least`; for AfterValidator, before Field."""

    least: float

    def __call__(self, given: float) -> float:
        """Return the number. Raises PydanticCustomError."""
        if given != 0 and given < self.least:
            raise PydanticCustomError("zero_or", "Input should be 0, or at least {least}", {"least": self.least})
        return given


def checked(kind: Kind) -> Kind:
    """Validate the arguments of a class, a dataclass or another, by their annotations; a decorator. `kind(…)` then raises UsageError.

    Arguments of `**more` are left to the class that takes them.
    """
    create = kind.__init__
    signature = inspect.signature(create)

    @functools.wraps(create)
    def validated(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = dict(list(signature.bind(self, *args, **kwargs).arguments.items())[1:])
        except TypeError:
            given = {}  # the call below says what is wrong with it
        model = _model(create)
        check(model, {name: value for name, value in given.items() if name in model.model_fields})
        create(self, *args, **kwargs)

    kind.__init__ = validated
    return kind


def check(model: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Raise UsageError, which names each wrong option, its bound and the remedy. Options that are missing are not wrong."""
    try:
        model.model_validate(dict(given))
    except ValidationError as error:
        if wrong := problems([each for each in error.errors() if each["type"] != "missing"], model):
            raise UsageError("; ".join(wrong)) from None


@functools.cache
def _model(create: Callable[..., Any]) -> type[BaseModel]:
    return create_model("Arguments", __config__=STRICT, **arguments_of(create))


def arguments_of(create: Callable[..., Any], *, hidden: Collection[str] = ()) -> dict[str, Any]:
    """Return {name: (annotation, default)} of the named arguments of an `__init__`, without `hidden` ones."""
    hints = get_type_hints(create, include_extras=True)
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(create).parameters.values())[1:]:
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in hidden:
            required = parameter.default is inspect.Parameter.empty
            found[parameter.name] = (hints[parameter.name], ... if required else parameter.default)
    return found


# --- messages


def problems(errors: Collection[Any], model: type[BaseModel], table: str = "", page: str = "") -> list[str]:
    """Return one line for each wrong option: its name, value, bound, the reason, and the remedy.

    `table` is written before each name; `page`, of the docs, has all names.
    """
    before, deepest = f"[{table}] " if table else "", dict[str, Any]()
    for error in errors:
        own = str(error["loc"][0]) if error["loc"] else error["msg"]
        if len(error["loc"]) > len(deepest.get(own, {"loc": ()})["loc"]) or own not in deepest:
            deepest[own] = error  # of several forms of an option that with which the value fits best
    return [before + _line(error, str((*error["loc"], "")[0]), model.model_fields, page) for error in deepest.values()]


def _line(error: Mapping[str, Any], name: str, fields: Mapping[str, FieldInfo], page: str) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key {name}: {nearest(name, fields, page)}"
    if not name:
        return _own_words(error)
    field = fields.get(name)
    rule, why = rule_of(field) if field is not None else ("", "")
    because = f", because {why}" if why else ""
    if error["type"] == "missing":
        return f"{name} is missing: it must be given{because}"
    value = shown(error["input"])
    if error["type"] in ("value_error", "assertion_error"):
        words = _own_words(error)
        return f"{name} = {value}: {words}" + ("" if ";" in words else f"; {_remedy(field)}")  # some name a remedy of their own
    must = _must(error, rule)
    return f"{name} = {value}: it must be {must}{because}; {_remedy(field)}"


def _must(error: Mapping[str, Any], rule: str) -> str:
    if error["type"] == "literal_error":
        expected: str = error["ctx"]["expected"]
        close = difflib.get_close_matches(str(error["input"]), re.findall(r"'([^']*)'", expected), 1, cutoff=0.7)
        return expected + (f" (did you mean {close[0]}?)" if close else "")
    kind = _TYPES.get(error["type"], "")
    if error["type"] in _TYPES or not rule:
        kind = kind or str(error["msg"]).removeprefix("Input should be ").lower()
    return ", ".join(part for part in (kind, rule) if part)


def _own_words(error: Mapping[str, Any]) -> str:
    """The words of a check of our own."""
    return str(error.get("ctx", {}).get("error") or error["msg"])


def _remedy(field: FieldInfo | None) -> str:
    if field is None or field.is_required():
        return "give such a value"
    default = field.get_default()
    short = isinstance(default, str | int | float)
    return "give such a value, or leave it out" + (f" for {shown(default)}" if short else "")


def nearest(name: str, names: Collection[str], page: str) -> str:
    """Return which of the names was probably meant, if one is close, and the page of the docs that has all of them."""
    close = difflib.get_close_matches(name, names, 1)
    return (f"did you mean {close[0]}?" if close else "leave it out") + f" ({page} has all keys)"


def rule_of(part: Any) -> tuple[str, str]:
    """Return the bounds in an annotation or a field, in words, and the reason for them; "" where there is none."""
    found, why = _rules(part)
    return " and ".join(dict.fromkeys(found)), why


def _rules(part: Any) -> tuple[list[str], str]:
    if isinstance(part, FieldInfo):
        within, why = [*part.metadata, part.annotation], part.description or ""
    else:
        within, why = get_args(part), ""
    found = [f"{words} {number(value)}" for name, words in _BOUNDS.items() if (value := getattr(part, name, None)) is not None]
    found += [f"0, or at least {number(zero_or.least)}"] if isinstance(zero_or := getattr(part, "func", None), ZeroOr) else []
    found += ["non-empty"] if getattr(part, "min_length", None) else []
    for each in within:
        more, reason = _rules(each)
        found, why = [*found, *more], why or reason
    return found, why


def number(value: Any) -> str:
    """Return a number as a person would write it."""
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value.is_integer() and abs(value) < 1e8 else f"{value:g}"


def shown(value: Any) -> str:
    """Return a value as it would stand in a job file, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


# --- options that several algorithms share


def _credit(rule: str) -> str:
    where, _, name = rule.rpartition(":")
    if rule not in CREDITS and not (where and name):
        raise ValueError(f"it must be one of {', '.join(CREDITS)}, or a function, as file.py:name or package.module:name")
    return rule


def check_rollouts(prompts_per_step: int, group_size: int) -> None:
    """Raise UsageError where a step has more than MAX_ROLLOUTS rollouts."""
    if (rollouts := prompts_per_step * group_size) > MAX_ROLLOUTS:
        raise UsageError(
            f"prompts_per_step = {prompts_per_step} and group_size = {group_size} make {rollouts} rollouts a step: they must be at most "
            f"{MAX_ROLLOUTS}, because a step waits for all of them, and holds their tokens in memory; give smaller ones"
        )


def has_torch() -> bool:
    """Return whether torch is installed. A job is checked without it, too, except for what only torch and transformers know."""
    return find_spec("torch") is not None


_NO_DEVICE: Final = 'it is no device of torch, such as "cpu", "cuda" or "cuda:1"'


def _device(given: str) -> str:
    if not re.fullmatch(r"[a-z]+(:\d+)?", given):
        raise ValueError(_NO_DEVICE)
    if not has_torch():
        return given
    import torch

    try:
        device = torch.device(given)
    except RuntimeError:
        raise ValueError(_NO_DEVICE) from None
    if device.type == "cpu":
        if device.index:
            raise ValueError('a machine has one device of type cpu; give "cpu"')
        return given
    there = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if there is not None and there.type == device.type else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"this machine has {count or 'no'} device{'s' if count > 1 else ''} of type {device.type}; run the job on one that has it, or "
            'leave it out for "cpu"'
        )
    return given


_RATIO_BOUNDS: Final = (
    "rounding alone makes the ratio differ from 1 by about 1e-6, and for a token that the trainer would never sample it differs by 1, so "
    "that a greater bound stops nothing"
)
AgentMatch = Annotated[str, Field(min_length=1, description="an empty pattern would match every agent"), AfterValidator(checked_pattern)]
Clip = Annotated[
    float,
    Field(ge=1e-5, lt=1, description="the lower end of the ratio, 1 - clip, is more than 0, and rounding alone moves ratios by about 1e-6"),
]
CREDITS: Final = ("final", "to_go", "states")
Credit = Annotated[str, AfterValidator(_credit)]
Device = Annotated[str, AfterValidator(_device)]
Discount = Annotated[float, Field(ge=0, le=1, description="rewards that are further off count less, or as much")]
RewardSources = Annotated[
    Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=1, description="a run without a trusted source has no rewards")
]
SelectionName = Annotated[str, Field(pattern=NAMED, description="it names a selection, NAME or NAME@VERSION")]
RewardWaitSeconds = Annotated[float, Field(ge=0, le=2_592_000, description="it is counted from the end of a rollout")]
FillReward = Annotated[
    float,
    Field(ge=-MAX_REWARD, le=MAX_REWARD, description="rewards beyond these are refused, because beside them others are equal in float32"),
]
KlCoefficient = Annotated[
    float,
    AfterValidator(ZeroOr(1e-6)),
    Field(le=1000, description="a negative coefficient rewards drift, and one near 0 costs a second model without effect"),
]
LearningRate = Annotated[
    float,
    AfterValidator(ZeroOr(1e-12)),  # AdamW's step is about as great as the rate, and a float32 weight of 1e-4 has steps of 7e-12
    Field(
        le=1, description="the optimizer climbs away from the reward below 0, changes no float32 weight below 1e-12, and diverges above 1"
    ),
]
MaxGradNorm = Annotated[
    float,
    Field(
        ge=1e-3,
        le=1e9,
        description="gradients are scaled down to this norm: 0 trains nothing, a tiny one makes those of single weights less than AdamW's "
        "epsilon (1e-8), and 1e9 never clips",
    ),
]
MaxTokens = Annotated[int, Field(ge=1, le=1_000_000, description="a reply has at least one token, and fits in the model's context")]
MaxSteps = Annotated[int, Field(ge=1, le=10_000_000, description="a run does at least one step")]
ProbeTolerance = Annotated[float, Field(ge=1e-5, lt=1, description=_RATIO_BOUNDS)]
PromptsPerStep = Annotated[int, Field(ge=1, le=100_000, description="a step trains on the rollouts of at least one task")]
RatioErrorLimit = Annotated[float, Field(ge=1e-5, lt=1, description=_RATIO_BOUNDS)]
MOST_TEMPERATURE: Final = 5
"""Above it replies are noise."""
SamplingTemperature = Annotated[
    float,
    Field(
        ge=LEAST_TEMPERATURE,
        le=MOST_TEMPERATURE,
        description="replies at 0 (greedy) are all equal, so that groups teach nothing, vLLM has "
        f"{LEAST_TEMPERATURE:g} for less, and above 5 they are noise",
    ),
]
"""Of a policy gradient."""
Seed = Annotated[int, Field(ge=0, lt=1 << 32, description="model servers and numpy take seeds of 32 bits")]
StateWeight = Annotated[float, Field(ge=0, le=1000, description="0 leaves out the comparison by state")]
StepTimeout = Annotated[
    float, Field(ge=1, le=MONTH_SECONDS, description="a step waits for its rollouts, which take seconds, and not for ever")
]
TargetScore = Annotated[
    float, Field(ge=-MAX_REWARD, le=MAX_REWARD, description="it is compared with the mean of rewards, and those beyond these are refused")
]
Threads = Annotated[int, Field(ge=1, le=256, description="torch computes in at least one thread, and more than the cores slow it down")]
Temperature = Annotated[
    float,
    AfterValidator(ZeroOr(LEAST_TEMPERATURE)),
    Field(
        le=MOST_TEMPERATURE,
        description=f"logits are divided by it: 0 is greedy, vLLM has {LEAST_TEMPERATURE:g} for less, and above 5 the replies are noise",
    ),
]
ValEvery = Annotated[int, Field(ge=0, le=1_000_000, description="it counts steps")]
