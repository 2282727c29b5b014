"""The loss scale moves as torch's own does, and more patiently when asked to."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.totals import LossScale
from plait.errors import CheckpointError, ConfigError
from plait.plan.loss_scaling import LossScaling

OVERFLOWS = st.lists(st.booleans(), max_size=60)


@pytest.mark.quick
@given(
    overflows=OVERFLOWS,
    initial=st.integers(0, 127),
    growth=st.integers(1, 3),
    backoff=st.integers(1, 2),
    interval=st.integers(1, 5),
)
def test_with_hysteresis_1_it_is_torchs_own(
    overflows: list[bool], initial: int, growth: int, backoff: int, interval: int
) -> None:
    """Against the kernel that GradScaler.update calls; no minimum, which it does not know."""
    scaling = LossScaling(2.0**initial, 2.0**growth, 2.0**-backoff, interval, minimum=2.0**-126)
    mine = LossScale(scaling)
    scale, tracker = torch.tensor(2.0**initial), torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        found = torch.tensor(float(overflow))
        torch._amp_update_scale_(scale, tracker, found, scaling.growth, scaling.backoff, interval)
        mine.update(overflow)
        assert mine.value == scale.item()
        assert math.isfinite(mine.value)


@given(overflows=OVERFLOWS)
def test_a_gradscaler_that_drives_a_real_optimizer_has_the_same_scale_and_skips_the_same_steps(
    overflows: list[bool],
) -> None:
    parameter = torch.ones(1, requires_grad=True)
    plain = torch.optim.SGD([parameter], lr=0.0, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    mine = LossScale(LossScaling(interval=3, minimum=2.0**-126))
    for overflow in overflows:
        assert scaler.scale(torch.ones(())).item() == mine.value
        parameter.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(plain)
        scaler.update()
        mine.update(overflow)
    assert scaler.get_scale() == mine.value


@given(overflows=OVERFLOWS, hysteresis=st.integers(1, 4), interval=st.integers(1, 5))
def test_it_backs_off_at_the_nth_overflow_since_it_was_refilled_and_at_every_later_one(
    overflows: list[bool], hysteresis: int, interval: int
) -> None:
    mine = LossScale(LossScaling(initial=2.0**10, interval=interval, hysteresis=hysteresis, minimum=4.0))
    seen = clean = 0
    for overflow in overflows:
        before = mine.value
        mine.update(overflow)
        seen, clean = (seen + 1, 0) if overflow else (seen, clean + 1)
        if overflow:
            assert mine.value == (max(before / 2, 4.0) if seen >= hysteresis else before)
        elif clean == interval:
            assert mine.value == before * 2
            seen = clean = 0
        else:
            assert mine.value == before


@given(first=OVERFLOWS, rest=OVERFLOWS, hysteresis=st.integers(1, 3))
def test_a_scale_that_is_saved_and_loaded_goes_on_as_if_nothing_had_been(
    first: list[bool], rest: list[bool], hysteresis: int
) -> None:
    scaling = LossScaling(interval=4, hysteresis=hysteresis)
    whole, resumed = LossScale(scaling), LossScale(scaling)
    for overflow in first:
        whole.update(overflow)
    resumed.load(whole.state())
    for overflow in rest:
        whole.update(overflow)
        resumed.update(overflow)
        assert resumed.value == whole.value


def test_a_scale_of_other_settings_is_taken_over_within_these() -> None:
    patient = LossScale(LossScaling(initial=2.0, interval=100, hysteresis=5))
    for _ in range(50):
        patient.update(False)
    hasty = LossScale(LossScaling(interval=3, minimum=8.0))
    hasty.load(patient.state())
    assert hasty.value == 8.0
    hasty.update(False)
    assert hasty.value == 16.0
    hasty.update(True)
    assert hasty.value == 8.0
    with pytest.raises(CheckpointError, match="no valid loss scale"):
        hasty.load({**patient.state(), "value": torch.tensor(3.0)})


def test_a_fixed_scale_never_changes_also_when_a_checkpoint_has_another() -> None:
    fixed, dynamic = LossScale(LossScaling(initial=0.5, dynamic=False)), LossScale(LossScaling(interval=1))
    for overflow in (True, False, True, True):
        fixed.update(overflow)
        assert fixed.value == 0.5
    dynamic.update(False)
    fixed.load(dynamic.state())
    assert fixed.value == 0.5
    dynamic.load(LossScale(LossScaling(initial=64.0, dynamic=False)).state())
    assert dynamic.value == 64.0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"initial": 1000.0}, "initial=1024"),
        ({"initial": math.inf}, "initial"),
        ({"initial": math.nan}, "initial"),
        ({"initial": "65536"}, "initial"),
        ({"initial": 2.0**128}, "initial"),
        ({"growth": 1.0}, "more than 1"),
        ({"growth": 1.5}, "power of two"),
        ({"backoff": 1.0}, "less than 1"),
        ({"backoff": 0.0}, "backoff"),
        ({"interval": 0}, "an integer from 1"),
        ({"interval": 2.5}, "an integer from 1"),
        ({"hysteresis": True}, "an integer from 1"),
        ({"minimum": 2.0**17}, "at most the initial scale"),
        ({"dynamic": False, "initial": 1000.0}, "initial=1024"),
        ({"dynamic": False, "interval": 10}, "a fixed loss scale never changes"),
    ],
)
def test_invalid_settings_are_errors(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LossScaling(**settings)
