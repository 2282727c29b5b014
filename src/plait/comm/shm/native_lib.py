"""The compiled part of the host transport: loading and signatures.

`native/` holds plain C, independent of Python. Installing plait compiles it, if there is a compiler, into a
library next to this file, which ctypes calls without the GIL. It is optional: without it, torch's own
backends are used.
"""

import ctypes
import sys
from ctypes import POINTER, c_char, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


class NativeCall(ctypes.Structure):
    """pl_call of native/group.h."""

    _fields_ = (
        *((name, c_int32) for name in ("op_type", "dtype", "op", "root")),
        ("count", c_uint64),
        ("source", c_void_p),
        ("out", c_void_p),
        ("scale", c_double),
        ("label", c_char * 48),
    )


class NativeCallInfo(ctypes.Structure):
    """pl_said of native/group.h."""

    _fields_ = (
        *((name, c_int32) for name in ("op_type", "dtype", "op", "root")),
        *((name, c_uint64) for name in ("count", "source", "out")),
        ("label", c_char * 48),
    )


class NativeFailure(ctypes.Structure):
    """pl_failure of native/sync.h."""

    _fields_ = (("code", c_int32), ("peer", c_int32))


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
    "pl_squares": (None, [c_int, c_void_p, c_size_t, POINTER(c_double)]),
    # native/group.h, helper.h, messages.h
    "pl_control_bytes": (c_uint64, [c_int]),
    "pl_map": (c_void_p, [c_int, c_uint64]),
    "pl_unmap": (c_int, [c_void_p, c_uint64]),
    "pl_lock": (c_int, [c_int]),
    "pl_is_locked": (c_int, [c_int]),
    "pl_open": (
        c_void_p,
        [c_void_p, c_int, c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_uint64, c_uint64, c_uint64],
    ),
    "pl_close": (None, [c_void_p]),
    "pl_free": (None, [c_void_p]),
    "pl_run": (c_int, [c_void_p, POINTER(NativeCall)]),
    "pl_failure_of": (None, [c_void_p, POINTER(NativeFailure)]),
    "pl_last_said": (None, [c_void_p, c_int, POINTER(NativeCallInfo)]),
    "pl_start": (c_uint64, [c_void_p, POINTER(NativeCall)]),
    "pl_wait": (c_int, [c_void_p, c_uint64, c_uint64]),
    "pl_sum_start": (c_int, [c_void_p, POINTER(NativeCall), POINTER(c_uint32)]),
    "pl_sum_is_ready": (c_int, [c_void_p, c_uint32]),
    "pl_sum_into": (
        c_int,
        [c_void_p, c_uint32, c_void_p, c_int, c_uint64, c_uint64, c_double, c_int, POINTER(c_double)],
    ),
    "pl_sum_done": (None, [c_void_p, c_uint32]),
    "pl_sum_is_released": (c_int, [c_void_p, c_uint32]),
    "pl_sum_release": (c_int, [c_void_p, c_uint32]),
    "pl_send": (c_void_p, [c_void_p, c_int, c_void_p, c_uint64]),
    "pl_receive": (c_void_p, [c_void_p, c_int, c_void_p, c_uint64]),
    "pl_message_wait": (c_int, [c_void_p, c_void_p, c_uint64, POINTER(c_uint64)]),
    "pl_message_free": (None, [c_void_p, c_void_p]),
}


def load() -> ctypes.CDLL | None:
    """Return the library with its function signatures declared, or None: see `unavailable_reason`."""
    return _find(Path(__file__).parent)[0]


def unavailable_reason() -> str:
    """Return why `load` returns None, as text for a user; empty if it does not."""
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
    except (OSError, AttributeError) as error:  # built for another machine or from older sources
        return None, f"{path} does not match this installation; reinstall plait: {error}"
    return library, ""
