"""Check that the outputs of a model that a loss reads are the same on all ranks of `tp`.

Logits are gathered, and hidden states between layers are full unless `row` shards them. But attention scores
are those of a rank's heads, and with rows the hidden states are a rank's features: a loss of these would
differ between ranks, and no loss curve would show it.

[Note: outputs that are read later]
A loss may read an entry from some step on only: a term that begins later, or an entry that later batches
have. So reads are recorded until all entries have been read, and entries are compared after the call that
reads them first. Ranks of `tp` agree on that call without communication: they run one loss on one
micro-batch, on outputs of one structure, so they take the same branches until one depends on a value that
differs between them. Such a value is an entry that was not compared before, and was read on all ranks by
then. Afterwards ranks may read different entries; so all entries are gathered, which have the same names
everywhere, and marks of those that are read. A loss that reads by rank, for a log, breaks this: the other
ranks then receive another collective.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from plait.comm import Group, all_gather
from plait.errors import ModelError
from plait.models.tensors import storage_key, summary
from plait.models.trace.modes import watching_reads

# Difference of projections relative to the norm: about 1 for different values, rounding for equal ones.
_SAME = 1e-2


class LossReads:
    """Checks what a user's loss reads. See [Note: outputs that are read later]."""

    def __init__(self, group: Group) -> None:
        """`group`: the ranks that hold shards of the model."""
        self._group = group
        self._compared: set[str] = set()

    def call(self, loss: Callable[[Any, Any], Any], outputs: Any, batch: Any) -> Any:
        """Call the loss. Raises ModelError on all ranks of the group if it reads what differs between
        them."""
        named = named_tensors(outputs) if self._group.size > 1 else {}
        if named.keys() <= self._compared:
            return loss(outputs, batch)
        read: set[int] = set()
        with watching_reads(read.add):
            result = loss(outputs, batch)
        marks = {n: n not in self._compared and storage_key(tensor) in read for n, tensor in named.items()}
        if any(marks.values()):
            self._compared |= check_replicated(named, self._group, marks)
        return result


def check_replicated(
    outputs: Mapping[str, Tensor], group: Group, marks: Mapping[str, bool] | None = None
) -> set[str]:
    """Raise ModelError on all ranks of the group if a tensor's values or shapes differ between them; with
    `marks`, only for those that a rank marks. Returns the names of these."""
    if group.size == 1 or not outputs or any(tensor.is_meta for tensor in outputs.values()):
        return set()  # on meta, an estimate: there are no values
    summaries = torch.stack([summary(tensor) for tensor in outputs.values()])
    facts = [[marks is None or marks[name], tensor.numel()] for name, tensor in outputs.items()]
    own = torch.cat([summaries.new_tensor(facts), summaries], 1).flatten()
    all_ranks = own.new_empty(group.size * own.numel())
    all_gather(all_ranks, own, group)
    of_tensors = all_ranks.view(group.size, len(outputs), 4).transpose(0, 1).tolist()
    marked = {name for name, ranks in zip(outputs, of_tensors, strict=True) if any(rank[0] for rank in ranks)}
    for name, of_ranks in zip(outputs, of_tensors, strict=True):
        _, size, projection, norm = of_ranks[0]
        is_same = all(s == size and abs(p - projection) <= _SAME * max(norm, n) for _, s, p, n in of_ranks)
        if not is_same and name in marked:
            raise ModelError(
                "the ranks of tp have only their shards of an output that is read",
                given=f"outputs{name}, which is {tuple(outputs[name].shape)} here",
                expected="outputs that tp gathers, such as the logits, or does not shard",
                hint="a loss of the logits, or tp=1",
            )
    return marked


def named_tensors(outputs: Any) -> dict[str, Tensor]:
    """The floating-point tensors in a model's outputs, by their names."""
    leaves = tree_flatten_with_path(outputs)[0]
    return {keystr(p): v for p, v in leaves if isinstance(v, Tensor) and v.is_floating_point()}
