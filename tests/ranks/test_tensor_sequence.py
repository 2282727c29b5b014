"""Sequence parallelism against the whole model, in float64; whole layers and latents among cut ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.comm import all_reduce
from plait.plan.sharding import LayerSharding, Style
from support.pool import Pool, RankError
from support.tensor_shards import Case, DimSharding, even, groups_of, max_differences, muted_groups, recorded

TINY = 1e-10
H, F, HEADS = 8, 12, 4


def _linear(inp: int, out: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inp, out, bias=bias, dtype=torch.float64)


class Attention(nn.Module):
    """Mixes tokens, so that which rank has which of them matters."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = _linear(H, H), _linear(H, H, bias=False), _linear(H, H)
        self.o = _linear(H, H)

    def forward(self, *, hidden_states: Tensor, scale: float) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, H // HEADS)
        q, k, v = (p(hidden_states).view(shape).transpose(-3, -2) for p in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q * scale, k, v, is_causal=True)
        return self.o(mixed.transpose(-3, -2).flatten(-2)), None


class Mlp(nn.Module):
    """Reads its input through a view, which is another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = _linear(H, F), _linear(H, F), _linear(F, H)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.shape)
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class Mixed(Mlp):
    """A whole weight reads the input too, as DeepSeek's `q_a_proj` does: not pure."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.up = _linear(H, 3), _linear(3, F)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(torch.tanh(self.low(x))) * torch.sigmoid(self.gate(x)))


class Flat(Mlp):
    """Flattens whole sequences."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        y = self.down(self.up(flat) * torch.sigmoid(self.gate(flat)))
        return y.view(x.shape[0], -1, H)


class Table(nn.Module):
    """Expert tensors, cut over their width; of flat tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, H, F, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(2, F, H, dtype=torch.float64))

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        up, down = self.up[chosen], self.down[chosen]
        y = torch.tanh(x.unsqueeze(-2) @ up) @ down
        return y.squeeze(-2) * shares


class Experts(nn.Module):
    """A mixture of two, and a shared expert; flattens tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.table, self.shared = _linear(H, 2), Table(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        shares, chosen = torch.softmax(self.router(flat), -1).max(-1, keepdim=True)
        mixed = self.table(flat, chosen.squeeze(-1), shares)
        return mixed.view(x.shape) + self.shared(x)


class Lone(nn.Module):
    """As OPT's: linear layers that are children of the block, on flattened tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.attn = Attention()
        self.fc1, self.fc2 = _linear(H, F), _linear(F, H)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        x = hidden_states + self.attn(hidden_states=self.norm(hidden_states), scale=0.5)[0]
        flat = x.reshape(-1, H)
        return ((flat + self.fc2(torch.tanh(self.fc1(flat)))).view(x.shape),)


class Block(nn.Module):
    """Attention, then `ffn`; or both side by side on one tensor."""

    def __init__(self, ffn: Callable[[], nn.Module], *, parallel: bool = False) -> None:
        super().__init__()
        self.norm, self.norm2 = (nn.LayerNorm(H, dtype=torch.float64) for _ in range(2))
        self.attn, self.ffn, self.parallel = Attention(), ffn(), parallel

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        normed = self.norm(hidden_states)
        x = hidden_states + self.attn(hidden_states=normed, scale=0.5)[0]
        return (x + self.ffn(normed if self.parallel else self.norm2(x)),)


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], *, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.blocks, self.last = _linear(H, H), nn.ModuleList(blocks), _linear(H, H)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)[0] if self.recompute else block(hidden_states=x)[0]
        return self.last(x)


_MAKES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Block(Mlp),
    "parallel": lambda: Block(Mlp, parallel=True),
    "mixed": lambda: Block(Mixed),
    "experts": lambda: Block(Experts),
    "lone": Lone,
    "flat": lambda: Block(Flat),
}
_COLUMNS, _ROWS = ("q", "k", "v", "up", "gate", "fc1"), ("o", "down", "fc2")


