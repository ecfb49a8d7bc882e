"""REST under /v1/agl beyond Agent Lightning 0.3's: the views that the dashboard reads. SQL is restricted by the collector's guard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from pydantic import Field

from agl_otel.adapters.tree import TraceTree
from agl_otel.errors import NotFoundError, QueryError, SpanShapeError, UsageError
from agl_otel.spans.calls import JoinedCall
from agl_otel.spans.conversations import ModelCall, text_of_cut
from agl_otel.spans.history import SpanKey, expand_spans, lengths_of_prompts, whole_prompt
from agl_otel.store import Store
from agl_otel.traces.figures import AttemptFigures, OutlineSpan
from agl_otel.traces.span_query import SpanQuery
from agl_otel.types import Model, PaginatedResult, ResourcesUpdate, Served, Span
from agl_otel.types.feedback import StoredEvaluation
from agl_otel.web.routes import Page, PageOf, Route, Strict, params_of, require_found
from agl_otel.web.runs import FIGURES, RUNS, figures_of

OUTLINE_SPANS: Final = 5_000
READ_SPANS: Final = 20_000
"""Up to so many spans are read for conversations and tokens, else only the first OUTLINE_SPANS; SQL and export read all."""
PAGE_CHARACTERS: Final = 4 << 20
"""Of the messages and tools on a page of a conversation; a call with more is a page by itself."""
SQL_ROWS: Final = 1_000
OUTPUT_CHARACTERS: Final = 300
OUTPUT_BYTES: Final = 16 << 10
"""Bytes of the reply that are read; of a longer one only the beginning is shown."""


class Outline(Model):
    """The spans of a rollout or of one attempt, without message content."""

    spans: list[OutlineSpan]
    total: int
    """Number of spans before paging."""


class Call(Model):
    """A model call, merged from the agent's span and the proxy's."""

    span_id: str
    trace_id: str
    attempt_id: str
    name: str
    agent: str
    model: str
    start_time: float
    end_time: float
    messages: list[Any]
    """The prompt, as OpenAI chat messages; of all calls but a page's first without the `repeated` ones."""
    repeated: int
    """How many leading messages equal those of the previous call and its reply."""
    reply: list[Any]
    tools: list[Any]
    prompt_tokens: int | None
    response_tokens: int | None
    token_span_id: str
    """The span with token ids; empty if there is none."""
    error: str
    """The call's error, or why its messages cannot be parsed."""


class Conversation(Model):
    """The model calls of an attempt, in order of time."""

    calls: list[Call]
    """As many as were asked for, or fewer where they come to more than PAGE_CHARACTERS: the next page begins after them."""
    total: int
    """Number of calls before paging; of a call that an SDK repeated, the last try alone counts."""
    spans_left_out: int = 0
    """Number of latest spans beyond READ_SPANS that were not read; their calls are not in `total`."""


class Tokens(Model):
    """Token ids and log-probs of one model call."""

    prompt_token_ids: list[int]
    """The whole prompt; empty if the earlier call that it extends is not stored."""
    response_token_ids: list[int]
    logprobs: list[float] | None


class Output(Model):
    """Reply of the last model call in a rollout's latest attempt, truncated to OUTPUT_CHARACTERS."""

    rollout_id: str
    text: str


