"""`operation`, a decorator or context manager that makes a span with inputs and output of a call or block. Also 0.3's `reward`."""

from __future__ import annotations

import functools
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, TypeVar, cast, overload

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from agl_otel_hook import conventions
from agl_otel_hook.attributes import flatten_attributes, sanitize_attributes
from agl_otel_hook.emit.emitters import TRACER, as_number, emit_reward, warn_where_lost
from agl_otel_hook.emit.fields import SpanCoreFields, TraceStatus

Function = TypeVar("Function", bound=Callable[..., Any])
_ARGS: Final = "args"
_KWARGS: Final = "kwargs"
_log = logging.getLogger(__name__)


class OperationContext:
    """One operation. A `with` block becomes one span; as a decorator, it makes a span of every call of the function."""

    def __init__(self, attributes: Mapping[str, Any], propagate: bool = True) -> None:
        self._initial = sanitize_attributes(flatten_attributes(attributes))
        self._propagate = propagate
        self._open: AbstractContextManager[trace.Span] | None = None
        self._recording: trace.Span | None = None
        self._fields = SpanCoreFields(name=conventions.SPAN_OPERATION)

    def __enter__(self) -> OperationContext:
        self._fields = SpanCoreFields(name=conventions.SPAN_OPERATION, attributes=dict(self._initial), start_time=time.time())
        if self._propagate:
            self._open = trace.get_tracer(TRACER).start_as_current_span(
                conventions.SPAN_OPERATION, attributes=self._initial, record_exception=False, set_status_on_exception=False
            )
            self._recording = self._open.__enter__()
            warn_where_lost(self._recording)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None) -> None:
        status = TraceStatus(status_code="OK") if error is None else TraceStatus(status_code="ERROR", description=f"{error}")
        self._fields.status, self._fields.end_time = status, time.time()
        if self._open is not None and self._recording is not None:
            if error is not None:
                self._recording.record_exception(error)
            self._recording.set_status(Status(StatusCode.OK) if error is None else Status(StatusCode.ERROR, f"{error}"))
            self._open.__exit__(kind, error, stack)
            self._open = self._recording = None

    def span(self) -> SpanCoreFields:
        """Return the fields of the span. Raises RuntimeError before the end of the block."""
        if self._fields.end_time is None:
            raise RuntimeError("the operation has not ended: ask after the with block")
        return self._fields

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record inputs: positional ones by index, others by name. Raises RuntimeError outside the block."""
        self._record({conventions.OPERATION_INPUT: {**({_ARGS: _by_number(args)} if args else {}), **kwargs}})

    def set_output(self, output: Any) -> None:
        """Record the output. Raises RuntimeError outside the block."""
        self._record({conventions.OPERATION_OUTPUT: output})

    def __call__(self, function: Function) -> Function:
        """Wrap a function, sync or async: every call makes a span with its arguments and its result."""
        attributes = {conventions.OPERATION_NAME: function.__name__, **self._initial}
        signature = inspect.signature(function)

        @functools.wraps(function)
        async def traced_async(*args: Any, **kwargs: Any) -> Any:
            with OperationContext(attributes, self._propagate) as made:
                made._record({conventions.OPERATION_INPUT: _bound(signature, args, kwargs)})
                result = await function(*args, **kwargs)
                made.set_output(result)
                return result

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with OperationContext(attributes, self._propagate) as made:
                made._record({conventions.OPERATION_INPUT: _bound(signature, args, kwargs)})
                result = function(*args, **kwargs)
                made.set_output(result)
                return result

        return cast("Function", traced_async if inspect.iscoroutinefunction(function) else traced)

    def _record(self, nested: Mapping[str, Any]) -> None:
        if self._fields.start_time is None or self._fields.end_time is not None:
            raise RuntimeError("inputs and outputs are recorded inside the with block of an operation")
        attributes = sanitize_attributes(flatten_attributes(nested))
        self._fields.attributes.update(attributes)
        if self._recording is not None:
            self._recording.set_attributes(attributes)


@overload
def operation(fn: Function, *, propagate: bool = True, name: str | None = None, **attributes: Any) -> Function: ...
@overload
def operation(fn: None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any) -> OperationContext: ...
def operation(
    fn: Function | None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Function | OperationContext:
    """Make a span of each call of a function (`@operation`, `@operation(name=…)`) or of a block (`with operation(…) as op`).

    Args:
        fn: the function, if used as a decorator without arguments.
        propagate: if False, no span is made; only its fields are collected.
        name: of the operation; default is the function's name.
        attributes: further attributes of the span.

    Raises ValueError where the name is given twice, or `fn` is not a function.
    """
    if name is not None:
        if conventions.OPERATION_NAME in attributes:
            raise ValueError(f"an operation has one name: give name= or the attribute {conventions.OPERATION_NAME}")
        attributes[conventions.OPERATION_NAME] = name
    context = OperationContext(attributes, propagate)
    if fn is None:
        return context
    if not callable(fn):
        raise ValueError(f"operation takes a function, not {fn!r}; a name is given as name=")
    return context(fn)


def reward(function: Function) -> Function:
    """Wrap a function, sync or async, to emit its result as a reward. Deprecated since 0.3: call emit_reward."""
    warnings.warn("the decorator `reward` is deprecated: call emit_reward(value) instead", DeprecationWarning, stacklevel=2)

    def emit(result: Any) -> Any:
        if as_number(result) is not None:
            emit_reward(result)
        elif result is not None:
            _log.warning("%s returned %r, which is no number: no reward was emitted", function.__name__, result)
        return result

    @functools.wraps(function)
    async def rewarded_async(*args: Any, **kwargs: Any) -> Any:
        return emit(await function(*args, **kwargs))

    @functools.wraps(function)
    def rewarded(*args: Any, **kwargs: Any) -> Any:
        return emit(function(*args, **kwargs))

    return cast("Function", rewarded_async if inspect.iscoroutinefunction(function) else rewarded)


def _by_number(items: tuple[Any, ...]) -> dict[str, Any]:
    return {str(index): item for index, item in enumerate(items)}


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by parameter name, with defaults; by index if they do not fit the signature (the call itself will raise)."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {_ARGS: _by_number(args), _KWARGS: kwargs}
    bound.apply_defaults()
    variable = {p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL}
    return {name: _by_number(value) if name in variable else value for name, value in bound.arguments.items()}
