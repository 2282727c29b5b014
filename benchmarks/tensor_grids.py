"""1-D, 2-D, 2.5-D and 3-D tensor parallelism: elements sent and held by formula, and counted in real steps.

    python benchmarks/tensor_grids.py [--ranks 4] [--hidden 512] [--ratio 2] [--json FILE]

One block of a GPT (weights of 12 hidden^2: qkv, out, up, down) on P ranks, for T tokens in all, forward and
backward without recompute. Per rank: elements sent, in T x hidden; weights held, in 12 hidden^2; elements
saved for backward, in T x hidden (one rank: 16, with attention that stores no scores). `ratio` is T / hidden:
schemes that move weights send 1 / ratio as much of them. Collectives are rings; broadcasts are pipelined, so
that a rank forwards a block once: with trees, multiply SUMMA's and Tesseract's by log2 of the group.

  1-D           Megatron-LM (1909.08053): 4 all-reduces of T x hidden
  2-D grid      plait's tp=RxC, from AxoNN (2305.13525): all-reduces of partial sums over both axes
  2-D SUMMA     Optimus (2104.05343), q x q: broadcasts of activations and weights, reductions of gradients
  2.5-D         Tesseract (2105.14500), q x q x d: SUMMA on T / d tokens, weights replicated d times
  3-D           Colossal-AI (2105.14450) after Agarwal et al. 1995, l x l x l: operands are gathered, and
                activations saved so; results are reduce-scattered
  3-D grid      plait's tp=RxC with zero=3 on Z: weights gathered twice and their gradients reduce-scattered

"counted" are the collectives' bytes, weights and saved activations of an engine on --ranks ranks, with
layout rules as its plan: what two blocks have more than one. The statistics of norms over rows are among
them. Schemes that plait does not run have no counts.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import common
import plait
from plait.bench.report import machine
from plait.comm import World, connect
from plait.plan import Grid, Plan, subtract_traffic
from plait.plan.events import ring_bytes

RANKS = (4, 8, 16, 32, 64)
LAYOUT = "batch:dp vocab:col heads:col ffn:col hidden:row"
NAMES = {
    "tokens": "vocab hidden",
    "blocks.*.qkv": "(3 heads 8) hidden",
    "blocks.*.out": "hidden (heads 8)",
    "blocks.*.heads": "heads",
    "blocks.*.up": "ffn hidden",
    "blocks.*.down": "hidden ffn",
    "head": "vocab hidden",
}
COUNTED = ("sent_counted", "weights_counted", "saved_counted")


class Block(nn.Module):
    """A GPT's block, with heads of 8."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 8
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BSh: Tensor) -> Tensor:
        parts = self.qkv(self.before(x_BSh)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSh = x_BSh + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BSh + self.down(nn.functional.gelu(self.up(self.between(x_BSh))))


class Net(nn.Module):
    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x_BSh: Tensor = self.tokens(ids)
        for block in self.blocks:
            x_BSh = block(x_BSh)
        return self.head(x_BSh)


@dataclass(frozen=True)
class Scheme:
    """Elements that a rank sends, holds and saves; see above. `plan`: with which plait runs it."""

    name: str
    shape: str
    sent: float
    weights: float
    saved: float
    plan: str = ""


def schemes(ranks: int, ratio: float) -> Iterator[Scheme]:
    """Every scheme that has a shape of so many ranks; of a scheme with several, the one that sends least."""
    yield grid(1, ranks, 1, ratio)
    for name, depths in (("2-D grid", (1,)), ("3-D grid", divisors(ranks)[1:])):
        shapes = [(r, ranks // z // r, z) for z in depths for r in divisors(ranks // z)]
        best = min((grid(*shape, ratio) for shape in shapes if shape[0] * shape[2] > 1), key=lambda s: s.sent)
        yield Scheme(name, best.shape, best.sent, best.weights, best.saved, best.plan)
    if (q := math.isqrt(ranks)) ** 2 == ranks:
        yield Scheme("2-D SUMMA", f"{q}x{q}", summa(q, 1, ratio), 1 / ranks, 16 / ranks)
    depth_of = {q: ranks // q**2 for q in divisors(ranks)[1:] if ranks % q**2 == 0 and ranks > q**2}
    if depth_of:
        q = min(depth_of, key=lambda q: summa(q, depth_of[q], ratio))
        shape = f"{q}x{q}x{depth_of[q]}"
        yield Scheme("2.5-D", shape, summa(q, depth_of[q], ratio), 1 / q**2, 16 / ranks)
    side = round(ranks ** (1 / 3))
    if side**3 == ranks:
        sent = 2 * (side - 1) / ranks * (16 + 12 / ratio)
        yield Scheme("3-D", f"{side}x{side}x{side}", sent, 1 / ranks, 7 / side**2 + 9 / ranks)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def grid(rows: int, cols: int, depth: int, ratio: float) -> Scheme:
    """Plait's grid: AxoNN's volume of T / depth tokens, and ZeRO-3's of the weights."""
    products = 8 / (rows * cols) * (3 * (rows - 1) + (cols - 1)) / depth
    weights = 3 * (depth - 1) / depth * 12 / (rows * cols) / ratio
    name = "1-D" if rows == depth == 1 else "2-D grid" if depth == 1 else "3-D grid"
    plan = f"dp={depth} tp={rows}x{cols}" + (" zero=3" if depth > 1 else "")
    shape = f"{rows}x{cols}" + (f"x{depth}" if depth > 1 else "")
    saved = (4 / rows + 12 / cols) / depth
    return Scheme(name, shape, products + weights, 1 / (rows * cols * depth), saved, plan)


def summa(q: int, depth: int, ratio: float) -> float:
    """Three products (output, input gradient, weight gradient) on q x q ranks, with 7 T h and 12 h^2 moved in
    each; over the depth, an all-reduce of the weights' gradients."""
    return 3 * (q - 1) / q**2 * (7 / depth + 12 / ratio) + 2 * (depth - 1) / depth * 12 / q**2 / ratio


def loss(outputs: Tensor, _: dict[str, Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.numel()


def measured(world: World, plan: str, hidden: int, tokens: int, blocks: int) -> list[float]:
    """Bytes that this rank sends in a step, of weights that it holds and of activations that it saves."""
    torch.manual_seed(0)
    model = Net(hidden, blocks)
    engine = plait.parallelize(model, plan, layout=LAYOUT, tensor_plan=NAMES, loss=loss, world=world)
    ids = torch.zeros(1, tokens // engine.data_ranks, dtype=torch.long)
    for _ in range(3):  # the first one communicates more
        before = world.comm_log.read()
        engine.step({"ids": ids})
    traffic = subtract_traffic(before, world.comm_log.read())
    memory = engine.memory()
    sent = ring_bytes(traffic, Grid.from_plan(Plan.parse(plan)))
    return [sent, memory.parameters, memory.activations or 0]


def counts(world: World, plan: str, hidden: int, tokens: int) -> dict[str, float]:
    """Return counts of one block, in the units of the formulas."""
    one, two = (measured(world, plan, hidden, tokens, blocks) for blocks in (1, 2))
    sent, weights, saved = ((more - less) / 4 for less, more in zip(one, two, strict=True))
    stream = tokens * hidden
    values = sent / stream, weights / (12 * hidden**2), saved / stream
    return dict(zip(COUNTED, values, strict=True))


def measure(arguments: argparse.Namespace) -> None:
    """A rank's work: rank 0 prints the table."""
    world = connect(transport="gloo")  # in shared memory there is nothing to gather
    tokens = round(arguments.ratio * arguments.hidden)
    rows: list[common.Row] = []
    for ranks in RANKS if arguments.ranks in RANKS else (arguments.ranks, *RANKS):
        for scheme in schemes(ranks, arguments.ratio):
            row: common.Row = {"ranks": ranks, "scheme": scheme.name, "shape": scheme.shape}
            row |= {"sent": scheme.sent, "weights": scheme.weights, "saved": scheme.saved}
            row |= dict.fromkeys(COUNTED)
            if scheme.plan and ranks == world.size:
                row |= counts(world, scheme.plan, arguments.hidden, tokens)
            rows.append(row)
    if world.rank == 0:
        title = f"a block by P ranks, T = {arguments.ratio:g} hidden, hidden {arguments.hidden} where counted"
        common.report(title, rows, machine(), arguments.json)


def main() -> None:
    made = common.parser(__doc__)
    made.add_argument("--ranks", type=int, default=4, help="of the runs that are counted")
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--ratio", type=float, default=2.0, help="tokens / hidden")
    arguments = common.parse(made, ranks=2, hidden=64)
    common.on_ranks(__file__, arguments.ranks, lambda: measure(arguments))


if __name__ == "__main__":
    main()
