"""Python runs this at its start where this folder is on PYTHONPATH, in every environment, installed packages or not.

agl_otel_inject.py, beside it, does what is to be done. This file is also run by Pythons that the hook does not support: it keeps to what
all of them can read, and does for them only what it does for all, which is to run the sitecustomize that it has taken the place of.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_passed_over = [_here]
if (3, 10) <= sys.version_info[:2] <= (3, 13):
    try:
        import agl_otel_inject  # pyright: ignore[reportMissingImports]  # it lies beside this file

        _passed_over += agl_otel_inject.begin(_here)
    except Exception:  # noqa: BLE001  # the boundary: the program must start, and its output is not ours
        pass

_own, _path = sys.modules.pop(__name__, None), sys.path[:]
sys.path[:] = [_folder for _folder in _path if _folder not in _passed_over]
try:
    import sitecustomize  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]  # the next one; site.py reports its errors, or that there is none
finally:
    for _place, _folder in enumerate(_path):
        if _folder in _passed_over:
            sys.path.insert(_place, _folder)
    sys.modules.setdefault(__name__, _own)  # type: ignore[arg-type]
