"""Readers of one tensor share the sum of its gradient, during which weights' gradients are computed."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.parallel.activation_checkpoint import COMPARED, recompute_blocks
from plait.parallel.compile import compile_blocks
from plait.parallel.tensor.apply import apply_tp_plan
from plait.parallel.tensor.linear import HeadOutput
from plait.plan.sharding import LayerSharding, Style, TPPlan
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
    shard_parameters,
)

TINY = 1e-10
H, F = 6, 8


class Attention(nn.Module):
    """Three readers of one tensor, and a ROW layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(H, F, bias=b, dtype=torch.float64) for b in (True, False, True))
        self.o = nn.Linear(F, H, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


class Block(nn.Module):
    """Attention and mlp side by side on one tensor, as in GPT-J and Cohere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(H, F, dtype=torch.float64), nn.Tanh(), nn.Linear(F, H, dtype=torch.float64)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attn(normed) + self.mlp(normed)


_COLUMNS, _ROWS = ("attn.q", "attn.k", "attn.v", "mlp.0"), ("attn.o", "mlp.2")


def _case(rows: int, cols: int) -> Case:
    torch.manual_seed(1)
    hidden, wide = even("row", H, rows), even("col", F, cols)
    layers = [LayerSharding(name, Style.COLUMN, wide, hidden) for name in _COLUMNS]
    layers += [LayerSharding(name, Style.ROW, hidden, wide) for name in _ROWS]
    layers.append(LayerSharding("norm", Style.NORM, hidden))
    parameters: dict[str, Any] = {f"{name}.weight": (wide, hidden) for name in _COLUMNS}
    parameters |= {f"{name}.bias": (wide,) for name in _COLUMNS if name != "attn.k"}
    parameters |= {f"{name}.weight": (hidden, wide) for name in _ROWS}
    parameters |= {f"{name}.bias": (hidden,) for name in (*_ROWS, "norm")} | {"norm.weight": (hidden,)}
    x = torch.randn(2, 3, H, dtype=torch.float64)
    return Case(Block(), x, layers, parameters, (hidden,), (hidden,), blocks=("",))


def _log(rows: int, cols: int, steps: int) -> tuple[list[str], list[str]]:
    """Operations of the last of some steps, forward and backward."""
    log: list[str] = []
    groups = recorded(groups_of(rows, cols), log)
    case = _case(rows, cols)
    module = case.cut(groups)
    for _ in range(steps):
        log.clear()
        x = case.x[..., : H // rows].clone().requires_grad_()
        y = module(x)
        forward = [*log]
        log.clear()
        with MatmulLog(log):
            y.sum().backward()
    return forward, log


def test_readers_of_one_tensor_share_one_sum_of_its_gradient(pool: Pool) -> None:
    """Megatron's counts, attention and mlp side by side: two sums forward, one backward for four readers."""
    for steps in (1, 2):
        for forward, backward in pool.run(_log, 2, 1, 2, steps):
            assert forward == ["all-reduce col"] * 2
            assert [line for line in backward if "all-reduce" in line] == [
                "start all-reduce col",
                "end all-reduce col",
            ]


def test_weight_gradients_are_computed_between_start_and_end_of_the_sum(pool: Pool) -> None:
    for _, backward in pool.run(_log, 2, 1, 2, 2):
        start, end = backward.index("start all-reduce col"), backward.index("end all-reduce col")
        assert backward[start + 1 : end] == [f"mm ({F // 2}, {H})"] * 4
        assert f"mm ({F // 2}, {H})" not in backward[:start] + backward[end:]


def test_in_the_first_step_only_the_first_readers_is(pool: Pool) -> None:
    for _, backward in pool.run(_log, 2, 1, 2, 1):
        start, end = backward.index("start all-reduce col"), backward.index("end all-reduce col")
        assert backward[start + 1 : end] == [f"mm ({F // 2}, {H})"]
        assert backward[:start].count(f"mm ({F // 2}, {H})") == 3


def test_row_layers_do_the_same_over_row(pool: Pool) -> None:
    for forward, backward in pool.run(_log, 2, 2, 1, 2):
        sums = [line for line in forward if line == "all-reduce row"]
        assert len(sums) == 4  # of the COLUMN layers' parts; the norm gathers its moments
        starts = [place for place, line in enumerate(backward) if line == "start all-reduce row"]
        assert len(starts) == 2
        for start in starts:
            assert backward[start + 1 : start + 3] == [f"mm ({H // 2}, {F})", "end all-reduce row"]


def test_a_group_of_one_sends_nothing(pool: Pool) -> None:
    ((forward, backward),) = pool.run(_log, 1, 1, 1, 2)
    assert [line for line in forward + backward if "all-reduce" in line] == []


def _gaps(rows: int, cols: int, how: str) -> dict[str, float]:
    groups = groups_of(rows, cols)
    case = _case(rows, cols)
    if how == "frozen":
        for name in ("attn.q", "attn.o", "mlp.0"):
            case.module.get_submodule(name).weight.requires_grad_(False)
    if how == "recomputed":
        case = _Recomputed.of(case)
    return max_differences(case, groups, steps=3)


class _Recomputed(nn.Module):
    """A block that runs again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, case: Case) -> Case:
        layers = [replace(layer, module=f"block.{layer.module}") for layer in case.layers]
        parameters = {f"block.{name}": cuts for name, cuts in case.parameters.items()}
        return Case(cls(case.module), case.x, layers, parameters, case.inp, case.out, blocks=("block",))


@pytest.mark.parametrize("how", ["plain", "frozen", "recomputed"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (2, 1), (2, 2)])
def test_a_block_gives_the_same_gradients(pool: Pool, rows: int, cols: int, how: str) -> None:
    for found in pool.run(_gaps, rows * cols, rows, cols, how):
        assert len(found) == (12 if how == "frozen" else 15)
        assert max(found.values()) < TINY, found


class Odd(nn.Module):
    """Layers that read a tensor twice, and others; one that reads only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(H, F, dtype=torch.float64)
        self.gate = nn.Linear(H, F, dtype=torch.float64)
        self.down = nn.Linear(F, H, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) + self.up(x).tanh() + self.up(x.sin())
        if int(x[0, 0].round()) % 2:
            y = y * self.gate(x)
        return self.down(y) + self.down(y.cos())


def _odd(cols: int) -> dict[str, float]:
    torch.manual_seed(2)
    wide = even("col", F, cols)
    case = Case(
        Odd(),
        torch.randn(4, H, dtype=torch.float64),
        [
            LayerSharding("up", Style.COLUMN, wide),
            LayerSharding("gate", Style.COLUMN, wide),
            LayerSharding("down", Style.ROW, None, wide),
        ],
        {"up.weight": (wide, None), "up.bias": (wide,), "gate.weight": (wide, None), "gate.bias": (wide,)}
        | {"down.weight": (None, wide)},
    )
    return max_differences(case, groups_of(1, cols), steps=5)


def test_layers_that_read_twice_or_now_and_then_give_the_same_gradients(pool: Pool) -> None:
    for found in pool.run(_odd, 2, 2):
        assert len(found) == 8
        assert max(found.values()) < TINY, found


def _reached() -> dict[str, Any]:
    """How gradients reach the weights, in steps with and without what was expected."""
    case = _case(1, 2)
    module = case.cut(groups_of(1, 2))
    weight, seen = module.attn.k.weight, []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    found = []
    for _ in range(2):
        x = case.x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(x).square().sum(), [weight])
        module.zero_grad()
        seen.clear()
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        once = weight.grad.clone()
        loss.backward()
        twice = weight.grad.clone()
        hooked = [torch.equal(s, e) for s, e in zip(seen, (once, once, once, twice), strict=True)]
        module.zero_grad()
        (module(x).square().sum() + weight.square().sum()).backward()
        found.append(
            {
                "grad": max_difference(grad, once),
                "retained": max_difference(twice, 2 * once),
                "elsewhere": max_difference(weight.grad, once + 2 * weight.detach()),
                "hooks": 0.0 if all(hooked) else 1.0,
            }
        )
    return {"max_differences": found, "size": float(once.abs().max())}


