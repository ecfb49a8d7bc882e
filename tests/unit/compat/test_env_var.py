from __future__ import annotations

import pytest

from agl_otel.compat.env_var import LightningEnvVar, resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var
from agl_otel.errors import SettingsError

MANAGED, PORT, HOST = LightningEnvVar.AGL_MANAGED_STORE, LightningEnvVar.AGL_SERVER_PORT, LightningEnvVar.AGL_SERVER_HOST


@pytest.mark.parametrize(
    ("text", "value"), [*((t, True) for t in ("1", "true", " YES ", "On")), *((f, False) for f in ("0", "False", "no", "off"))]
)
def test_a_boolean_is_read_in_any_spelling(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv(MANAGED.value, text)
    assert resolve_bool_env_var(MANAGED, fallback=not value) is value
    assert resolve_bool_env_var(MANAGED, override=not value, fallback=value) is not value, "an explicit argument wins"


def test_without_the_variable_the_fallback_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LightningEnvVar:
        monkeypatch.delenv(variable.value, raising=False)
    assert resolve_bool_env_var(MANAGED) is None and resolve_bool_env_var(MANAGED, fallback=True) is True
    assert resolve_int_env_var(PORT) is None and resolve_int_env_var(PORT, fallback=4747) == 4747
    assert resolve_str_env_var(HOST) is None and resolve_str_env_var(HOST, fallback="localhost") == "localhost"


def test_numbers_and_texts_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT.value, "5000")
    monkeypatch.setenv(HOST.value, "10.0.0.1")
    assert (resolve_int_env_var(PORT, fallback=1), resolve_int_env_var(PORT, override=7)) == (5000, 7)
    assert (resolve_str_env_var(HOST, fallback="x"), resolve_str_env_var(HOST, override="y")) == ("10.0.0.1", "y")


def test_an_invalid_value_is_a_value_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT.value, "many")
    monkeypatch.setenv(MANAGED.value, "perhaps")
    with pytest.raises(ValueError, match="AGL_SERVER_PORT is 'many'"):
        resolve_int_env_var(PORT)
    with pytest.raises(SettingsError, match=r"AGL_MANAGED_STORE is 'perhaps'.*true"):
        resolve_bool_env_var(MANAGED)
