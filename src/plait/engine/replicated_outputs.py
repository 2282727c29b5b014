"""Check that the outputs of a model that a loss reads are the same on all ranks of `tp`.

Logits are gathered, and hidden states between layers are full unless `row` shards them. But attention scores
are those of a rank's heads, and with rows the hidden states are a rank's features: a loss of these would
differ between ranks, and no loss curve would show it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from plait.comm import Group, all_gather
from plait.errors import ModelError

# Difference of projections relative to the norm: about 1 for different values, rounding for equal ones.
_SAME = 1e-2


class RecordedReads(TorchDispatchMode):
    """Records which tensors operators read."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))

    def of(self, outputs: Any) -> dict[str, Tensor]:
        """The tensors of these outputs that operators have read, by their names."""
        named = named_tensors(outputs).items()
        return {name: t for name, t in named if t.untyped_storage()._cdata in self._storages}


def check_replicated(outputs: Mapping[str, Tensor], group: Group) -> None:
    """Raise ModelError on all ranks of the group if a tensor's values or shapes differ between them."""
    if group.size == 1 or not outputs or any(tensor.is_meta for tensor in outputs.values()):
        return  # on meta, an estimate: there are no values
    own = torch.stack([_fingerprint(tensor) for tensor in outputs.values()]).flatten()
    all_ranks = own.new_empty(group.size * own.numel())
    all_gather(all_ranks, own, group)
    of_tensors = all_ranks.view(group.size, len(outputs), 3).transpose(0, 1).tolist()
    for name, of_ranks in zip(outputs, of_tensors, strict=True):
        size, projection, norm = of_ranks[0]
        if any(s != size or not abs(p - projection) <= _SAME * max(norm, n) for s, p, n in of_ranks):
            raise ModelError(
                "the ranks of tp have only their shards of an output that is read",
                given=f"outputs{name}, which is {tuple(outputs[name].shape)} here",
                expected="outputs that tp gathers, such as the logits, or does not shard",
                hint="a loss of the logits, or tp=1",
            )


def named_tensors(outputs: Any) -> dict[str, Tensor]:
    """The floating-point tensors in a model's outputs, by their names."""
    leaves = tree_flatten_with_path(outputs)[0]
    return {keystr(p): v for p, v in leaves if isinstance(v, Tensor) and v.is_floating_point()}


def _fingerprint(tensor: Tensor) -> Tensor:
    """The size, the projection on a fixed direction, and the norm. NaN counts as 0, infinity as 1."""
    flat = torch.nan_to_num(tensor.detach().double().flatten(), posinf=1.0, neginf=-1.0)
    direction = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float64))
    return torch.stack([torch.tensor(float(flat.numel())).to(flat), flat @ direction, flat.norm()])
