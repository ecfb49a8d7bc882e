"""How commands show verdicts."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from agl_otel.text import printable
from agl_otel.types import Verdict

VERDICT_STYLES: Final = {"complete": "green", "incomplete": "red", "unproven": "yellow", "empty": "dim"}


def verdict_lines(verdict: Verdict) -> list[Text]:
    """Format all reasons and notes of a verdict."""
    reasons = [Text(f"  - {printable(reason)}", "yellow") for reason in verdict.reasons]
    return reasons + [Text(f"  note: {printable(note)}", "dim") for note in verdict.notes]
