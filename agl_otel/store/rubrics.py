"""The part of the store for rubrics.

A rubric is a set of resources with one prompt template, so that it has versions, a page that compares them, and can be given to a model.
"""

from __future__ import annotations

import re
from typing import Final

from agl_otel.adapters.reviews import labels_in
from agl_otel.errors import NotFoundError, UsageError
from agl_otel.store.resources import Resources
from agl_otel.types import PromptTemplate, ResourcesUpdate
from agl_otel.types.reviews import Rubric, RubricLabel

PREFIX: Final = "rubric-"
"""How the ids of their sets begin."""
LONGEST_TEXT: Final = 100_000  # characters
_RUBRIC: Final = "rubric"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")


class Rubrics(Resources):
    """Rubrics with versions, the same for all reviewers."""

    async def rubrics(self) -> list[Rubric]:
        """Return the current version of each rubric, by name."""
        found = await (await self._queue()).query_resources(resources_id_contains=PREFIX)
        return sorted((rubric for each in found if (rubric := _rubric_of(each))), key=lambda rubric: rubric.name)

    async def rubric(self, named: str, *, earlier: bool = False) -> Rubric:
        """Return the current version of a rubric, by NAME or NAME@VERSION; `earlier`: or another one that is named.

        Raises NotFoundError if it is not there, or not current.
        """
        name, _, version = named.partition("@")
        if named != name and not _VERSION.fullmatch(version):
            raise NotFoundError(f"{named[:120]!r} names no rubric: write NAME, or NAME@VERSION with a number")
        given = await (await self._queue()).get_resources(PREFIX + name, version=int(version) if earlier and version else None)
        found = _rubric_of(given) if given else None
        if found is None and earlier and version and (current := await self.rubric(name)):
            raise NotFoundError(f"there is no version {version} of the rubric {name}: the current one is {current.rubric}")
        if found is None:
            known = ", ".join(each.name for each in await self.rubrics()) or "none"
            how = "write it on the dashboard's page /review, or by `agl-otel rubrics put`"
            raise NotFoundError(f"there is no rubric {name[:120]!r}: {how} (there is: {known})")
        if named not in (name, found.rubric):
            raise NotFoundError(f"{named[:120]!r} is not the rubric's current version: that is {found.rubric}")
        return found

    async def put_rubric(self, name: str, text: str) -> Rubric:
        """Store a rubric, or the next version of it if its text is another one (but for white space at its end).

        Its labels are the lines `label = reward`, or `label =` for one without a reward. Raises UsageError.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name[:120]!r} is no name for a rubric: use 1 to 100 of the characters A-Z a-z 0-9 . _ -")
        if len(text) > LONGEST_TEXT:
            raise UsageError(f"the rubric has {len(text)} characters: at most {LONGEST_TEXT}")
        labels_in(text)
        before = await self.resources(PREFIX + name)
        known = _rubric_of(before) if before else None
        if known and known.text.rstrip() == text.rstrip():
            return known
        made = _rubric_of(
            await self.publish({_RUBRIC: PromptTemplate(template=text, engine="jinja")}, resources_id=PREFIX + name, aside=True)
        )
        assert made is not None
        return made


def _rubric_of(given: ResourcesUpdate) -> Rubric | None:
    """Return the rubric in a set of resources; None if it has none, since anyone may name a set so."""
    template = given.resources.get(_RUBRIC)
    if not given.resources_id.startswith(PREFIX) or not isinstance(template, PromptTemplate):
        return None
    try:
        labels = [RubricLabel(label=label, value=value) for label, value in labels_in(template.template)]
    except UsageError:
        return None
    name = given.resources_id.removeprefix(PREFIX)
    return Rubric(rubric=f"{name}@{given.version}", name=name, version=given.version, text=template.template, labels=labels)
