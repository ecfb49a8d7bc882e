"""The editor: a model that criticises and edits prompts, behind any client with OpenAI's `chat.completions.create`.

Every answer is journaled before it is used. Calls, tokens and failures are counted over the whole run, including earlier starts. A reached
limit, or an editor that keeps failing, ends the search with the best candidate so far.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn

from agl_otel.algorithms.prompts.journal import Journal, digest_of
from agl_otel.errors import AglError

FAILURES_IN_A_ROW: Final = 5  # ends the search; the client has retried each call already
CHARACTERS_PER_TOKEN: Final = 4  # estimate, for servers that report no usage
_log = logging.getLogger(__name__)


class SearchOverError(AglError):
    """The search ends with the best candidate so far, because a limit on its spending is reached or the editor keeps failing."""


class EditorError(AglError):
    """One call of the editor failed."""

    retryable = True


@dataclass
class Spend:
    """What a run has spent so far, including earlier starts."""

    editor_calls: int = 0
    editor_tokens: int = 0
    """As reported by the server, else estimated from the number of characters."""
    editor_failures: int = 0
    rollouts: int = 0

    def described(self) -> dict[str, int]:
        """Return the counts as JSON."""
        return asdict(self)


class Editor:
    """Calls the editor's models.

    Args:
        client: an AsyncOpenAI, or any object with its `chat.completions.create`.
        journal: records the answers.
        spend: counts calls, tokens and failures.
        max_calls: limit on calls, including failed ones; None: no limit.
        max_tokens: no call starts once this many tokens are spent, so the last one may exceed it; None: no limit.
        temperature: sampling temperature of every call.
    """

    def __init__(
        self, client: Any, journal: Journal, spend: Spend, *, max_calls: int | None, max_tokens: int | None, temperature: float
    ) -> None:
        self._client = client
        self._journal = journal
        self._spend = spend
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._failed_in_a_row: list[str] = []

    async def ask(self, name: str, model: str, inputs: Any, prompt: Callable[[], Awaitable[str]]) -> str:
        """Return the model's answer, which may be empty.

        Args:
            name: name of the answer in the journal.
            model: name of the model.
            inputs: what the prompt is made from, as JSON: a recorded answer to equal inputs is used again.
            prompt: makes the prompt; called only where there is no recorded answer.

        Raises EditorError where the call failed, SearchOverError where no further call is allowed.
        """
        self.check()
        digest = digest_of(model, inputs)
        known: dict[str, Any] | None = self._journal.find(name, digest)
        if known is None:
            known = await self._call(model, await prompt())
            self._journal.note(name, digest, known)
        self._spend.editor_calls += 1
        self._spend.editor_tokens += known["tokens"]
        if known["error"]:
            self._failed(name, known["error"])
        self._failed_in_a_row.clear()
        return known["text"].strip()

    @property
    def fails(self) -> bool:
        """Whether its last call failed."""
        return bool(self._failed_in_a_row)

    def check(self) -> None:
        """Raise SearchOverError where no further call is allowed."""
        if self._max_calls is not None and self._spend.editor_calls >= self._max_calls:
            raise SearchOverError(f"max_editor_calls = {self._max_calls} are made")
        if self._max_tokens is not None and self._spend.editor_tokens >= self._max_tokens:
            raise SearchOverError(f"max_editor_tokens = {self._max_tokens} are spent")

    def _failed(self, name: str, error: str) -> NoReturn:
        self._spend.editor_failures += 1
        self._failed_in_a_row.append(name)
        if len(self._failed_in_a_row) >= FAILURES_IN_A_ROW:
            self._journal.forget(self._failed_in_a_row)  # so that the next start repeats them
            raise SearchOverError(f"the editor failed {len(self._failed_in_a_row)} times in a row, the last time with: {error}")
        raise EditorError(error)

    async def _call(self, model: str, prompt: str) -> dict[str, Any]:
        create = self._client.chat.completions.create
        try:
            answer = await create(model=model, messages=[{"role": "user", "content": prompt}], temperature=self._temperature)
            text = str(answer.choices[0].message.content or "")
        except Exception as error:  # noqa: BLE001 - third-party client: any exception is a failed call, counted and bounded
            _log.warning("a call of the editor %s failed: %s: %s", model, type(error).__name__, error)
            return {"text": "", "tokens": 0, "error": f"{type(error).__name__}: {error}"}
        counted = getattr(getattr(answer, "usage", None), "total_tokens", None)
        estimate = (len(prompt) + len(text)) // CHARACTERS_PER_TOKEN
        return {"text": text, "tokens": counted if isinstance(counted, int) else estimate, "error": ""}
