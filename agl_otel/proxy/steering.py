"""What an agent may write into a request that litellm reads: what samples a reply, and nothing that says who gives it. Pure.

litellm takes the fields of a body as arguments of its own, beside those of the protocol: other models in place of the one asked for, other
addresses and keys, answers made up, retries. By any of them what is recorded would not be what the resource's model sampled. So a body
holds what the dialect names, and what the resource's sampling parameters hold with the same value, because agents are told those.

`metadata` is of the protocols (Claude Code sends it with every call, Codex `client_metadata`), and litellm chooses deployments and traces
by what is in it. No model server samples by it, so it is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from agl_otel.errors import RefusedError
from agl_otel.proxy.reply import Json, encoded
from agl_otel.proxy.upstream import Upstream
from agl_otel.types.sampling import EXTRA_BODY

HEADERS: Final = ("x-litellm", "litellm")
"""How the names begin of headers that litellm takes orders from."""
LEFT_OUT: Final = frozenset({"metadata", "client_metadata"})


def for_litellm(asked: Json, fields: Collection[str], upstream: Upstream, path: str) -> tuple[bytes, Json]:
    """An agent's request to a route as litellm may read it, as text and as read here.

    Args:
        fields: that requests to this route have.
        upstream: whose sampling parameters the agent was told.

    Raises RefusedError that names what may not be asked.
    """
    told = {**upstream.sampling, **_object(upstream.sampling.get(EXTRA_BODY))}
    kept = {name: value for name, value in asked.items() if name not in LEFT_OUT}
    for name, value in kept.items():
        if name not in fields and not (name in told and told[name] == value):
            raise RefusedError(
                f"the field {name[:100]!r} may not be in a request to {path}, which litellm serves: it could have another model answer. "
                "Leave it out, or have the operator set it in sampling_parameters of the LLM resource",
                status=400,
                code="field",
            )
    model = kept.get("model")
    if upstream.provider == "litellm" and not upstream.model and not _is_one_model(model):
        raise RefusedError(
            f"the model {str(model)[:100]!r} is no name of one model: ask for one model, without commas and control characters",
            status=400,
            code="model_name",
        )
    return encoded(kept), kept  # as it was read here: text that two readers read in two ways is passed on to none


def _is_one_model(name: Any) -> bool:
    return name is None or (isinstance(name, str) and name.isprintable() and "," not in name)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
