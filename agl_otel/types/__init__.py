"""The data model that users and services share: rollouts, attempts, resources, workers and spans as pydantic models.

Times are Unix seconds (float) here, as in Agent Lightning 0.3; on the wire and in ClickHouse spans carry nanoseconds.
One module for each kind of thing; import from here.
"""

from __future__ import annotations

from agl_otel.types.agents import Dataset, Hook, ParallelWorkerBase, RolloutRawResult, Triplet
from agl_otel.types.base import check_id, new_id
from agl_otel.types.queries import FilterField, FilterOptions, PaginatedResult, SortOptions
from agl_otel.types.resources import (
    LLM,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Resource,
    ResourcesUpdate,
    ResourceUnion,
    routed_base_url,
)
from agl_otel.types.rollouts import (
    TERMINAL_STATUSES,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Verdict,
    VerdictKind,
    Worker,
    WorkerStatus,
)
from agl_otel.types.spans import (
    Attributes,
    AttributeValue,
    Event,
    Link,
    OtelResource,
    Span,
    SpanAttributeNames,
    SpanContext,
    SpanCoreFields,
    SpanLike,
    SpanNames,
    SpanRecordingContext,
    StatusCode,
    TraceState,
    TraceStatus,
    convert_timestamp,
)
from agl_otel.types.stack import Describe

__all__ = [
    "LLM",
    "TERMINAL_STATUSES",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "Dataset",
    "Describe",
    "EnqueueRolloutRequest",
    "Event",
    "FilterField",
    "FilterOptions",
    "Hook",
    "Link",
    "NamedResources",
    "OtelResource",
    "PaginatedResult",
    "ParallelWorkerBase",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourceUnion",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutRawResult",
    "RolloutStatus",
    "SortOptions",
    "Span",
    "SpanAttributeNames",
    "SpanContext",
    "SpanCoreFields",
    "SpanLike",
    "SpanNames",
    "SpanRecordingContext",
    "StatusCode",
    "TaskInput",
    "TraceState",
    "TraceStatus",
    "Triplet",
    "Verdict",
    "VerdictKind",
    "Worker",
    "WorkerStatus",
    "check_id",
    "convert_timestamp",
    "new_id",
    "routed_base_url",
]
