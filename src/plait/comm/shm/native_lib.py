"""The compiled part of the host transport: loading, signatures, calls in the form that it reads, and the text
of its call descriptions.

`native/` holds plain C, independent of Python. Installing plait compiles it, if there is a compiler, into a
library next to this file, which ctypes calls without the GIL. It is optional: without it, torch's own
backends are used.

Sums of squares use the kernel that also computes them while adding up gradients: the same bits everywhere.
"""

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from plait.comm.transport import Call, OpType
from plait.errors import CommError


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


_FOLDER = Path(__file__).parent


def load() -> ctypes.CDLL | None:
    """Return the library with its function signatures declared, or None: see `unavailable_reason`."""
    return _find(_FOLDER)[0]


def unavailable_reason() -> str:
    """Return why `load` returns None, as text for a user; empty if it does not."""
    return _find(_FOLDER)[1]


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


# --- calls

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = {dtype: code for code, dtype in enumerate(_FLOATS + _INTEGERS)} | {torch.bool: 8}
_BITS = {8: 4, 4: 5, 2: 6, 1: 7}  # data that is only copied is sent as integers of its size
_OP_CODES = ("sum", "max", "min", "prod")  # pl_op of kernels.h
_OPS = {op: code for code, op in enumerate(_OP_CODES)} | {"mean": 0}
_OP_TYPES = {op_type: number for number, op_type in enumerate([*OpType][:9])}  # pl_verb of group.h
_SUM = 9
_OP_NAMES = {number: op_type.value for op_type, number in _OP_TYPES.items()} | {_SUM: "sum"}
_REDUCTIONS = (OpType.ALL_REDUCE, OpType.REDUCE_SCATTER, OpType.REDUCE)
_SHARD_COUNTED = (OpType.REDUCE_SCATTER, OpType.SCATTER, OpType.ALL_TO_ALL)  # the count is of a shard


