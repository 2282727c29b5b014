"""Calls as C reads them, and what C says of them in words.

Sums of squares by the kernel that also takes them while it adds up gradients: the same ones everywhere.
"""

import ctypes

import torch
from torch import Tensor

from plait.comm.shm import native_lib
from plait.comm.shm.native_lib import NativeCall, NativeSaid
from plait.comm.transport import Call, OpType
from plait.errors import CommError

DTYPES = {
    torch.float64: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 8,
}
_BITS = {8: 4, 4: 5, 2: 6, 1: 7}  # what is only copied travels as integers of its size
_OPS = {"sum": 0, "mean": 0, "max": 1, "min": 2}
_VERBS = {
    OpType.ALL_REDUCE: 0,
    OpType.REDUCE_SCATTER: 1,
    OpType.ALL_GATHER: 2,
    OpType.BROADCAST: 3,
    OpType.REDUCE: 4,
    OpType.SCATTER: 5,
    OpType.GATHER: 6,
    OpType.ALL_TO_ALL: 7,
    OpType.BARRIER: 8,
}
_SUM = 9
_NAMES = {number: verb.value for verb, number in _VERBS.items()} | {_SUM: "sum"}
_REDUCTIONS = (OpType.ALL_REDUCE, OpType.REDUCE_SCATTER, OpType.REDUCE)
_SPREAD = (
    OpType.REDUCE_SCATTER,
    OpType.SCATTER,
    OpType.ALL_TO_ALL,
)  # `out` is a piece, or as large as all pieces


def described(call: Call, num_ranks: int) -> NativeCall:
    """A call of any verb but messages. Raises CommError for tensors that it cannot be of."""
    label = call.label.encode()[:47]
    tensor = call.out if call.source is None else call.source
    if tensor is None:
        return NativeCall(_VERBS[call.verb], 5, 0, 0, 0, None, None, 1.0, label)
    for given in (call.source, call.out):
        if given is not None:
            check_device(call, given)
    dtype, parts = tensor.dtype, 1
    count = tensor.numel()
    if call.verb in _SPREAD:
        count = call.taken.numel() // (num_ranks if call.verb is OpType.ALL_TO_ALL else 1)
    if call.verb in _REDUCTIONS:
        code = reducible(call.op, dtype)
    else:
        parts = 2 if dtype.itemsize == 16 else 1
        code = _BITS[dtype.itemsize // parts]
    return NativeCall(
        _VERBS[call.verb],
        code,
        _OPS[call.op],
        call.root,
        count * parts,
        None if call.source is None else call.source.data_ptr(),
        None if call.out is None else call.out.data_ptr(),
        1.0 / num_ranks if call.op == "mean" else 1.0,
        label,
    )


def described_sum(given: Tensor, label: str) -> NativeCall:
    """A sum in two halves."""
    code = reducible("sum", given.dtype)
    return NativeCall(_SUM, code, 0, 0, given.numel(), given.data_ptr(), None, 1.0, label.encode()[:47])


def check_device(call: Call, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise CommError(
            f"{call} of a tensor that is not in this host's memory",
            given=f"a tensor on {tensor.device}",
            expected="on cpu: the ranks of this world compute there",
        )


def reducible(op: str, dtype: torch.dtype) -> int:
    """The code of a dtype that ranks can reduce."""
    if dtype not in DTYPES or (dtype is torch.bool and op == "sum"):
        raise CommError(
            "ranks cannot reduce tensors of this dtype",
            given=f"{op} of {dtype}",
            expected="floating-point numbers or integers; of bool max (or) and min (and)",
        )
    return DTYPES[dtype]


def in_words(said: NativeSaid, ranks: tuple[int, ...]) -> str:
    """What a rank says of a call, without the rank. Of what is only copied C knows the bytes."""
    name = _NAMES[said.verb]
    dtype = next(dtype for dtype, code in DTYPES.items() if code == said.dtype)
    what = f" of {said.label.decode(errors='replace')}" if said.label else ""
    root = f" with root {ranks[said.root]}" if name in ("broadcast", "reduce", "scatter", "gather") else ""
    if name == "barrier":
        return name + what
    if name not in ("all-reduce", "reduce-scatter", "reduce", "sum"):
        return f"{name}{what}{root}, {said.count * dtype.itemsize} bytes"
    op = "mean" if said.op >> 8 else ("sum", "max", "min")[said.op]
    op = "" if name == "sum" else f" ({op})"
    return f"{name}{op}{what}{root}, {said.count} x {str(dtype).removeprefix('torch.')}"


def sum_of_squares(flat: Tensor) -> Tensor | None:
    """Of a flat CPU tensor of floats, as a float64 scalar; None where there is no kernel for it."""
    clib = native_lib.load() if flat.device.type == "cpu" else None
    if clib is None or not flat.is_floating_point() or flat.dtype not in DTYPES or not flat.is_contiguous():
        return None
    total = ctypes.c_double(0.0)
    clib.pl_squares(DTYPES[flat.dtype], flat.data_ptr(), flat.numel(), ctypes.byref(total))
    return torch.tensor(total.value, dtype=torch.float64)
