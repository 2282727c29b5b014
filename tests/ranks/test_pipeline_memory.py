"""Memory of a pipeline's ranks: counted while a step runs, and compared with the schedule's counts."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.models import causal_lm_on_meta
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.reduce_ops import DefaultReduction
from plait.plan import MemoryUse
from plait.plan.schedule import Action, B, Kind
from support.live_memory import LiveBytes, after_actions
from support.pool import Pool, PoolOver

HIDDEN, FFN, KV, HEAD_DIM, LENGTH, VOCABULARY, LAYERS = 64, 176, 32, 16, 32, 61, 8
SEQUENCES = 2  # of a micro-batch
TOKENS = SEQUENCES * LENGTH


def llama() -> nn.Module:
    return causal_lm_on_meta(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HIDDEN // HEAD_DIM,
            "num_key_value_heads": KV // HEAD_DIM,
            "max_position_embeddings": LENGTH,
        }
    )


class Shift(nn.Module):
    """Keeps one tensor for backward, the product's input: neither what it was given nor its result."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.shift)


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shift() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def summed(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
    return outputs.sum(), outputs.numel()  # its backward needs sizes only


def engine_of(build: Any, plan: str) -> plait.Engine:
    how: dict[str, Any] = {"loss": summed} if build is Shifts else {}
    return plait.parallelize(build(), f"{plan} precision=fp32", optimizer=torch.optim.SGD, seed=3, **how)


def batch_for(engine: plait.Engine) -> dict[str, Tensor]:
    num = SEQUENCES * engine.plan.micro
    if isinstance(engine.model, Shifts):
        return {"x": torch.ones(num, LENGTH, HIDDEN)}
    ids = torch.randint(0, VOCABULARY, (num, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Counted:
    """Bytes that a rank held after each action of a step.

    live             all that operations of the step had made and that was not freed
    sent, received   of that what was in transfer
    unsent           what outboxes held, be it copies in memory that the transport lends
    """

    actions: list[Action]
    live: list[int]
    sent: list[int]
    received: list[int]
    unsent: list[int]
    estimated: MemoryUse
    measured: MemoryUse
    split: frozenset[tuple[int, int]]

    @property
    def kept(self) -> list[int]:
        rows = zip(self.live, self.sent, self.received, strict=True)
        return [live - sent - received for live, sent, received in rows]


def counted(build: Any, plan: str) -> Counted:
    """On one rank, in the second step, in which nothing is made for the first time."""
    engine = engine_of(build, plan)
    estimated = engine.estimated_memory((SEQUENCES, LENGTH))
    batch = batch_for(engine)
    engine.step(batch)
    actions: list[Action] = []
    live: list[int] = []
    sent: list[int] = []
    received: list[int] = []
    unsent: list[int] = []
    with LiveBytes() as watch:

        def tell(action: Action, run: Any) -> None:
            actions.append(action)
            live.append(watch.now())
            here = [tensor for tensors in run._local.values() for tensor in tensors]
            outboxes = run._pipeline._outboxes.values()
            wires = [wire for outbox in outboxes for _, wire in outbox._in_flight]
            sent.append(watch.part([*here, *wires]))
            received.append(watch.part(t for posted in run._posted.values() for t in posted._tensors))
            unsent.append(sum(wire.nbytes for wire in wires))

        with after_actions(tell):
            engine.step(batch)
    split = frozenset(engine._spec.schedule.split)
    return Counted(actions, live, sent, received, unsent, estimated, engine.memory(), split)


def said(found: Counted) -> list[int]:
    """Bytes that a rank keeps after each action by its schedule, from what the first action of each kind
    takes or frees on a stage."""
    change: dict[tuple[Kind, bool, int], int] = {}
    before = 0
    for action, kept in zip(found.actions, found.kept, strict=True):
        change.setdefault(_kind(action, found), kept - before)
        before = kept
    sums, total = [], 0
    for action in found.actions:
        total += change[_kind(action, found)]
        sums.append(total)
    return sums


def _kind(action: Action, found: Counted) -> tuple[Kind, bool, int]:
    return action.kind, (action.stage, action.micro) in found.split, action.stage


PLANS = [
    "pp=2 micro=4",
    "pp=2 micro=4 schedule=gpipe",
    "pp=2 micro=4 schedule=interleaved chunks=2",
    "pp=2 micro=4 schedule=zb-h1",
    "pp=2 micro=4 schedule=zbv",
    "pp=2 micro=4 recompute=full",
    "pp=2 micro=4 schedule=zb-h1 recompute=full",
]


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_keep_the_bytes_of_their_schedule_and_estimate(pool: Pool, plan: str) -> None:
    """In bytes, after every action; that is, also what forwards take, backwards give back."""
    for found in pool.run(counted, 2, llama, plan):
        peak = max(found.kept)
        for kept, expected in zip(found.kept, said(found), strict=True):
            assert kept == pytest.approx(expected, abs=0.005 * peak)
        assert found.kept[-1] < 0.001 * peak, "a step leaves something"
        assert found.measured.activations == pytest.approx(peak, rel=0.05)
        assert found.estimated.activations == pytest.approx(peak, rel=0.05)


def in_flight(found: Counted) -> list[int]:
    """After each action: micro-batches on this rank's only stage."""
    held = 0
    return [held := held + {Kind.F: 1, Kind.B: -1, Kind.W: 0}[action.kind] for action in found.actions]


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [6] * 4)])
def test_one_f_one_b_holds_as_many_micro_batches_as_stages_follow_and_gpipe_all(
    pool: Pool, schedule: str, most: list[int]
) -> None:
    ranks = pool.run(counted, 4, llama, f"pp=4 micro=6 schedule={schedule}")
    assert [max(in_flight(found)) for found in ranks] == most
    for found, number in zip(ranks, most, strict=True):
        assert max(found.kept) == pytest.approx(number * found.kept[0], rel=0.01)


