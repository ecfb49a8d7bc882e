"""Every reason has a remedy."""

from __future__ import annotations

from agl_otel.adapters import remedies
from agl_otel.adapters.records import REASONS
from agl_otel.adapters.split_reasons import SPLIT_REASONS


def test_every_reason_has_a_remedy() -> None:
    assert remedies.REFUSED.keys() == REASONS.keys()
    assert remedies.SPLIT.keys() == SPLIT_REASONS.keys()
