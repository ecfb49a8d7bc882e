"""The interpreter of an environment that has litellm, which cannot share ours: the one in $AGL_TEST_LITELLM, else one of environments.py.

Without a network tests that need it are skipped.
"""

from __future__ import annotations

import os

import pytest

from tests.environments import LITELLM, AbsentError, installed


def litellm_python() -> str:
    """The path of that interpreter; skips the test where there can be none."""
    if given := os.environ.get("AGL_TEST_LITELLM"):
        return given
    try:
        return str(installed("litellm", LITELLM) / "bin" / "python")
    except AbsentError as reason:
        pytest.skip(str(reason))
