"""What torch.distributed is given, in the verbs' terms: tensors, reductions, tags. Letters for the rest."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import CommError

NAME = "plait"  # of the backend

_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)


def op_of(opts: Any, verb: str) -> str:
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op, name in _OPS:
        if asked == op:
            return name
    known = [name for name, op in dist.ReduceOp.RedOpType.__members__.items() if asked == op]
    raise CommError(
        f"the {NAME} backend cannot {verb} by that",
        given=f"ReduceOp.{known[0]}" if known else asked,
        expected="SUM, AVG, MAX or MIN",
    )


def plain(tensor: Tensor, verb: str) -> Tensor:
    """The same storage as what transports know: dense, on the CPU, of real numbers."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        given = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CommError(f"{verb} of a tensor that is not dense", given=given, hint="tensor.to_dense()")
    if tensor.device.type != "cpu":
        raise CommError(
            f"{verb} of a tensor that is not on the CPU",
            given=f"device {tensor.device}, {tuple(tensor.shape)} of {tensor.dtype}",
            expected="cpu",
            hint="tensor.cpu(), or nccl for a group of GPUs",
        )
    found = tensor.detach()
    if found.is_conj() or found.is_neg():
        raise CommError(
            f"{verb} of a view that conjugates or negates", hint="tensor.resolve_conj().resolve_neg()"
        )
    if found.is_complex():
        return torch.view_as_real(found)
    return found.view(torch.uint8) if found.dtype is torch.bool else found


def reducible(tensor: Tensor, op: str, verb: str) -> tuple[Tensor, str]:
    """And the reduction that means the same: the sum of bools is whether one of them is true."""
    if (tensor.is_complex() and op in ("max", "min")) or (tensor.dtype is torch.bool and op == "mean"):
        raise CommError(f"{verb} by {op} of numbers that have none", given=tensor.dtype)
    return plain(tensor, verb), "max" if tensor.dtype is torch.bool and op == "sum" else op


def only(things: Sequence[Any], verb: str) -> Any:
    if len(things) != 1:
        raise CommError(f"{verb} takes one tensor of each rank", given=len(things))
    return things[0]


def check_fit(out: Tensor, given: Tensor, verb: str) -> None:
    if out.numel() != given.numel() or out.dtype != given.dtype:
        raise CommError(
            f"the tensors of {verb} do not fit each other",
            given=f"{given.numel()} x {given.dtype} into {out.numel()} x {out.dtype}",
            expected="as many elements, of one dtype",
        )


def check_tag(tag: int) -> None:
    if tag != 0:
        raise CommError(
            f"messages of the {NAME} backend have no tags",
            given=f"tag={tag}",
            hint="messages between two ranks are matched in the order in which they start",
        )


def from_flat(outs: Sequence[Tensor], whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(out, part.view_as(out)) for out, part in zip(outs, whole.chunk(len(outs)), strict=True)]
