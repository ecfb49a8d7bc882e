"""agl-otel: train AI agents from the OpenTelemetry they already emit.

Importing this package is fast and opens nothing; names are loaded on first use. Users of Agent Lightning 0.3 write
`import agl_otel as agl`: its names are here, and its modules are here or in compat/.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

__version__ = "0.1.0a1"
__path__.append(str(Path(__file__).parent / "compat" / "names"))  # `agl_otel.emitter` and other modules of 0.3

_NAMES: Final = {
    "agl_otel.types": """
        AttemptStatus Attempt AttemptedRollout AttributeValue Attributes Dataset EnqueueRolloutRequest Event FilterField FilterOptions
        Hook LLM Link NamedResources OtelResource PaginatedResult ParallelWorkerBase PromptTemplate ProxyLLM Resource ResourceUnion
        ResourcesUpdate Rollout RolloutConfig RolloutMode RolloutQuery RolloutRawResult RolloutStatus SortOptions Span SpanAttributeNames
        SpanContext SpanCoreFields SpanLike SpanNames SpanRecordingContext StatusCode TaskInput TraceState TraceStatus TrainingRun
        TrainingStep Triplet Worker WorkerStatus Verdict""",
    "agl_otel.store": """
        Store""",
    "agl_otel_hook.emit": """
        reward operation emit_reward emit_message emit_object emit_exception emit_annotation""",
    "agl_otel.spans.emitted": """
        get_reward_value get_rewards_from_span is_reward_span find_reward_spans find_final_reward get_message_value get_object_value""",
    "agl_otel.adapters": """
        Adapter TraceAdapter OtelTraceAdapter TraceToTripletBase TracerTraceToTriplet LlmProxyTraceToTriplet TraceToMessages""",
    "agl_otel.algorithms": """
        Algorithm algo FastAlgorithm Baseline APO GEPA RandomSearch VERL""",
    "agl_otel.compat.stores": """
        LightningStore LightningStoreClient LightningStoreServer InMemoryLightningStore CollectionBasedLightningStore
        LightningStoreThreaded MongoLightningStore LightningStoreCapabilities LightningStoreStatistics UNSET""",
    "agl_otel.compat.litagent": """
        LitAgent rollout llm_rollout prompt_rollout""",
    "agl_otel.compat.runner": """
        Runner LitAgentRunner""",
    "agl_otel.compat.trainer": """
        Trainer build_component""",
    "agl_otel.compat.execution": """
        ExecutionStrategy ClientServerExecutionStrategy SharedMemoryExecutionStrategy ExecutionEvent ThreadingEvent
        MultiprocessingEvent""",
    "agl_otel.compat.llm_proxy": """
        LLMProxy""",
    "agl_otel.compat.tracer": """
        Tracer OtelTracer AgentOpsTracer WeaveTracer DummyTracer get_active_tracer set_active_tracer clear_active_tracer""",
    "agl_otel.config": """
        lightning_cli""",
    "agl_otel.logging": """
        setup_logging setup_module_logging configure_logger""",
    "agl_otel.compat.env_var": """
        LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var""",
}
"""{module: its public names}: Agent Lightning 0.3's, and others that users need. `__init__.pyi` is for editors."""
_MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]  # they come through __getattr__


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
