"""Sums that travel in codes or as factors: what they are, what they send, what they keep."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.comm import CODECS, Call, CompressedReduce, Compressor, Group, OpType, PowerSGDReduce, connect
from plait.comm.torch_transport import TorchTransport
from plait.errors import CommError
from plait.plan import Layout, ParamInfo, Plan, UnitInfo, UnitLayout, compression
from plait.plan.compression import Factors, code_bytes
from support import programs
from support.pool import Pool, RankError
from support.trainings import engine_of, train

SHAPES = {"wide": (24, 80), "vector": (40,), "cube": (16, 5, 12), "small": (3, 4), "scalar": ()}


def _layout() -> UnitLayout:
    tensors = tuple(ParamInfo(name, shape, 0) for name, shape in SHAPES.items())
    return Layout.build([UnitInfo("unit", tensors)], 12).units[0]  # ranges for 2, 3 and 4 ranks


def _compressor(way: str, group: Group) -> Compressor:
    layout, rank = _layout(), Plan(reduce=way).powersgd_rank
    if rank is not None:
        factors = Factors.of_unit(layout, rank)
        scratch = torch.zeros(factors.left_bytes, dtype=torch.uint8)
        return PowerSGDReduce(layout.name, layout.numel, factors, group, scratch)
    buffer = torch.zeros(code_bytes(layout.numel, group.size, way), dtype=torch.uint8)
    return CompressedReduce(layout.numel, group, CODECS[way], buffer)


def _contribution(rank: int, directions: int | None = None) -> Tensor:
    """Random; with `directions`, its matrices are of that rank, with columns in common to all ranks."""
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    flat = torch.zeros(_layout().numel)
    for piece in _layout().params:
        values = torch.randn(piece.boxes.shape, generator=own)
        if directions is not None and values.ndim > 1:
            columns = torch.randn(len(values), directions, generator=common)
            values = columns @ torch.randn(directions, values[0].numel(), generator=own)
        flat[piece.start : piece.stop] = values.flatten()
    return flat


def _own(group: Group, scatter: bool) -> tuple[int, int]:
    each = _layout().numel // group.size
    return (group.rank * each, (group.rank + 1) * each) if scatter else (0, _layout().numel)


def _summed(way: str, scatter: bool, times: int = 1, directions: int | None = None) -> list[Tensor]:
    """This rank's results of several sums of the same contributions."""
    group = connect().group
    compressor, own = _compressor(way, group), _own(group, scatter)
    found = []
    for _ in range(times):
        given, out = _contribution(group.rank, directions), torch.empty(own[1] - own[0])
        for _ in compressor.start(given, own, label="unit").into(out):
            pass
        found.append(out)
    return found


def _whole(answers: list[list[Tensor]], scatter: bool, time: int = 0) -> Tensor:
    parts = [answer[time] for answer in answers]
    return torch.cat(parts) if scatter else parts[0]


def _exact(ranks: int, directions: int | None = None) -> Tensor:
    return torch.stack([_contribution(rank, directions) for rank in range(ranks)]).sum(0)


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_codes_add_up_to_the_sum_within_their_precision(pool: Pool, ranks: int, scatter: bool) -> None:
    largest = max(float(_contribution(rank).abs().max()) for rank in range(ranks))
    for way, step in (("int8", 1 / 254), ("fp16", 2.0**-11)):
        answers = pool.run(_summed, ranks, way, scatter)
        worst = (_whole(answers, scatter) - _exact(ranks)).abs().max()
        # Peers' contributions are written once; where all get the sum, so is that, which is up to p times as
        # large.
        assert 0 < worst <= largest * step * ((ranks - 1) + (0 if scatter else ranks + 1)) * 1.01


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd"])
def test_all_ranks_get_the_same_bits(pool: Pool, way: str, ranks: int) -> None:
    first, *others = pool.run(_summed, ranks, way, False, 3)
    for other in others:
        assert all(map(torch.equal, first, other))


