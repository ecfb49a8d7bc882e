from __future__ import annotations

import pytest

from agl_otel.cli import GONE, main

REMEDIES = {"vllm": "vllm serve", "prometheus": "/metrics", "agentops": "AgentOpsTracer"}


@pytest.mark.parametrize("name", GONE)
def test_a_command_of_0_3_that_is_gone_says_in_one_line_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "serve", "some/model", "--port", "8000"])
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and len(said.splitlines()) == 1
    assert f"agl-otel {name}" in said and REMEDIES[name] in said
