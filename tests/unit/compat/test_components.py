"""Forms in which a Trainer's components may be given, including those of 0.3. Nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_otel.adapters import TracerTraceToTriplet, TraceToMessages
from agl_otel.algorithms import Algorithm, Baseline
from agl_otel.compat.execution import ClientServerExecutionStrategy, ExecutionStrategy, SharedMemoryExecutionStrategy
from agl_otel.compat.registry import build_component
from agl_otel.compat.tracer import AgentOpsTracer, DummyTracer, OtelTracer, Tracer
from agl_otel.compat.trainer import Trainer
from agl_otel.errors import UsageError
from agl_otel.store import LightningStoreClient

BASELINE: list[Any] = [
    Baseline(n_epochs=3),
    lambda: Baseline(n_epochs=3),
    {"type": "agl_otel.algorithms.Baseline", "n_epochs": 3},
    {"type": "agentlightning.algorithm.Baseline", "n_epochs": 3},
    {"type": "agentlightning.Baseline", "n_epochs": 3},
    {"type": "agentlightning.algorithm.fast.Baseline", "n_epochs": 3},
    {"type": Baseline, "n_epochs": 3},
]


def trainer(**given: Any) -> Trainer:
    return Trainer(store=LightningStoreClient("127.0.0.1:1"), **given)


@pytest.mark.parametrize("spec", BASELINE)
def test_a_component_is_an_instance_a_factory_a_path_or_a_dict(spec: Any) -> None:
    made = build_component(spec, expected_type=Algorithm, spec_name="algorithm")
    assert isinstance(made, Baseline) and made.n_epochs == 3


@pytest.mark.parametrize("spec", [Baseline, "agl_otel.algorithms.Baseline", "agl_otel.algorithms:Baseline", "agentlightning.Baseline"])
def test_a_class_or_its_path_is_made_without_arguments(spec: Any) -> None:
    made = build_component(spec, expected_type=Algorithm, spec_name="algorithm")
    assert isinstance(made, Baseline) and made.n_epochs == 1


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (None, UsageError, "algorithm is missing"),
        ({"n_epochs": 3}, UsageError, "algorithm: a dict needs a key `type`"),
        ({"type": None}, UsageError, "algorithm: a dict needs a key `type`"),
        ({"type": ""}, UsageError, "algorithm '' is neither a known name nor an import path"),
        ({"type": 0}, UsageError, "algorithm is 0: give a Algorithm"),
        (".algorithms.Baseline", UsageError, "algorithm '.algorithms.Baseline' is neither a known name nor an import path"),
        ("agl_otel..Baseline", UsageError, "algorithm 'agl_otel..Baseline' is neither a known name nor an import path"),
        ({"type": Baseline, "epochs": 3}, UsageError, "['epochs']: got an unexpected keyword argument 'epochs'"),
        ({"type": Baseline, 3: 3}, UsageError, "algorithm: Baseline("),
        (lambda model: Baseline(), UsageError, "(model) cannot be called with []: missing a required argument: 'model'"),
        ("nothing", UsageError, "algorithm 'nothing' is neither a known name nor an import path"),
        ("no_such_package.Thing", UsageError, "algorithm 'no_such_package.Thing' cannot be found"),
        ("agentlightning.algorithm.NoSuch", UsageError, "algorithm 'agentlightning.algorithm.NoSuch' cannot be found"),
        (7, UsageError, "algorithm is 7: give a Algorithm"),
        (OtelTracer, TypeError, "algorithm is a OtelTracer, not a Algorithm"),
    ],
)
def test_an_invalid_component_is_named(spec: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        build_component(spec, expected_type=Algorithm, spec_name="algorithm")
    assert words in str(caught.value)


def test_a_dependency_that_a_component_lacks_is_not_taken_for_the_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_mine.py").write_text("import parts\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="'parts'"):
        build_component("parts_of_mine.Thing", expected_type=Algorithm, spec_name="algorithm")


def test_an_error_of_the_constructor_is_its_own() -> None:
    def broken() -> Algorithm:
        raise TypeError("inside")

    with pytest.raises(TypeError, match=r"^inside$"):
        build_component(broken, expected_type=Algorithm, spec_name="algorithm")


@pytest.mark.parametrize(
    "known", [Baseline, "agl_otel.algorithms.Baseline", "agentlightning.Baseline", Baseline(n_epochs=1), lambda: Baseline()]
)
def test_a_registry_has_paths_or_components(known: Any) -> None:
    made = build_component("quick", expected_type=Algorithm, spec_name="algorithm", registry={"quick": known})
    assert isinstance(made, Baseline) and made.n_epochs == 1


def test_errors_follow_the_templates_of_0_3() -> None:
    given: dict[str, Any] = {"expected_type": Algorithm, "spec_name": "algorithm"}
    templates: dict[str, Any] = {
        "type_error_fmt": "{type_name} is no {expected_type}",
        "invalid_spec_error_fmt": "no {actual_type} for {expected_type}",
    }
    with pytest.raises(TypeError, match=r"^<class '.*OtelTracer'> is no Algorithm$"):
        build_component(OtelTracer, **given, **templates)
    with pytest.raises(ValueError, match=r"^no <class 'int'> for Algorithm$"):
        build_component(7, **given, **templates)


def test_a_trainer_without_arguments_has_the_defaults_of_0_3() -> None:
    made = trainer()
    assert type(made.tracer) is AgentOpsTracer and type(made.adapter) is TracerTraceToTriplet
    assert type(made.strategy) is ClientServerExecutionStrategy
    assert (made.n_runners, made.max_rollouts, made.algorithm, made.llm_proxy, made.hooks) == (1, None, None, None, [])


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("shm", SharedMemoryExecutionStrategy),
        ("cs", ClientServerExecutionStrategy),
        (SharedMemoryExecutionStrategy, SharedMemoryExecutionStrategy),
        ("agentlightning.execution.SharedMemoryExecutionStrategy", SharedMemoryExecutionStrategy),
        ({"type": "shm", "join_timeout": 3.0}, SharedMemoryExecutionStrategy),
        (ClientServerExecutionStrategy(n_runners=4), ClientServerExecutionStrategy),
    ],
)
def test_a_strategy_may_be_a_short_name(spec: Any, kind: type[ExecutionStrategy]) -> None:
    made = trainer(strategy=spec, n_runners=4)
    assert type(made.strategy) is kind and made.n_runners == 4


def test_port_runners_and_old_strings_reach_the_parts() -> None:
    made = trainer(n_runners=2, port=5005, adapter={"agent_match": "write"}, tracer="agentlightning.tracer.DummyTracer")
    assert isinstance(made.strategy, ClientServerExecutionStrategy)
    assert (made.strategy.server_port, made.strategy.n_runners) == (5005, 2)
    assert isinstance(made.adapter, TracerTraceToTriplet) and made.adapter.agent_match == "write"
    assert isinstance(made.tracer, DummyTracer)
    assert isinstance(trainer(adapter="agentlightning.adapter.TraceToMessages").adapter, TraceToMessages)
    assert isinstance(trainer(tracer={"type": OtelTracer}).tracer, Tracer)


def test_deprecated_names_warn_and_unknown_ones_are_refused() -> None:
    with pytest.warns(DeprecationWarning, match="n_workers.*n_runners"):
        assert trainer(n_workers=3).n_runners == 3
    with pytest.warns(DeprecationWarning, match="max_tasks.*max_rollouts"):
        assert trainer(max_tasks=5).max_rollouts == 5
    with pytest.raises(UsageError, match="no argument 'n_runner'"):
        trainer(n_runner=3)


def test_dev_refuses_an_algorithm_that_is_not_fast() -> None:
    class Slow(Algorithm):
        pass

    with pytest.raises(TypeError, match=r"FastAlgorithm, not Slow.*fit"):
        trainer(algorithm=Slow()).dev(lambda task: 1.0, [1])  # pyright: ignore[reportUnknownLambdaType]  # its task has no type
