"""The advantage estimator that is registered with verl: it takes the advantages that samples carry (credit.py). Does not import verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

ADVANTAGES: Final = "advantages_of_tokens"
"""Key of a sample's `extra_fields`: float32, one for each token of its response."""


class Carried:
    """An estimator of verl. It has to be told what the rows carry, because verl passes rewards and masks alone to estimators."""

    def __init__(self) -> None:
        self.rows: Sequence[Mapping[str, Any]] = []
        """The `extra_fields` of the batch's rows, in their order."""

    def __call__(self, *, token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Return the advantages of the tokens and, as there is no critic, the same as returns: float32 [rows, tokens], 0 by the mask."""
        found = torch.zeros_like(token_level_rewards)
        for place, (row, mask) in enumerate(zip(self.rows, response_mask, strict=True)):
            if mask.any():  # rows that verl pads a batch with have the fields of others
                own = torch.as_tensor(row[ADVANTAGES], dtype=found.dtype, device=found.device)
                found[place, : len(own)] = own
        found *= response_mask
        return found, found.clone()


CARRIED: Final = Carried()
"""The one of a process."""
