"""Blocks that read more than their stream under sequence parallelism: an encoder's output. And what runs
between blocks, or without the blocks before it."""

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import ModelError
from plait.parallel.tensor.apply import apply_tp_plan
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.sequence_forward import map_hidden_output
from plait.plan.sharding import TPPlan
from support.pool import Pool
from support.tensor_shards import groups_of

TINY = 1e-10
W, HEADS = 24, 6


class Cross(nn.Module):
    """Queries of the stream, keys and values of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, W) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            layer(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, tokens in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LowCross(Cross):
    """A whole weight reads the memory: not pure."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(W, W)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x, torch.tanh(self.low(memory)))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(W), kind
        self.cross = LowCross() if kind.startswith("low") else Cross()
        if kind.endswith("normed"):
            self.memory_norm = nn.LayerNorm(W)

    def forward(self, x: Tensor, memory: Any) -> Tensor:
        memory = memory[0] if isinstance(memory, tuple) else memory
        memory = self.memory_norm(memory) if self.kind.endswith("normed") else memory
        return x + self.cross(self.norm(x), memory)


class Net(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.encoder = nn.Linear(W, W)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(2)])
        self.kind = kind

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(source))
        for block in self.blocks:
            if self.kind == "moved":
                memory = memory * 0.5
            if self.kind == "checkpointed":
                x = checkpoint(block, x, memory, use_reentrant=False)
            elif self.kind == "in tuple":
                x = block(x, memory=(memory, None))
            else:
                x = block(x, memory=memory)
        return x


CUTS = {f"blocks.*.cross.{name}": "colwise" for name in "qkv"}
CUTS |= {"blocks.*.cross.o": "rowwise", "blocks.*.cross": "local:heads"}


def _loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch["labels"]).square().sum(), outputs.numel()


def _gap(kind: str, plan: str, length: int, source: int) -> float:
    torch.manual_seed(0)
    net = Net(kind)
    batch = {"x": torch.randn(2, length, W), "source": torch.randn(2, source, W)}
    batch["labels"] = batch["x"].flip(-1)
    whole = copy.deepcopy(net).double()
    options: Any = {"example_batch": batch, "optimizer_args": {"lr": 0.0}}
    engine = plait.parallelize(net, plan, loss=_loss, tensor_plan=CUTS, **options)
    for _ in range(2):  # the second step knows which layers read together
        loss, found = engine.step(batch).loss, engine.full_gradients()
    wide = {key: value.double() for key, value in batch.items()}
    expected = (whole(wide["x"], wide["source"]) - wide["labels"]).square().mean()
    expected.backward()
    gaps = [abs(loss - expected.item())]
    if engine.world.rank == 0:
        gaps += [float((found[name] - p.grad).abs().max()) for name, p in whole.named_parameters()]
    return max(gaps)


KINDS = ("plain", "normed", "low", "in tuple", "checkpointed")
OPTIONS = ("", " sp=true", " sp=true recompute=full")


