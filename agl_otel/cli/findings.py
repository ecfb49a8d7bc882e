"""What checks find, and chains of checks in which one cause is one cross. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, TypeVar

T = TypeVar("T")
State = Literal["good", "advice", "wrong", "skipped"]
MARKS: Final[Mapping[State, str]] = {"good": "[green]✓[/]", "advice": "[yellow]![/]", "wrong": "[red]✗[/]", "skipped": "[dim]–[/]"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    """What is checked, as a statement that holds if the state is good."""
    state: State
    detail: str
    remedy: str = ""
    reasons: Sequence[str] = ()
    """Details, one a line: for example, the missing spans of each process."""
    spoils: Sequence[str] = ()
    """The names of checks that tell nothing if this finding is wrong."""

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {name: value for name, value in vars(self).items() if name != "spoils"}


def good(what: str, detail: str = "yes", reasons: Sequence[str] = ()) -> Finding:
    """Return a finding of nothing to do."""
    return Finding(what, "good", detail, reasons=reasons)


def advice(what: str, detail: str, remedy: str, reasons: Sequence[str] = ()) -> Finding:
    """Return a finding of something that does not prevent training."""
    return Finding(what, "advice", detail, remedy, reasons)


def wrong(what: str, detail: str, remedy: str, reasons: Sequence[str] = (), *, spoils: Sequence[str] = ()) -> Finding:
    """Return a finding of something that prevents training."""
    return Finding(what, "wrong", detail, remedy, reasons, spoils)


@dataclass(frozen=True)
class Check(Generic[T]):
    """One check of a chain."""

    name: str
    look: Callable[[T], Finding | None]
    """None: there is nothing to check."""


def walk(checks: Sequence[Check[T]], facts: T, before: Sequence[Finding] = ()) -> list[Finding]:
    """Make the checks in their order. One that is wrong, and spoilt by an earlier one or by a finding `before`, is skipped."""
    causes: dict[str, str] = {}
    for finding in before:
        _spoil(causes, finding, finding.what)
    found: list[Finding] = []
    for check in checks:
        if (finding := check.look(facts)) is None:
            continue
        if finding.state == "wrong":
            cause = causes.get(check.name)
            _spoil(causes, finding, cause or finding.what)
            if cause is not None:
                finding = replace(finding, state="skipped", detail=f"{finding.detail} (first: {cause})", remedy="", reasons=())
        found.append(finding)
    return found


def _spoil(causes: dict[str, str], finding: Finding, cause: str) -> None:
    if finding.state == "wrong":
        for name in finding.spoils:
            causes.setdefault(name, cause)
