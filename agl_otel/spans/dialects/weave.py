"""Weave's calls as Agent Lightning 0.3 stored them: operations with the bodies of request and response as attributes."""

from __future__ import annotations

from agl_otel.spans.dialects.dialect import ANY, Content, Dialect
from agl_otel.spans.dialects.shapes import from_bodies
from agl_otel_hook import conventions

_IN, _OUT = conventions.OPERATION_INPUT, conventions.OPERATION_OUTPUT

DIALECT = Dialect(
    name="agent_lightning_weave",
    written_by="Agent Lightning 0.3's WeaveTracer",
    call=(
        {"span.name": ("openai.chat.completions.create",)},
        {f"{_IN}.model": ANY, f"{_OUT}.id": ANY},
    ),
    read=from_bodies(_IN, _OUT),
    model=((f"{_OUT}.model",), (f"{_IN}.model",)),
    response_id=((f"{_OUT}.id",), ("gen_ai.response.id",)),
    input_tokens=((f"{_OUT}.usage.prompt_tokens",),),
    output_tokens=((f"{_OUT}.usage.completion_tokens",),),
    prompt_token_ids=((f"{_OUT}.prompt_token_ids",), ("prompt_token_ids",)),
    response_token_ids=(
        (f"{_OUT}.response_token_ids.0",),
        (f"{_OUT}.response_token_ids",),
        (f"{_OUT}.choices.0.token_ids",),
        (f"{_OUT}.choices.0.provider_specific_fields.token_ids",),
        ("response_token_ids",),
    ),
    request=(_IN,),
    response=(_OUT,),
    content=(
        Content(_IN, "body"),
        Content(f"{_IN}."),
        Content(_OUT, "body", reply=True),
        Content(f"{_OUT}.", reply=True),
    ),
)