def test_recompute_keeps_the_inputs_of_blocks(pool: Pool) -> None:
    first, _ = pool.run(counted, 2, llama, "pp=2 stages=4,4 micro=4 recompute=full")
    a_micro = 4 * (4 * TOKENS * HIDDEN + 2 * LENGTH * HEAD_DIM)  # and the rotary table
    assert max(first.kept) == pytest.approx(2 * a_micro, rel=0.01)


def test_between_the_halves_of_a_backward_linear_layers_keep_inputs_and_gradients(pool: Pool) -> None:
    """In a block: inputs of q, k and v (one), o, gate and up (one), down; gradients of all seven outputs."""
    first, _ = pool.run(counted, 2, llama, "pp=2 stages=4,4 micro=4 schedule=zb-h1")
    of_a_block = (3 * HIDDEN + FFN) + (3 * HIDDEN + 2 * KV + 2 * FFN)
    at = first.actions.index(B(0, 3))
    assert first.kept[at] == pytest.approx(4 * 4 * TOKENS * of_a_block, rel=0.01)


# --- messages


@pytest.fixture(params=["host", "gloo"])
def over(request: pytest.FixtureRequest, workers: Pool) -> PoolOver:
    return workers.over(request.param)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_outputs_live_until_they_are_sent_and_inputs_until_they_are_used(
    over: PoolOver, schedule: str
) -> None:
    """A stage of two blocks keeps two tensors; all others that are alive are in transfer."""
    message = 4 * TOKENS * HIDDEN
    first, last = over.run(counted, 2, Shifts, f"pp=2 stages=2,2 micro=5 schedule={schedule}")
    for found in (first, last):
        for kept, number in zip(found.kept, in_flight(found), strict=True):
            assert kept == pytest.approx(2 * message * number, abs=512)
    if schedule == "gpipe" and over.transport == "host":  # over Gloo a thread tells when something is sent
        assert first.unsent[0] == message
        at = first.actions.index(B(0, 1))  # all forwards are done, and nothing is to be sent
        assert first.unsent[at:] == [0] * 4


# --- gradients


