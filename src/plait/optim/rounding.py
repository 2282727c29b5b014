"""bf16 copies of optimizer states.

[Note: why states are rounded at random]
bf16 has 8 bits of mantissa: it does not see a change of less than 1/512. `exp_avg_sq` with beta2 = 0.999
changes by 1/1000 of its distance a step, so that rounding to nearest freezes it where it first stood. Rounded
up with the probability of what is cut off, it is right on average (Gupta et al. 2015, 1502.02551; Zamirai
et al. 2020, 2010.06192).

The noise is a function of the training step, the state's name and the element's position, so that a step that
is run again, or after a resume, gives the same bits. Elements _PERIOD apart share it, which none of them can
tell: from step to step it is independent.
"""

import math
import zlib

import torch
from torch import Tensor

_PERIOD = 8192  # elements: 32 KB of noise, added from the first level of the cache


class StochasticRounding:
    """Rounds float32 to bf16 with the noise of one training step."""

    def __init__(self) -> None:
        self._number = -1
        self._noise: dict[tuple[str, torch.device], Tensor] = {}

    def begin(self, number: int) -> None:
        """From now on, the noise is that of training step `number`."""
        if number != self._number:
            self._noise.clear()
        self._number = number

    def round(self, wide: Tensor, narrow: Tensor, name: str, position: int) -> None:
        """Rounds a contiguous `wide`, which is lost, into `narrow`. `position`: of its first element.

        What bf16 can hold stays as it is; a NaN becomes infinite.
        """
        if wide.dtype != torch.float32:
            wide = wide.float()
        # The mantissa of a NaN could be full: with noise it would overflow into a zero.
        wide.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        bits = wide.view(torch.int32)
        first = position % _PERIOD
        noise = self._noise_of(name, wide.device)[first : first + _PERIOD]
        body = bits.numel() // _PERIOD * _PERIOD
        bits[:body].view(-1, _PERIOD).add_(noise)
        bits[body:].add_(noise[: bits.numel() - body])
        narrow.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def _noise_of(self, name: str, device: torch.device) -> Tensor:
        """16 random bits per element of a period, twice over: a period may begin anywhere."""
        key = name, device
        if key not in self._noise:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._number}/{name}".encode()))
            period = torch.randint(2**16, (_PERIOD,), generator=generator, dtype=torch.int32)
            self._noise[key] = torch.cat([period, period]).to(device)
        return self._noise[key]
