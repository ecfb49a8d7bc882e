"""The experts that tokens were routed to, as text: base64 of NumPy's .npy, a row for each token. Pure; NumPy is imported on use."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NPY: Final = b"\x93NUMPY"
_SHAPE: Final = rb"[1-9][0-9]{0,8}(?:, [1-9][0-9]{0,8}){0,3}"
_HEADER: Final = re.compile(rb"\{'descr': '([<|][iu][1248])', 'fortran_order': False, 'shape': \((" + _SHAPE + rb"),?\), \} *\n")
"""As NumPy writes it for whole numbers of one to four dimensions; np.lib.format evaluates any header as Python."""
_BEFORE: Final = len(_NPY) + 4
"""The bytes before the header: magic, version, length."""
_MOST: Final = 2**31


def encode(experts: NDArray[Any]) -> str:
    """Encode whole numbers, in as few bytes as the largest needs."""
    import numpy as np

    lowest, highest = (np.min_scalar_type(int(each)) for each in (experts.min(), experts.max()))
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(experts, np.result_type(lowest, highest)))
    return base64.b64encode(file.getvalue()).decode()


def decode(text: Any) -> NDArray[Any] | None:
    """Decode base64 of .npy, or of 32-bit numbers, which have one dimension; None for anything else."""
    import numpy as np

    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return None
    if not data.startswith(_NPY):
        return np.frombuffer(data, "<i4") if len(data) % 4 == 0 else None
    found = _HEADER.fullmatch(data[_BEFORE:end]) if (end := _end_of_header(data)) else None
    if found is None:
        return None
    dtype, shape = np.dtype(found[1].decode()), [int(each) for each in found[2].split(b",")]
    if len(data) - end != math.prod(shape) * dtype.itemsize:
        return None
    read = np.frombuffer(data, dtype, offset=end).reshape(shape)
    return read if int(read.min()) >= -_MOST and int(read.max()) < _MOST else None


def _end_of_header(data: bytes) -> int:
    """Return where the numbers of .npy (version 1.0) begin; 0 for another version."""
    return _BEFORE + int.from_bytes(data[_BEFORE - 2 : _BEFORE], "little") if data[len(_NPY) : _BEFORE - 2] == b"\x01\x00" else 0
