"""Norms over cut features against the whole ones, in float64, whatever their class."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.parallel.tensor.shards import TensorGroups
from plait.plan.sharding import LayerSharding, Style
from support.pool import Pool, RankError
from support.tensor_shards import GRIDS, Case, DimSharding, even, groups_of, max_differences, muted_groups

TINY = 1e-10


class Mean(nn.Module):
    """LlamaRMSNorm's arithmetic, with transformers' casts to float32 inside."""

    def __init__(self, size: int, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * (1.0 + self.weight) if self.plus_one else self.weight * normed


class Centred(nn.Module):
    """CohereLayerNorm's arithmetic."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(-1, keepdim=True)
        variance = (hidden - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((hidden - mean) * torch.rsqrt(variance + 1e-5))


class Asked(nn.Module):
    """A norm of one question."""

    def __init__(self, size: int, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (1 + self.ask(x))


def _norms(size: int) -> dict[str, nn.Module]:
    torch.manual_seed(size)
    wide = {"dtype": torch.float64}
    made = {
        "llama": Mean(size),
        "gemma": Mean(size, plus_one=True),
        "cohere": Centred(size),
        "layer": nn.LayerNorm(size, **wide),
        "layer without bias": nn.LayerNorm(size, bias=False, **wide),
        "bare layer": nn.LayerNorm(size, elementwise_affine=False, **wide),
        "rms": nn.RMSNorm(size, **wide),
        "rms with eps": nn.RMSNorm(size, eps=1e-3, **wide),
        "bare rms": nn.RMSNorm(size, elementwise_affine=False, **wide),
        "var": Asked(size, lambda x: x.var(-1, keepdim=True)),
        "biased var": Asked(size, lambda x: torch.var(x, dim=[-1], correction=0, keepdim=True)),
        "std": Asked(size, lambda x: x.std(dim=2).unsqueeze(-1)),
        "var_mean": Asked(size, lambda x: torch.var_mean(x, -1, unbiased=False)[0].unsqueeze(2)),
        "norm": Asked(size, lambda x: x.norm(dim=-1, keepdim=True)),
        "vector_norm": Asked(size, lambda x: torch.linalg.vector_norm(x, 2, -1, keepdim=True)),
        "sum": Asked(size, lambda x: x.abs().sum((2,)).unsqueeze(-1)),
        "of tokens": Asked(size, lambda x: x.abs().mean(1, keepdim=True)),
    }
    for norm in made.values():
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    return made


def _case(norm: nn.Module, features: DimSharding, size: int) -> Case:
    torch.manual_seed(size)
    return Case(
        nn.Sequential(norm),
        3 + torch.randn(2, 3, size, dtype=torch.float64),
        [LayerSharding("0", Style.NORM, features)],
        {f"0.{name}": (features,) for name, _ in norm.named_parameters()},
        (features,),
        (features,),
    )


def _norm_gaps(rows: int, cols: int) -> dict[str, dict[str, float]]:
    groups = groups_of(rows, cols)
    found = {}
    for axis, ranks in (("row", rows), ("col", cols)):
        for size in (24, 13):
            for name, norm in _norms(size).items():
                found[f"{name} {size} {axis}"] = max_differences(
                    _case(norm, even(axis, size, ranks), size), groups, steps=1
                )
    return found


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_a_norm_of_any_class_takes_its_statistics_over_all_features(pool: Pool, rows: int, cols: int) -> None:
    results = pool.run(_norm_gaps, rows * cols, rows, cols)
    assert len(results[0]) == 68
    assert all(
        "0.weight" in max_differences for name, max_differences in results[0].items() if "bare" not in name
    )
    for rank, cases in enumerate(results):
        assert [
            (rank, name, max_differences)
            for name, max_differences in cases.items()
            if not max(max_differences.values()) < TINY
        ] == []


def _alone(rows: int) -> dict[str, dict[str, float]]:
    """With the messages left out."""
    groups = muted_groups(groups_of(rows, 1), "row")
    found = {}
    for name, norm in _norms(24).items():
        case = _case(norm, even("row", 24, rows), 24)
        found[name] = max_differences(case, groups, steps=1)
    return found


def test_without_its_messages_a_norm_gives_other_numbers(pool: Pool) -> None:
    for found in pool.run(_alone, 2, 2):
        assert found.pop("of tokens")["y"] == 0
        assert all(max_differences["y"] > 1e-3 for max_differences in found.values())


def _shared() -> dict[str, tuple[Tensor, Tensor]]:
    """A norm over kv heads that two pairs of columns share; on each, something else is done with its
    output."""
    groups = groups_of(1, 4)
    features = DimSharding("col", (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)))
    found = {}
    for name, norm in _norms(8).items():
        case = _case(norm, features, 8)
        c = torch.randn(4, 2, 3, 8, dtype=torch.float64)
        x = case.x.clone().requires_grad_()
        (case.module(x) * (c[0] + c[1])).narrow(-1, 0, 4).sum().backward()
        (case.module(x) * (c[2] + c[3])).narrow(-1, 4, 4).sum().backward()
        place = groups.col.rank
        mine = case.x[..., slice(*features.ranges[place][0])].clone().requires_grad_()
        (case.cut(groups)(mine) * c[place, ..., slice(*features.ranges[place][0])]).sum().backward()
        assert x.grad is not None
        assert mine.grad is not None
        found[name] = (mine.grad, x.grad)
    return found


def test_features_that_ranks_share_count_once_in_a_norm(pool: Pool) -> None:
    """The copies' gradients are parts of a sum."""
    results = pool.run(_shared, 4)
    for name in results[0]:
        parts = [found[name][0] for found in results]
        summed = torch.cat([parts[0] + parts[1], parts[2] + parts[3]], -1)
        assert torch.allclose(summed, results[0][name][1], rtol=0, atol=TINY), name


_UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(-1, keepdim=True),
    "max": lambda x: x.max(),
    "softmax": lambda x: F.softmax(x, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum((1, 2)).unsqueeze(1).unsqueeze(1),
    "norm": lambda x: x.norm(p=1, dim=-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "prod": lambda x: x.prod(2).unsqueeze(-1),
}


def _refusal(what: str) -> None:
    groups = groups_of(2, 1)
    _ask(_case(Asked(8, _UNKNOWN[what]), even("row", 8, 2), 8), groups)


def _ask(case: Case, groups: TensorGroups) -> None:
    case.cut(groups)(case.x[..., :4])


@pytest.mark.parametrize("what", sorted(_UNKNOWN))
def test_modules_that_use_features_in_another_way_are_refused(pool: Pool, what: str) -> None:
    words = rf"(?s)ModelError: cannot shard the norm 0 over row.*it calls {what} "
    with pytest.raises(RankError, match=words):
        pool.run(_refusal, 2, what)


def _half(rows: int) -> dict[str, tuple[torch.dtype, float]]:
    groups = groups_of(rows, 1)
    found = {}
    for name in ("layer", "rms", "llama"):
        norm = _norms(16)[name]
        case = _case(norm, even("row", 16, rows), 16)
        own = slice(*even("row", 16, rows).ranges[groups.row.rank][0])
        with torch.no_grad():
            y = case.cut(groups).bfloat16()(case.x[..., own].bfloat16())
            found[name] = (y.dtype, float((y - case.module(case.x)[..., own]).abs().max()))
    return found


def test_norms_of_bf16_features_are_near_those_of_float64(pool: Pool) -> None:
    for found in pool.run(_half, 2, 2):
        for dtype, far in found.values():
            assert dtype == torch.bfloat16
            assert 0 < far < 0.1
