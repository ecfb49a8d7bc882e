"""What the tries to insert one batch have taught, so that an insert which is sent twice, because its answer never came, is stored once.

Each insert carries a deduplication token that names the batch and the part of it that is inserted: a retry carries the same one, after
a restart too. So whichever of two equal inserts ClickHouse runs second, minutes later maybe, stores nothing. For that a batch keeps to
the road (store_batch.py) that it has once been sent on: rows that ClickHouse builds and rows that are built here have different tokens.

ClickHouse notes a token before it keeps the rows: after a crash it may skip rows that it does not have, and a full disk may be answered
with success. Only where it has answered, and rows are missing all the same, do they get another token; one of this process's own,
because which ones an earlier process used up is not known.
"""

from __future__ import annotations

from collections import Counter
from typing import Final
from uuid import uuid4

ANSWERED_REFUSALS: Final = 3
"""So often ClickHouse may refuse to build the rows of a batch in doubt before they are built here: an earlier insert may still run."""


class Tries:
    """Of the batch at work; a writer inserts one after the other."""

    def __init__(self) -> None:
        self._process = uuid4().hex[:12]
        self._batch_id = 0
        self._skipped: Counter[str] = Counter()
        self._refused = 0
        self.built_here = False
        """Whether its rows are built here for good."""

    def begin(self, batch_id: int) -> None:
        """Another try of this batch, or the first."""
        if batch_id != self._batch_id:
            self._batch_id, self._refused, self.built_here = batch_id, 0, False
            self._skipped.clear()

    def token(self, part: str) -> str:
        """The token for an insert of this part of the batch."""
        again = self._skipped[part]
        return f"{self._batch_id}-{part}" + (f"-{self._process}-{again}" if again else "")

    def skipped(self, part: str) -> None:
        """ClickHouse answered an insert of `part` with success, and rows of it are not there."""
        self._skipped[part] += 1

    def refused(self, *, about_the_data: bool, in_doubt: bool) -> bool:
        """ClickHouse refused to build the batch's rows; whether they are built here from now on."""
        self._refused += 1
        self.built_here = about_the_data or not in_doubt or self._refused >= ANSWERED_REFUSALS
        return self.built_here
