"""8-bit codes of optimizer states: the nearest levels of each block, and the same codes when quantized
again."""

import math

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import ConfigError
from plait.optim.adamw_8bit import BLOCK, dequantize, quantize, stored_bytes
from plait.optim.flat_optimizer import FlatSlice, make_optimizer
from plait.optim.stepper import ChunkedOptimizer
from plait.optim.update_kinds import GroupOptimizer, UpdateScope, state_kinds
from support import block_codes

STATES = ("exp_avg", "exp_avg_sq")
RANGES = [(1, 0), (256, 0), (1000, 0), (1000, 24), (100, 200), (40, 8), (2 * BLOCK, BLOCK - 8), (700, 512)]


def values_of(name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator, dtype=dtype)
    values *= (4 * torch.randn(numel, generator=generator, dtype=dtype)).exp()
    return values.square() if name == "exp_avg_sq" else values


def coded(values: Tensor, name: str, position: int = 0) -> tuple[Tensor, Tensor]:
    """Return what is stored, and its values."""
    stored = torch.empty(stored_bytes(values.numel(), position), dtype=torch.uint8)
    quantize(values, stored, position, name)
    return stored, dequantize(stored, torch.empty_like(values), position, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize(("numel", "position"), RANGES)
def test_values_are_the_nearest_levels_of_their_block(
    numel: int, position: int, name: str, dtype: torch.dtype
) -> None:
    values = values_of(name, numel, dtype)
    expected = block_codes.rounded(values, position, unsigned=name == "exp_avg_sq")
    assert torch.equal(coded(values, name, position)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-18, 1e-26, 1e20])
def test_values_of_codes_have_the_same_codes(name: str, scale: float, dtype: torch.dtype) -> None:
    values = values_of(name, 40_000, dtype) * (abs(scale) if name == "exp_avg_sq" else scale)
    stored, values = coded(values, name, 8)
    assert values.count_nonzero() > 20_000
    again, same = coded(values, name, 8)
    assert torch.equal(again, stored)
    assert torch.equal(same, values)


@pytest.mark.parametrize("unsigned", [False, True])
def test_the_table_finds_the_level_next_to_every_boundary(unsigned: bool) -> None:
    """A cell of the table has one boundary at most: one more comparison finds the level."""
    name = STATES[unsigned]
    known = torch.tensor(block_codes.levels(unsigned=unsigned))
    middle = (known[1:] + known[:-1]) / 2
    beyond = [torch.nextafter(middle, middle.new_full((), end)) for end in (-2.0, 2.0)]
    for ratios in (middle, *beyond, known):
        ratios = ratios.clamp(min=0.0) if unsigned else ratios
        values = torch.cat([torch.ones(1), ratios])[:BLOCK]  # the first one is the block's scale
        assert torch.equal(coded(values, name)[1], block_codes.rounded(values, 0, unsigned=unsigned))


def test_the_largest_value_of_a_block_is_kept() -> None:
    for name in STATES:
        values = values_of(name, 4 * BLOCK)
        at = values.view(-1, BLOCK).abs().argmax(1) + torch.arange(4) * BLOCK
        assert torch.equal(coded(values, name)[1][at], values[at]), name


def test_opposite_values_of_the_largest_size_keep_their_block_s_scale() -> None:
    stored, values = coded(torch.tensor([-2.0, 1.0, 2.0]), "exp_avg")
    assert values[2] == 2.0
    assert -2.0 < values[0] < -1.9
    assert torch.equal(coded(values, "exp_avg")[0], stored)


def test_blocks_of_zeros_and_of_tiny_values_are_zero() -> None:
    for tiny in (0.0, 1e-31, 1e-44):
        for name in STATES:
            assert torch.equal(coded(torch.full((300,), tiny), name)[1], torch.zeros(300)), (tiny, name)


def test_a_small_second_moment_is_not_rounded_to_zero() -> None:
    """The first moment is divided by its root: 0 would make this a division by `eps`."""
    values = torch.cat([torch.ones(1), torch.full((200,), 1e-12), torch.zeros(55)])
    _, found = coded(values, "exp_avg_sq")
    assert torch.equal(found[1:201], torch.full((200,), found[1].item()))
    assert found[1] == pytest.approx(3.25e-7)
    assert not found[201:].count_nonzero()


def test_a_value_that_is_not_a_number_stays_in_its_block() -> None:
    for value in (math.nan, math.inf):
        values = torch.ones(3 * BLOCK)
        values[BLOCK + 5] = value
        found = coded(values, "exp_avg")[1].view(3, BLOCK)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2]], torch.ones(2, BLOCK))


def test_an_element_takes_one_byte_and_its_share_of_a_scale() -> None:
    assert stored_bytes(1 << 20, 0) == (1 << 20) * (1 + 4 / BLOCK)
    assert stored_bytes(100, 200) == 100 + 2 * 4
    assert stored_bytes(0, 8) == 0


def test_it_is_of_a_kind_of_its_own_and_takes_adamw_s_arguments() -> None:
    own = GroupOptimizer(plait.AdamW8bit, {"lr": 1e-3, "amsgrad": True})
    assert own.scope is UpdateScope.BLOCKS
    assert own.fuses
    assert set(own.state_shapes((5, 3))) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "scalar.step"}
    with pytest.raises(ConfigError, match="AdamW8bit does not take these arguments"):
        GroupOptimizer(plait.AdamW8bit, {"lr": 1e-3, "momentum": 0.9}).check()
    with pytest.raises(ConfigError, match="AdamW8bit does not work with parameter servers"):
        state_kinds(plait.AdamW8bit, {})


def test_the_stepper_holds_codes_and_two_wide_states_of_one_leaf() -> None:
    numel, leaves = 1 << 18, 8
    master, gradient = torch.ones(numel * leaves), torch.ones(numel * leaves)
    parts = [
        FlatSlice.from_views(0, p, g) for p, g in zip(master.split(numel), gradient.split(numel), strict=True)
    ]
    optimizer = make_optimizer(plait.AdamW8bit, {"lr": 1e-3}, parts)
    kinds = GroupOptimizer(plait.AdamW8bit, {}).state_shapes((1,))
    stepper = ChunkedOptimizer(optimizer, kinds)
    for number in range(2):
        stepper.step([part.leaf for part in parts], 1.0, number)
    assert stepper.state_bytes == 2 * stored_bytes(numel * leaves, 0)
    assert not optimizer.state
    assert sum(wide.nbytes for wide in stepper._wide.values()) == 2 * 4 * numel
