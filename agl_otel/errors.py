"""The error tree. Every message says what happened, to which id or path, and what to do next.

    AglError
    ├── UsageError            an invalid call: fix it (exit code 2); also a ValueError, which callers of
    │   │                     Agent Lightning 0.3 catch
    │   ├── SettingsError     a setting, flag, environment variable or job file is wrong
    │   ├── InvalidIdError    an id does not match conventions.ID_PATTERN
    │   └── NotFoundError     no such rollout, attempt, resources or worker
    ├── ConflictError         the call is not allowed in the current state
    │   ├── FencedError       the claim is void: a newer attempt exists, or the rollout was cancelled
    │   └── InUseError        a port, data directory or lease is in use by another process
    ├── UnavailableError      a service is down, overloaded or still starting: try again
    │   └── DiskFullError     its disk is full: a retry is useless until there is room
    ├── DataError             invalid data: malformed OTLP, a row that ClickHouse refuses, a damaged log
    │   ├── TooLargeError     a request is too large, or takes too long to unpack
    │   ├── EncodingError     an unsupported Content-Encoding
    │   ├── CrowdedError      a request has too many parts, or its rows would be too large
    │   └── SpanShapeError    a span's attributes do not have the shape of its convention; also a ValueError, as in 0.3
    ├── QueryError            ClickHouse (or the read-only guard before it) refused a query
    ├── AgentError            the user's agent or grader failed: data about one rollout, never the end of a run
    │   └── AgentTimeoutError it exceeded its time limit
    ├── TrainingError         a training process ended with an error
    ├── ModelServerError      the model server answered with an error or not at all
    ├── SwitchedOffError      a setting has switched off what is asked for
    └── RefusedError          the proxy does not forward a model call: attempt over, budget spent, wrong key, paused

`grpc_status` and `http_status` are the only places that map errors to the wire; `from_grpc` maps back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a write to a disk without room."""
DISK_IS_FULL: Final = "disk is full"
"""Words of every DiskFullError, also where an agent quotes the answer of a service."""


class AglError(Exception):
    """Base of all errors that this package raises on purpose."""

    retryable: bool = False
    """Whether the same call may succeed later."""


class UsageError(AglError, ValueError):
    """The call is invalid."""


class SettingsError(UsageError):
    """A setting, flag, environment variable or job file is wrong."""


class InvalidIdError(UsageError):
    """An id that may not travel in paths, headers and the environment."""


class NotFoundError(UsageError):
    """No such rollout, attempt, resources or worker."""


class ConflictError(AglError):
    """The call is not allowed in the current state."""


class FencedError(ConflictError):
    """The claim is void: a newer attempt exists, or the rollout was cancelled."""


class InUseError(ConflictError):
    """A port, data directory or lease is in use by another process."""

    @classmethod
    def of_port(cls, host: str, port: int, why: OSError | str, setting: str) -> InUseError:
        """Return the error for a port that cannot be listened on; `setting` is its variable."""
        number = getattr(why, "errno", None) or 0  # negative for an unknown host name
        reason = os.strerror(number) if number > 0 else why
        return cls(f"cannot listen on {host}:{port} ({reason}): stop what runs there, or choose another with {setting}")


class UnavailableError(AglError):
    """A service is down, overloaded or still starting."""

    retryable = True


class DiskFullError(UnavailableError):
    """A disk is full. Clients do not retry it, since that would only delay the message."""

    @classmethod
    def of(cls, what: str, why: object) -> DiskFullError:
        """Return the error for `what`, which is on the full disk."""
        return cls(
            f"{what} cannot be written, its {DISK_IS_FULL} ({why}): check the disk's free space and make room "
            "(`agl-otel disk` shows what of a data directory is large), then try again"
        )


def unwritable(what: str, error: OSError) -> str:
    """Return the message for a file or folder that cannot be written, with the remedy if the disk is full."""
    why = error.strerror or error
    return str(DiskFullError.of(what, why)) if error.errno in FULL_DISK else f"{what} cannot be written: {why}"


@contextmanager
def writing(what: str) -> Generator[None]:
    """Raise SettingsError with the message of `unwritable` where the block, which writes `what`, raises an OSError."""
    try:
        yield
    except OSError as error:
        raise SettingsError(unwritable(what, error)) from error


class DataError(AglError):
    """Bytes or rows are invalid."""


class TooLargeError(DataError):
    """A request is too large, or takes too long to unpack."""


class EncodingError(DataError):
    """A Content-Encoding is not supported."""


class CrowdedError(DataError):
    """A request has too many parts, or its rows would be too large."""


class SpanShapeError(DataError, ValueError):
    """A span's attributes do not have the shape of its convention."""


class QueryError(AglError):
    """ClickHouse, or the read-only guard before it, refused a query; `code` is ClickHouse's number (0 if it gave none).

    On the wire it is a service's own failure; where a caller wrote the query, the service makes a UsageError of it.
    """

    code = 0


class AgentError(AglError):
    """The user's agent or grader failed on one rollout."""


class AgentTimeoutError(AgentError):
    """The agent exceeded its time limit and was ended."""


class TrainingError(AglError):
    """A training process ended with an error."""


class ModelServerError(AglError):
    """The model server answered with an error or not at all."""

    retryable = True


class SwitchedOffError(AglError):
    """A setting of the service has switched off what is asked for."""


class RefusedError(AglError):
    """The proxy does not forward a model call: the attempt is over, its budget is spent, the key is another attempt's, or it is paused."""

    def __init__(self, message: str, *, status: int = 403, code: str = "refused", retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; one that SDKs retry (429) only with `retry_seconds`."""
        self.code = code
        self.retry_seconds = retry_seconds


_GRPC: Final[tuple[tuple[type[AglError], str], ...]] = (  # the most specific first
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
    (SwitchedOffError, "UNIMPLEMENTED"),
)
_HTTP: Final = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 507,
    "UNAVAILABLE": 503,
    "UNIMPLEMENTED": 501,
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
    """Return the name of the gRPC status code for `error` (`INTERNAL` for errors of other packages)."""
    return next((code for kind, code in _GRPC if isinstance(error, kind)), "INTERNAL")


def http_status(error: BaseException) -> int:
    """Return the HTTP status for `error`."""
    if isinstance(error, TooLargeError | EncodingError):
        return 413 if isinstance(error, TooLargeError) else 415
    return error.status if isinstance(error, RefusedError) else _HTTP[grpc_status(error)]


def from_grpc(code: str, details: str) -> AglError:
    """Return the error for a gRPC status, with `details` as its message."""
    return _FROM_GRPC.get(code, AglError)(details)
