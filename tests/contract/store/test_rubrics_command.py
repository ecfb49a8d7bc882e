"""`agl-otel rubrics` on a real stack."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from agl_otel.cli import main
from agl_otel.store import LightningStore
from tests.unit.test_docs import ROOT, commands_in

TEXT = "Is the tone right?\n\nyes = 1\nnot sure =\nno = 0\n"


class Rubrics:
    """The command on the store."""

    def __init__(self, store: LightningStore, capsys: pytest.CaptureFixture[str]) -> None:
        self.address, self._capsys = store._source.address(), capsys  # pyright: ignore[reportPrivateUsage]

    def run(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["rubrics", *arguments, "--store", self.address])
        captured = self._capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out if code == 0 else captured.err


@pytest.fixture
def rubrics(store: LightningStore, capsys: pytest.CaptureFixture[str]) -> Rubrics:
    return Rubrics(store, capsys)


def test_a_rubric_is_stored_from_a_file_and_shown_as_it_was_written(rubrics: Rubrics, tmp_path: Path) -> None:
    file = tmp_path / "tone.txt"
    file.write_text(TEXT)
    assert rubrics.run("put", "manners", str(file)) == "manners@1 is stored, with 3 labels: yes = 1, not sure, no = 0\n"
    assert rubrics.run("put", "manners", str(file)).startswith("manners@1 has this text already")
    file.write_text(TEXT.replace("right", "kind"))
    assert json.loads(rubrics.run("put", "manners", str(file), "--json")) | {"text": ""} == {
        "rubric": "manners@2",
        "name": "manners",
        "version": 2,
        "text": "",
        "labels": [{"label": "yes", "value": 1.0}, {"label": "not sure", "value": None}, {"label": "no", "value": 0.0}],
        "is_new": True,
    }
    assert rubrics.run("show", "manners") == rubrics.run("show", "manners@2") == TEXT.replace("right", "kind")
    assert rubrics.run("show", "manners@1") == TEXT
    file.write_text(rubrics.run("show", "manners").rstrip())
    assert rubrics.run("put", "manners", str(file)).startswith("manners@2 has this text already"), "as the page stores it"
    assert "manners@2" in rubrics.run("ls") and "Is the tone kind?" in rubrics.run("ls")
    assert "manners@2" in [each["rubric"] for each in json.loads(rubrics.run("ls", "--json"))]


def test_what_is_wrong_is_named_with_its_remedy(rubrics: Rubrics, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(TEXT)
    (tmp_path / "prose.txt").write_text("Is it right?")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    rubrics.run("put", "wrong", str(tmp_path / "good.txt"))
    assert "no label: write one on a line of its own" in rubrics.run("put", "wrong", str(tmp_path / "prose.txt"), code=2)
    assert "bytes.txt is no text in UTF-8" in rubrics.run("put", "wrong", str(tmp_path / "bytes.txt"), code=2)
    assert "is no name for a rubric" in rubrics.run("put", "a b", str(tmp_path / "good.txt"), code=2)
    assert "none.txt" in rubrics.run("put", "wrong", str(tmp_path / "none.txt"), code=2)
    assert "there is no version 7 of the rubric wrong: the current one is wrong@1" in rubrics.run("show", "wrong@7", code=2)
    assert "write NAME, or NAME@VERSION with a number" in rubrics.run("show", "wrong@new", code=2)
    assert "by `agl-otel rubrics put`" in rubrics.run("show", "nope", code=2)


def test_the_commands_of_the_docs_write_the_next_version(rubrics: Rubrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        (ROOT / "docs" / "reviews.md").read_text().replace("helpful", "helpful-shown")
    )  # on the same store other pages have a rubric `helpful`
    typed = [shlex.split(each, comments=True) for each in commands_in(page)]
    show, put, listed = (arguments[2:] for arguments in typed if arguments[1] == "rubrics")
    monkeypatch.chdir(tmp_path)
    Path("first.txt").write_text(TEXT)
    rubrics.run("put", show[1], "first.txt")
    assert show[2] == ">"
    Path(show[3]).write_text(rubrics.run(*show[:2]) + "Read all of it.\n")
    assert f"{show[1]}@2 is stored" in rubrics.run(*put)
    assert f"{show[1]}@2" in rubrics.run(*listed)
