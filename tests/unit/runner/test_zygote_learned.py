"""What a warm parent learns from its first forks: built models, and contexts that each process gets once."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from pydantic import BaseModel, ConfigDict

from agl_otel.runner.zygote import learned


class Deferred(BaseModel):
    model_config = ConfigDict(defer_build=True)
    n: int


@pytest.fixture
def ca_file(tmp_path: Path) -> Iterator[str]:
    """A file of certificates for which a context is ready, as a fork finds it."""
    path = shutil.copy(certifi.where(), tmp_path / "ca.pem")
    original = ssl.create_default_context
    learned.make_contexts([str(path), str(tmp_path / "missing.pem"), __file__])
    try:
        yield str(path)
    finally:
        ssl.create_default_context = original
        learned._ready.clear()  # pyright: ignore[reportPrivateUsage]  # the module is the state of one process


def test_models_that_a_fork_has_built_are_built_in_the_parent() -> None:
    learner = learned.Learner()
    name = f"{__name__}:Deferred"
    assert name not in learner.result()["models"]
    learned.build_models(["no.such:Model"])
    assert not Deferred.__pydantic_complete__
    learned.build_models([name])
    assert Deferred.__pydantic_complete__ and name in learner.result()["models"]


def test_a_context_that_is_ready_is_handed_out_once(ca_file: str) -> None:
    learner = learned.Learner()
    learned.hand_out_contexts(learner)
    assert list(learned._ready) == [ca_file]  # pyright: ignore[reportPrivateUsage]  # as above
    ready = learned._ready[ca_file][1]  # pyright: ignore[reportPrivateUsage]  # as above
    first, second = ssl.create_default_context(cafile=ca_file), ssl.create_default_context(cafile=ca_file)
    assert first is ready and second is not ready
    assert first.cert_store_stats() == second.cert_store_stats()
    assert (first.verify_mode, first.check_hostname, first.options) == (second.verify_mode, second.check_hostname, second.options)
    assert learner.result()["ca_files"] == [ca_file]


@pytest.mark.parametrize("change", ["content", "purpose", "keys"])
def test_a_context_is_made_anew_where_it_would_not_be_the_same(ca_file: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learned.hand_out_contexts(None)
    ready = learned._ready[ca_file][1]  # pyright: ignore[reportPrivateUsage]  # as above
    purpose = ssl.Purpose.SERVER_AUTH
    if change == "content":
        os.utime(ca_file, ns=(1, 1))
    elif change == "purpose":
        purpose = ssl.Purpose.CLIENT_AUTH
    else:
        monkeypatch.setenv("SSLKEYLOGFILE", str(Path(ca_file).with_name("keys")))
    assert ssl.create_default_context(purpose, cafile=ca_file) is not ready


def test_a_context_is_not_handed_out_where_its_class_was_replaced(ca_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = learned._ready[ca_file][1]  # pyright: ignore[reportPrivateUsage]  # as above
    assert learned._is_as_usual(ready)  # pyright: ignore[reportPrivateUsage]  # a replaced class breaks the making of a new one
    monkeypatch.setattr(ssl, "SSLContext", object)
    assert not learned._is_as_usual(ready)  # pyright: ignore[reportPrivateUsage]  # as above
