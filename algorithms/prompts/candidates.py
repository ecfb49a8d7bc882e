"""A candidate: the texts of one or several prompt templates, and where it comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.types import NamedResources, PromptTemplate, placeholders

FENCE: Final = "```"


@dataclass(frozen=True)
class Candidate:
    """One candidate of a search."""

    version: str
    """v0 (what the search began with), v1, …"""
    templates: Mapping[str, str]
    """{name of the resource: its text}."""
    parents: tuple[str, ...] = ()
    """The versions that it was made from."""

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return {"version": self.version, "templates": dict(self.templates), "parents": list(self.parents)}


def prompts_in(resources: NamedResources | None) -> dict[str, PromptTemplate]:
    """The prompt templates among some resources, in their order."""
    return {name: resource for name, resource in (resources or {}).items() if isinstance(resource, PromptTemplate)}


def template_problem(text: str, before: str, engine: str) -> str:
    """Why an edited template cannot take the place of the one before; empty where it can.

    An f-string template must have the placeholders of the one before, no more and no fewer: a new one fails in the agent, and without
    one of the old the agent no longer says what it was asked.
    """
    if engine != "f-string":
        return ""
    try:
        wanted, found = placeholders(before), placeholders(text)
    except ValueError as error:
        return f"it is no f-string template: {error}"
    lost, new = sorted(wanted - found), sorted(found - wanted)
    return "; ".join(
        f"{words} {', '.join('{' + name + '}' for name in names)}" for words, names in (("it lacks", lost), ("it invents", new)) if names
    )


def cleaned(answer: str) -> str:
    """The prompt in an editor's answer: without spaces around it, and without a code fence around all of it."""
    text = answer.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and text.count(FENCE) == 2 and "\n" in text:
        text = text.partition("\n")[2].removesuffix(FENCE).strip()
    return text
