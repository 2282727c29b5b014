"""Calls in the form that the C code reads, and the text of its call descriptions.

Sums of squares use the kernel that also computes them while adding up gradients: the same bits everywhere.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm.shm import native_lib
from plait.comm.shm.native_lib import NativeCall, NativeCallInfo
from plait.comm.transport import Call, OpType
from plait.errors import CommError

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
    clib = native_lib.load() if out.device.type == "cpu" else None
    is_uniform = all(flat.dtype == out.dtype and flat.is_contiguous() for flat in (out, *flats))
    if clib is None or out.dtype not in _FLOATS or not is_uniform:
        return None
    sources = (ctypes.c_void_p * len(flats))(*(flat.data_ptr() for flat in flats))
    target = (ctypes.c_void_p * 1)(out.data_ptr())
    code, squares = DTYPES[out.dtype], ctypes.c_double(0.0)
    operation = (code, code, _OPS["sum"], sources, len(flats), target, 1)
    clib.pl_reduce(*operation, out.numel(), 1.0, 0, ctypes.byref(squares))
    return torch.tensor(squares.value, dtype=torch.float64)


def sum_of_squares(flat: Tensor) -> Tensor | None:
    """Return the sum of squares of a flat CPU tensor of floats, in float64; None if there is no kernel."""
    clib = native_lib.load() if flat.device.type == "cpu" else None
    if clib is None or not flat.is_floating_point() or flat.dtype not in DTYPES or not flat.is_contiguous():
        return None
    total = ctypes.c_double(0.0)
    clib.pl_squares(DTYPES[flat.dtype], flat.data_ptr(), flat.numel(), ctypes.byref(total))
    return torch.tensor(total.value, dtype=torch.float64)
