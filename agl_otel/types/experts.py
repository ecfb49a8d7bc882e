"""The experts that tokens were routed to, as text: base64 of NumPy's .npy, a row for each token. Pure; NumPy is imported on use."""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NPY: Final = b"\x93NUMPY"
_HEADER_BYTES: Final = 10_000  # of .npy, at most


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
        if not data.startswith(_NPY):
            return np.frombuffer(data, "<i4")
        file = io.BytesIO(data)
        read: Any = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[np.lib.format.read_magic(file)[0]]
        shape, by_column, dtype = read(file, max_header_size=_HEADER_BYTES)
        if by_column or dtype.kind not in "iu" or len(data) - file.tell() != math.prod(shape) * dtype.itemsize:
            return None  # it is not read by np.load, which would first allocate what the header claims
        return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    except (binascii.Error, TypeError, ValueError, LookupError, SyntaxError, OverflowError):
        return None
