"""What algorithms improve and agents use: model addresses and prompts, in named sets with versions."""

from __future__ import annotations

import inspect
import logging
import re
import string
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from agl_otel.text import without_secrets
from agl_otel.types.model import Model
from agl_otel.types.rollouts import AttemptedRollout

_INSIDE: Final = ("agl_otel.", "pydantic")
_UNBOUNDED: Final = re.compile(r"\d{3}|[{]")
"""In the format spec of a placeholder: a number above 99, or a nested field."""
_ROUNDING: Final = 1e-9
_log = logging.getLogger(__name__)
OWNER: Final = "improved_by"
"""In a set of `agl-otel improve`: the resource name of a text with the id of the run whose set it is."""


Bridging = Literal["off", "keep", "drop"]
"""What the proxy does with a call that goes on with an answer of the model server's (proxy/bridge.py). `off`: the messages are sent, and
the chat template writes the answer again. `keep`: the sampled tokens are sent, thinking included. `drop`: so they are, but where the
template leaves out thinking."""


StrictTools = Literal["keep", "drop"]
"""What the proxy does with `strict` of an agent's tools, by which model servers hold a call's arguments to their schemas, and so sample
from another distribution. `drop`: it sends them without it."""


class Resource(Model):
    """Base of everything that an algorithm can provide to agents."""

    resource_type: Any
    """The discriminator of the kinds in JSON."""


class LLM(Resource):
    """A model behind an OpenAI-compatible address."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    model: str
    """Empty: the model that the agent's request names."""
    api_key: str | None = Field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    bridge: Bridging = "off"
    strict_tools: StrictTools = "keep"
    share: float | None = Field(default=None, ge=0, le=1)
    """Makes it a canary: it answers this share of the conversations of the set's other LLMs, and else only calls that request it by its
    resource name. None: it is none."""
    most_conversations: int | None = Field(default=None, ge=1)
    """Of a canary: how many conversations of no rollout a proxy lets it take by one version of the set. Later ones get the other LLMs.
    `Store.served` knows no such limit."""

    def get_base_url(self, *_: Any, **__: Any) -> str:
        """Return the base URL for an OpenAI client."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the proxy: every attempt has its own address."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride]  # the discriminator: each kind has its own

    def __getattribute__(self, name: str) -> Any:
        """Warn an agent that reads `.endpoint`: calls to it belong to no attempt."""
        if name == "endpoint" and not _read_inside():
            _log.warning("ProxyLLM.endpoint is the address of no attempt: use get_base_url(rollout_id, attempt_id)")
        return super().__getattribute__(name)

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL for one attempt, or the plain endpoint without ids. Raises ValueError if only one id is given."""
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if rollout_id is None or attempt_id is None:
            raise ValueError("get_base_url takes a rollout id and an attempt id, or neither")
        return routed_base_url(self.endpoint, rollout_id, attempt_id)

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return a plain LLM whose endpoint is the attempt's."""
        endpoint = self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        own = self.model_dump(exclude={"resource_type", "endpoint"})
        return LLM(endpoint=endpoint, **own)


def _read_inside() -> bool:
    """Whether the reader of the attribute is this package or pydantic."""
    here = inspect.currentframe()
    reader = here.f_back.f_back if here is not None and here.f_back is not None else None
    return reader is not None and str(reader.f_globals.get("__name__", "")).startswith(_INSIDE)


def routed_base_url(endpoint: str, rollout_id: str, attempt_id: str) -> str:
    """Insert `/rollout/…/attempt/…` into a proxy's `endpoint`, before a trailing `/v1` if there is one."""
    base = endpoint.removesuffix("/")
    stem = base.removesuffix("/v1")
    return f"{stem}/rollout/{rollout_id}/attempt/{attempt_id}" + ("/v1" if stem != base else "")


class PromptTemplate(Resource):
    """A prompt that an algorithm may rewrite."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]

    def format(self, **values: Any) -> str:
        """Return the template with `values` filled in.

        Raises NotImplementedError for engines other than f-string, KeyError for a missing value, and what `placeholders` raises.
        """
        if self.engine != "f-string":
            raise NotImplementedError(f"format() knows f-string templates only, not {self.engine}")
        placeholders(self.template)
        return self.template.format(**values)


def placeholders(template: str) -> set[str]:
    """Return the names of an f-string template's placeholders.

    Raises ValueError for braces that str.format cannot parse, and for placeholders by which a template that a model wrote could do harm:
    attributes and items of values, which reach any secret of the process, and widths that exhaust memory.
    """
    try:
        parts = string.Formatter().parse(template)
        fields = [(name, spec or "", conversion or "") for _, name, spec, conversion in parts if name is not None]
    except ValueError as error:
        raise ValueError(f"{error}: braces that are meant are written twice") from None
    for name, spec, conversion in fields:
        shown = f"{{{name}{'!' if conversion else ''}{conversion}{':' if spec else ''}{spec}}}"
        if "." in name or "[" in name:
            raise ValueError(f"{shown} reaches into a value: name plain values only, and pass what is in them by names of their own")
        if _UNBOUNDED.search(spec):
            raise ValueError(f"{shown} asks for a width above 99, or one that a value gives; braces that are meant are written twice")
    return {name for name, *_ in fields}


def check_shares(resources: dict[str, Any]) -> dict[str, Any]:
    """Return the resources of a set.

    Raises ValueError for shares that sum up to more than 1, canaries without another LLM, and limits of LLMs that are no canaries.
    """
    llms = [name for name, resource in resources.items() if isinstance(resource, LLM)]
    shares = shares_in(resources)
    if sum(shares.values()) > 1 + _ROUNDING:
        told = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        raise ValueError(f"the shares of the canaries sum up to {sum(shares.values()):g} ({told}): they may have 1 together")
    if shares and len(shares) == len(llms):
        raise ValueError(
            f"all LLMs of the set have a share ({', '.join(shares)}): a canary needs another LLM, without one, to stand in for"
        )
    for name in llms:
        if name not in shares and resources[name].most_conversations is not None:
            raise ValueError(f"{name} has most_conversations, which limits canaries, and no share, which makes it one")
    return resources


def shares_in(resources: Mapping[str, Any]) -> dict[str, float]:
    """Return {resource name: share} of the canaries among some resources, in order."""
    return {name: each.share for name, each in resources.items() if isinstance(each, LLM) and each.share is not None}


def is_canary(resource: object) -> bool:
    """Whether a resource is an LLM that answers a share of the conversations only."""
    return isinstance(resource, LLM) and resource.share is not None


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = Annotated[dict[str, ResourceUnion], AfterValidator(check_shares)]


class ResourcesUpdate(Model):
    """One version of a named set of resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int = Field(ge=1)
    resources: NamedResources

    def without_keys(self) -> ResourcesUpdate:
        """Return a copy for display: without providers' API keys, and without passwords in addresses and options."""
        seen: NamedResources = {}
        for name, resource in self.resources.items():
            secret = isinstance(resource, LLM)
            seen[name] = type(resource).model_validate(without_secrets(resource.model_dump())) if secret else resource
        return self.model_copy(update={"resources": seen})


class Served(Model):
    """The prompts of a set of resources that a conversation gets."""

    resources_id: str
    version: int
    arm: str
    """The resource name of the LLM whose prompts they are, and to which the proxy sends the conversation's calls; empty without an LLM.
    A product sets it on its span as `agentlightning.served.arm`."""
    prompts: dict[str, PromptTemplate]
    """By their names; those of a canary have these, too."""
