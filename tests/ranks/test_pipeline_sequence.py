"""Stages exchange token shards under sequence parallelism: each column its own tokens."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.spec import Arguments
from plait.errors import ModelError
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import explain
from plait.plan import Plan, subtract_traffic, sum_traffic
from plait.plan.comm_log import Traffic
from support import programs
from support.own_gpt import CUTS, GPT, Block
from support.pool import Pool
from support.programs import Task

ODD = 13  # tokens: columns have 7 and 6, or 5, 4 and 4


class PairBlock(Block):
    """Also passes on a second tensor of its tokens, made between the sharded modules."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x_BSh: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_BSh = super().forward(x_BSh)
        new = torch.tanh(x_BSh) * self.scale
        return (x_BSh, new) if second is None else (x_BSh + second, 0.5 * second + new)


class PairGPT(GPT):
    def __init__(self) -> None:
        super().__init__(layers=4, block=PairBlock)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSh, second = self.embed(input_ids), None
        for block in self.blocks:
            x_BSh, second = block(x_BSh, second)
        return self.head(self.norm(x_BSh))


class SkipGPT(GPT):
    """Its last block reads the first one's output too, which stages send along."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def forward(self, input_ids: Tensor) -> Tensor:
        first, *between, last = self.blocks
        x_BSh = seen = first(self.embed(input_ids))
        for block in between:
            x_BSh = block(x_BSh)
        return self.head(self.norm(last(x_BSh + seen)))


class ContextBlock(Block):
    def forward(self, x_BSh: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x_BSh + context.mean(1, keepdim=True)), context


class ContextGPT(GPT):
    """Blocks pass on a tensor from outside of them, of 7 tokens: half of a sequence of 14."""

    def __init__(self) -> None:
        super().__init__(layers=4, block=ContextBlock)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSh = self.embed(input_ids)
        context = made = torch.tanh(x_BSh[:, :7])
        for block in self.blocks:
            x_BSh, context = block(x_BSh, context)
        del made  # blocks know the tensor that they pass on while the one from outside is alive
        return self.head(self.norm(x_BSh))


def plain(kind: type[nn.Module], on_meta: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return kind()


def frozen(on_meta: bool = False) -> nn.Module:
    """The first stage's weights are frozen, so no gradient is sent."""
    model = plain(functools.partial(GPT, layers=4))  # type: ignore[arg-type]
    for module in (model.tokens, model.places, *list(model.blocks)[:2]):  # type: ignore[arg-type]
        module.requires_grad_(False)
    return model


def task_of(build: Any, length: int = ODD, tensor_plan: dict[str, str] | None = CUTS) -> Task:
    return Task(build, functools.partial(programs.batches, length=length), tensor_plan=tensor_plan)


BUILD_LLAMA = functools.partial(programs.llama, layers=4)
LLAMA, TWO_TOKENS = (task_of(BUILD_LLAMA, length, None) for length in (ODD, 2))


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        pytest.param(LLAMA, "pp=2 tp=2 micro=3", marks=pytest.mark.quick),
        (LLAMA, "pp=2 tp=2 micro=4 schedule=interleaved chunks=2 recompute=full"),
        (LLAMA, "pp=2 tp=2 dp=2 zero=3 micro=3 schedule=zb-h1"),
        (LLAMA, "pp=2 tp=2 micro=3 schedule=zbv recompute=selective"),
        (LLAMA, "pp=2 tp=3 micro=2 schedule=gpipe"),
        (LLAMA, "pp=2 tp=2x2 micro=2"),
        (TWO_TOKENS, "pp=2 tp=3 micro=2"),  # the last column has none
        (task_of(functools.partial(plain, PairGPT)), "pp=2 tp=2 micro=2"),
        (task_of(functools.partial(plain, PairGPT)), "pp=2 chunks=2 tp=2 micro=2 recompute=full"),
        (task_of(functools.partial(plain, SkipGPT)), "pp=2 tp=2 micro=2"),
        (task_of(functools.partial(plain, SkipGPT)), "pp=3 tp=2 micro=2 schedule=gpipe recompute=every=2"),
        (task_of(frozen), "pp=2 tp=2 micro=2 recompute=full"),
        (task_of(functools.partial(plain, ContextGPT), 14), "pp=2 tp=2 micro=2"),
    ],
)
def test_stages_that_exchange_token_shards_train_as_one_process(pool: Pool, task: Task, plan: str) -> None:
    parsed = Plan.parse(f"{plan} sp=true precision=fp64")
    ours = pool.run(programs.train_task, parsed.num_ranks, task, str(parsed))[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, parsed.micro))


def _refused(plan: str) -> str:
    task = task_of(functools.partial(plain, ContextGPT), 16)
    engine = programs.engine_of(task, f"{plan} precision=fp64")
    with pytest.raises(ModelError) as caught:
        engine.step(programs.share_of(task.data(1)[0], engine))
    return str(caught.value)


def test_a_received_tensor_that_may_be_no_shard_is_refused(pool: Pool) -> None:
    messages = pool.run(_refused, 2, "chunks=2 schedule=interleaved tp=2 sp=true micro=1")
    assert all("unknown whether every rank has the same values" in message for message in messages)


def _messages(plan: str) -> tuple[tuple[int, int], ...]:
    """Calls and bytes of this rank's messages between stages in a step: sent, then received."""
    engine = plait.parallelize(BUILD_LLAMA(), f"{plan} precision=fp64")
    batch = programs.share_of(programs.batches(1, length=ODD)[0], engine)
    engine.step(batch)
    before = engine.world.comm_log.read()
    engine.step(batch)
    traffic = subtract_traffic(before, engine.world.comm_log.read())
    return _of_messages(traffic)


def _of_messages(traffic: Traffic) -> tuple[tuple[int, int], ...]:
    of_op = [[c for key, c in traffic.items() if key.op == op] for op in ("send", "receive")]
    return tuple((sum(c.count for c in found), sum(c.num_bytes for c in found)) for found in of_op)


@pytest.mark.parametrize("sp", ["true", "false"])
def test_a_column_sends_its_own_tokens_and_no_more_as_estimated(pool: Pool, sp: str) -> None:
    plan, micros, per_token = f"pp=2 tp=2 sp={sp} micro=3", 3, programs.SEQUENCES // 3 * 32 * 8
    batch = {key: value.chunk(micros)[0] for key, value in programs.batches(1, length=ODD)[0].items()}
    host = HypotheticalRanks("host", None, torch.device("cpu"))
    estimated = explain(Arguments(BUILD_LLAMA(), f"{plan} precision=fp64"), batch, host)
    for rank, messages in enumerate(pool.run(_messages, 4, plan)):
        tokens = ODD if sp == "false" else (7, 6)[rank % 2]
        assert messages == ((micros, micros * tokens * per_token),) * 2
        assert messages == _of_messages(sum_traffic(estimated.of_rank(rank).traffic.values()))


def _evaluated(plan: str) -> tuple[float, Tensor]:
    engine = plait.parallelize(BUILD_LLAMA(), f"{plan} precision=fp64", seed=3)
    [batch] = programs.batches(1, length=ODD)
    return engine.evaluate(batch).loss_sum, engine.outputs(batch, lambda outputs: outputs.logits)


def test_evaluation_without_a_graph_gives_the_same_logits(pool: Pool) -> None:
    [(alone, expected)] = pool.run(_evaluated, 1, "micro=3")
    for loss, logits in pool.run(_evaluated, 4, "pp=2 tp=2 sp=true micro=3"):
        assert loss == pytest.approx(alone, rel=1e-9)
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
