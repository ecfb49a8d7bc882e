from __future__ import annotations

import logging
import pickle

import pytest

from agl_otel.types import ProxyLLM

MADE = ProxyLLM(endpoint="http://proxy:4000", model="m")


def test_reading_the_endpoint_warns_with_the_alternative(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert MADE.endpoint == "http://proxy:4000"
    [record] = caplog.records
    assert "get_base_url(rollout_id, attempt_id)" in record.getMessage()


def test_nothing_else_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert MADE.get_base_url() == "http://proxy:4000"
        assert MADE.get_base_url("ro-1", "at-1") == "http://proxy:4000/rollout/ro-1/attempt/at-1"
        assert ProxyLLM.model_validate_json(MADE.model_dump_json()) == MADE == pickle.loads(pickle.dumps(MADE))
        assert "http://proxy:4000" in repr(MADE) and MADE.model_copy(update={"model": "n"}).model == "n"
    assert caplog.records == []
