"""The error tree. Every message says what happened, to which id or path, and what to do next.

    AglError
    ├── UsageError            the caller asked for something that cannot be: fix the call (exit code 2); also a ValueError,
    │   │                     which is what callers of Agent Lightning 0.3 catch
    │   ├── SettingsError     a setting, flag, environment variable or job file is wrong
    │   ├── InvalidIdError    an id breaks the rule of semconv.ID_PATTERN
    │   └── NotFoundError     no such rollout, attempt, resources or worker
    ├── ConflictError         the state does not allow it
    │   ├── FencedError       a newer attempt exists, or the rollout was cancelled: this claim is void
    │   └── InUseError        a port, data directory or lease is held by somebody else
    ├── UnavailableError      a service is away, full or still starting: try again
    │   └── DiskFullError     its disk is full: nothing is tried again until somebody makes room
    ├── DataError             bytes that cannot be taken: malformed OTLP, a row that ClickHouse refuses, a damaged log
    │   ├── TooLargeError     a request is larger than is taken, or takes too long to unpack
    │   ├── EncodingError     its Content-Encoding is none of ours
    │   └── SpanShapeError    attributes of a span have another shape than its convention says; also a ValueError, as in 0.3
    ├── QueryError            ClickHouse (or the read-only guard before it) refused a query
    ├── AgentError            the user's agent or grader failed: data about one rollout, never the end of a run
    │   └── AgentTimeoutError it ran past its time
    ├── ModelServerError      the model's server answered an error or not at all
    └── RefusedError          the proxy does not forward a model call: attempt over, budget spent, wrong key, paused

`grpc_status` and `http_status` are the only places that map errors to the wire; `from_grpc` maps back.
"""

from __future__ import annotations

import errno
import os
from typing import Final

FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a write to a disk without room fails with."""


class AglError(Exception):
    """Base of every error that this package raises on purpose."""

    retryable: bool = False
    """Whether the same call may succeed later without a change."""


class UsageError(AglError, ValueError):
    """The caller asked for something that cannot be."""


class SettingsError(UsageError):
    """A setting, flag, environment variable or job file is wrong."""


class InvalidIdError(UsageError):
    """An id that may not travel in paths, headers and the environment."""


class NotFoundError(UsageError):
    """No such rollout, attempt, resources or worker."""


class ConflictError(AglError):
    """The state of the thing does not allow the call."""


class FencedError(ConflictError):
    """The claim is void: a newer attempt exists, or the rollout was cancelled."""


class InUseError(ConflictError):
    """A port, data directory or lease is held by somebody else."""

    @classmethod
    def of_port(cls, host: str, port: int, why: OSError | str, setting: str) -> InUseError:
        """Of a port that cannot be listened on; `setting` is the variable that names it."""
        number = getattr(why, "errno", None) or 0  # of a name that is not found it is negative
        reason = os.strerror(number) if number > 0 else why
        return cls(f"cannot listen on {host}:{port} ({reason}): stop what runs there, or choose another with {setting}")


class UnavailableError(AglError):
    """A service is away, full or still starting."""

    retryable = True


class DiskFullError(UnavailableError):
    """A disk has no room. Callers hear of it at once: the client's own retries would only hide it for a while."""

    @classmethod
    def of(cls, what: str, why: object) -> DiskFullError:
        """`what` lies on the disk that is full."""
        return cls(f"{what} cannot be written, its disk is full ({why}): check the disk's free space and make room (`agl-otel disk` shows "
                   "what of a data directory is large), then try again")  # fmt: skip


def unwritable(what: str, error: OSError) -> str:
    """What is said of a file or folder that the disk refuses to write, with the remedy where the disk is full."""
    why = error.strerror or error
    return str(DiskFullError.of(what, why)) if error.errno in FULL_DISK else f"{what} cannot be written: {why}"


class DataError(AglError):
    """Bytes or rows that cannot be taken."""


class TooLargeError(DataError):
    """A request beyond what is taken of one, or beyond what may be spent on unpacking it."""


class EncodingError(DataError):
    """A Content-Encoding that is not taken."""


class SpanShapeError(DataError, ValueError):
    """The attributes of a span have another shape than its convention says."""


class QueryError(AglError):
    """ClickHouse, or the read-only guard before it, refused a query; `code` is ClickHouse's number (0 where none was given)."""

    code = 0


class AgentError(AglError):
    """The user's agent or grader failed on one rollout."""


class AgentTimeoutError(AgentError):
    """The agent ran past its time and was ended."""


class ModelServerError(AglError):
    """The model's server answered an error, or not at all."""

    retryable = True


class RefusedError(AglError):
    """The proxy does not forward a model call: the attempt is over, its budget is spent, the key is another attempt's, or it is paused."""

    def __init__(self, message: str, *, status: int = 403, code: str = "refused", retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status: one that SDKs retry (429) only where `retry_seconds` says when."""
        self.code = code
        self.retry_seconds = retry_seconds


_GRPC: Final[tuple[tuple[type[AglError], str], ...]] = (  # the most special first
    (InvalidIdError, "INVALID_ARGUMENT"),
    (NotFoundError, "NOT_FOUND"),
    (UsageError, "INVALID_ARGUMENT"),
    (FencedError, "ABORTED"),
    (InUseError, "ALREADY_EXISTS"),
    (ConflictError, "FAILED_PRECONDITION"),
    (DiskFullError, "RESOURCE_EXHAUSTED"),
    (UnavailableError, "UNAVAILABLE"),
    (DataError, "INVALID_ARGUMENT"),
    (RefusedError, "FAILED_PRECONDITION"),
    (QueryError, "INVALID_ARGUMENT"),
)
_HTTP: Final = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 507,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
}
_FROM_GRPC: Final[dict[str, type[AglError]]] = {
    "INVALID_ARGUMENT": UsageError,
    "NOT_FOUND": NotFoundError,
    "ABORTED": FencedError,
    "ALREADY_EXISTS": InUseError,
    "FAILED_PRECONDITION": ConflictError,
    "RESOURCE_EXHAUSTED": DiskFullError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": UnavailableError,
    "UNAUTHENTICATED": SettingsError,
}


def grpc_status(error: BaseException) -> str:
    """The name of the gRPC status code for `error` (`INTERNAL` for what is not ours)."""
    return next((code for kind, code in _GRPC if isinstance(error, kind)), "INTERNAL")


def http_status(error: BaseException) -> int:
    """The HTTP status for `error`."""
    if isinstance(error, TooLargeError | EncodingError):
        return 413 if isinstance(error, TooLargeError) else 415
    return error.status if isinstance(error, RefusedError) else _HTTP[grpc_status(error)]


def from_grpc(code: str, details: str) -> AglError:
    """The error that a gRPC status stands for; `details` becomes its message."""
    return _FROM_GRPC.get(code, AglError)(details)
