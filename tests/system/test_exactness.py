"""The tokens that are trained on are the sampled ones: a few hundred calls of the bench's random conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.exact_agents import CODECS
from bench.exactness import run

pytestmark = pytest.mark.full


async def test_trained_ids_are_the_sampled_ids_in_every_protocol_with_faults_and_edits(tmp_path: Path) -> None:
    result = await run(400, 11, tmp_path, start_seconds=300.0)
    assert result.wrong == []
    assert result.good
    assert result.whole_accepted == result.whole  # only deliberately broken calls are refused
    assert result.answers.keys() == CODECS.keys()
    assert result.refused.total() > 0
    assert {"choice", "sub_agent"} <= set(result.breaks)
    assert result.bridges["bridged"] > 20
    assert result.bridges.keys() <= {"bridged", "edited", "unknown", "media", "request", "no_ids", "cut", "server"}
