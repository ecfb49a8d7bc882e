from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel import errors
from agl_otel.errors import AglError, InvalidIdError
from agl_otel.types import Attempt, AttemptedRollout, ProxyLLM, check_id, new_id
from agl_otel.types.columns import Ragged
from agl_otel_hook import conventions

ROOT = Path(__file__).parents[2]


def test_ids_grow_with_time_and_follow_the_rule() -> None:
    ids = [new_id("ro") for _ in range(100)]
    assert len(set(ids)) == 100
    assert [i[:13] for i in ids] == sorted(i[:13] for i in ids)  # the prefix and ten characters of milliseconds
    assert all(conventions.is_valid_id(i) for i in ids)


@pytest.mark.parametrize("value", ["", "a b", "a/b", "ä", "a" * 129, "a\n"])
def test_an_invalid_id_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidIdError, match="rollout id"):
        check_id(value, "rollout id")


def test_an_attempt_of_another_rollout_is_refused() -> None:
    attempt = Attempt(rollout_id="ro-2", attempt_id="at-1", sequence_id=1, start_time=0)
    with pytest.raises(ValueError, match="ro-2, not to ro-1"):
        AttemptedRollout(rollout_id="ro-1", input=None, start_time=0, attempt=attempt)


@pytest.mark.parametrize(
    ("endpoint", "routed"),
    [
        ("http://h:1", "http://h:1/rollout/r/attempt/a"),
        ("http://h:1/", "http://h:1/rollout/r/attempt/a"),
        ("http://h:1/v1", "http://h:1/rollout/r/attempt/a/v1"),
        ("http://h:1/v1/", "http://h:1/rollout/r/attempt/a/v1"),
    ],
)
def test_a_routed_address_keeps_v1_at_its_end(endpoint: str, routed: str) -> None:
    assert ProxyLLM(endpoint=endpoint, model="m").get_base_url("r", "a") == routed


def test_a_routed_address_needs_both_ids() -> None:
    with pytest.raises(ValueError, match="or neither"):
        ProxyLLM(endpoint="http://h", model="m").get_base_url("r")


def test_every_error_is_drawn_in_the_tree_and_has_a_status() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AglError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert kind.__name__ in (errors.__doc__ or ""), f"{kind.__name__} is missing in the drawn tree"
        assert errors.http_status(kind("x")) >= 400
    assert errors.http_status(errors.QueryError("x")) == 500, "a view's own query is no mistake of who asks for the view"


def test_a_status_on_the_wire_comes_back_as_the_same_error() -> None:
    for kind in (errors.NotFoundError, errors.FencedError, errors.InUseError, errors.UnavailableError):
        assert type(errors.from_grpc(errors.grpc_status(kind("x")), "x")) is kind


def test_ragged_rows_are_views_and_may_be_empty() -> None:
    import numpy as np

    rows = Ragged.from_rows([[1, 2], [], [3]], np.int32)
    assert [list(rows[i]) for i in range(len(rows))] == [[1, 2], [], [3]]
    assert list(rows.lengths) == [2, 0, 1]
    assert rows[0].base is rows.values
    assert len(Ragged.from_rows([], np.int32)) == 0


def test_importing_the_package_is_cheap_and_opens_nothing() -> None:
    code = "import sys, agl_otel; print([m for m in ('torch', 'chdb', 'grpc', 'aiohttp', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_no_module_but_semconv_spells_a_name_of_the_wire() -> None:
    """String constants only: SQL files and documentation may quote the names."""
    spelled: list[str] = []
    for path in [
        *ROOT.glob("agl_otel/**/*.py"),
        *ROOT.glob("adapters/**/*.py"),
        *ROOT.glob("algorithms/**/*.py"),
        *ROOT.glob("collector/**/*.py"),
    ]:
        if path.name == "conventions.py" or path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        spelled += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("agentlightning.")
            and id(node) not in docstrings
        ]
    assert spelled == []