def _accumulated(plan: str) -> tuple[MemoryUse, MemoryUse, int, list[int], float]:
    """Memory estimated and measured, bytes of the largest unit's whole gradient and of all, and after every
    action how many units had memory for whole gradients."""
    engine = engine_of(llama, plan)
    estimated = engine.estimated_memory((SEQUENCES, LENGTH))
    units = engine._parts.sharded.trained
    held: list[int] = []
    with after_actions(
        lambda *_: held.append(sum(unit.grad_buffer.memory.tensor is not None for unit in units))
    ):
        engine.step(batch_for(engine))
    sizes = [4 * unit.layout.numel for unit in units]
    return estimated, engine.memory(), max(sizes), held, sum(sizes)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_whole_gradients_are_not_held_while_micro_batches_accumulate(
    pool: Pool, zero: int, schedule: str
) -> None:
    plan = f"dp=2 pp=2 micro=3 schedule={schedule} prefetch=1"
    for estimated, measured, largest, held, all_bytes in pool.run(_accumulated, 4, f"{plan} zero={zero}"):
        assert held[:-1] == [0] * (len(held) - 1)  # at the end of a step what travels lands later
        assert measured.buffers <= estimated.buffers
        if zero == 2:  # at stage 3 parameters come and go too
            assert measured.buffers <= 3 * largest < all_bytes
    for _, _, _, held, _ in pool.run(_accumulated, 4, f"{plan} zero=1"):
        assert min(held) > 0


def _events(plan: str) -> tuple[list[Action], dict[int, list[Any]], dict[int, int]]:
    """This rank's actions; of each stage after which action its units' reductions started; how many units."""
    engine = engine_of(llama, plan)
    stage_of = {
        unit: stage for stage, forward in engine._parts.stages.items() for unit in forward.sharded.trained
    }
    done: list[Action] = []
    started: dict[int, list[Any]] = {}
    start = DefaultReduction.start

    def start_and_note(sums: DefaultReduction, unit: FlatParam, contribution: Tensor) -> Any:
        started.setdefault(stage_of[unit], []).append(done[-1])
        return start(sums, unit, contribution)

    with pytest.MonkeyPatch.context() as patch, after_actions(lambda action, _: done.append(action)):
        patch.setattr(DefaultReduction, "start", start_and_note)
        engine.step(batch_for(engine))
    return done, started, dict(Counter(stage_of.values()))


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_stage_is_reduced_with_its_last_micro_batch_and_not_at_the_end(pool: Pool, schedule: str) -> None:
    """All its units' reductions start in the last action of its backwards, while other stages have theirs to
    come."""
    for done, started, num_units in pool.run(
        _events, 4, f"dp=2 pp=2 chunks=2 micro=4 schedule={schedule} zero=1"
    ):
        ends = []
        for stage, before in started.items():
            end = max(place for place, action in enumerate(done) if action.stage == stage)
            assert done[end].kind is not Kind.F
            assert before == [done[end - 1]] * num_units[stage]
            ends.append(end)
        assert len(ends) == 2
        assert min(ends) < len(done) - 1


# --- first weights


def _materialised(plan: str) -> tuple[int, int, int, int, bool]:
    """Elements that were alive at most while the engine was made, this rank's, the largest module's, the
    whole model's, and whether of the user's model all else is on meta."""
    model = llama()
    whole = sum(p.numel() for p in model.parameters())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    with LiveBytes() as watch:
        engine = plait.parallelize(model, plan, optimizer=torch.optim.SGD, seed=3)
    own = sum(unit.layout.numel for unit in engine._parts.sharded.units)
    named = {name for unit in engine._parts.sharded.units for name in unit.parameters}
    real = {name for name, p in model.named_parameters() if not p.is_meta}
    return watch.peak_bytes // 4, own, largest, whole, real == named


def test_no_rank_makes_the_weights_of_other_ranks(pool: Pool) -> None:
    """Its own twice, as weights and gradients, and of others' one module at a time."""
    for peak, own, largest, whole, others_are_on_meta in pool.run(
        _materialised, 4, "pp=4 micro=4 precision=fp32"
    ):
        assert own < peak <= 2 * own + 3 * largest
        assert peak < 0.7 * whole
        assert others_are_on_meta
