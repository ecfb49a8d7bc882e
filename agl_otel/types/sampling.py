"""Sampling parameters of model servers, and the contract of a call: from which distribution its tokens were drawn.

A server fills in what a request leaves out from the model's generation_config.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, cast

from pydantic_core import to_json

from agl_otel.text import without_secrets

EXTRA_HEADERS: Final = "extra_headers"
EXTRA_BODY: Final = "extra_body"
"""Arguments of OpenAI's client beside the parameters: extra headers, and extra fields of the body."""
NEUTRAL: Final[Mapping[str, float]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""{parameter that a training resource sends with every call: the value that leaves the distribution unchanged} for vLLM, SGLang and this
package's server; top_k -1 is all tokens. A parameter that only some servers take goes into SHAPES alone."""
_PARAMETERS: Final[Mapping[str, Sequence[Any]]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    **{name: (value,) for name, value in NEUTRAL.items() if name not in ("top_p", "top_k")},
    "typical_p": (1.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
}
SHAPES: Final[Mapping[str, Sequence[Any]]] = {
    **_PARAMETERS,
    "response_format": ("text",),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    "strict_tools": (False,),
    **dict.fromkeys(("structured_outputs", "regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}
"""{field beside the temperature that makes some tokens more or less likely than the model has them: its values without effect}.

`strict_tools`: whether a tool's arguments are held to its schema (`strict`), with tool_choice auto as well. OpenAI does so always, vLLM
from 0.24 on unless VLLM_ENFORCE_STRICT_TOOL_CALLING is 0, SGLang with parsers that have structural tags.
Any other field of a request that is neither among LIMITS nor HARMLESS may do the same, whatever its value.
"""
FILLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that a model server may fill in from generation_config.json if a request leaves them out."""
LIMITS: Final = ("max_tokens", "stop", "n")
"""Fields that end or repeat a reply, and change no token's probability."""
_FORMATS: Final = frozenset({"text", "output_config", "output_format"})
"""HARMLESS but for a format in them."""
HARMLESS: Final = frozenset(
    {
        # the prompt, and what a server makes it of
        *(
            "model",
            "messages",
            "system",
            "prompt",
            "suffix",
            "input",
            "instructions",
            "prompt_token_ids",
            "input_ids",
            "kv_transfer_params",
        ),
        *("tools", "functions", "parallel_tool_calls", "max_tool_calls", "mcp_servers", "container", "documents", "reasoning", "thinking"),
        *("reasoning_effort", "enable_thinking", "verbosity", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "mm_processor_kwargs", "media_io_kwargs", "context_management", "compaction"),
        *("previous_response_id", "previous_response", "previous_input_messages", "conversation", "truncation", "truncation_side"),
        *("truncate_prompt_tokens", "echo", *_FORMATS),
        # where a reply ends
        *("stop_token_ids", "stop_regex", "no_stop_trim", "include_stop_str_in_output", "ignore_eos", "repetition_detection"),
        # what an answer contains, and how it is sent
        *("stream", "stream_options", "stream_interval", "stream_reasoning", "background", "include", "include_reasoning"),
        *("separate_reasoning", "skip_special_tokens", "spaces_between_special_tokens", "enable_response_messages"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"),
        *("return_prompt_token_ids", "return_token_offsets", "return_prompt_text", "return_meta_info", "return_hidden_states"),
        *("return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start", "return_cached_tokens_details"),
        *("return_weight_versions", "return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_spec_tokens_details"),
        # whose call it is, and which machine computes it when
        *(
            "user",
            "user_profile_id",
            "metadata",
            "client_metadata",
            "safety_identifier",
            "request_id",
            "rid",
            "session_id",
            "custom_labels",
        ),
        *("store", "service_tier", "priority", "timeout", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("cache_control", "cache_salt", "extra_key", "inference_geo", "diagnostics", "bootstrap_host", "bootstrap_port"),
        *("bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", EXTRA_HEADERS),
        # how it is computed: the distribution is the same
        *("seed", "sampling_seed", "prediction", "ngram_corpus_id", "ec_transfer_params"),
        "length_penalty",  # of beam search alone
    }
)
"""Fields that leave the distribution of the next token, given the tokens before it, as it is: by the source of vLLM and SGLang, and the
protocols' reference. Servers of today read of `thinking` whether it is on, and ignore its budget."""
HONOURS_ALL: Final = "*"
LENIENT: Final = f"{HONOURS_ALL}, -strict_tools"
"""The header `agl-sampling` of a server that heeds all fields, and takes strict tools for others."""
LogProbs = Literal["", "processed", "raw"]
"""Of which distribution a model server's log-probs are: `processed`, the one that it sampled from; `raw`, the softmax of the logits, as
vLLM's are by default; empty: unknown."""
POLICY: Final = "sampling_policy"
"""In a rollout's metadata: `enforce`, where its resource's parameters win over the agent's but for a temperature of 0; or `enforce_all`."""
ENFORCED: Final = ("temperature", *_PARAMETERS)
"""Fields that a policy enforces. A grammar, a tool choice and LIMITS stay the agent's: its program relies on them."""
LEAST_TEMPERATURE: Final = 0.01
"""Below it replies are greedy: at 0 by definition, and vLLM samples at 0.01 for anything less."""
_ALIASES: Final = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stop_sequences": "stop"}
_LONGEST: Final = 100  # characters of a recorded value
_BEYOND: Final = 1 << 63  # no parameter is as large; an integer of JSON may be too large for a float
_UNREADABLE: Final = "unreadable"
_KNOWN: Final = frozenset({"temperature", *SHAPES, *LIMITS})
_NAMEABLE: Final = _KNOWN | HARMLESS | {HONOURS_ALL}
"""What a model server may say that it heeds."""
_LESS: Final = frozenset(f"-{name}" for name in _KNOWN)
"""What it may say that it does not heed."""
_MOST_UNKNOWN: Final = 8  # recorded fields that are not known; one suffices
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_UNKNOWN: Final = "unknown_field"
_dense: Final = json.JSONEncoder(separators=(",", ":")).encode
_SCALAR: Final = frozenset({str, int, float, bool})
_MOST_SCALARS: Final = 32  # fields of a request whose contract is remembered
_Scalars = tuple[tuple[str, type, Any], ...]
"""(name, class, value) of fields: 1, 1.0 and True are equal, and not the same."""
_NOT_OPENAIS: Final = frozenset({"top_k", "min_p", "repetition_penalty"})


def all_parameters(temperature: float, max_tokens: int, **others: float) -> dict[str, Any]:
    """Return every sampling parameter, so that no server's default applies; `others` override the neutral ones."""
    return {"temperature": float(temperature), "max_tokens": int(max_tokens), **NEUTRAL, **others}


def for_agents(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters to show an agent behind the proxy, which adds the rest itself.

    Left out are neutral ones for which OpenAI's client has no argument, headers, and anything that holds a secret.
    """
    return {
        name: value
        for name, value in sampling.items()
        if (name not in _NOT_OPENAIS or value != NEUTRAL[name])
        and name != EXTRA_HEADERS
        and without_secrets({name: value}) == {name: value}
    }


@dataclass(frozen=True)
class Contract:
    """From which distribution a call's tokens were drawn: what was asked for, and by whom."""

    agent: Mapping[str, Any]
    """What the agent's request sets, by OpenAI's names."""
    resource: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the LLM resource adds where the agent sets nothing."""
    server: Sequence[str] = ()
    """Fields that nobody sent, and that the model server may have filled in: unknown."""
    overridden: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the agent had set, and a policy replaced."""
    logprobs: LogProbs = ""

    @classmethod
    def of(
        cls,
        asked: Mapping[str, Any],
        told: Mapping[str, Any],
        honoured: str | None = None,
        overridden: Mapping[str, Any] | None = None,
        logprobs: LogProbs = "",
    ) -> Contract:
        """Return the contract of a request.

        Args:
            asked: the agent's request, in any protocol.
            told: the resource's parameters that are sent with it.
            honoured: the answer's header `agl-sampling` (`heeded`): the server fills in no field by itself, and its log-probs are
                processed; None: it says nothing.
            overridden: fields of the agent's that were taken out of `asked`.
            logprobs: what a probe of the server found.
        """
        own, others, taken = _scalars(asked), _scalars(told), _scalars(overridden or {})
        if own is None or others is None or taken is None:
            return cls._of(asked, told, honoured, overridden or {}, logprobs)
        return _shared(own, others, honoured, taken, logprobs)

    @classmethod
    def _of(
        cls, asked: Mapping[str, Any], told: Mapping[str, Any], honoured: str | None, overridden: Mapping[str, Any], logprobs: LogProbs
    ) -> Contract:
        agent = _by_openais_names(asked)
        resource = {name: value for name, value in _by_openais_names(told).items() if name not in agent}
        replaced = _by_openais_names(overridden)
        said = heeded(honoured)
        if said is None:
            return cls(agent, resource, tuple(name for name in FILLED if name not in agent and name not in resource), replaced, logprobs)
        agent, resource = ({name: value for name, value in part.items() if _is_heeded(name, said)} for part in (agent, resource))
        return cls(agent, resource, (), replaced, "processed")

    @classmethod
    def loads(cls, text: str) -> Contract | None:
        """Read what `dumps` has written; None if it is something else. Anybody may have written it: its values are bounded again."""
        try:
            held = json.loads(text)
            parts = (_by_openais_names(held.get(part, {})) for part in ("agent", "resource", "overridden"))
            agent, resource, overridden = parts
            server = tuple(name for name in held.get("server", ()) if isinstance(name, str))
            logprobs = held.get("logprobs")
            return cls(agent, resource, server, overridden, logprobs if logprobs in ("processed", "raw") else "")
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def dumps(self) -> str:
        """Write it as JSON: {"agent": {field: value}, "resource": …, "server": [field], "overridden": {…}, "logprobs": …}, without
        empty parts."""
        return self._text

    @cached_property
    def _text(self) -> str:
        held = {each.name: part for each in fields(self) if (part := getattr(self, each.name))}
        try:
            return to_json(held).decode()
        except ValueError:  # unpaired surrogates
            return _dense(held)

    @property
    def fields(self) -> Mapping[str, Any]:
        """Every field that was sent, with its value."""
        return {**self.resource, **self.agent}

    @property
    def temperature(self) -> float:
        """The temperature; NaN if it is unknown. Nobody's is 1."""
        value = self.fields.get("temperature", math.nan if "temperature" in self.server else 1.0)
        return float(value) if isinstance(value, int | float) else math.nan

    @cached_property
    def is_plain(self) -> bool:
        """Whether the tokens were drawn from the softmax of the logits, so that raw and processed log-probs are one."""
        return self.temperature == 1.0 and not self._unlike({})

    def differing(self, wanted: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the fields, but for the temperature, that make the distribution another than that of the `wanted` parameters; unknown
        ones do. `logprobs` is among them if the log-probs are not known to be those of the distribution."""
        found = self._unlike(wanted)
        return found if self.logprobs == "processed" or self.is_plain else (*found, "logprobs")

    def _unlike(self, wanted: Mapping[str, Any]) -> tuple[str, ...]:
        sent, found = self.fields, list[str]()
        for name, neutral in SHAPES.items():
            value, asked = sent.get(name), wanted.get(name)
            if value is None and name not in self.server:
                value = neutral[0] if neutral else None
            if asked is None:
                asked = neutral[0] if neutral else None
            if value != asked and not (value in neutral and asked in neutral):
                found.append(name)
        return (*found, *(name for name, value in sent.items() if name not in _KNOWN and value != wanted.get(name)))

    def own(self) -> Mapping[str, Any]:
        """Return what the agent itself set of the distribution: its temperature, and the fields that have an effect, or may have one."""
        return {name: value for name, value in self.agent.items() if name not in LIMITS and value not in SHAPES.get(name, ())}

    def notes(self, told: Mapping[str, Any]) -> list[str]:
        """Return in words what is unusual about the sampling, against the parameters that a resource has for agents (`told`)."""
        own = in_words({name: value for name, value in self.own().items() if value != told.get(name)})
        replaced = in_words(self.overridden)
        return [
            *(["own " + ", ".join(own)] if own else []),
            *(["replaced " + ", ".join(replaced)] if replaced else []),
            *(["raw log-probs"] if self.logprobs == "raw" else []),
        ]


@lru_cache(maxsize=256)
def heeded(header: str | None) -> frozenset[str] | None:
    """Return the fields that a model server heeds by its header `agl-sampling`, several of which are joined by commas; HONOURS_ALL: all
    but those with a minus before them.

    None, as without a header, if anything in it is no name of a field: a misspelt one would hide what the agent set.
    """
    names = frozenset(name.strip() for name in header.split(",")) if header is not None else frozenset({""})
    return names if names <= (_NAMEABLE | _LESS if HONOURS_ALL in names else _NAMEABLE) else None


def _is_heeded(name: str, said: frozenset[str]) -> bool:
    return name in LIMITS or (f"-{name}" not in said if HONOURS_ALL in said else name in said)


def lenient(tools: Any) -> list[Any] | None:
    """Return a request's tools without `strict`, so that no server constrains their arguments; None if none is strict."""
    if not isinstance(tools, list):
        return None
    given = cast("list[Any]", tools)
    found = [_lenient(tool) for tool in given]
    return found if found != given else None


def in_words(fields: Mapping[str, Any]) -> list[str]:
    """Write each field with its value, if that is a number."""
    return [f"{name} {value:g}" if isinstance(value, float | int) and value is not True else name for name, value in fields.items()]


def overridden(policy: str | None, asked: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an agent's request that its resource's parameters (`told`) replace by the rollout's policy.

    None are, if the resource sets no temperature (it is no trained one), or the agent asks for greedy replies, as judges and routers do.
    """
    if policy not in ("enforce", "enforce_all") or "temperature" not in told:
        return {}
    own = {name: asked[name] for name in ENFORCED if asked.get(name) is not None and asked[name] != told.get(name)}
    temperature = _short("temperature", own.get("temperature", 1.0))
    greedy = isinstance(temperature, int | float) and temperature < LEAST_TEMPERATURE
    return own if policy == "enforce_all" or not greedy else {}


def _scalars(request: Mapping[str, Any]) -> _Scalars | None:
    """Return the fields of a request that belong to its contract; None unless they are few, and all numbers and short texts."""
    found: list[tuple[str, type, Any]] = []
    for name, value in request.items():
        if value is None or (name in HARMLESS and name not in _FORMATS):
            continue
        if value.__class__ not in _SCALAR or (value.__class__ is str and len(value) > _LONGEST) or len(name) > _LONGEST:
            return None
        found.append((name, value.__class__, value))
    return tuple(found) if len(found) <= _MOST_SCALARS and not any(map(_is_strict, _tools_of(request))) else None


@lru_cache(maxsize=1024)
def _shared(asked: _Scalars, told: _Scalars, honoured: str | None, overridden: _Scalars, logprobs: LogProbs) -> Contract:
    """Return the contract of all requests with these fields: it is made once, as calls of one agent are alike."""
    parts = [{name: value for name, _, value in fields} for fields in (asked, told, overridden)]
    return Contract._of(parts[0], parts[1], honoured, parts[2], logprobs)  # pyright: ignore[reportPrivateUsage]  # of this module


def _by_openais_names(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that belong to its contract, by the names of OpenAI's chat/completions, long values shortened."""
    found: dict[str, Any] = {}
    unknown = 0
    for name, value in request.items():
        if value is None or name in HARMLESS:
            continue
        name = _ALIASES.get(name, name)
        if name not in _KNOWN:
            unknown += 1
            if unknown > _MOST_UNKNOWN:
                continue
            name = name if _NAME.fullmatch(name) else _UNKNOWN
        found[name] = _short(name, value)
    formats = (
        request.get("response_format"),
        request.get("output_format"),
        *(_format_of(request.get(each)) for each in ("text", "output_config")),
    )
    grammar = next((kind for each in formats if each is not None and (kind := _short("response_format", each)) != "text"), None)
    found.pop("response_format", None)
    if grammar is not None:  # a server may heed any of them
        found["response_format"] = grammar
    if found.get("tool_choice") != "none" and any(map(_is_strict, _tools_of(request))):
        found["strict_tools"] = True
    return found


def _format_of(holder: Any) -> Any:
    """Return the format in `text` of the Responses API, or in `output_config` of Anthropic's."""
    return holder.get("format") if isinstance(holder, Mapping) else None


def _tools_of(request: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a request, and those within its messages, which SGLang takes."""
    messages: Any = request.get("messages")
    within = [each["tools"] for each in messages if isinstance(each, dict) and "tools" in each] if isinstance(messages, list) else []
    return [tool for tools in (request.get("tools"), *within) if isinstance(tools, list) for tool in cast("list[Any]", tools)]


def _is_strict(tool: Any, levels: int = 4) -> bool:
    """Whether a server may hold what is written to a tool, or to one of its namespace, to a schema or a grammar."""
    if not isinstance(tool, dict):
        return False
    held = cast("dict[str, Any]", tool)
    if not levels or held.get("strict") not in (None, False):  # servers read 1 and "true" as true
        return True
    kind = held.get("format")
    if kind is not None and _short("format", kind) != "text":
        return True
    if _is_strict(held.get("function"), levels - 1) or _is_strict(held.get("custom"), levels - 1):
        return True
    nested: Any = held.get("tools")
    return isinstance(nested, list) and any(_is_strict(each, levels - 1) for each in cast("list[Any]", nested))


def _lenient(tool: Any, levels: int = 4) -> Any:
    if not levels or not isinstance(tool, dict):
        return tool
    held = cast("dict[str, Any]", tool)
    inner = {name: _lenient(held[name], levels - 1) for name in ("function", "custom") if name in held}
    if isinstance(nested := held.get("tools"), list):
        inner["tools"] = [_lenient(each, levels - 1) for each in cast("list[Any]", nested)]
    return {**held, **inner, **({"strict": False} if held.get("strict") not in (None, False) else {})}


def _short(name: str, value: Any) -> Any:
    """Return a field's value as it is recorded: of an object with a `type` the type, numbers as servers read them, others shortened."""
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        return value["type"]
    if isinstance(value, str):  # servers read "0.3" as 0.3
        number = math.nan
        if name in NEUTRAL or name in ("temperature", "max_tokens", "n"):
            with contextlib.suppress(ValueError):
                number = float(value)
        return number if abs(number) < _BEYOND else value[:_LONGEST]
    if isinstance(value, int | float):
        return value if abs(value) < _BEYOND else _UNREADABLE
    if value in ({}, []):
        return value
    try:
        return json.dumps(value)[:_LONGEST]
    except (ValueError, RecursionError):  # an integer of thousands of digits; very deep
        return _UNREADABLE
