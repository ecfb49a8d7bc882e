"""Each test of jobs loads its modules anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Unload modules: jobs load modules of the same names from different folders."""
    for name, module in list(sys.modules.items()):  # those of other files' tests
        if (getattr(module, "__file__", "") or "").startswith(str(EXAMPLES)):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not place.startswith(str(EXAMPLES))]
    before, path = dict(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith("agl_user_") or not (getattr(sys.modules[name], "__file__", "") or "").startswith(sys.prefix):
            del sys.modules[name]
    sys.path[:] = path
