"""The deduplication tokens of a batch's inserts, so that an insert that is sent twice, because its response was lost, is stored once.

Each token names the batch and the part of it that is inserted; a retry has the same token, even after a restart. ClickHouse therefore
stores only the first of two equal inserts, even if the second runs minutes later. For this, a batch keeps to the code path of its first
insert (store_batch.py): rows that ClickHouse builds and rows that are built here have different tokens.

ClickHouse records a token before it stores the rows. After a crash it may therefore skip rows that it does not have, and on a full disk it
may report success. Only if it has responded and rows are missing all the same do they get another token. That token contains an id of this
process, because the tokens that an earlier process used are unknown.
"""

from __future__ import annotations

from collections import Counter
from typing import Final
from uuid import uuid4

ANSWERED_REFUSALS: Final = 3
"""Refusals to build the rows of a batch in doubt after which they are built here: an earlier insert may still be running."""


class DedupTokens:
    """The tokens of the current batch; a writer inserts one batch after the other."""

    def __init__(self) -> None:
        self._process = uuid4().hex[:12]
        self._batch_id = 0
        self._skipped: Counter[str] = Counter()
        self._refused = 0
        self.built_here = False
        """Whether the rows of the batch are built here from now on."""

    def begin(self, batch_id: int) -> None:
        """Start a try of this batch, the first or another."""
        if batch_id != self._batch_id:
            self._batch_id, self._refused, self.built_here = batch_id, 0, False
            self._skipped.clear()

    def token(self, part: str) -> str:
        """Return the token for an insert of this part of the batch."""
        again = self._skipped[part]
        return f"{self._batch_id}-{part}" + (f"-{self._process}-{again}" if again else "")

    def skipped(self, part: str) -> None:
        """Note that an insert of `part` reported success but its rows are missing."""
        self._skipped[part] += 1

    def refused(self, *, is_data_error: bool, in_doubt: bool) -> bool:
        """Note that ClickHouse refused to build the batch's rows; return whether they are built here from now on."""
        self._refused += 1
        self.built_here = is_data_error or not in_doubt or self._refused >= ANSWERED_REFUSALS
        return self.built_here
