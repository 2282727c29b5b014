"""Dropout of attention over ranks: which pairs of a query and a key are dropped, for every degree and method.

# B samples  H heads  Q queries  N keys

[Note: dropped pairs]
A pair is dropped if a hash of the seed of its attention call, its sample, its head and both positions is low.
So each tile of scores is given its own factors where it is computed, in forward and again in backward, they
are never in memory beyond it, and they are the same on every rank, device, degree and method. Positions are
those in the row; heads are those of the model, over all columns of `tp`.

For a row of scores the seed's two halves are hashed with sample, head and query, to numbers a and b of 32
bits. A key at k has the hash of a k + b. The hash of 32 bits is that of Wellons' Hash Function Prospector
with the constants 16, 21f0aaad, 15, 735a2d97, 15. Numbers are int32, whose products wrap around: with int64
the hash takes three times as long.

[Note: seeds of attention calls]
Each call draws its seed from a generator that all ranks of `cp` and `tp` seed alike, before each pass of a
micro-batch through a stage. Blocks have this generator as an attribute, so a recomputation draws what the
forward drew: see [Note: state that a forward changes] in parallel/activation_checkpoint.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.models.init_weights import derive_seed

_HALF = 1 << 31


@dataclass(frozen=True)
class DropoutStream:
    """The seeds of this rank's attention calls. `first_heads`: the first of a column's heads, by their
    number."""

    first_heads: Mapping[int, int]
    generator: torch.Generator = field(default_factory=torch.Generator)

    def install(self, blocks: Iterable[nn.Module]) -> None:
        """See [Note: seeds of attention calls]."""
        for block in blocks:
            block.attention_stream = self.generator  # type: ignore[assignment]

    def seed(self, *parts: object) -> None:
        """Draw from here on what follows from `parts`."""
        self.generator.manual_seed(derive_seed("attention", *parts))

    def draw(self) -> int:
        """The seed of a call."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))


class Dropout(NamedTuple):
    """Dropout of an attention call's tile. `rate`: the share of pairs that are dropped. The tensors: indices
    of samples and heads, positions of queries and keys."""

    rate: float
    seed: int
    samples_B: Tensor
    heads_H: Tensor
    queries_Q: Tensor
    keys_N: Tensor

    def factors(self, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """Return (B, H, rows, keys): 0 for dropped pairs, and what makes up for them for the others."""
        of_rows = self._replace(queries_Q=self.queries_Q[rows])
        high, low = divmod(self.seed, 2 * _HALF)
        a_BHQ, b_BHQ = of_rows._hashed(high), of_rows._hashed(low - _HALF)
        odd_BHQ1 = (a_BHQ | 1).unsqueeze(-1)  # so that all keys have different hashes
        numbers = (odd_BHQ1 * self.keys_N[keys].to(torch.int32)).add_(b_BHQ.unsqueeze(-1))
        kept = _hash(numbers) >= min(round(self.rate * 2 * _HALF), 2 * _HALF - 1) - _HALF
        return kept.to(dtype).mul_(1 / (1 - self.rate) if self.rate < 1 else 0.0)

    def _hashed(self, half: int) -> Tensor:
        of_samples = _hash((self.samples_B ^ half).to(torch.int32))
        of_heads = _hash(of_samples[:, None] ^ self.heads_H.to(torch.int32))
        return _hash(of_heads[..., None] ^ self.queries_Q.to(torch.int32))


def _hash(x: Tensor) -> Tensor:
    """Hash int32, in place: see [Note: dropped pairs]. Shifts fill up with the sign, which is masked."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
