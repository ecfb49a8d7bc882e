"""Our proxy: one span for each (call, choice), with token ids and OpenTelemetry's message attributes beside them."""

from __future__ import annotations

from agl_otel.spans.dialects.dialect import ANY, Dialect
from agl_otel.spans.dialects.shapes import from_parts
from agl_otel_hook import conventions

DIALECT = Dialect(
    name="agl",
    written_by="agl-otel's proxy",
    call=({conventions.LLM_CALL: ANY}, {"span.name": (conventions.SPAN_LLM,)}),
    read=from_parts,
    prompt_token_ids=((conventions.LLM_PROMPT_TOKEN_IDS,),),  # in prefix form: history.py expands it
    response_token_ids=((conventions.LLM_RESPONSE_TOKEN_IDS,),),
    logprobs=((conventions.LLM_RESPONSE_LOGPROBS,),),
)
