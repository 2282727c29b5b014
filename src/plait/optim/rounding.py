"""Stochastic rounding of optimizer states to bf16.

[Note: stochastic rounding of states]
bf16 has 8 bits of mantissa: a relative change of less than 1/512 is lost. `exp_avg_sq` with beta2 = 0.999
moves by 1/1000 of its distance per step, so rounding to nearest freezes it at its first value. Rounding up
with a probability equal to the truncated fraction is unbiased (Gupta et al. 2015, 1502.02551; Zamirai et al.
2020, 2010.06192).

The noise is a function of the training step, the state's name and the element's position, so that repeating a
step, also after a resume, gives the same bits. Elements _PERIOD apart share their noise; it is independent
from step to step.
"""

import math
import zlib

import torch
from torch import Tensor

_PERIOD = 8192  # elements: 32 KB of noise, which stay in the L1 cache


class StochasticRounding:
    """Rounds float32 to bf16 with the noise of one training step."""

    def __init__(self) -> None:
        self._number = -1
        self._noise: dict[tuple[str, torch.device], Tensor] = {}

    def begin(self, number: int) -> None:
        """Use the noise of training step `number` from now on."""
        if number != self._number:
            self._noise.clear()
        self._number = number

    def round(self, wide: Tensor, narrow: Tensor, name: str, position: int) -> None:
        """Round a contiguous `wide`, which is overwritten, into `narrow`. `position`: of its first element.

        Values that bf16 represents stay unchanged; a NaN becomes infinite.
        """
        if wide.dtype != torch.float32:
            wide = wide.float()
        # With noise, a NaN whose mantissa is all ones would overflow into a zero.
        wide.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        bits = wide.view(torch.int32)
        first = position % _PERIOD
        noise = self._noise_for(name, wide.device)[first : first + _PERIOD]
        body = bits.numel() // _PERIOD * _PERIOD
        bits[:body].view(-1, _PERIOD).add_(noise)
        bits[body:].add_(noise[: bits.numel() - body])
        narrow.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def _noise_for(self, name: str, device: torch.device) -> Tensor:
        """16 random bits per element of a period, repeated once: a period may start at any position."""
        key = name, device
        if key not in self._noise:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._number}/{name}".encode()))
            period = torch.randint(2**16, (_PERIOD,), generator=generator, dtype=torch.int32)
            noise = torch.cat([period, period])
            if device.type == "cuda":
                noise = noise.pin_memory()  # or the copy would block
            self._noise[key] = noise.to(device, non_blocking=True)
        return self._noise[key]
