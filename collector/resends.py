"""The responses to recent requests, for detecting resends: an SDK that got no response sends the same bytes again.

For ten minutes a resend gets the outcome of the first request and is not stored again (remembered.py). If there are more requests than a
collector can take in that time, the oldest are dropped earlier. After a restart they are read from the write-ahead log and, for requests
that the log may delete, from a journal beside it. The journal consists of framed files (framed.py). It gets the responses of a batch when
the batch is stored, before its segments are deleted; a file is deleted when all its entries are old. It contains only hashes and counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agl_otel.collector.identities import Identities
from agl_otel.collector.journal import ALREADY, Request
from agl_otel.collector.policy import DROPPED
from agl_otel.collector.unreadable import UNREADABLE
from agl_otel.errors import SettingsError, UnavailableError, unwritable
from agl_otel.service import framed
from agl_otel.service.framed import Frame, FramedFile

RESEND_SECONDS: Final = 600.0  # SDKs give up on a request after a minute; senders with a queue on disk come back later
MAX_REMEMBERED: Final = 1_250_000
"""Ten minutes of 1,900 requests a second: twice what one collector can take."""
MAX_FILES: Final = 3
_ANSWERS: Final = 1
_IN_A_RECORD: Final = 10_000
_SUFFIX: Final = ".resends"
_NO_REJECTION: Final = frozenset({"", DROPPED, ALREADY})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The response to a request."""

    rejected: int = 0
    """Number of spans or records rejected."""
    message: str = ""
    """The reasons, with counts."""
    position: int | None = None
    """Log position of the request; None if none of it was kept or all of it is stored."""

    @classmethod
    def of(cls, request: Request, position: int | None = None) -> Outcome:
        """Build the response to a request."""
        reasons = rejections(request.identities, request.unreadable)
        return cls(sum(reasons.values()), reason_text(reasons), position)


class PendingOutcome:
    """The response to a request that is not on disk yet. Any number of clients may wait for it, and each may stop waiting."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[Outcome]] = []

    def outcome(self) -> asyncio.Future[Outcome]:
        """Wait for the response. Raises what `fail` gets."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def settle(self, outcome: Outcome) -> None:
        """Answer all that wait."""
        for future in self._waiting:
            if not future.done():
                future.set_result(outcome)

    def fail(self, error: BaseException) -> None:
        """Let all that wait raise an error."""
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)


class Answered(NamedTuple):
    """A request that has got its response."""

    key: int
    """Identifies a resend of the request."""
    received_ms: int
    outcome: Outcome


def rejections(identities: Identities, unreadable: int = 0) -> dict[str, int]:
    """Return {reason: number of items rejected for it}; `unreadable` items were removed before."""
    reasons = {UNREADABLE: unreadable} if unreadable else {}
    for count, identity in identities.runs:
        if identity.reason not in _NO_REJECTION:
            reasons[identity.reason] = reasons.get(identity.reason, 0) + count
    return reasons


def reason_text(reasons: Mapping[str, int]) -> str:
    """Format the reasons for clients."""
    return "; ".join(f"{count} × {reason}" for reason, count in reasons.items())


class ResendJournal:
    """The journal in a folder. Opening it reads the existing files (`known`) and copies the entries that are not old to a new file.

    Only one thread may add at a time. Raises SettingsError if the folder cannot be used.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time, max_entries: int = MAX_REMEMBERED) -> None:
        self._folder = folder
        self._clock = clock
        self._max_entries = max_entries
        self._files: list[Path] = []
        self._file: FramedFile | None = None
        self._entries = 0
        self._began_at = 0.0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = sorted(folder.glob(f"*{_SUFFIX}"))
            entries = [entry for path in before for entry in framed.mend(path) if isinstance(entry, Frame)]
            self._number = int(before[-1].stem) + 1 if before else 0
            self.known = self._recent(answer for entry in entries for answer in _unpack(entry.payload))
            """The responses read when the journal was opened, oldest first."""
            if self.known:
                self._add(self.known)
            for path in before:
                framed.remove(path)
        except OSError as error:
            raise SettingsError(f"cannot use the journal of resends in {folder}: {error.strerror or error}") from None

    def add(self, requests: Sequence[Request]) -> None:
        """Append the responses to these requests; they are on disk on return. Raises UnavailableError; the call may then be repeated."""
        answers = self._recent(Answered(each.key, each.received_ms, Outcome.of(each)) for each in requests if each.key)
        if not answers:
            return
        try:
            self._add(answers)
        except OSError as error:
            self.close()  # the contents of this file are uncertain now; the next call begins another
            raise UnavailableError(unwritable(f"the journal of resends in {self._folder}", error)) from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _recent(self, answers: Iterable[Answered]) -> list[Answered]:
        oldest = (self._clock() - RESEND_SECONDS) * 1000
        return sorted((each for each in answers if each.received_ms > oldest), key=lambda each: each.received_ms)[-self._max_entries :]

    def _add(self, answers: Sequence[Answered]) -> None:
        now = self._clock()
        if self._file is None or now - self._began_at > RESEND_SECONDS or self._entries > self._max_entries // 2:
            self._begin(now)
        file = self._file
        assert file is not None  # _begin opened it
        try:
            for start in range(0, len(answers), _IN_A_RECORD):
                file.write([(_ANSWERS, _pack(answers[start : start + _IN_A_RECORD]))])
            file.sync()
        except OSError:
            if not self._entries:
                file.discard()
                self._files.pop()
            raise
        self._entries += len(answers)

    def _begin(self, now: float) -> None:
        """Start another file and delete old ones: all but the last if it is more than ten minutes old, otherwise all but MAX_FILES - 1."""
        old = self._file is not None and now - self._began_at > RESEND_SECONDS
        self.close()
        while len(self._files) > (1 if old else MAX_FILES - 1):
            framed.remove(self._files.pop(0))
        path = self._folder / f"{self._number:08d}{_SUFFIX}"
        self._file = FramedFile(path)
        self._number += 1
        self._files.append(path)
        self._entries, self._began_at = 0, now


def _pack(answers: Iterable[Answered]) -> bytes:
    rows = [[each.key, each.received_ms, each.outcome.rejected, each.outcome.message] for each in answers]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()


def _unpack(payload: bytes) -> list[Answered]:
    plain = Outcome()  # shared: there may be a million
    return [
        Answered(key, received_ms, Outcome(rejected, message) if rejected or message else plain)
        for key, received_ms, rejected, message in json.loads(payload)
    ]
