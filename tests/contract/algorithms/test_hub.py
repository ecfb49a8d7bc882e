"""Models of the hub, by a real client (huggingface_hub, in a process of its own) against a server of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl_otel.algorithms.hub import is_hub_id, model_folder, origin_of
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.algorithms.run_folder import RunFolder
from tests.hub_server import Hub, serving

MODEL = "tiny/policy"
SMALL = {"chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "first_light"
JOB = f"""
[agent]
function = "{EXAMPLE}/agent.py:answer"
grader = "{EXAMPLE}/grade.py:grade"
[data]
train = "tasks.jsonl"
val = "tasks.jsonl"
[policy]
model = "{MODEL}"
[algorithm]
max_steps = 1
prompts_per_step = 2
group_size = 2
"""
FOLDER_OF = """
import sys
from pathlib import Path
from agl_otel.algorithms.hub import model_folder
from agl_otel.errors import AglError
try:
    print(model_folder(sys.argv[1], run=Path(sys.argv[2]) if sys.argv[2:] else None))
except AglError as error:
    print(f"{type(error).__name__}: {error}")
"""
Client = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    shutil.copytree(Path(__file__).parents[2] / "tiny_policy", tmp_path / "at_hub")
    with serving(Hub(MODEL, tmp_path / "at_hub")) as running:
        yield running


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    """Run Python against the hub, with a cache of its own."""

    def run(*words: object, offline: bool = False) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": str(int(offline))}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def folder_by(client: Client, *words: object, offline: bool = False) -> Path:
    return Path(client("-c", FOLDER_OF, *words, offline=offline).stdout.strip())


def test_a_model_is_downloaded_once_and_is_the_one_of_its_folder(hub: Hub, client: Client, tmp_path: Path) -> None:
    first = client("-c", FOLDER_OF, MODEL)
    folder = Path(first.stdout.strip())
    assert f"downloading {MODEL} (commit {'a' * 12}, 0.8 MB in 5 files) from {hub.url} to {tmp_path / 'hf' / 'hub'}" in first.stderr
    assert hub.downloaded() == {"model.safetensors", *SMALL}
    assert origin_of(folder) == {"id": MODEL, "commit": "a" * 40}
    assert model_fingerprint(folder) == model_fingerprint(tmp_path / "at_hub")
    (folder / "consolidated.safetensors").write_bytes(b"of another program that uses the cache")
    assert model_fingerprint(folder) == model_fingerprint(tmp_path / "at_hub")
    hub.asked.clear()
    again = client("-c", FOLDER_OF, MODEL)
    assert (Path(again.stdout.strip()), again.stderr, hub.downloaded()) == (folder, "", set())
    assert folder_by(client, MODEL, offline=True) == folder


@pytest.mark.full
def test_a_run_goes_on_with_its_commit_when_the_models_branch_has_moved(hub: Hub, client: Client, tmp_path: Path) -> None:
    folder = folder_by(client, MODEL)
    options = {"model": model_fingerprint(folder)}
    for _ in range(2):  # the second time it is resumed
        RunFolder(tmp_path / "run", algorithm="grpo", options=options, model=origin_of(folder)).close()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == {"id": MODEL, "commit": "a" * 40}
    shutil.copytree(tmp_path / "at_hub", tmp_path / "newer")
    hub.push(tmp_path / "newer", "b" * 40)
    assert folder_by(client, MODEL, tmp_path / "run") == folder
    assert folder_by(client, MODEL).name == "b" * 40
    assert folder_by(client, f"{MODEL}@{'a' * 40}") == folder


def test_a_folder_that_exists_is_taken_first(tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir(parents=True)
    assert model_folder(MODEL, tmp_path) == tmp_path / MODEL
    assert is_hub_id("tiny/policy@main", tmp_path) and is_hub_id("Qwen/Qwen2.5-0.5B-Instruct")
    assert not any(is_hub_id(name, tmp_path) for name in (MODEL, "tiny", "./tiny/policy", "/tiny/policy", "a/b/c", "tiny/policy@"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny/polcy", "SettingsError: 'tiny/polcy' is no folder, and there is no such model at http://"),
        (f"{MODEL}@v2", "SettingsError: the model tiny/policy has no revision 'v2' at http://"),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_refused(client: Client, model: str, words: str) -> None:
    assert client("-c", FOLDER_OF, model).stdout.startswith(words)


@pytest.mark.full
def test_without_the_hub_the_error_says_how_to_bring_the_model(hub: Hub, client: Client, tmp_path: Path) -> None:
    said = client("-c", FOLDER_OF, MODEL, offline=True).stdout
    assert said.startswith(f"UnavailableError: '{MODEL}' is no folder, the hub {hub.url} cannot be reached")
    assert f"call `hf download {MODEL}` elsewhere and copy it" in said
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tasks.jsonl").write_text('{"question": "digit 437", "expected": "7"}\n')
    client("-m", "agl_otel", "train", "job.toml", "--check", "--json")  # which leaves a part of the model in the cache
    assert "does not hold the whole model" in client("-c", FOLDER_OF, MODEL, offline=True).stdout


@pytest.mark.full
def test_a_check_reads_the_headers_of_the_weights_and_says_what_a_run_downloads(hub: Hub, client: Client, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tasks.jsonl").write_text('{"question": "digit 437", "expected": "7"}\n')
    done = client("-m", "agl_otel", "train", "job.toml", "--check", "--json")
    found = json.loads(done.stdout)
    assert found["ok"], done
    assert f"a run downloads {MODEL} (commit {'a' * 12}, 0.8 MB in 5 files)" in found["notes"]
    assert hub.downloaded() == SMALL
    config = json.loads((tmp_path / "at_hub" / "config.json").read_text())
    (shutil.copytree(tmp_path / "at_hub", tmp_path / "wider") / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    hub.push(tmp_path / "wider", "b" * 40)
    done = client("-m", "agl_otel", "train", "job.toml", "--check", "--json")
    assert done.returncode == 2 and "has shape [104, 64], and config.json makes it [104, 128]" in done.stdout


@pytest.mark.full
def test_a_run_trains_a_model_of_the_hub_and_records_its_commit(client: Client, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"digit {n}", "expected": str(n % 10)}) + "\n" for n in (431, 437))
    )
    done = client("-m", "agl_otel", "train", "job.toml", "--data-dir", "data", "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == {"id": MODEL, "commit": "a" * 40}
    assert not list((tmp_path / "hf").rglob("weights")), "a run's weights do not belong into the cache"
    assert client("-m", "agl_otel", "runs", "export", "run", "out", offline=True).returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", *SMALL}