def _case(
    kind: str, cols: int, shape: tuple[int, ...], *, sequence: bool = True, recompute: bool = False
) -> Case:
    torch.manual_seed(4)
    model = Model([_MAKES[kind]() for _ in range(2)], recompute=recompute)
    heads = even("col", HEADS, cols)
    size = H // HEADS
    of_heads = DimSharding("col", tuple(tuple((a * size, b * size) for a, b in r) for r in heads.ranges))
    width = even("col", F, cols)
    layers, parameters, regions, partial = [], {}, [], []
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        cut = of_heads if leaf in "qkvo" else width
        if isinstance(module, nn.Linear) and leaf in _COLUMNS:
            layers.append(LayerSharding(name, Style.COLUMN, cut))
            parameters |= {f"{name}.weight": (cut, None), f"{name}.bias": (cut,)}
        elif isinstance(module, nn.Linear) and leaf in _ROWS:
            layers.append(LayerSharding(name, Style.ROW, None, cut))
            parameters[f"{name}.weight"] = (None, cut)
            if sequence and not (kind == "experts" and ".ffn" in name):  # a closed region's see all tokens
                partial.append(f"{name}.bias")
        elif isinstance(module, Table):
            layers.append(LayerSharding(name, Style.EXPERTS))
            parameters |= {f"{name}.up": (None, None, cut), f"{name}.down": (None, cut, None)}
        elif leaf in ("attn", "ffn"):
            regions.append(name)
        elif isinstance(module, nn.LayerNorm) and sequence:
            partial += [f"{name}.weight", f"{name}.bias"]  # every rank sees its tokens only
    if kind == "parallel":
        partial = [name for name in partial if "norm2" not in name]
    pure = frozenset(n for n in regions if n.endswith("attn") or kind in ("plain", "parallel", "flat"))
    blocks = tuple(f"blocks.{i}" for i in range(2))
    return Case(
        model,
        torch.randn(*shape, H, dtype=torch.float64),
        layers,
        {name: cuts for name, cuts in parameters.items() if name in dict(model.named_parameters())},
        partial=tuple(partial),
        blocks=blocks,
        sequence=sequence,
        plan={"regions": tuple(regions), "pure": pure},
    )


_SHAPES = [(1, 8), (2, 8), (2, 7), (3, 5), (2, 1)]


def _sequence_gaps(cols: int, kind: str) -> dict[str, dict[str, float]]:
    groups = groups_of(1, cols)
    found = {}
    for shape in (*_SHAPES, *([(6,)] if kind in ("plain", "mixed") else [])):
        for recompute in (False, True):
            case = _case(kind, cols, shape, recompute=recompute)
            found[f"{shape} {recompute=}"] = max_differences(case, groups)
    found["without sp"] = max_differences(_case(kind, cols, (2, 7), sequence=False), groups)
    return found


@pytest.mark.parametrize("kind", sorted(_MAKES))
@pytest.mark.parametrize("cols", [1, 2, 3, 4])
def test_tokens_cut_over_col_give_the_same_numbers(pool: Pool, cols: int, kind: str) -> None:
    results = pool.run(_sequence_gaps, cols, cols, kind)
    assert len(results[0]) >= 11
    assert len(results[0]["without sp"]) >= 27
    for rank, cases in enumerate(results):
        far = [
            (rank, name, {n: g for n, g in max_differences.items() if not g < TINY})
            for name, max_differences in cases.items()
        ]
        assert [found for found in far if found[2]] == []


def _log(kind: str, steps: int) -> tuple[list[str], list[str]]:
    """Messages of a step, forward and backward."""
    log: list[str] = []
    case = _case(kind, 2, (1, 8))
    module = case.cut(recorded(groups_of(1, 2), log))
    for _ in range(steps):
        log.clear()
        y = module(case.x)
        forward = [*log]
        log.clear()
        y.sum().backward()
    return forward, [line for line in log if not line.startswith("end")]


def test_a_region_gathers_once_and_scatters_once(pool: Pool) -> None:
    """Korthikanti's counts: per block two gathers and two scatters each way; one more gather at the end of
    the last block, and in backward at the beginning of the first. Side by side, both read one tensor. What
    attention reads is gathered again; what the mlp reads, through a view, is kept."""
    for kind, gathers in (("plain", 2), ("parallel", 1)):
        for steps in (1, 2):
            for forward, backward in pool.run(_log, 2, kind, steps):
                assert forward.count("all-gather col") == 2 * gathers + 1
                assert forward.count("start reduce-scatter col") == 2 * 2
                assert len([line for line in forward if "end" not in line]) == 2 * gathers + 1 + 4
                assert backward.count("all-gather col") == 2 * 2 + 1
                assert backward.count("start reduce-scatter col") == 2 * gathers
                assert backward.count("start all-gather col") == 2
                assert len(backward) == 2 * gathers + 5 + 2


