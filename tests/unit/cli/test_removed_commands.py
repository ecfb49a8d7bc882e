from __future__ import annotations

import pytest

from agl_otel.cli import REMOVED, main

REMEDIES = {"vllm": "vllm serve", "prometheus": "/metrics", "agentops": "AgentOpsTracer"}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_command_of_0_3_names_its_replacement_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "serve", "some/model", "--port", "8000"])
    message = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and len(message.splitlines()) == 1
    assert f"agl-otel {name}" in message and REMEDIES[name] in message


@pytest.mark.parametrize(("typed", "near"), [("trian", " Did you mean 'train'?"), ("no-such-thing", "")])
def test_a_mistyped_command_names_the_nearest(typed: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([typed])
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"No such command {typed!r}.{near}\n")
