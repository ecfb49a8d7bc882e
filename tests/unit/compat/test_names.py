"""`import agentlightning as agl` becomes `import agl_otel as agl`: the names of 0.3, by module.

A name in these lists must be importable from its module; a moved or removed one fails here.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import agl_otel as agl
from agl_otel.store import LightningStore

TYPES = """Triplet TaskInput RolloutRawResult RolloutMode ParallelWorkerBase Dataset AttemptStatus RolloutStatus RolloutConfig
Rollout Attempt AttemptedRollout EnqueueRolloutRequest Hook Worker WorkerStatus PaginatedResult FilterOptions
SortOptions FilterField Resource LLM ProxyLLM PromptTemplate ResourceUnion NamedResources ResourcesUpdate AttributeValue
Attributes TraceState SpanContext TraceStatus Event Link OtelResource Span SpanNames SpanAttributeNames SpanLike
StatusCode SpanCoreFields SpanRecordingContext"""
STORE = """LightningStore LightningStoreCapabilities LightningStoreStatistics LightningStoreClient LightningStoreServer
InMemoryLightningStore CollectionBasedLightningStore LightningStoreThreaded"""
EMITTERS = """reward operation emit_reward emit_message emit_object emit_exception emit_annotation get_reward_value get_rewards_from_span
is_reward_span find_reward_spans find_final_reward get_message_value get_object_value"""
OTEL = """full_qualified_name get_tracer_provider get_tracer make_tag_attributes extract_tags_from_attributes make_link_attributes
query_linked_spans extract_links_from_attributes filter_attributes filter_and_unflatten_attributes flatten_attributes unflatten_attributes
sanitize_attribute_value sanitize_attributes sanitize_list_attribute_sanity check_attributes_sanity format_exception_attributes"""
SEMCONV = """AGL_ANNOTATION AGL_MESSAGE AGL_OBJECT AGL_EXCEPTION AGL_OPERATION AGL_REWARD AGL_VIRTUAL LightningResourceAttributes
LightningSpanAttributes RewardAttributes RewardPydanticModel LinkAttributes LinkPydanticModel"""
ADAPTERS = "Adapter TraceAdapter OtelTraceAdapter TraceToTripletBase TracerTraceToTriplet LlmProxyTraceToTriplet TraceToMessages"
ALGORITHMS = "Algorithm algo FastAlgorithm Baseline APO VERL"
AGENTS = "LitAgent rollout llm_rollout prompt_rollout"
RUNS = "Runner LitAgentRunner"
EXECUTION = """ExecutionStrategy ClientServerExecutionStrategy SharedMemoryExecutionStrategy ExecutionEvent ThreadingEvent
MultiprocessingEvent"""
TRACERS = """Tracer OtelTracer AgentOpsTracer WeaveTracer DummyTracer get_active_tracer set_active_tracer clear_active_tracer"""
ENV_VARS = "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var"
LOGGING = "setup_logging setup_module_logging"
MODULES = {
    "agl_otel": f"""{TYPES} {STORE} {EMITTERS} {ADAPTERS} {ALGORITHMS} {AGENTS} {RUNS} {EXECUTION} {TRACERS} {ENV_VARS} {LOGGING}
        MongoLightningStore Trainer build_component LLMProxy lightning_cli""",
    "agl_otel.adapter": f"{ADAPTERS} TraceTree RewardMatchPolicy",
    "agl_otel.adapter.triplet": "TracerTraceToTriplet LlmProxyTraceToTriplet TraceToTripletBase TraceTree RewardMatchPolicy",
    "agl_otel.adapter.messages": "TraceToMessages",
    "agl_otel.algorithm": ALGORITHMS,
    "agl_otel.algorithm.apo": "APO",
    "agl_otel.tracer.agentops": "AgentOpsTracer",
    "agl_otel.tracer.weave": "WeaveTracer",
    "agl_otel.store.collection_based": "CollectionBasedLightningStore",
    "agl_otel.store.mongo": "MongoLightningStore",
    "agl_otel.algorithm.utils": "with_store with_llm_proxy batch_iter_over_dataset",
    "agl_otel.litagent": AGENTS,
    "agl_otel.runner": RUNS,
    "agl_otel.trainer": "Trainer build_component",
    "agl_otel.execution": EXECUTION,
    "agl_otel.tracer": TRACERS,
    "agl_otel.llm_proxy": "LLMProxy ModelConfig",
    "agl_otel.env_var": ENV_VARS,
    "agl_otel.logging": f"{LOGGING} configure_logger",
    "agl_otel.config": "lightning_cli",
    "agl_otel.utils.metrics": "MetricsBackend",
    "agl_otel.instrumentation": "instrument_all uninstrument_all",
    "agl_otel.types": TYPES,
    "agl_otel.store": f"{STORE} MongoLightningStore UNSET",
    "agl_otel.store.base": "UNSET",
    "agl_otel.emitter": EMITTERS,
    "agl_otel.reward": "reward emit_reward get_reward_value is_reward_span find_reward_spans find_final_reward",
    "agl_otel.semconv": SEMCONV,
    "agl_otel.utils.otel": OTEL,
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MODULES.items() for name in names.split()])
def test_a_name_of_0_3_can_be_imported_from_its_module(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


def test_every_name_at_the_top_is_listed_and_loads() -> None:
    names: list[str] = [name for name in agl.__all__ if name != "__version__"]
    assert len(set(names)) == len(names) and set(names) <= set(dir(agl))
    assert {*MODULES["agl_otel"].split()} <= set(names)
    for name in names:
        assert getattr(agl, name) is getattr(import_module(agl.__name__), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(agl, "no_such_name")  # noqa: B009 - type checkers know that it is not there


def test_type_checkers_know_every_name_at_the_top() -> None:
    """Through the star imports of the stub."""
    stub = Path(agl.__file__).with_suffix(".pyi").read_text()
    modules = [line.split()[1] for line in stub.splitlines() if line.startswith("from ")]
    known = {name for module in modules for name in import_module(module).__all__}
    assert {*agl.__all__} - {"__version__"} <= known


@pytest.mark.parametrize(
    "module",
    [
        *("agl_otel.emitter", "agl_otel.reward", "agl_otel.utils.otel", "agl_otel.adapter", "agl_otel.algorithm", "agl_otel.config"),
        *("agl_otel.algorithm.utils", "agl_otel.logging"),
    ],
)
def test_an_alias_module_lists_what_it_holds(module: str) -> None:
    held = import_module(module)
    assert len({*held.__all__}) == len(held.__all__) and all(hasattr(held, name) for name in held.__all__)
    assert set(MODULES[module].split()) <= set(held.__all__)


PARAMETERS: dict[str, str] = {
    "start_rollout": "input mode resources_id config metadata worker_id",
    "enqueue_rollout": "input mode resources_id config metadata",
    "enqueue_many_rollouts": "rollouts",
    "dequeue_rollout": "worker_id",
    "dequeue_many_rollouts": "limit worker_id",
    "start_attempt": "rollout_id worker_id",
    "query_rollouts": "status_in rollout_id_in rollout_id_contains filter_logic sort_by sort_order limit offset status rollout_ids",
    "get_rollout_by_id": "rollout_id",
    "query_attempts": "rollout_id sort_by sort_order limit offset",
    "get_latest_attempt": "rollout_id",
    "add_resources": "resources",
    "update_resources": "resources_id resources",
    "get_resources_by_id": "resources_id",
    "get_latest_resources": "",
    "query_resources": "resources_id resources_id_contains sort_by sort_order limit offset",
    "get_next_span_sequence_id": "rollout_id attempt_id",
    "get_many_span_sequence_ids": "rollout_attempt_ids",
    "add_span": "span",
    "add_many_spans": "spans",
    "add_otel_span": "rollout_id attempt_id readable_span sequence_id",
    "query_spans": """rollout_id attempt_id trace_id trace_id_contains span_id span_id_contains parent_id parent_id_contains name
        name_contains filter_logic limit offset sort_by sort_order""",
    "wait_for_rollouts": "rollout_ids timeout",
    "update_rollout": "rollout_id input mode resources_id status config metadata",
    "update_attempt": "rollout_id attempt_id status worker_id last_heartbeat_time metadata",
    "query_workers": "status_in worker_id_contains filter_logic sort_by sort_order limit offset",
    "get_worker_by_id": "worker_id",
    "update_worker": "worker_id heartbeat_stats",
    "statistics": "",
    "otlp_traces_endpoint": "",
}
ADDED = {"query_rollouts": ["mode_in", "run", "input_contains", "attempts_from", "output_contains"], "query_spans": ["everything"]}


@pytest.mark.parametrize("method", PARAMETERS)
def test_a_store_method_accepts_the_arguments_of_0_3(method: str) -> None:
    assert len(PARAMETERS) == 29
    found = getattr(LightningStore, method)
    parameters: Any = inspect.signature(found).parameters
    added = ADDED.get(method, [])
    assert {*parameters} == {"self", *PARAMETERS[method].split(), *added}
    for name in added:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and not parameters[name].default  # left out, it behaves as in 0.3
    assert inspect.iscoroutinefunction(found) is (method != "otlp_traces_endpoint")


def test_a_program_of_0_3_imports_by_changing_the_packages_name() -> None:
    program = """
import agl_otel as agl
import agl_otel.emitter
from agl_otel.emitter import emit_reward
from agl_otel.semconv import LightningSpanAttributes
from agl_otel.types import Span
from agl_otel.utils.otel import make_tag_attributes
assert agl.emitter.emit_reward is agl.emit_reward is emit_reward and agl.Span is Span
print(LightningSpanAttributes.TAG.value, *make_tag_attributes(["a"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agentlightning.tag", "agentlightning.tag.0"]
