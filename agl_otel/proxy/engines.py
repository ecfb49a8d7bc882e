"""What vLLM and SGLang answer beside OpenAI's protocol: weights versions, and the experts that each token was routed to. Pure.

| | vLLM (0.33) | SGLang (0.5.23) |
|---|---|---|
| versions | `weight_versions` of a choice, if requested | `metadata` of a whole answer, or `meta_info` of a choice |
| experts | `routed_experts` of a choice: base64 of .npy | `routed_experts` of `sglext` or `meta_info`: base64 of int32 |
| token ids | `token_ids` of a choice | `response_token_ids` of a choice; in a stream `input_ids`, `output_ids` of `sglext` |

`metadata` and `routed_experts` of `sglext` are of the first choice. Both engines have experts of all tokens but the last, which no forward
pass has read, and leave out those of the first prompt tokens if a request says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from agl_otel.proxy.reply import Choice, Json, Reply, dicts, integer, string
from agl_otel.types.experts import decode, encode

VERSIONS: Final = "return_weight_versions"
UNNAMED: Final = "default"
"""Both engines' label of weights that nobody has named."""
MAX_EXPERTS_BYTES: Final = 32 << 20  # of base64: half of an OTLP request
_SKIPPED: Final = {True: "routed_experts_start_len", False: "routed_experts_prompt_start"}
"""{whether the experts are flat: the field by which a request of that engine leaves out those of the first prompt tokens}."""


class VersionSpan(NamedTuple):
    """The response tokens `[start, end)` were sampled by these weights."""

    version: str
    start: int
    end: int


def take_choice(choice: Choice, item: Json) -> None:
    """Add what a choice of an answer, or of a chunk, has."""
    meta = item.get("meta_info")
    for part in (item, cast("Json", meta)) if isinstance(meta, dict) else (item,):
        choice.versions = part.get("weight_versions") or part.get("weight_version") or choice.versions
        choice.experts = part.get("routed_experts") or choice.experts


def take_answer(reply: Reply, payload: Json) -> None:
    """Add what an answer of SGLang's has beside its choices, or the last chunk of one."""
    metadata, extension = payload.get("metadata"), payload.get("sglext")
    if isinstance(metadata, dict) and ("weight_version" in metadata or "weight_versions" in metadata):
        take_choice(reply.choice(), cast("Json", metadata))
    if not isinstance(extension, dict):
        return
    held = cast("Json", extension)
    take_choice(reply.choice(), held)
    if "input_ids" in held:
        reply.prompt({"prompt_token_ids": held["input_ids"]})
    ids = held.get("output_ids")
    for index, own in enumerate(cast("list[Any]", ids) if isinstance(ids, list) else ()):
        reply.tokens(reply.choice(index), {"token_ids": own})


def versions_of(choice: Choice) -> list[VersionSpan] | None:
    """Return which weights sampled each of the tokens, in order; empty if that is not known, None if it is of other tokens."""
    given, count = choice.versions, len(choice.token_ids)
    if isinstance(given, str):
        spans = [VersionSpan(string(given) or "", 0, count)]
    else:
        spans = [
            VersionSpan(string(each.get("version")) or "", integer(each.get("start")) or 0, integer(each.get("end")) or 0)
            for each in dicts(given)
        ]
    if all(span.version in ("", UNNAMED) for span in spans):
        return []
    ends = [0, *(span.end for span in spans)]
    aligned = all(span.start == end <= span.end for span, end in zip(spans, ends, strict=False)) and ends[-1] == count
    return spans if aligned else None


def experts_of(choice: Choice, prompt_tokens: int, body: Mapping[str, Any]) -> str | None:
    """Return base64 of .npy: the experts of each token of prompt and response but the last, in as few bytes as they need.

    Rows are tokens; their form is the engine's: (layers, experts), or flat where it does not say (SGLang). An empty text: there are none;
    None: they are of other tokens, or cannot be read.
    """
    given = choice.experts
    if not given:
        return ""
    found = decode(given)
    if found is None:
        return None
    rows = prompt_tokens + len(choice.token_ids) - 1
    skipped = integer(body.get(_SKIPPED[found.ndim == 1])) or 0
    rows -= min(max(0, skipped), rows)
    if not rows or not found.size or found.size % rows:
        return None
    experts = found if found.ndim > 1 else found.reshape(rows, -1)
    return encode(experts) if len(experts) == rows else None
