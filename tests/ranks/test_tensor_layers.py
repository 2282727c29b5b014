"""Cut linear layers and embeddings against the whole ones, in float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from plait.errors import ModelError
from plait.plan.sharding import LayerSharding, Style
from support.pool import Pool, RankError
from support.tensor_shards import (
    GRIDS,
    Case,
    DimSharding,
    even,
    groups_of,
    max_differences,
    muted_groups,
    packed,
)

TINY = 1e-10


class Pair(nn.Module):
    """The pattern of most of a transformer: a COLUMN layer, something between, a ROW layer."""

    def __init__(self, h: int, f: int, *, bias: bool, transposed: bool) -> None:
        super().__init__()
        if transposed:
            self.up, self.down = Conv1D(f, h).double(), Conv1D(h, f).double()
            nn.init.normal_(self.up.bias)
            nn.init.normal_(self.down.bias)
        else:
            self.up = nn.Linear(h, f, bias=bias, dtype=torch.float64)
            self.down = nn.Linear(f, h, bias=bias, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def _pair(rows: int, cols: int, h: int, f: int, *, bias: bool, transposed: bool) -> Case:
    torch.manual_seed(h + f)
    hidden, wide = even("row", h, rows), even("col", f, cols)
    flip = (lambda a, b: (b, a)) if transposed else (lambda a, b: (a, b))
    return Case(
        Pair(h, f, bias=bias, transposed=transposed),
        torch.randn(2, 3, h, dtype=torch.float64),
        [
            LayerSharding("up", Style.COLUMN, wide, hidden, transposed=transposed),
            LayerSharding("down", Style.ROW, hidden, wide, transposed=transposed),
        ],
        {
            "up.weight": flip(wide, hidden),
            "up.bias": (wide,),
            "down.weight": flip(hidden, wide),
            "down.bias": (hidden,),
        },
        (hidden,),
        (hidden,),
    )


def _lone_column(rows: int, cols: int, out: DimSharding, size: int, *, gathers: bool) -> Case:
    """One COLUMN layer."""
    torch.manual_seed(size)
    hidden = even("row", 6, rows)
    shared = len(set(out.ranges)) < len(out.ranges)
    return Case(
        nn.Sequential(nn.Linear(6, size, dtype=torch.float64)),
        torch.randn(5, 6, dtype=torch.float64),
        [LayerSharding("0", Style.COLUMN, out, hidden, gathers=gathers)],
        {"0.weight": (out, hidden), "0.bias": (out,)},
        (hidden,),
        () if gathers else (out,),
        ("0.weight", "0.bias") if shared and gathers else (),
    )


def _lone_row(rows: int, cols: int, inp: DimSharding, size: int) -> Case:
    """A ROW layer that is given whole features."""
    torch.manual_seed(size)
    hidden = even("row", 6, rows)
    return Case(
        nn.Sequential(nn.Linear(size, 6, dtype=torch.float64)),
        torch.randn(5, size, dtype=torch.float64),
        [LayerSharding("0", Style.ROW, hidden, inp, splits=True)],
        {"0.weight": (hidden, inp), "0.bias": (hidden,)},
        (),
        (hidden,),
    )


def _linear_cases(rows: int, cols: int) -> Iterator[tuple[str, Case]]:
    for h, f in ((12, 24), (7, 13), (6, 2)):
        for bias, transposed in ((True, False), (False, False), (True, True)):
            case = _pair(rows, cols, h, f, bias=bias, transposed=transposed)
            yield f"pair {h} {f} {bias=} {transposed=}", case
    for gathers in (False, True):
        yield f"even {gathers=}", _lone_column(rows, cols, even("col", 8, cols), 8, gathers=gathers)
        yield f"uneven {gathers=}", _lone_column(rows, cols, even("col", 7, cols), 7, gathers=gathers)
        yield f"packed {gathers=}", _lone_column(rows, cols, packed("col", 5, 3, cols), 15, gathers=gathers)
    everyone = DimSharding("col", (((0, 4),),) * cols)
    yield "shared", _lone_column(rows, cols, everyone, 4, gathers=True)
    yield "splits", _lone_row(rows, cols, even("col", 7, cols), 7)
    yield "splits packed", _lone_row(rows, cols, packed("col", 5, 2, cols), 10)


def _linear_gaps(rows: int, cols: int) -> dict[str, dict[str, float]]:
    groups = groups_of(rows, cols)
    return {name: max_differences(case, groups) for name, case in _linear_cases(rows, cols)}


def _far(results: list[dict[str, dict[str, float]]]) -> list[tuple[int, str, dict[str, float]]]:
    """Numbers that are not the same, by rank and case."""
    return [
        (rank, name, max_differences)
        for rank, cases in enumerate(results)
        for name, max_differences in cases.items()
        if not max(max_differences.values()) < TINY
    ]


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_cut_linear_layers_give_the_numbers_of_whole_ones(pool: Pool, rows: int, cols: int) -> None:
    results = pool.run(_linear_gaps, rows * cols, rows, cols)
    assert len(results[0]) == 18
    assert {"x", "y", "up.weight", "down.weight", "up.bias", "down.bias"} == results[0][
        "pair 7 13 bias=True transposed=False"
    ].keys()
    assert _far(results) == []


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, indices: Tensor) -> Tensor:
        return super().forward(indices) * 3.5


def _embedding(rows: int, cols: int, kind: type[nn.Embedding], v: int, padding: int | None) -> Case:
    torch.manual_seed(v)
    words, hidden = even("col", v, cols), even("row", 5, rows)
    table = kind(v, 5, padding_idx=padding, dtype=torch.float64)
    nn.init.normal_(table.weight)
    indices = torch.cat([torch.arange(v), torch.randint(0, v, (v,))]).view(2, v)
    return Case(
        nn.Sequential(table),
        indices,
        [LayerSharding("0", Style.VOCABULARY, hidden, words)],
        {"0.weight": (words, hidden)},
        (),
        (hidden,),
    )


def _embedding_gaps(rows: int, cols: int) -> dict[str, dict[str, float]]:
    groups = groups_of(rows, cols)
    found = {}
    for kind in (nn.Embedding, Scaled):
        for v in (12, 7, 2):
            for padding in (None, 0, v - 1):
                case = _embedding(rows, cols, kind, v, padding)
                found[f"{kind.__name__} {v} {padding}"] = max_differences(case, groups)
    table = _embedding(rows, 1, nn.Embedding, 7, None)  # the whole vocabulary on every column
    found["table"] = max_differences(
        Case(
            table.module,
            table.x,
            [LayerSharding("0", Style.FEATURE_EMBEDDING, even("row", 5, rows))],
            {"0.weight": (None, even("row", 5, rows))},
            (),
            (even("row", 5, rows),),
        ),
        groups,
    )
    return found


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_cut_embeddings_give_the_numbers_of_whole_ones(pool: Pool, rows: int, cols: int) -> None:
    results = pool.run(_embedding_gaps, rows * cols, rows, cols)
    assert len(results[0]) == 19
    assert _far(results) == []


def _refused(words: dict[str, object]) -> None:
    groups = groups_of(1, 2)
    case = _embedding(1, 2, nn.Embedding, 8, None)
    for word, value in words.items():
        setattr(case.module[0], word, value)
    case.cut(groups)


@pytest.mark.parametrize("words", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_looks_at_other_ranks_rows_is_refused(pool: Pool, words: dict[str, object]) -> None:
    with pytest.raises(RankError, match="cannot shard the embedding 0") as caught:
        pool.run(_refused, 2, words)
    assert isinstance(caught.value.__cause__, ModelError | None)


def _without_messages(rows: int, cols: int) -> dict[str, dict[str, float]]:
    """Every rank by itself: as if all sums and gathers had been forgotten."""
    groups = groups_of(rows, cols)
    case = _pair(rows, cols, 12, 24, bias=True, transposed=False)
    return {axis: max_differences(case, muted_groups(groups, axis), steps=1) for axis in ("row", "col")}


def test_without_its_messages_a_cut_layer_gives_other_numbers(pool: Pool) -> None:
    """The sums of each axis: over col the output of ROW layers and COLUMN's input gradient, over row the
    others."""
    for found in pool.run(_without_messages, 4, 2, 2):
        assert found["col"]["y"] > 1e-3
        assert found["col"]["x"] > 1e-3
        assert found["row"]["y"] > 1e-3
        assert found["row"]["up.weight"] > 1e-3


def _half(rows: int, cols: int) -> tuple[torch.dtype, torch.dtype, float]:
    groups = groups_of(rows, cols)
    case = _pair(rows, cols, 8, 16, bias=True, transposed=False)
    expected = case.module(case.x).detach()
    module = case.cut(groups).bfloat16()
    hidden = even("row", 8, rows).ranges[groups.row.rank][0]
    x = case.x[..., slice(*hidden)].bfloat16().requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.dtype, x.grad.dtype, float((y.detach() - expected[..., slice(*hidden)]).abs().max())


def test_cut_layers_work_in_bf16(pool: Pool) -> None:
    for dtype, grad_dtype, far in pool.run(_half, 4, 2, 2):
        assert dtype == grad_dtype == torch.bfloat16
        assert 0 < far < 0.05


def _twice() -> None:
    groups = groups_of(1, 2)
    module = _pair(1, 2, 4, 8, bias=True, transposed=False).cut(groups)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(module(x).square().sum(), [x], create_graph=True)
    dx.sum().backward()


def test_differentiating_twice_is_refused_by_torch(pool: Pool) -> None:
    with pytest.raises(RankError, match="once_differentiable"):
        pool.run(_twice, 2)


def _own_forward() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    groups = groups_of(1, 2)
    case = _lone_column(1, 2, even("col", 8, 2), 8, gathers=False)
    case.module[0].__class__ = Noisy
    case.cut(groups)


def test_a_linear_layer_with_a_forward_of_its_own_is_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match="cannot shard 0 as a linear layer"):
        pool.run(_own_forward, 2)
