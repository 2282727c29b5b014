"""Tokens that a region has gathered are not kept for backward, but gathered again during the products."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plait.models import watch_activations
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.plan.sharding import LayerSharding, Style
from support.pool import Pool
from support.tensor_shards import (
    Case,
    MatmulLog,
    even,
    groups_of,
    max_difference,
    max_differences,
    recorded,
    run,
)

TINY = 1e-10
H, F = 6, 8
_COLUMNS, _ROWS = ("attn.q", "attn.k", "attn.v", "mlp.0"), ("attn.o", "mlp.2")


def _linear(inp: int, out: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inp, out, bias=bias, dtype=torch.float64)


class Attention(nn.Module):
    """Mixes tokens. Reads its input three times, once more with `q`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            _linear(H, F),
            _linear(H, F, bias=False),
            _linear(H, F),
            _linear(F, H),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.o((torch.tanh(self.q(x)) * self.k(x)).cumsum(-2) + self.v(x) * self.q(x))


class Block(nn.Module):
    """Attention, then mlp; or side by side on one tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.norm2 = (nn.LayerNorm(H, dtype=torch.float64) for _ in range(2))
        self.attn, self.mlp = Attention(), nn.Sequential(_linear(H, F), nn.Tanh(), _linear(F, H))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y = x + self.attn(normed)
        return y + self.mlp(normed if self.kind == "parallel" else self.norm2(y))


def _case(kind: str, rows: int, cols: int, shape: tuple[int, ...] = (2, 6), frozen: str = "") -> Case:
    torch.manual_seed(1)
    hidden, wide = even("row", H, rows), even("col", F, cols)
    layers = [LayerSharding(name, Style.COLUMN, wide, hidden) for name in _COLUMNS]
    layers += [LayerSharding(name, Style.ROW, hidden, wide) for name in _ROWS]
    layers += [LayerSharding(name, Style.NORM, hidden) for name in ("norm", "norm2")]
    module = Block(kind)
    cuts: dict[str, Any] = {f"{name}.weight": (wide, hidden) for name in _COLUMNS}
    cuts |= {f"{name}.bias": (wide,) for name in _COLUMNS}
    cuts |= {f"{name}.weight": (hidden, wide) for name in _ROWS}
    cuts |= {f"{name}.bias": (hidden,) for name in (*_ROWS, "norm", "norm2")}
    cuts |= {f"{name}.weight": (hidden,) for name in ("norm", "norm2")}
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(not (frozen and name.startswith(tuple(frozen.split()))))
    stream = ("norm.", "norm2.", "attn.o.bias", "mlp.2.bias")
    partial = [
        name
        for name, parameter in named.items()
        if name.startswith(stream)
        and parameter.requires_grad
        and not (kind == "parallel" and "norm2" in name)
    ]
    return Case(
        nn.Sequential(module),
        torch.randn(*shape, H, dtype=torch.float64),
        [LayerSharding(f"0.{layer.module}", layer.style, layer.out, layer.inp) for layer in layers],
        {f"0.{name}": dims for name, dims in cuts.items() if name in named},
        (hidden,),
        (hidden,),
        tuple(f"0.{name}" for name in partial),
        blocks=("0",),
        sequence=True,
        plan={"regions": ("0.attn", "0.mlp"), "pure": frozenset(("0.attn", "0.mlp"))},
    )


class _Recomputed(Case):
    how = "none"

    def cut(self, groups: Any) -> nn.Module:
        module = super().cut(groups)
        recompute_blocks(list(module), self.how)
        return module


def _gaps(kind: str, rows: int, cols: int, frozen: str) -> dict[str, dict[str, float]]:
    groups, found = groups_of(rows, cols), {}
    for shape in ((1, 6), (2, 6), (2, 7), (2, 1), (5,)):
        for how in ("none", "full", "selective"):
            case = _case(kind, rows, cols, shape, frozen)
            case.__class__, case.how = _Recomputed, how
            found[f"{shape} {how}"] = max_differences(case, groups, steps=3)
    return found


@pytest.mark.parametrize("frozen", ["", "attn.q.weight attn.o", "attn", "norm"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_gathered_again_gives_the_same_gradients(
    pool: Pool, kind: str, rows: int, cols: int, frozen: str
) -> None:
    for cases in pool.run(_gaps, rows * cols, kind, rows, cols, frozen):
        far = {name: {n: g for n, g in found.items() if not g < TINY} for name, found in cases.items()}
        assert {name: found for name, found in far.items() if found} == {}
        assert len(cases) == 15


def _log(kind: str, steps: int, frozen: str = "") -> list[str]:
    """Operations of the last of some steps in backward."""
    log: list[str] = []
    case = _case(kind, 1, 2, frozen=frozen)
    module = case.cut(recorded(groups_of(1, 2), log))
    for _ in range(steps):
        y = module(case.x.clone().requires_grad_())
        log.clear()
        with MatmulLog(log):
            y.sum().backward()
    return log


def test_the_gather_overlaps_the_products_and_the_sum_overlaps_weight_gradients(pool: Pool) -> None:
    tokens = 2 * 6
    dz, dw = f"mm ({tokens}, {H})", f"mm ({F // 2}, {H})"
    # the mlp's products follow once they are learned; before, they are computed before the sum
    for steps, num_between in ((1, 4), (2, 5)):
        for log in pool.run(_log, 2, "parallel", steps):
            assert log.count("start all-gather col") == log.count("start reduce-scatter col") == 1
            gather, scatter = log.index("start all-gather col"), log.index("start reduce-scatter col")
            assert log[gather + 1] == dz
            assert log[gather:scatter].count(dz) == 5
            end = log.index("end reduce-scatter col")
            assert log[scatter:end].count(dw) == num_between
            assert log.count(dw) == 5
            assert log.index("end all-gather col") < log.index(dw)
    for steps in (1, 2):
        for log in pool.run(_log, 2, "serial", steps):
            assert log.count("start all-gather col") == log.count("start reduce-scatter col") == 2
            for first, dws in (
                (log.index("start all-gather col"), 1),
                (_last(log, "start all-gather col"), 4),
            ):
                scatter = log.index("start reduce-scatter col", first)
                assert log[scatter : scatter + dws + 3] == [
                    "start reduce-scatter col",
                    "end all-gather col",
                    *[dw] * dws,
                    "end reduce-scatter col",
                ]


def _last(log: list[str], line: str) -> int:
    return len(log) - 1 - log[::-1].index(line)


def test_for_frozen_weights_nothing_is_gathered_again(pool: Pool) -> None:
    for frozen, gathers in (("attn", 1), ("mlp attn", 0)):
        for log in pool.run(_log, 2, "serial", 2, frozen):
            assert log.count("start all-gather col") == gathers
            assert log.count("start reduce-scatter col") == 2


@contextmanager
def _saved() -> Iterator[Counter[tuple[int, ...]]]:
    shapes: Counter[tuple[int, ...]] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        shapes[tuple(tensor.shape)] += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield shapes


def _kept(kind: str) -> list[Counter[tuple[int, ...]]]:
    case = _case(kind, 1, 2)
    module = case.cut(groups_of(1, 2))
    found = []
    for _ in range(2):
        with _saved() as shapes:
            y = module(case.x.clone().requires_grad_())
        y.sum().backward()
        found.append(shapes)
    return found


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_gathered_tensors_are_not_kept(pool: Pool, kind: str) -> None:
    for first, second in pool.run(_kept, 2, kind):
        assert first == second
        assert first[(2, 6, H)] == 0
        assert first[(2, 3, H)] >= 5  # a piece for every product


def _walked(kind: str) -> dict[str, float]:
    """Graphs walked in part, and again."""
    found: dict[str, float] = {}
    case = _case(kind, 1, 2)
    module = case.cut(groups_of(1, 2))
    c = torch.randn_like(case.x)
    expected = run(case.cut(groups_of(1, 2)), case.x, c)
    for step in range(2):
        module.zero_grad()
        loss = (module(case.x) * c).sum()
        names = ["0.mlp.0.bias", "0.attn.k.weight", "0.attn.q.bias", "0.mlp.0.weight"]
        for name in names:
            (grad,) = torch.autograd.grad(loss, [module.get_parameter(name)], retain_graph=True)
            found[f"{step} {name} alone"] = max_difference(grad, expected[name])
        loss.backward(retain_graph=True)
        for name in names:
            found[f"{step} {name}"] = max_difference(module.get_parameter(name).grad, expected[name])
        loss.backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"{step} {name} twice"] = max_difference(parameter.grad, 2 * expected[name])
    return found


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_graphs_are_walked_in_part_and_again(pool: Pool, kind: str) -> None:
    for found in pool.run(_walked, 2, kind):
        assert len(found) >= 2 * (8 + 13)
        assert max(found.values()) < TINY, found


def _meta_copy(kind: str) -> tuple[int, int, list[str]]:
    """Bytes kept by a copy on meta and by the model; what the copy says."""
    log: list[str] = []
    case = _case(kind, 1, 2, (2, 7))
    module = case.cut(recorded(groups_of(1, 2), log))
    copied = copy.deepcopy(module).to("meta")
    with watch_activations(copied) as estimated:
        y = copied(case.x.to("meta").requires_grad_())
    y.sum().backward()
    said = [*log]
    with watch_activations(module) as measured:
        module(case.x.clone().requires_grad_())
    return estimated.total, measured.total, said


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_a_copy_on_meta_keeps_as_much_and_sends_nothing(pool: Pool, kind: str) -> None:
    for estimated, measured, said in pool.run(_meta_copy, 2, kind):
        assert estimated == measured > 0
        assert said == []
