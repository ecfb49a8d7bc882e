from __future__ import annotations

from pydantic import BaseModel, ValidationError

from agl_otel.types.model import describe_invalid


class Body(BaseModel):
    names: list[str]


def told(wrong: int) -> str:
    try:
        Body.model_validate({"names": [1] * wrong})
    except ValidationError as error:
        return describe_invalid(error)
    raise AssertionError("they are valid")


def test_errors_are_named_as_far_as_one_reads_them() -> None:
    assert told(1) == "names.0: Input should be a valid string"
    assert told(25).count("Input should be") == 20 and told(25).endswith("; and 5 more")
    assert told(1_000_000) == "1000000 values are wrong"
