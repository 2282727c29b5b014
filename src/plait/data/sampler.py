"""Sample order, a pure function of (seed, epoch, sample number), and the samples of each batch, a pure
function of the batch's number.

[Note: shuffling without a table]  A Feistel network is a bijection of [0, 2**bits) for any round function:
each round changes one half of the number by a function of the other half, which can be undone. Numbers
outside [0, n) are mapped again until they fall inside (cycle walking; Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002): a bijection of [0, n). The domain is less than twice n, so a number takes
fewer than two passes on average. There is no state: sample i of epoch e is computed in O(1), for any number
of ranks, from any step on.

[Note: batch size ramp]  As in GPT-3 (Brown et al. 2020, appendix B), the batch grows linearly with the number
of tokens, in equal increments. The size of a batch follows from the number of samples before it, so a few
runs of equal batches describe the entire ramp. The order of samples does not depend on it: batches are taken
from one sequence of samples, in which those of a resumed run continue.

[Note: mixtures]  Source s, with share w_s of the samples, has its k-th one at time (k + 1/2) / w_s, and
samples are taken by time. So each run of samples has each source's share of them, up to one. Before time t
there are about t samples, so the counts at any sample number are found without those before it. Each source
has its own order, and with it its own epochs.

[Note: length groups]  Samples padded to one length waste the less, the more similar they are. Within windows
of some batches, samples are sorted by length and the batches shuffled, as transformers' LengthGroupedSampler
does. Global batches, not those of a rank: all ranks have samples of about the same length, no rank waits for
another one, and the order depends on no plan.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # four are pseudorandom for large halves (Luby and Rackoff); small halves need more
BLOCK = 4096  # samples per cached block: NumPy's fixed costs are paid once for many steps

Int64s = NDArray[np.int64]


class Permutation:
    """Bijection of [0, n) drawn by (seed, epoch), for 1 <= n < 2**62.

    See [Note: shuffling without a table].
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        assert 1 <= n < 2**62, f"permutation of {n} samples"
        bits = max(2, (n - 1).bit_length())
        self._n = np.uint64(n)
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits // 2)) - 1)
        words = hashlib.blake2b(f"plait order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [np.uint64(key) for key in np.frombuffer(words, dtype="<u8")]

    def __call__(self, numbers: Int64s) -> Int64s:
        """Permuted indices in [0, n) of sample numbers in [0, n); any shape."""
        flat = np.asarray(numbers).astype(np.uint64).ravel()
        flat = self._network(flat)
        outside = np.flatnonzero(flat >= self._n)
        while outside.size:
            flat[outside] = self._network(flat[outside])
            outside = outside[flat[outside] >= self._n]
        return flat.astype(np.int64).reshape(np.shape(numbers))

    def _network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high = numbers >> self._low_bits
        low = numbers & self._low_mask
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high ^= _mix(low, even) & self._high_mask
            low ^= _mix(high, odd) & self._low_mask
        return (high << self._low_bits) | low


def _mix(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea, Flood 2014), keyed."""
    x = numbers + key
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@dataclass
class SampleOrder:
    """Indices of samples number c = 0, 1, 2, ...: the c % n-th of epoch c // n.

    `_block` caches the last block of the order; results do not depend on it.
    """

    num_samples: int
    seed: int
    order: Literal["random", "sequential"] = "random"
    _block: tuple[tuple[int, int], Int64s] | None = field(default=None, repr=False, compare=False)

    def indices(self, first: int, count: int) -> Int64s:
        """Indices in [0, num_samples) of samples number first, first + 1, ...: (count,) int64."""
        if self.order == "sequential":
            return np.arange(first, first + count, dtype=np.int64) % self.num_samples
        blocks: list[Int64s] = []
        while count > 0:
            epoch, number = divmod(first, self.num_samples)
            block, offset = divmod(number, BLOCK)
            part = self._block_indices(epoch, block)[offset : offset + count]
            blocks.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)

    def epochs(self, count: int) -> list[float]:
        return [count / self.num_samples]

    def _block_indices(self, epoch: int, block: int) -> Int64s:
        if self._block is None or self._block[0] != (epoch, block):
            numbers = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.num_samples), dtype=np.int64)
            self._block = (epoch, block), Permutation(self.num_samples, seed=self.seed, epoch=epoch)(numbers)
        return self._block[1]


class Order(Protocol):
    """An order of samples: `SampleOrder`, `MixedOrder`, or `LengthGroups` or `OneEpoch` over one."""

    def indices(self, first: int, count: int) -> Int64s: ...

    def epochs(self, count: int) -> list[float]:
        """Epochs of each source in the first `count` samples."""


@dataclass
class MixedOrder:
    """Sources take turns by weight: see [Note: mixtures].

    orders   of each source's samples
    stops    where each source's samples stop among all
    shares   of each source, of all samples; their sum is 1
    """

    orders: Sequence[SampleOrder]
    stops: Int64s
    shares: Sequence[float]
    _block: tuple[int, Int64s] | None = field(default=None, repr=False, compare=False)

    @property
    def seed(self) -> int:
        return self.orders[0].seed

    def indices(self, first: int, count: int) -> Int64s:
        """Indices of samples number first, first + 1, ...: (count,) int64."""
        parts = [np.empty(0, dtype=np.int64)]
        while count > 0:
            block, offset = divmod(first, BLOCK)
            part = self._block_indices(block)[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts)

    def epochs(self, count: int) -> list[float]:
        pairs = zip(self.orders, self.shares, strict=True)
        return [count * share / order.num_samples for order, share in pairs]

    def _block_indices(self, block: int) -> Int64s:
        if self._block is None or self._block[0] != block:
            begin, slack = block * BLOCK, len(self.shares)
            span = max(0, begin - slack), begin + BLOCK + slack  # of time, with the block's samples
            lows = [max(0, int(share * span[0]) - 2) for share in self.shares]
            numbers = [
                np.arange(low, int(share * span[1]) + 3) for low, share in zip(lows, self.shares, strict=True)
            ]
            source = np.repeat(np.arange(len(lows)), [len(of_source) for of_source in numbers])
            times = [(n + 0.5) / share for n, share in zip(numbers, self.shares, strict=True)]
            taken = np.lexsort((source, np.concatenate(times)))[begin - sum(lows) :][:BLOCK]
            found = np.empty(BLOCK, dtype=np.int64)
            for number, order in enumerate(self.orders):
                of_source = np.concatenate(numbers)[taken[source[taken] == number]]
                start = self.stops[number] - order.num_samples
                first = int(of_source[0]) if len(of_source) else 0
                found[source[taken] == number] = start + order.indices(first, len(of_source))
            self._block = block, found
        return self._block[1]


@dataclass
class OneEpoch:
    """An order's first `num_samples` samples; from then on, the index `num_samples`, which is of a sample
    without targets."""

    order: Order
    num_samples: int

    def indices(self, first: int, count: int) -> Int64s:
        """Indices of samples number first, first + 1, ...: (count,) int64."""
        found = self.order.indices(first, count)
        return np.where(np.arange(first, first + count) < self.num_samples, found, self.num_samples)

    def epochs(self, count: int) -> list[float]:
        return [min(1.0, number) for number in self.order.epochs(count)]


@dataclass
class LengthGroups:
    """Another order, in which samples of similar length are next to each other. See [Note: length groups].

    lengths    of all samples
    batch      samples of similar length in a row
    window     number of such rows among which samples are sorted
    """

    order: SampleOrder | MixedOrder
    lengths: Int64s
    batch: int
    window: int
    _sorted: tuple[int, Int64s] | None = field(default=None, repr=False, compare=False)

    def indices(self, first: int, count: int) -> Int64s:
        """Indices of samples number first, first + 1, ...: (count,) int64."""
        parts = [np.empty(0, dtype=np.int64)]
        while count > 0:
            window, offset = divmod(first, self.batch * self.window)
            part = self._window_indices(window)[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts)

    def epochs(self, count: int) -> list[float]:
        return self.order.epochs(count)

    def _window_indices(self, window: int) -> Int64s:
        if self._sorted is None or self._sorted[0] != window:
            size = self.batch * self.window
            samples = self.order.indices(window * size, size)
            rows = samples[np.argsort(self.lengths[samples], kind="stable")].reshape(self.window, self.batch)
            order = Permutation(self.window, seed=self.order.seed, epoch=window)(np.arange(self.window))
            self._sorted = window, rows[order].ravel()
        return self._sorted[1]


@dataclass(frozen=True)
class BatchRamp:
    """Batches that grow from `start` samples, by `step` at a time, while `tokens` tokens are read."""

    start: int
    step: int
    tokens: int
    sequence: int  # tokens of a sample


class _BatchRun(NamedTuple):
    """Batches of one size: the number of the first one, and of its first sample."""

    batch: int
    sample: int
    size: int


class BatchSizes:
    """The size of each batch and its first sample. See [Note: batch size ramp].

    full    size of the largest batches; without a ramp, of all
    """

    def __init__(self, full: int, ramp: BatchRamp | None = None) -> None:
        self.full = full
        self._runs = [_BatchRun(0, 0, full)] if ramp is None else _ramp_runs(full, ramp)

    def span(self, batch: int) -> tuple[int, int]:
        """The number of the batch's first sample, and the batch's size."""
        run = self._runs[bisect_right(self._runs, batch, key=lambda run: run.batch) - 1]
        return run.sample + (batch - run.batch) * run.size, run.size

    def batches_of(self, samples: int) -> int:
        """The number of batches that contain the first `samples` samples."""
        return bisect_left(range(samples), samples, key=lambda batch: self.span(batch)[0])


def _ramp_runs(full: int, ramp: BatchRamp) -> list[_BatchRun]:
    increments, remainder = divmod(full - ramp.start, ramp.step)
    assert increments > 0 == remainder, f"a ramp from {ramp.start} to {full} in steps of {ramp.step}"
    runs, batch, sample, done = list[_BatchRun](), 0, 0, 0
    while done < increments:
        done = min(increments, sample * ramp.sequence * increments // ramp.tokens)
        size = ramp.start + done * ramp.step
        runs.append(_BatchRun(batch, sample, size))
        next_sample = -(-(done + 1) * ramp.tokens // (ramp.sequence * increments))  # of the next increment
        count = -(-(next_sample - sample) // size)
        batch, sample = batch + count, sample + count * size
    return runs
