"""Quantization of flat tensors in blocks: see [Note: quantized weights] in `plan/quantized.py`.

# N blocks  E elements of a block  C bytes of its codes
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.plan.quantized import BLOCK, FORMATS

# Elements that are dequantized at a time. On a CPU they stay in cache; on a GPU, where a launch costs more,
# their codes and values in float32 take 24 MB.
_CHUNK, _GPU_CHUNK = 2**16, 2**22


def quantize(values: Tensor, name: str) -> Tensor:
    """Return the bytes of a flat tensor of complete blocks, (N x block_bytes,) in uint8."""
    form = FORMATS[name]
    values_NE = values.detach().to(torch.float32).reshape(-1, BLOCK)
    absmax_N1 = values_NE.abs().amax(1, keepdim=True)
    scaled_NE = values_NE / torch.where(absmax_N1 == 0, 1, absmax_N1)
    codes_NE = torch.bucketize(scaled_NE, _midpoints(name, values.device), out_int32=True).to(torch.uint8)
    codes_NC = codes_NE if form.bits == 8 else codes_NE[:, ::2] << 4 | codes_NE[:, 1::2]
    return torch.cat([codes_NC, absmax_N1.view(torch.uint8)], 1).reshape(-1)


def rounded(values: Tensor, name: str) -> Tensor:
    """Return a tensor as it is stored: quantized and dequantized."""
    result = torch.empty_like(values, memory_format=torch.contiguous_format)
    dequantize(quantize(values, name), name, result.view(-1))
    return result


def as_stored(values: Tensor, name: str | None, dtype: torch.dtype) -> Tensor:
    """Return the values of a frozen weight in forward, in their own dtype. `name`: of its format, if it has
    one; `dtype`: in which the plan computes."""
    return (values if name is None else rounded(values, name)).to(dtype).to(values.dtype)


def dequantize(stored: Tensor, name: str, out: Tensor) -> None:
    """Write the values of the blocks in `stored` to a flat tensor: products in float32, then cast. Modes of a
    model's forward do not see it."""
    with torch._C.DisableTorchFunction():
        _dequantize(stored, name, out)


def _dequantize(stored: Tensor, name: str, out: Tensor) -> None:
    form = FORMATS[name]
    blocks = stored.view(-1, form.block_bytes)
    size = (_GPU_CHUNK if out.is_cuda else _CHUNK) // BLOCK
    for part, into_NE in zip(blocks.split(size), out.view(-1, BLOCK).split(size), strict=True):
        codes_NC, absmax_N1 = part[:, : form.code_bytes], part[:, form.code_bytes :].view(torch.float32)
        if form.bits == 8:  # the levels k / 127, without a table
            values_NE = codes_NC.float().sub_(127).div_(127)
        else:
            values_NE = F.embedding(codes_NC.int(), _pairs(name, out.device)).view(-1, BLOCK)
        into_NE.copy_(values_NE.mul_(absmax_N1))


@cache
def _pairs(name: str, device: torch.device) -> Tensor:
    """The levels of the two codes in a byte, for each byte: the first is in the high half."""
    levels = torch.tensor(FORMATS[name].levels, dtype=torch.float32, device=device)
    return torch.cartesian_prod(levels, levels)


@cache
def _midpoints(name: str, device: torch.device) -> Tensor:
    """The largest values that are nearest to each level but the last. Halfway, the lower code is taken."""
    levels = torch.tensor(FORMATS[name].levels, dtype=torch.float32).double()
    exact = (levels[1:] + levels[:-1]) / 2
    rounded = exact.float()
    lower = torch.nextafter(rounded, rounded.new_tensor(-torch.inf))
    return torch.where(rounded.double() > exact, lower, rounded).to(device)