def test_weight_gradients_arrive_as_all_gradients_do(pool: Pool) -> None:
    """Through hooks, `autograd.grad`, graphs that are kept, and with other uses of the weight."""
    for got in pool.run(_reached, 2):
        assert got["size"] > 0.1
        for found in got["max_differences"]:
            assert max(found.values()) < TINY, found


def _only_weights() -> list[str]:
    """An input that needs no gradient has no sum."""
    log: list[str] = []
    case = _case(1, 2)
    module = case.cut(recorded(groups_of(1, 2), log))
    module.norm.requires_grad_(False)
    y = module(case.x)
    log.clear()
    y.sum().backward()
    assert module.attn.q.weight.grad is not None
    return log


def test_an_input_without_gradient_has_no_sum(pool: Pool) -> None:
    assert pool.run(_only_weights, 2) == [[], []]


def _on_meta() -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """A copy of the cut model on meta says nothing, and the model itself still does."""
    log: list[str] = []
    case = _case(1, 2)
    module = case.cut(recorded(groups_of(1, 2), log))
    module(case.x.clone().requires_grad_()).sum().backward()
    copied = copy.deepcopy(module).to("meta")
    log.clear()
    x = case.x.to("meta").requires_grad_()
    y = copied(x)
    y.sum().backward()
    assert log == []
    grad = copied.attn.q.weight.grad
    assert grad.is_meta
    assert copied.attn.q.forward.__self__ is copied.attn.q
    c = torch.ones_like(case.x)
    return (
        tuple(y.shape),
        tuple(grad.shape),
        max_difference(run(module, case.x, c)["y"], case.module(case.x).detach()),
    )