def to_native_call(call: Call, num_ranks: int) -> NativeCall:
    """Convert a call of any collective (messages excepted). Raises CommError for unsupported tensors."""
    label = call.label.encode()[:47]
    tensor = call.out if call.source is None else call.source
    if tensor is None:
        return NativeCall(_OP_TYPES[call.op_type], 5, 0, 0, 0, None, None, 1.0, label)
    for each in (call.source, call.out):
        if each is not None:
            check_device(call, each)
    dtype, parts = tensor.dtype, 1
    count = tensor.numel()
    if call.op_type in _SHARD_COUNTED:
        count = call.output.numel() // (num_ranks if call.op_type is OpType.ALL_TO_ALL else 1)
    if call.op_type in _REDUCTIONS:
        dtype_code = reduce_dtype_code(call.op, dtype)
    else:
        parts = 2 if dtype.itemsize == 16 else 1
        dtype_code = _BITS[dtype.itemsize // parts]
    return NativeCall(
        _OP_TYPES[call.op_type],
        dtype_code,
        _OPS[call.op],
        call.root,
        count * parts,
        None if call.source is None else call.source.data_ptr(),
        None if call.out is None else call.out.data_ptr(),
        1.0 / num_ranks if call.op == "mean" else 1.0,
        label,
    )


def to_native_sum(tensor: Tensor, label: str) -> NativeCall:
    """Convert the input of a split-phase sum."""
    dtype_code = reduce_dtype_code("sum", tensor.dtype)
    return NativeCall(
        _SUM, dtype_code, 0, 0, tensor.numel(), tensor.data_ptr(), None, 1.0, label.encode()[:47]
    )


def check_device(call: Call, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise CommError(
            f"{call} of a tensor that is not in host memory",
            given=f"a tensor on {tensor.device}",
            expected="cpu, the device of this world's ranks",
            hint="tensor.cpu()",
        )


def reduce_dtype_code(op: str, dtype: torch.dtype) -> int:
    """Return the C code of a dtype that ranks can reduce."""
    if dtype not in DTYPES or (dtype is torch.bool and op in ("sum", "prod")):
        raise CommError(
            "ranks cannot reduce tensors of this dtype",
            given=f"{op} of {dtype}",
            expected="floating-point or integer; bool with max (or) and min (and)",
            hint="tensor.float()",
        )
    return DTYPES[dtype]


def call_text(info: NativeCallInfo, ranks: tuple[int, ...]) -> str:
    """Format a rank's description of its call. For calls that only copy, C knows the bytes alone."""
    name = _OP_NAMES.get(info.op_type)
    dtype = next((dtype for dtype, dtype_code in DTYPES.items() if dtype_code == info.dtype), None)
    if name is None or dtype is None or not (0 <= info.root < len(ranks) and info.op & 0xFF < len(_OP_CODES)):
        return "a description that was overwritten"
    data = f" of {info.label.decode(errors='replace')}" if info.label else ""
    root = f" with root {ranks[info.root]}" if name in ("broadcast", "reduce", "scatter", "gather") else ""
    if name == "barrier":
        return name + data
    if name not in ("all-reduce", "reduce-scatter", "reduce", "sum"):
        return f"{name}{data}{root}, {info.count * dtype.itemsize} bytes"
    op = "mean" if info.op >> 8 else _OP_CODES[info.op]
    op = "" if name == "sum" else f" ({op})"
    return f"{name}{op}{data}{root}, {info.count} x {str(dtype).removeprefix('torch.')}"


def sum_into(out: Tensor, flats: Sequence[Tensor]) -> Tensor | None:
    """Write the sum of flat CPU tensors of floats, added in this order, into `out`, in one pass over memory;
    return the sum's squared norm in float64, or None if there is no kernel, and nothing is written."""
    clib = load() if out.device.type == "cpu" else None
    is_uniform = all(flat.dtype == out.dtype and flat.is_contiguous() for flat in (out, *flats))
    if clib is None or out.dtype not in _FLOATS or not is_uniform:
        return None
    sources = (ctypes.c_void_p * len(flats))(*(flat.data_ptr() for flat in flats))
    target = (ctypes.c_void_p * 1)(out.data_ptr())
    code, squares = DTYPES[out.dtype], ctypes.c_double(0.0)
    operation = (code, code, _OPS["sum"], sources, len(flats), target, 1)
    clib.pl_reduce(*operation, out.numel(), 1.0, 0, ctypes.byref(squares))
    return torch.tensor(squares.value, dtype=torch.float64)


def add_widened(out: Tensor, values: Tensor) -> bool:
    """Add 16-bit floats to float32 on a CPU, in one pass over memory. Return False, and do nothing, if there
    is no kernel, or torch, which makes a converted copy first, would use several threads. Torch's bits."""
    is_half = values.dtype in (torch.bfloat16, torch.float16) and out.dtype is torch.float32
    clib = load() if is_half and out.is_cpu and values.is_cpu and torch.get_num_threads() == 1 else None
    if clib is None or not (out.is_contiguous() and values.is_contiguous()):
        return False
    assert out.shape == values.shape, f"{values.shape} added to {out.shape}"
    source, target = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(out.data_ptr())
    operation = DTYPES[values.dtype], DTYPES[out.dtype], _OPS["sum"]
    arrays = ctypes.byref(source), 1, ctypes.byref(target), 1
    clib.pl_reduce(*operation, *arrays, out.numel(), 1.0, 1, None)
    return True


def sum_of_squares(flat: Tensor) -> Tensor | None:
    """Return the sum of squares of a flat CPU tensor of floats, in float64; None if there is no kernel."""
    clib = load() if flat.device.type == "cpu" else None
    if clib is None or not flat.is_floating_point() or flat.dtype not in DTYPES or not flat.is_contiguous():
        return None
    total = ctypes.c_double(0.0)
    clib.pl_squares(DTYPES[flat.dtype], flat.data_ptr(), flat.numel(), ctypes.byref(total))
    return torch.tensor(total.value, dtype=torch.float64)
