"""The deduplication tokens of a batch's inserts, so that an insert that is sent twice, because its response was lost, is stored once.

Each token names the batch and the part of it that is inserted; a retry has the same token, even after a restart. ClickHouse therefore
stores only the first of two equal inserts, even if the second runs minutes later.

ClickHouse records a token before it stores the rows. After a crash it may therefore skip rows that it does not have, and on a full disk it
may report success. Only if it has responded and rows are missing all the same do they get another token. That token contains an id of this
process, because the tokens that an earlier process used are unknown.
"""

from __future__ import annotations

from collections import Counter
from uuid import uuid4


class DedupTokens:
    """The tokens of a collector's inserts."""

    def __init__(self) -> None:
        self._process = uuid4().hex[:12]
        self._skipped: Counter[tuple[int, str]] = Counter()

    def token(self, batch_id: int, part: str) -> str:
        """Return the token for an insert of this part of the batch."""
        again = self._skipped[batch_id, part]
        return f"{batch_id}-{part}" + (f"-{self._process}-{again}" if again else "")

    def skipped(self, batch_id: int, part: str) -> None:
        """Note that an insert of `part` reported success but its rows are missing."""
        self._skipped[batch_id, part] += 1

    def forget(self, batch_id: int) -> None:
        """Forget a batch that is stored."""
        for each in [each for each in self._skipped if each[0] == batch_id]:
            del self._skipped[each]
