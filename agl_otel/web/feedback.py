"""POST /v1/agl/feedback: rewards, texts and corrections after the fact, also by the users of an agent, whose keys open nothing else."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final

from aiohttp import web
from pydantic import RootModel

from agl_otel.compat.stores import LightningStore
from agl_otel.errors import UsageError
from agl_otel.net.auth import Subject, bearer, refusal, subject_of
from agl_otel.types.feedback import TARGETS, Feedback, GivenFeedback
from agl_otel.web.routes import PREFIX, Route, body_of

PATH: Final = "/feedback"
FEEDBACK_PER_MINUTE: Final = 60
USERS_OF_A_PROGRAM: Final = 100
"""A token that is bound to nothing sends for so many users: a program has it, and no browser."""
LARGEST_BYTES: Final = 1 << 20
"""The largest body with a token or key for feedback."""
USER: Final = "user"
"""The source of feedback by a bound key."""
USERS_REWARD: Final = 1.0
"""The greatest reward, of either sign, with a bound key: one user cannot outweigh all other rewards."""
_SUBJECT: Final = web.RequestKey("feedback_subject", Subject)
_MOST_KEYS: Final = 10_000


class _Fields(RootModel[dict[str, Any]]):
    """The fields of Feedback that the holder of a bound key gives."""


class Limits:
    """Allows each key `per_minute` calls in a minute (a token bucket of that size). Not for several threads."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, key: str, users: int = 1) -> float:
        """Count a call of a key for so many users; return 0, or how long it must wait for its next one."""
        now, most = time.monotonic(), self._per_minute * users
        left, then = self._left.pop(key, (float(most), now))
        left = min(most, left + (now - then) * most / 60)
        wait = 0.0 if left >= 1 else (1 - left) * 60 / most
        self._left[key] = (left if wait else left - 1, now)
        if len(self._left) > _MOST_KEYS:
            self._left.popitem(last=False)
        return wait


LIMITS: Final = web.AppKey("feedback_limits", Limits)


def admit(request: web.Request, token: str) -> bool:
    """Return whether a request is feedback by a token or key that is made for it.

    Raises HTTPTooManyRequests, HTTPRequestEntityTooLarge, and HTTPUnauthorized for a key that has expired.
    """
    if not token or request.method != "POST" or request.path != PREFIX + PATH:
        return False
    given = bearer(request.headers)
    subject = subject_of(token, given)
    if isinstance(subject, str):
        raise web.HTTPUnauthorized(text=subject)
    if subject is None and (refusal(token, given, "feedback") is not None or refusal(token, given, "web") is None):
        return False
    if request.content_length is None or request.content_length > LARGEST_BYTES:
        raise web.HTTPRequestEntityTooLarge(LARGEST_BYTES, request.content_length or 0)
    if wait := request.app[LIMITS].wait_seconds(given, 1 if subject is not None else USERS_OF_A_PROGRAM):
        seconds = int(wait) + 1
        text = f"too much feedback with this key (AGL_FEEDBACK_PER_MINUTE): try again in {seconds} s"
        raise web.HTTPTooManyRequests(text=text, headers={"Retry-After": str(seconds)})
    if subject is not None:
        request[_SUBJECT] = subject
    return True


async def _feedback(store: LightningStore, request: web.Request) -> Any:
    subject: Subject | None = request.get(_SUBJECT)
    if subject is None:
        return await store.add_feedback(await body_of(request, Feedback))
    made = await store.add_feedback(_about(subject, (await body_of(request, _Fields)).root))
    return GivenFeedback(id=made.id, is_new=made.is_new)  # whose key may only write is not told which attempt it is


def _about(subject: Subject, fields: dict[str, Any]) -> Feedback:
    """Return feedback by the holder of a bound key, who names neither its subject nor its source, and whose rewards are within -1 and 1."""
    own = f"{subject.kind}_id"
    for name, value in ((own, subject.name), ("source", USER)):
        if fields.setdefault(name, value) != value:
            raise web.HTTPForbidden(text=f"this key gives feedback with {name} {value!r} only")
    if others := sorted(TARGETS & fields.keys() - {own}):
        raise web.HTTPForbidden(text=f"this key gives feedback with {own} {subject.name!r} only: leave out {', '.join(others)}")
    feedback = Feedback.of(fields, "the body")
    if feedback.value is not None and abs(feedback.value) > USERS_REWARD:
        raise UsageError(f"the value is {feedback.value:g}: this key gives rewards from -{USERS_REWARD:g} to {USERS_REWARD:g}")
    return feedback


FEEDBACK: Final = (
    Route("POST", PATH, _feedback, "Reward, comment or correct what an agent did, after the fact.", Feedback, GivenFeedback, 201),
)
"""The route of feedback."""