def _gaps(tp: int, kind: str, in_pairs: bool) -> dict[str, float]:
    """Memories that are longer, as long as the piece, as the sequence, and a token long; in pairs, each with
    one of the options, which are others for another kind or `tp`."""
    found = {}
    for number, (length, source) in enumerate(((6, 8), (6, 6 // tp), (7, 4), (6, 6), (7, 1))):
        first = number + tp + KINDS.index(kind)
        for words in [OPTIONS[first % len(OPTIONS)]] if in_pairs else OPTIONS:
            plan = f"tp={tp} precision=fp64{words}"
            found[f"{plan} {length} {source}"] = _gap(kind, plan, length, source)
    return found


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_all_blocks_outside_the_stream_get_every_columns_gradient(
    pool: Pool, kind: str, in_pairs: bool
) -> None:
    for tp in (2, 3):
        for found in pool.run(_gaps, tp, tp, kind, in_pairs):
            assert {name: gap for name, gap in found.items() if not gap < TINY} == {}


def _message(kind: str, match: str) -> str:
    with pytest.raises(ModelError, match=match) as caught:
        _gap(kind, "tp=2 sp=true precision=fp64", 6, 3)
    return str(caught.value)


def test_values_that_may_differ_between_columns_are_refused(pool: Pool) -> None:
    """Made between blocks; or in a block, for a region that sums for itself."""
    for kind, where in (("moved", "blocks.1"), ("low normed", "blocks.0.cross")):
        for message in pool.run(_message, 2, kind, "whether every rank has the same"):
            assert message.startswith(where)
            assert "sp=false" in message


# --- between blocks


class Ff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(W, 2 * W), nn.Tanh(), nn.Linear(2 * W, W))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Norms(nn.Module):
    """Norms outside the blocks, which run between them; or all before."""

    def __init__(self, *, between: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(W) for _ in range(2)])
        self.blocks = nn.ModuleList([Ff() for _ in range(2)])
        self.last, self.between, self.fails = nn.LayerNorm(W), between, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.between:
            for norm in self.norms:
                x = norm(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = block(norm(x) if self.between else x)
            if self.fails:
                raise RuntimeError("of the model's own")
        return self.last(x)


FF = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}


def _between(what: str) -> None:
    model = Norms(between=what != "failed")
    engine = plait.parallelize(model, "tp=2 sp=true", loss=_loss, tensor_plan=FF, blocks=Ff)
    x = torch.randn(2, 6, W)
    if what == "failed":
        model.fails = True
        with pytest.raises(RuntimeError, match="of the model's own"):
            engine.step({"x": x, "labels": x})
        model.fails = False
        engine.step({"x": x, "labels": x})
        return
    model = copy.deepcopy(model) if what == "copied" else model
    with torch.set_grad_enabled(what != "no grad"), pytest.raises(ModelError) as caught:
        model(x)
    assert str(caught.value).startswith("norms.1 is outside of the blocks and runs between them")
    assert "sp=false" in str(caught.value)


@pytest.mark.parametrize("what", ["with a graph", "no grad", "copied", "failed"])
def test_modules_outside_the_blocks_must_not_see_pieces(pool: Pool, what: str) -> None:
    """After a forward that failed among its blocks, the next one starts again."""
    pool.run(_between, 2, what)


# --- marks


class Chain(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList([Ff() for _ in range(2)]), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "alone":
            return self.blocks[1](x)
        x = self.blocks[0](x)
        if self.how == "lost":
            return checkpoint(self.blocks[1], x.detach().clone(), use_reentrant=False)
        return checkpoint(self.blocks[1], x, use_reentrant=False)


def _two(model: nn.Module) -> list[Tensor]:
    outputs = [model(torch.randn(2, length, W)) for length in (5, 6)]
    for output in outputs:
        output.square().sum().backward()
    return outputs


def _lengths(how: str) -> None:
    """Two lengths are under way, of which rank 0 has the same number of tokens."""
    model = Chain(how)
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    groups = groups_of(1, 2)
    apply_tp_plan(model, TPPlan(1, 2), groups, blocks, sequence_shard=SequenceShard(groups.col))
    with pytest.raises(ModelError, match=r"blocks\.1 gets tokens .* of unknown length") as caught:
        _two(model)
    assert ("in backward" if how == "lost" else "first block has not run") in str(caught.value)


@pytest.mark.parametrize("how", ["alone", "lost"])
def test_a_block_that_cannot_know_its_sequence_does_not_guess(pool: Pool, how: str) -> None:
    pool.run(_lengths, 2, how)


def _frozen() -> None:
    model = Chain("marked")
    model.blocks[0].requires_grad_(False)
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    groups = groups_of(1, 2)
    apply_tp_plan(model, TPPlan(1, 2), groups, blocks, sequence_shard=SequenceShard(groups.col))
    assert [output.shape[1] for output in _two(model)] == [5, 6]


def test_a_frozen_blocks_mark_is_found_again(pool: Pool) -> None:
    pool.run(_frozen, 2)


Pair = namedtuple("Pair", "states rest")


def test_an_output_with_names_keeps_them() -> None:
    for output in (Pair(torch.ones(1), 3), (torch.ones(1), 3), [torch.ones(1), 3]):
        found = map_hidden_output(lambda x: 2 * x, "a block", output)
        assert type(found) is type(output)
        assert [*found] == [torch.full((1,), 2.0), 3]