def test_a_copy_on_meta_does_its_shapes_alone(pool: Pool) -> None:
    for shape, grad_shape, far in pool.run(_on_meta, 2):
        assert shape == (2, 3, H)
        assert grad_shape == (F // 2, H)
        assert far < TINY


def _kept(sequence: bool) -> tuple[float, list[str], list[str]]:
    """Selective recompute keeps sums: what backward says is what it says without it."""
    case = _case(1, 2)
    case.sequence, case.partial = sequence, ("norm.weight", "norm.bias") if sequence else ()
    case.plan = {"regions": ("attn", "mlp"), "pure": frozenset(("attn", "mlp"))}
    said, grads = [], []
    c = torch.randn_like(case.x)
    for how in ("none", "selective"):
        log: list[str] = []
        module = case.cut(recorded(groups_of(1, 2), log))
        recompute_blocks([module], how)
        for _ in range(COMPARED):  # passes in which all products run again
            run(module, case.x, c)
        log.clear()
        grads.append(run(module, case.x, c))
        said.append([line for line in log if not line.startswith("end")])
    return max(max_difference(grads[0][name], grads[1][name]) for name in grads[0]), said[0], said[1]


@pytest.mark.parametrize("sequence", [False, True])
def test_selective_recompute_sums_no_product_again(pool: Pool, sequence: bool) -> None:
    for far, plain, recomputed in pool.run(_kept, 2, sequence):
        assert far == 0.0
        assert len(plain) == (3 if not sequence else 9)
        gathers = 1 if sequence else 0  # of the regions' input: no product
        assert len(recomputed) == len(plain) + gathers


def _compiled() -> float:
    case = _case(1, 2)
    module = case.cut(groups_of(1, 2))
    c = torch.randn_like(case.x)
    plain = run(module, case.x, c)
    compile_blocks([module], torch.device("cpu"))
    again = run(module, case.x, c)
    return max(max_difference(again[name], plain[name]) for name in plain)


def test_a_compiled_block_gives_the_same_numbers(pool: Pool) -> None:
    assert max(pool.run(_compiled, 2)) < TINY


def _heads(cols: int) -> dict[str, Any]:
    """The head's logits, whole and cut, and an attribute."""
    groups = groups_of(1, cols)
    torch.manual_seed(3)
    words = even("col", 7, cols)
    model = nn.Sequential(nn.Linear(H, 7, dtype=torch.float64))
    x = torch.randn(4, H, dtype=torch.float64)
    expected = model(x).detach()
    shard_parameters(model, groups, {"0.weight": (words, None), "0.bias": (words,)})
    plan = TPPlan(
        1, cols, (LayerSharding("0", Style.COLUMN, words, head=True),), attributes=(("0", "heads", (3, 4)),)
    )
    head = HeadOutput()
    apply_tp_plan(model, plan, groups, [], head=head)
    with head.calling(lambda _: None):
        piece = model(x).value().detach()
    start, stop = words.ranges[groups.col.rank][0]
    return {
        "whole": max_difference(model(x).detach(), expected),
        "piece": max_difference(piece, expected[..., start:stop]),
        "attribute": model[0].heads,
    }


def test_logits_can_stay_sharded(pool: Pool) -> None:
    for rank, got in enumerate(pool.run(_heads, 2, 2)):
        assert got["attribute"] == 3 + rank
        assert got["whole"] < TINY
        assert got["piece"] < TINY
