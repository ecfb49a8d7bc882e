"""Every reason has a remedy."""

from __future__ import annotations

import pytest

from agl_otel.adapters import remedies
from agl_otel.adapters.records import REASONS
from agl_otel.adapters.split_reasons import SPLIT_REASONS


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"top_p", "logprobs"}, [remedies.REFUSED["sampling_differs"]]),
        ({"logprobs"}, [remedies.SAMPLING["logprobs"]]),
        ({"unsent"}, [remedies.SAMPLING["unsent"]]),
        ({"strict_tools"}, [remedies.SAMPLING["strict_tools"]]),
        ({"top_p", "top_k", "unsent"}, [remedies.REFUSED["sampling_differs"], remedies.SAMPLING["unsent"]]),
    ],
)
def test_a_call_that_was_sampled_otherwise_has_the_remedies_of_its_fields(fields: set[str], remedy: list[str]) -> None:
    assert remedies.of("sampling_differs", fields) == "; ".join(remedy)
    assert remedies.of("greedy", fields) == remedies.REFUSED["greedy"]


def test_every_reason_has_a_remedy() -> None:
    assert remedies.REFUSED.keys() == REASONS.keys()
    assert remedies.SPLIT.keys() == SPLIT_REASONS.keys()
