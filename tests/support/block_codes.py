"""8-bit states, block by block: a reference for `plait.optim.adamw_8bit`, without its code."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256


def levels(*, unsigned: bool) -> list[float]:
    """The dynamic map of Dettmers et al. (bitsandbytes' `create_dynamic_map`), in float32."""
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2 ** (exponent + 1) if unsigned else 2**exponent
        width = 0.9 / count
        for index in range(count):
            value = (0.1 + width * (index + 0.5)) * 10.0 ** (exponent - 6)
            found += [value] if unsigned else [value, -value]
    return torch.tensor(sorted(found)).tolist()


_LEVELS = {unsigned: torch.tensor(levels(unsigned=unsigned)) for unsigned in (False, True)}


def nearest(ratios: Tensor, *, unsigned: bool) -> Tensor:
    """The nearest levels; of a ratio above 0, one above 0 if unsigned."""
    known = _LEVELS[unsigned]
    middle = (known[1:] + known[:-1]) / 2
    found = known[torch.bucketize(ratios.float(), middle)]
    return torch.where((ratios > 0) & (found == 0), known[1], found) if unsigned else found


def rounded(values: Tensor, position: int, *, unsigned: bool) -> Tensor:
    """The values of the codes of a flat tensor, whose first element is at `position` of its unit."""
    result = torch.zeros_like(values)
    start = 0
    while start < len(values):
        stop = min(len(values), start + BLOCK - (position + start) % BLOCK)
        block = values[start:stop]
        high, low = float(block.max()), float(block.min())
        scale = torch.tensor(high if high >= -low else low, dtype=torch.float32)
        if abs(float(scale)) >= 2.0**-100:
            result[start:stop] = nearest(block / scale, unsigned=unsigned).to(values.dtype) * scale
        start = stop
    return result


class PlainAdamW8bit(torch.optim.AdamW):
    """AdamW, whose states are rounded after each step, along the flat storage of each unit."""

    def __init__(
        self,
        units: Sequence[Any],
        named: Mapping[str, nn.Parameter],
        groups: list[dict[str, Any]],
        arguments: Mapping[str, Any],
    ) -> None:
        """`units`: their layouts, of one process."""
        super().__init__(groups, **{"foreach": False} | dict(arguments))
        self._units, self._named = units, named

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for unit in self._units:
            for kind in ("exp_avg", "exp_avg_sq"):
                states = {p.name: self.state[self._named[p.name]][kind] for p in unit.params}
                flat = torch.zeros(unit.numel, dtype=torch.float64)
                for p in unit.params:
                    flat[p.start : p.stop] = states[p.name].view(-1)
                for _, start, stop in unit.groups:
                    flat[start:stop] = rounded(flat[start:stop], start, unsigned=kind == "exp_avg_sq")
                for p in unit.params:
                    states[p.name].view(-1).copy_(flat[p.start : p.stop])
