"""Experts as text: what NumPy writes is read, and nothing else, whatever a model server or an agent sends."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from agl_otel.types.experts import decode, encode


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", "<i8"])
@pytest.mark.parametrize("shape", [(6,), (3, 2), (3, 2, 1), (1, 3, 1, 2)])
def test_whole_numbers_come_back_in_their_form(dtype: str, shape: tuple[int, ...]) -> None:
    given = np.arange(6, dtype=dtype).reshape(shape)
    for text in (base64.b64encode(npy(given)).decode(), encode(given)):
        found = decode(text)
        assert found is not None and found.shape == shape and found.tolist() == given.tolist()


def test_numbers_of_32_bits_have_one_dimension() -> None:
    found = decode(base64.b64encode(np.array([1, -1], "<i4").tobytes()))
    assert found is not None and found.tolist() == [1, -1]


HEADER = b"{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n"


@pytest.mark.parametrize(
    "data",
    [
        with_header(b"((("),  # Python's tokenizer raises
        with_header(b"-" * 9000 + b"1"),  # its parser runs out of memory
        npy(np.array(5)),
        npy(np.array([[1.5]])),
        npy(np.array([["a"]], dtype=object)),
        npy(np.asfortranarray(np.arange(6).reshape(3, 2))),
        npy(np.array([2**63], np.uint64)),
        npy(np.array([-(2**40)])),
        npy(np.zeros((0, 2), np.int8)),
        npy(np.arange(6))[:-1],
        with_header(HEADER % (b"|u1", b"(4,)"), b"abc"),
        with_header(HEADER % (b"|u1", b"(999999999, 999999999)"), b"abc"),
        with_header(HEADER % (b"|u1", b"(-3,)"), b"abc"),
        b"\x93NUMPY",
        b"\x93NUMPY\x02\x00",
        b"abc",
    ],
)
def test_anything_else_is_nothing(data: bytes) -> None:
    assert decode(base64.b64encode(data).decode()) is None


@pytest.mark.parametrize("text", [None, 7, [1], "", "no base64", "é"])
def test_no_text_is_nothing(text: Any) -> None:
    found = decode(text)
    assert found is None or not found.size