def _local() -> dict[str, float]:
    return max_differences(_case("plain", 2, (2, 8)), muted_groups(groups_of(1, 2), "col"), steps=1)


def test_without_its_messages_a_block_gives_other_numbers(pool: Pool) -> None:
    for found in pool.run(_local, 2):
        assert found["y"] > 1e-3
        assert found["blocks.0.attn.q.weight"] > 1e-3


def _lengths() -> float:
    """Two forwards of different lengths before either runs backward: rank 0 has 3 tokens of both."""
    groups = groups_of(1, 2)
    case = _case("plain", 2, (2, 5), recompute=True)
    module = case.cut(groups)
    xs = [torch.randn(2, length, H, dtype=torch.float64) for length in (5, 6)]
    for model in (case.module, module):
        losses = [model(x).square().sum() for x in xs]
        losses[0].backward()
        losses[1].backward()
    grad, expected = (m.blocks[0].attn.o.bias.grad for m in (module, case.module))
    all_reduce(grad, groups.col)  # of each rank's tokens
    return float((grad - expected).abs().max())


def test_a_block_that_runs_again_finds_the_length_of_its_own_sequence(pool: Pool) -> None:
    assert max(pool.run(_lengths, 2)) < TINY


def _nameless() -> None:
    class Nameless(Attention):
        def forward(self, *, states: Tensor) -> Tensor:  # type: ignore[override]
            return states

    case = _case("plain", 2, (2, 8))
    case.module.blocks[0].attn.__class__ = Nameless
    module = case.cut(groups_of(1, 2))
    module.blocks[0].attn(states=case.x)


def test_a_region_with_an_ambiguous_input_is_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"cannot tell which input of blocks\.0\.attn"):
        pool.run(_nameless, 2)


# --- whole layers, latents


class Latent(nn.Module):
    """As DeepSeek's: heads read a common latent through cut layers, and a rotary part themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = _linear(H, 5), _linear(3, F), _linear(F, H)
        self.norm = nn.RMSNorm(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        latent, rotary = self.a(x).split([3, 2], -1)
        y = self.b(self.norm(latent))
        return self.o(y * rotary[..., :1] + rotary[..., 1:].sin())


def _latent(rows: int, cols: int) -> dict[str, float]:
    torch.manual_seed(5)
    hidden, wide = even("row", H, rows), even("col", F, cols)
    case = Case(
        nn.Sequential(Latent()),
        torch.randn(2, 3, H, dtype=torch.float64),
        [
            LayerSharding("0.a", Style.MLA_LATENT, None, hidden, summed=((3, 5),)),
            LayerSharding("0.b", Style.COLUMN, wide, even("row", 3, rows)),
            LayerSharding("0.o", Style.ROW, hidden, wide),
        ],
        {
            "0.b.weight": (wide, None),
            "0.b.bias": (wide,),
            "0.o.weight": (hidden, wide),
            "0.o.bias": (hidden,),
        },
        (hidden,),
        (hidden,),
    )
    return max_differences(case, groups_of(rows, cols))


def test_a_latent_that_all_heads_share_gets_their_gradients(pool: Pool) -> None:
    for cols in (2, 3):
        for found in pool.run(_latent, cols, 1, cols):
            assert len(found) == 9
            assert max(found.values()) < TINY, found


def _whole(rows: int) -> dict[str, float]:
    """A whole layer between pieces of the stream."""
    torch.manual_seed(6)
    hidden = even("row", H, rows)
    case = Case(
        nn.Sequential(_linear(H, H)),
        torch.randn(2, 3, H, dtype=torch.float64),
        [LayerSharding("0", Style.REPLICATE, hidden, hidden)],
        {},
        (hidden,),
        (hidden,),
    )
    return max_differences(case, groups_of(rows, 1))


def test_a_whole_layer_gathers_what_it_reads_and_gives_a_piece(pool: Pool) -> None:
    for rows in (2, 3):
        for found in pool.run(_whole, rows, rows):
            assert set(found) == {"x", "y", "0.weight", "0.bias"}
            assert max(found.values()) < TINY, found