def _summed_in_pieces(*arguments: Any) -> list[Tensor]:
    with mock.patch.object(compression, "_MIN_MESSAGE_BLOCKS", 1):
        return _summed(*arguments)


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize(("way", "ranks"), [("int8", 2), ("int8", 3), ("bf16", 4)])
def test_ranges_sent_in_two_pieces_have_the_bits_of_whole_ones(
    pool: Pool, way: str, ranks: int, scatter: bool
) -> None:
    whole, pieces = (pool.run(run, ranks, way, scatter, 3) for run in (_summed, _summed_in_pieces))
    for one, other in zip(whole, pieces, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("scatter", [True, False])
def test_factors_of_as_many_directions_as_there_are_are_the_sum(pool: Pool, scatter: bool) -> None:
    """Matrices as well as float32 can tell directions apart, the rest exactly."""
    answers = pool.run(_summed, 3, "powersgd:3", scatter, 1, 3)
    exact = _exact(3, 3)
    assert torch.allclose(_whole(answers, scatter), exact, atol=1e-4 * float(exact.abs().max()))
    fewer = pool.run(_summed, 3, "powersgd:2", scatter, 1, 3)
    assert (_whole(fewer, scatter) - exact).abs().max() > 0.1


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize(("way", "times", "share"), [("int8", 20, 0.1), ("powersgd:2", 40, 0.35)])
def test_compression_errors_are_fed_back_later(
    pool: Pool, way: str, times: int, share: float, scatter: bool
) -> None:
    """The mean of many sums of the same is far nearer to it than one: without feedback all would be equal."""
    answers, exact = pool.run(_summed, 2, way, scatter, times), _exact(2)
    found = torch.stack([_whole(answers, scatter, time) for time in range(times)])
    once, mean = ((it - exact).norm() / exact.norm() for it in (found[0], found.mean(0)))
    assert 0 < mean < share * once


def _with_one_bad(way: str, scatter: bool, place: int, bad: float) -> bool:
    group = connect().group
    compressor, own, given = _compressor(way, group), _own(group, scatter), _contribution(group.rank)
    if group.rank == 1:
        given[place] = bad
    out = torch.empty(own[1] - own[0])
    for _ in compressor.start(given, own, label="unit").into(out):
        pass
    return bool(out.isfinite().all())


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("way", ["fp16", "int8", "powersgd:2"])
def test_one_element_of_one_rank_that_is_not_finite_is_never_lost(
    pool: Pool, way: str, scatter: bool
) -> None:
    """In a matrix that travels as factors, in a vector, and in a small matrix."""
    for place, bad in ((700, float("nan")), (1930, float("inf")), (2921, float("nan")), (5, -float("inf"))):
        finite = pool.run(_with_one_bad, 2, way, scatter, place, bad)
        assert not (all(finite) if scatter else any(finite)), (place, bad)


@contextmanager
def _counting() -> Iterator[dict[OpType, float]]:
    """Bytes that this rank sends in what has a label, as the best algorithm of each verb sends them."""
    sent: dict[OpType, float] = {}
    start = TorchTransport.start

    def counted(self: TorchTransport, call: Call) -> Any:
        p = len(self._ranks)
        shares = {
            OpType.ALL_REDUCE: 2 * (p - 1) / p,
            OpType.ALL_TO_ALL: (p - 1) / p,
            OpType.ALL_GATHER: p - 1,
        }
        if call.label:
            sent[call.op_type] = sent.get(call.op_type, 0.0) + shares[call.op_type] * call.input.nbytes
        return start(self, call)

    with mock.patch.object(TorchTransport, "start", counted):
        yield sent


def _sent(plan: str) -> tuple[dict[OpType, float], list[UnitLayout]]:
    engine = engine_of(plan, programs.wide_llama)
    with _counting() as sent:
        train(engine, last=1)
    return sent, list(engine.layout.units)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_codes_send_as_much_as_the_formula(pool: Pool, ranks: int, zero: int) -> None:
    for way, block_bytes in (("int8", 260), ("fp16", 512)):
        for sent, units in pool.over("gloo").run(_sent, ranks, f"dp={ranks} zero={zero} reduce={way}"):
            blocks = sum(-(-unit.numel // 256 // ranks) for unit in units)
            once = (ranks - 1) * blocks * block_bytes
            assert sent[OpType.ALL_TO_ALL] == once
            assert OpType.ALL_REDUCE not in sent
            if not zero:  # later stages gather parameters
                assert sent[OpType.ALL_GATHER] == once
            ideal = (ranks - 1) / ranks * sum(unit.numel for unit in units) * block_bytes / 256
            assert ideal <= once < 1.01 * ideal  # the rest is the last block of each unit's


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_factors_send_as_much_as_the_formula(pool: Pool, ranks: int, zero: int) -> None:
    rank = 2
    for sent, units in pool.over("gloo").run(_sent, ranks, f"dp={ranks} zero={zero} reduce=powersgd:{rank}"):
        numbers = 0
        for piece in (piece for unit in units for piece in unit.params):
            thin = rank * sum(piece.full_shape)
            numbers += thin if len(piece.full_shape) > 1 else piece.boxes.numel
        assert sent[OpType.ALL_REDUCE] == pytest.approx(2 * (ranks - 1) / ranks * 4 * numbers)
        assert OpType.ALL_TO_ALL not in sent
        assert numbers < 0.06 * sum(unit.numel for unit in units)


def _fails_alone() -> None:
    group = connect().group
    compressor = _compressor("int8", group)
    if group.rank == 1:
        raise ZeroDivisionError
    for _ in compressor.start(_contribution(0), _own(group, True), label="unit").into(torch.empty(0)):
        pass


def test_a_peer_that_is_lost_is_an_error_where_the_sum_is_taken(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(_fails_alone, 2)
    alone, consequence = sorted(caught.value.failures, key=lambda failure: -failure.rank)
    assert isinstance(alone.exception, ZeroDivisionError)
    assert isinstance(consequence.exception, CommError)
    assert "all-to-all of unit failed" in str(consequence.exception)
    assert ", in into" in consequence.text
