"""Restrict the fields of an agent's request to litellm: those that affect sampling, none that affect which model answers. Pure.

litellm reads fields of the body, beyond those of the protocol, as its own arguments: fallback models, other addresses and keys, mock
answers, retries. With any of them the recorded reply might not come from the resource's model. So a body may contain only the fields of
the dialect, and the resource's sampling parameters with unchanged values, because agents receive those.

`metadata` belongs to the protocols (Claude Code sends it with every call, Codex `client_metadata`), but litellm chooses deployments and
traces by it. It does not affect sampling, so it is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from agl_otel.errors import RefusedError
from agl_otel.proxy.reply import Json, encoded
from agl_otel.proxy.upstream import Upstream
from agl_otel.types.sampling import EXTRA_BODY

HEADERS: Final = ("x-litellm", "litellm")
"""Prefixes of the headers that control litellm."""
LEFT_OUT: Final = frozenset({"metadata", "client_metadata"})


def for_litellm(asked: Json, fields: Collection[str], upstream: Upstream, path: str) -> tuple[bytes, Json]:
    """Return an agent's request without anything that could redirect litellm, as (JSON text, parsed).

    Args:
        fields: the fields of requests to this route.
        upstream: the source of the sampling parameters that the agent received.

    Raises RefusedError that names the field that is not allowed.
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
            f"the model {str(model)[:100]!r} is not the name of one model: request one model, without commas and control characters",
            status=400,
            code="model_name",
        )
    return encoded(kept), kept  # encoded again: litellm must not parse the agent's text differently


def _is_one_model(name: Any) -> bool:
    return name is None or (isinstance(name, str) and name.isprintable() and "," not in name)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
