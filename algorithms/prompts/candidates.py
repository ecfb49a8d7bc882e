"""Candidates of a prompt search: texts of prompt templates, with their parents; and the checks of edited texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.types import NamedResources, PromptTemplate, placeholders

FENCE: Final = "```"


@dataclass(frozen=True)
class Candidate:
    """A candidate of a search."""

    version: str
    """v0 (the initial prompts), v1, …"""
    templates: Mapping[str, str]
    """{name of the resource: text of its template}."""
    parents: tuple[str, ...] = ()
    """Versions of the candidates that it was derived from."""

    def described(self) -> dict[str, Any]:
        """Return the candidate as JSON."""
        return {"version": self.version, "templates": dict(self.templates), "parents": list(self.parents)}


def prompts_in(resources: NamedResources | None) -> dict[str, PromptTemplate]:
    """Return the prompt templates among the resources, in order."""
    return {name: resource for name, resource in (resources or {}).items() if isinstance(resource, PromptTemplate)}


def template_problem(text: str, before: str, engine: str) -> str:
    """Return why the edited template `text` cannot replace the template `before`; empty where it can.

    An f-string template must keep the set of placeholders: the agent has no value for a new one, and without an old one the prompt lacks
    part of the task.
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
    """Strip whitespace, and a code fence around the whole text, from an editor's answer."""
    text = answer.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and text.count(FENCE) == 2 and "\n" in text:
        text = text.partition("\n")[2].removesuffix(FENCE).strip()
    return text
