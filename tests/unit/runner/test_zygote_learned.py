"""What a warm parent learns from its first forks: models to build, and TLS contexts to prepare."""

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
    """Yield a CA file with a prepared context."""
    path = shutil.copy(certifi.where(), tmp_path / "ca.pem")
    original = ssl.create_default_context
    learned.make_contexts([str(path), str(tmp_path / "missing.pem"), __file__])
    try:
        yield str(path)
    finally:
        ssl.create_default_context = original
        learned._prepared.clear()  # pyright: ignore[reportPrivateUsage]  # module state of this process


def test_models_that_a_fork_built_are_built_in_the_parent() -> None:
    learner = learned.Learner()
    name = f"{__name__}:Deferred"
    assert name not in learner.result()["models"]
    learned.build_models(["no.such:Model"])
    assert not Deferred.__pydantic_complete__
    learned.build_models([name])
    assert Deferred.__pydantic_complete__ and name in learner.result()["models"]


def test_a_prepared_context_is_used_once(ca_file: str) -> None:
    learner = learned.Learner()
    learned.use_prepared_contexts(learner)
    assert list(learned._prepared) == [ca_file]  # pyright: ignore[reportPrivateUsage]  # as above
    ready = learned._prepared[ca_file][1]  # pyright: ignore[reportPrivateUsage]  # as above
    first, second = ssl.create_default_context(cafile=ca_file), ssl.create_default_context(cafile=ca_file)
    assert first is ready and second is not ready
    assert first.cert_store_stats() == second.cert_store_stats()
    assert (first.verify_mode, first.check_hostname, first.options) == (second.verify_mode, second.check_hostname, second.options)
    assert learner.result()["ca_files"] == [ca_file]


@pytest.mark.parametrize("change", ["content", "purpose", "keys"])
def test_a_new_context_is_made_if_it_would_differ(ca_file: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learned.use_prepared_contexts(None)
    ready = learned._prepared[ca_file][1]  # pyright: ignore[reportPrivateUsage]  # as above
    purpose = ssl.Purpose.SERVER_AUTH
    if change == "content":
        os.utime(ca_file, ns=(1, 1))
    elif change == "purpose":
        purpose = ssl.Purpose.CLIENT_AUTH
    else:
        monkeypatch.setenv("SSLKEYLOGFILE", str(Path(ca_file).with_name("keys")))
    assert ssl.create_default_context(purpose, cafile=ca_file) is not ready


def test_a_prepared_context_is_not_used_after_its_class_was_replaced(ca_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = learned._prepared[ca_file][1]  # pyright: ignore[reportPrivateUsage]  # as above
    assert learned._is_reusable(ready)  # pyright: ignore[reportPrivateUsage]  # a replaced class breaks creating a new context
    monkeypatch.setattr(ssl, "SSLContext", object)
    assert not learned._is_reusable(ready)  # pyright: ignore[reportPrivateUsage]  # as above
