"""Compose verl's config tree with the given keys, from verl's files; verl is imported only for a key that they do not name.

Every key is checked against this tree twice: when a job is checked or a run begins, and in verl's process, which trains with the result.
Needs the extra [verl].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.verl.keys import Tree, overlay
from agl_otel.algorithms.verl.spec import SECTION
from agl_otel.errors import UsageError

ENGINE: Final = "model_engine"
"""The key of verl's config that selects files of it, so that it decides which keys there are."""


def compose_config(given: Mapping[str, Any]) -> Tree:
    """Overlay verl's default config with `given`; the section `agl_otel` is taken as it is.

    Raises UsageError that names a key which verl does not have.
    """
    keys = {key: value for key, value in given.items() if key != SECTION}
    section = {SECTION: given[SECTION]} if SECTION in given else {}
    return overlay(verl_config(keys.get(ENGINE)), keys, fields_of=fields_of) | section


@functools.cache
def verl_config(engine: str | None = None) -> Tree:
    """Return verl's own config with its defaults, unresolved, for one of its engines. Raises UsageError for an unknown one."""
    from hydra import compose, initialize_config_dir  # pyright: ignore[reportMissingImports] - of the extra [verl], as all of these
    from hydra.errors import MissingConfigException  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports] - of the [verl] extra

    found = find_spec("verl")
    assert found is not None and found.submodule_search_locations, "the extra is there"
    folder = Path(found.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        try:
            composed: Any = compose("ppo_trainer", overrides=[f"{ENGINE}={engine}"] if engine is not None else [])
        except MissingConfigException as error:
            known = sorted(path.stem for path in (folder / ENGINE).glob("*.yaml"))
            raise UsageError(f"{ENGINE} is {engine!r}: verl 0.9.1 has {', '.join(known)}") from error
    return OmegaConf.to_container(composed, resolve=False)  # pyright: ignore[reportReturnType] - a mapping


def fields_of(target: str) -> frozenset[str]:
    """Return the fields of verl's config class with this import path; none where it is not a dataclass of verl."""
    module, _, name = target.rpartition(".")
    if not module.startswith("verl."):
        return frozenset()
    kind = getattr(import_module(module), name)
    return frozenset(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else frozenset()
