from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.algorithms.prompts.journal import JOURNAL, Journal
from agl_otel.errors import InUseError, SettingsError, UsageError
from agl_otel.service.framed import Frame, read

OPTIONS = {"beam_width": 4, "train": "abc"}


def opened(folder: Path, **given: Any) -> Journal:
    whole: dict[str, Any] = {"algorithm": "apo", "options": OPTIONS, **given}
    return Journal(folder, **whole)


def test_a_resumed_run_finds_its_recorded_values(tmp_path: Path) -> None:
    first = opened(tmp_path / "run")
    first.note("a", "1", {"score": 0.5})
    first.note("b", "1", ["x"])
    first.forget(["b"])
    first.close()
    second = opened(tmp_path / "run")
    assert (second.run_id, second.seed) == (first.run_id, first.seed)
    assert second.find("a", "1") == {"score": 0.5}
    assert second.find("a", "2") is None, "made from other inputs"
    assert second.find("b", "1") is None
    second.close()


def test_a_folder_belongs_to_one_process_and_one_run(tmp_path: Path) -> None:
    first = opened(tmp_path, seed=7)
    with pytest.raises(InUseError, match="another process works on the run"):
        opened(tmp_path)
    first.close()
    with pytest.raises(UsageError, match=r"begun with another beam_width .*, train"):
        opened(tmp_path, options={"beam_width": 2})
    with pytest.raises(UsageError, match="begun with another algorithm"):
        opened(tmp_path, algorithm="gepa")
    with pytest.raises(UsageError, match="begun with another seed"):
        opened(tmp_path, seed=8)
    opened(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        opened(tmp_path / "file")


@given(st.data())
def test_a_torn_or_damaged_record_loses_no_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    journal = opened(folder)
    for number in range(4):
        journal.note(f"step {number}", "1", "é" * number)
    journal.close()
    records = [each for each in read(folder / JOURNAL) if isinstance(each, Frame)]
    content = bytearray((folder / JOURNAL).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    hit = max(each.position for each in records if each.offset <= at)
    if data.draw(st.booleans(), "torn"):
        del content[at:]
        expected = [f"step {number}" for number in range(hit)]
    else:
        content[at] ^= 16
        expected = [f"step {number}" for number in range(4) if number != hit]
    (folder / JOURNAL).write_bytes(content)
    again = opened(folder)
    assert list(again.known) == expected
    again.note("more", "1", None)
    again.close()
    third = opened(folder)
    assert list(third.known) == [*expected, "more"]
    third.close()


def test_a_journal_without_a_folder_is_in_memory() -> None:
    journal = Journal(None, algorithm="apo", options=OPTIONS)
    journal.note("a", "1", 2)
    journal.metric({"round": 1})
    journal.best({"version": "v1"})
    assert journal.find("a", "1") == 2
    journal.close()
