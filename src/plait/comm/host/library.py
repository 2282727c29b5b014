"""The compiled part of the host transport: where it is found and how it is called.

`native/` holds plain C that knows nothing of Python. Installing plait compiles it, where there is a compiler,
into a library beside this file, which ctypes calls without holding the interpreter's lock. It is optional: a
program that gets None talks through torch's own backends.
"""

import ctypes
import sys
from ctypes import POINTER, c_double, c_int, c_size_t, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    # native/kernels.h
    "pl_itemsize": (c_size_t, [c_int]),
    "pl_copy": (None, [c_void_p, c_void_p, c_size_t]),
    "pl_reduce": (
        None,
        [
            *(c_int, c_int, c_int),  # dtype of the ins and of the outs, operation
            *(POINTER(c_void_p), c_int, POINTER(c_void_p), c_int, c_size_t),  # ins, outs, items
            *(c_double, c_int, POINTER(c_double)),  # scale, add, squares
        ],
    ),
}


def load() -> ctypes.CDLL | None:
    """The library with the signatures of its functions declared, or None: `why_not` has the reason."""
    return _find(Path(__file__).parent)[0]


def why_not() -> str:
    """Why `load` returns None, in words for a user; empty when it does not."""
    return _find(Path(__file__).parent)[1]


@cache
def _find(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    if not sys.platform.startswith("linux"):
        return None, f"the host transport needs Linux, and this is {sys.platform}"
    path = next(
        (path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_native{suffix}").exists()), None
    )
    if path is None:
        return None, f"{folder}/_native*.so is missing: plait was installed without a C compiler"
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # built for another machine, or from older sources
        return None, f"{path} does not fit this installation, which installing again mends: {error}"
    return library, ""