class Answer(Model):
    """Result of a query."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    truncated: bool
    """Whether there are more rows than `limit`."""


class _Figures(Strict):
    rollout_ids: list[str] = Field(max_length=FIGURES)


class _OfAttempt(Strict):
    attempt_id: str | None = None
    limit: int = Field(default=OUTLINE_SPANS, ge=0, le=READ_SPANS)
    offset: int = Field(default=0, ge=0, le=1 << 31)


class _Calls(Strict):
    attempt_id: str | None = None
    limit: int = Field(default=100, ge=0, le=1000)
    offset: int = Field(default=0, ge=0, le=1 << 31)


class _Tokens(Strict):
    attempt_id: str
    span_id: str


class _Served(Strict):
    conversation_id: str
    resources_id: str = ""
    """Empty: AGL_UPSTREAM_RESOURCES."""


class _Sql(Strict):
    query: str = Field(max_length=100_000)
    limit: int = Field(default=SQL_ROWS, ge=0, le=10_000)


async def _figures(store: Store, request: web.Request) -> Any:
    await store.open()
    return await figures_of(store, (await params_of(request, _Figures)).rollout_ids)


async def _outputs(store: Store, request: web.Request) -> Any:
    await store.open()
    ids = (await params_of(request, _Figures)).rollout_ids
    attempts = await store.queue.query_attempts(ids, latest_only=True) if ids else []
    found = await store.reader.outputs(list(attempts), limit=OUTPUT_BYTES)
    return [Output(rollout_id=rollout_id, text=text_of_cut(reply)[:OUTPUT_CHARACTERS]) for (rollout_id, _), reply in found.items()]


async def _attempt_figures(store: Store, request: web.Request) -> Any:
    await store.open()
    rollout_id = request.match_info["rollout_id"]
    attempts = list(await store.queue.query_attempts([rollout_id]))
    if not attempts:
        await _must_exist(store, rollout_id)
    return await store.reader.figures(attempts)


async def _outline(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _OfAttempt)
    await store.open()
    rollout_id = request.match_info["rollout_id"]
    limit = max(1, params.limit)  # the total comes with the rows
    spans, total = await store.reader.outline(rollout_id, attempt_id=params.attempt_id or "", limit=limit, offset=params.offset)
    if not total:
        await _must_exist(store, rollout_id, params.attempt_id)
    return Outline(spans=spans[: params.limit], total=total)


async def _must_exist(store: Store, rollout_id: str, attempt_id: str | None = None) -> None:
    """Raise NotFoundError if the queue does not know a rollout or attempt that has no spans."""
    if attempt_id is None:
        require_found(await store.rollout(rollout_id), f"rollout {rollout_id!r}, and no span of it")
        return
    attempts = await store.queue.query_attempts([rollout_id])
    what = f"attempt {attempt_id!r} of rollout {rollout_id!r}, and no span of it"
    require_found(next((each for each in attempts if each.attempt_id == attempt_id), None), what)


async def _read(store: Store, rollout_id: str, attempt_id: str | None) -> tuple[list[Span], int]:
    """Return the spans and how many were left out (see READ_SPANS)."""
    await store.open()
    _, total = await store.reader.outline(rollout_id, attempt_id=attempt_id or "", limit=1)
    if not total:
        await _must_exist(store, rollout_id, attempt_id)
    if total <= READ_SPANS:
        return await store.spans(rollout_id, attempt_id=attempt_id), 0
    first = await store.find_spans(SpanQuery(rollout_id=rollout_id, attempt_id=attempt_id or "", limit=OUTLINE_SPANS))
    return list(first), max(0, first.total - len(first))


async def _evaluations(store: Store, request: web.Request) -> Any:
    rollout_id = request.match_info["rollout_id"]
    found = await store.evaluations(rollout_id)
    if not found:
        await _must_exist(store, rollout_id, None)
    return found


async def _conversation(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _Calls)
    spans, left_out = await _read(store, request.match_info["rollout_id"], params.attempt_id)
    found = await asyncio.to_thread(_conversation_of, spans, params.offset, params.limit)
    found.spans_left_out = left_out
    return found


def _conversation_of(spans: list[Span], offset: int, limit: int) -> Conversation:
    if not spans:
        return Conversation(calls=[], total=0)
    joined = TraceTree.from_spans(expand_spans(spans)).find_llm_calls(exclude_llm_call_in_reward=False)
    joined.sort(key=lambda call: (call.span.attempt_id, call.span.start_time or 0.0, call.span.sequence_id))
    lengths = lengths_of_prompts(spans)
    calls: list[Call] = []
    before: list[str] = []
    characters = 0
    first = max(0, offset - 1)
    for place, each in enumerate(joined[first : offset + limit], first):
        call = _call(each, lengths)
        texts, replies, tools = (list(map(_as_text, some)) for some in (call.messages, call.reply, call.tools))
        call.repeated = next((same for same, (a, b) in enumerate(zip(texts, before, strict=False)) if a != b), min(len(texts), len(before)))
        before = [*texts, *replies]
        if place < offset:
            continue
        if calls:
            call.messages = call.messages[call.repeated :]
        characters += sum(map(len, [*texts[call.repeated if calls else 0 :], *replies, *tools]))
        if calls and characters > PAGE_CHARACTERS:
            break
        calls.append(call)
    return Conversation(calls=calls, total=len(joined))


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _call(call: JoinedCall, lengths: Mapping[SpanKey, int]) -> Call:
    span, tokens = call.span, call.tokens
    error = (span.status.description or "it failed") if span.status.status_code == "ERROR" else ""
    try:
        found = call.conversation
    except SpanShapeError as unreadable:
        found, error = None, str(unreadable)
    prompt, response = _counts(call, tokens, lengths)
    return Call(
        span_id=span.span_id,
        trace_id=span.trace_id,
        attempt_id=span.attempt_id,
        name=span.name,
        agent=call.agent,
        model=next((each.model for each in call.calls if each.model), ""),
        start_time=span.start_time or 0.0,
        end_time=span.end_time or span.start_time or 0.0,
        messages=list(found.prompt) if found else [],
        repeated=0,
        reply=list(found.reply) if found else [],
        tools=list(found.tools or []) if found else [],
        prompt_tokens=prompt,
        response_tokens=response,
        token_span_id=str(getattr(tokens.span, "span_id", "")) if tokens else "",
        error=error,
    )


def _counts(call: JoinedCall, tokens: ModelCall | None, lengths: Mapping[SpanKey, int]) -> tuple[int | None, int | None]:
    """Return the numbers of (prompt, response) tokens: of the recorded ids, else as the provider counted them."""
    if tokens is not None and isinstance(tokens.span, Span):
        length = lengths.get((tokens.span.trace_id, tokens.span.span_id), len(tokens.prompt_token_ids))
        return length or None, len(tokens.response_token_ids)
    return next((each.usage for each in call.calls if any(each.usage)), (None, None))


async def _tokens(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _Tokens)
    rollout_id = request.match_info["rollout_id"]
    spans, left_out = await _read(store, rollout_id, params.attempt_id)
    tree = TraceTree.from_spans(spans).find_llm_calls(exclude_llm_call_in_reward=False) if spans else []
    of_span = (call for joined in tree for call in joined.calls if getattr(call.span, "span_id", "") == params.span_id)
    among = f", among its first {len(spans)} spans: `agl-otel export` and SQL read the {left_out} others" if left_out else ""
    call: ModelCall = require_found(next(of_span, None), f"model call {params.span_id!r} in rollout {rollout_id!r}{among}")
    key = (str(getattr(call.span, "trace_id", "")), params.span_id)
    whole = whole_prompt(spans, key)
    prompt = call.prompt_token_ids if whole is None else whole.tolist()
    return Tokens(prompt_token_ids=prompt, response_token_ids=call.response_token_ids, logprobs=call.logprobs)


async def _versions(store: Store, request: web.Request) -> Any:
    params: dict[str, Any] = {"sort_by": "version", **(await params_of(request, Page)).checked(ResourcesUpdate)}
    resources_id = request.match_info["resources_id"]
    await store.open()
    page: PaginatedResult[ResourcesUpdate] = await store.queue.query_resources(resources_id_in=[resources_id], all_versions=True, **params)
    if not page.total:
        raise NotFoundError(f"there is no set of resources {resources_id!r}")
    return page


async def _served(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _Served)
    return await store.served(params.conversation_id, params.resources_id)


async def _version(store: Store, request: web.Request) -> Any:
    resources_id, version = request.match_info["resources_id"], request.match_info["version"]
    await store.open()
    if not version.isdecimal() or len(version) > 10 or int(version) >= 1 << 31:
        raise UsageError(f"version {version[:40]!r} is not a version number")
    return require_found(await store.queue.get_resources(resources_id, version=int(version)), f"version {version} of {resources_id!r}")


async def _sql(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _Sql)
    await store.open()
    try:
        answer = await store.reader.sql(params.query, limit=params.limit + 1)
    except QueryError as error:
        raise UsageError(str(error)) from error
    columns = answer["meta"]
    return Answer(
        columns=[column["name"] for column in columns],
        types=[column["type"] for column in columns],
        rows=answer["data"][: params.limit],
        truncated=len(answer["data"]) > params.limit,
    )


SERVED: Final = "/resources/served"
VIEWS: Final = (
    *RUNS,
    Route(
        "POST",
        "/rollouts/figures",
        _figures,
        "Verdict, reward and sizes of latest attempts.",
        _Figures,
        list[AttemptFigures],
        read_only=True,
    ),
    Route("POST", "/rollouts/outputs", _outputs, "The model's last reply in latest attempts.", _Figures, list[Output], read_only=True),
    Route(
        "GET",
        "/rollouts/{rollout_id}/figures",
        _attempt_figures,
        "Verdict, reward and sizes of a rollout's attempts.",
        None,
        list[AttemptFigures],
    ),
    Route("GET", "/rollouts/{rollout_id}/outline", _outline, "Spans without message content, by time.", _OfAttempt, Outline),
    Route(
        "GET",
        "/rollouts/{rollout_id}/evaluations",
        _evaluations,
        "Evaluations that came as log records, feedback among them.",
        None,
        list[StoredEvaluation],
    ),
    Route("GET", "/rollouts/{rollout_id}/conversation", _conversation, "Model calls with their messages.", _Calls, Conversation),
    Route("GET", "/rollouts/{rollout_id}/tokens", _tokens, "Token ids and log-probs of a model call.", _Tokens, Tokens),
    Route("GET", SERVED, _served, "The prompts that a conversation gets of a set, and their arm.", _Served, Served),
    Route("GET", "/resources/{resources_id}/versions", _versions, "All versions of a set.", Page, PageOf[ResourcesUpdate]),
    Route("GET", "/resources/{resources_id}/versions/{version}", _version, "One version of a set.", None, ResourcesUpdate),
    Route("POST", "/sql", _sql, "Rows of a read-only ClickHouse query.", _Sql, Answer, read_only=True),
)
"""All routes beyond those of Agent Lightning 0.3."""
