"""Stepping leaf by leaf, with states in bf16 or in a file: the same numbers, in less memory."""

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.optim.disk_tensors import MappedFile, mapped_bytes
from plait.optim.flat_optimizer import FlatSlice, make_optimizer
from plait.optim.stepper import ChunkedOptimizer
from plait.optim.update_kinds import state_kinds

NUMEL, STEPS = 20_000, 4
CUTS = (7_000, 9_000, 4_000)  # the second group is the last cut
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 1e-2, "amsgrad": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    ("RMSprop", {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    ("NAdam", {"lr": 1e-2}),
    ("ASGD", {"lr": 1e-2}),
    ("Rprop", {"lr": 1e-2}),
]


class Run:
    """A master of NUMEL elements under one optimizer, stepped in one of the ways."""

    def __init__(
        self,
        name: str = "AdamW",
        arguments: dict[str, Any] | None = None,
        *,
        cuts: Sequence[int] = CUTS,
        masters: Path | None = None,
        dtype: torch.dtype = torch.float32,
        **how: Any,
    ) -> None:
        arguments = arguments or {"lr": 1e-2}
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(NUMEL, generator=generator, dtype=dtype)
        self.master = values
        if masters is not None:
            how["masters"] = MappedFile(masters, mapped_bytes(NUMEL, dtype))
            self.master = how["masters"].allocate(NUMEL, dtype).copy_(values)
        self.gradient = torch.zeros_like(values)
        pairs = list(zip(self.master.split(list(cuts)), self.gradient.split(list(cuts)), strict=True))
        slices = [FlatSlice.from_views(int(pair is pairs[-1]), *pair) for pair in pairs]
        self.leaves = [each.leaf for each in slices]
        kind = getattr(torch.optim, name)
        self.optimizer = make_optimizer(kind, arguments, slices)
        self.stepper = ChunkedOptimizer(self.optimizer, state_kinds(kind, arguments), **how)
        self.lr = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (step + 1))

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number + 1)
        self.gradient.copy_(torch.randn(NUMEL, generator=generator))
        self.stepper.step(self.leaves[:1], 0.3, number)
        self.stepper.step(self.leaves[1:], 0.3, number)
        self.lr.step()

    def steps(self, first: int = 0, last: int = STEPS) -> "Run":
        for number in range(first, last):
            self.step(number)
        return self

    def state(self) -> dict[str, Tensor]:
        """Flat states over the whole master, counters of the first leaf."""
        states = [self.stepper.state(leaf) for leaf in self.leaves]
        return {
            key: torch.cat([state[key] for state in states])
            if isinstance(value, Tensor) and value.ndim
            else torch.as_tensor(0 if value is None else value)
            for key, value in states[0].items()
        }


def assert_equal_bits(one: Run, other: Run) -> None:
    assert torch.equal(one.master, other.master)
    mine, theirs = one.state(), other.state()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "states in a file": lambda folder: {"folder": folder},
    "masters in a file": lambda folder: {"masters": folder},
    "both": lambda folder: {"folder": folder, "masters": folder},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "arguments"), KINDS)
def test_states_in_a_file_give_the_same_bits_as_one_step_over_all(
    name: str, arguments: dict[str, Any], way: str, tmp_path: Path
) -> None:
    plain = Run(name, arguments).steps()
    mapped = Run(name, arguments, **WAYS[way](tmp_path)).steps()
    assert_equal_bits(plain, mapped)
    assert not mapped.optimizer.state
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_leaves_keep_float64_states_in_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    mapped = Run(dtype=dtype, folder=tmp_path).steps()
    assert_equal_bits(Run(dtype=dtype).steps(), mapped)
    assert mapped.state()["exp_avg"].dtype == dtype


HOWS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "memory": lambda _: {},
    "bf16": lambda _: {"states": "bf16"},
    "disk": lambda folder: {"folder": folder},
    "bf16 on disk": lambda folder: {"states": "bf16", "folder": folder, "masters": folder},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_state_that_is_taken_and_loaded_goes_on_with_the_same_bits(
    how: str, name: str, tmp_path: Path
) -> None:
    options = HOWS[how](tmp_path)
    straight, resumed = Run(name, **options).steps(0, 2), Run(name, **options)
    assert resumed.stepper.state(resumed.leaves[0]) == {}
    resumed.step(7)  # what it held is replaced
    resumed.master.copy_(straight.master)
    resumed.lr.load_state_dict(straight.lr.state_dict())
    resumed.optimizer.param_groups[0]["lr"] = straight.optimizer.param_groups[0]["lr"]
    resumed.optimizer.param_groups[1]["lr"] = straight.optimizer.param_groups[1]["lr"]
    for mine, theirs in zip(resumed.leaves, straight.leaves, strict=True):
        resumed.stepper.load(mine, copy.deepcopy(straight.stepper.state(theirs)))
    assert_equal_bits(straight.steps(2, STEPS), resumed.steps(2, STEPS))


@pytest.mark.parametrize("how", HOWS)
def test_a_cleared_stepper_starts_again(how: str, tmp_path: Path) -> None:
    fresh, cleared = Run(**HOWS[how](tmp_path)), Run(**HOWS[how](tmp_path))
    start = cleared.master.clone()
    cleared.steps()
    cleared.stepper.clear()
    assert cleared.stepper.state_bytes == 0
    cleared.master.copy_(start)
    for group in cleared.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    cleared.lr = fresh.lr  # stepped by neither
    fresh.gradient.fill_(0.25)
    cleared.gradient.fill_(0.25)
    for run in (fresh, cleared):
        run.stepper.step(run.leaves, 1.0, 0)
    assert_equal_bits(fresh, cleared)


def test_bf16_states_are_the_same_bits_in_a_file_and_however_they_are_cut(tmp_path: Path) -> None:
    whole = Run(states="bf16").steps()
    assert_equal_bits(whole, Run(states="bf16", folder=tmp_path).steps())
    assert_equal_bits(whole, Run(states="bf16", cuts=(123, 6_877, 9_000, 4_000)).steps())
    alone = Run(states="bf16", cuts=(16_000, 4_000)).steps()
    assert torch.equal(whole.master, alone.master)


def test_bf16_states_take_half_the_memory_and_train_nearly_the_same(tmp_path: Path) -> None:
    wide, narrow = Run().steps(), Run(states="bf16").steps()
    assert wide.stepper.state_bytes == 8 * NUMEL + 4 * len(CUTS)  # and a counter per leaf
    assert narrow.stepper.state_bytes == 4 * NUMEL
    on_disk = Run(states="bf16", folder=tmp_path).steps().stepper
    assert on_disk.state_bytes == 0
    assert 4 * NUMEL <= on_disk.disk_bytes < 4 * NUMEL + 6 * 4096
    difference = (wide.master - narrow.master).abs().mean() / (wide.master - Run().master).abs().mean()
    assert 0 < difference < 0.01
    on_disk.close()
    assert on_disk.disk_bytes == 0


def test_bf16_second_moments_follow_a_gradient_that_shrinks() -> None:
    """Rounded to nearest, 0.999 v + 0.001 g^2 would stay where it is for ever: less than half a bf16 step."""
    leaf = FlatSlice.from_views(0, torch.zeros(NUMEL), torch.ones(NUMEL)).leaf
    optimizer = make_optimizer(torch.optim.Adam, {}, [FlatSlice(0, leaf)])
    stepper = ChunkedOptimizer(optimizer, state_kinds(torch.optim.Adam, {}), states="bf16")
    stepper.step([leaf], 1.0, 0)
    stepper.load(leaf, {**stepper.state(leaf), "exp_avg_sq": torch.ones(NUMEL)})
    nearest, exact = torch.ones((), dtype=torch.bfloat16), 1.0
    assert leaf.grad is not None
    for number in range(1, 301):
        leaf.grad.fill_(0.1)
        stepper.step([leaf], 1.0, number)
        nearest = (nearest.float() * 0.999 + 0.001 * 0.01).bfloat16()
        exact = exact * 0.999 + 0.001 * 0.01
    assert nearest == 1.0
    assert stepper.state(leaf)["exp_avg_sq"].mean().item() == pytest.approx(exact, rel=0.002)


@pytest.mark.parametrize("how", HOWS)
def test_an_exception_in_the_optimizer_leaves_its_groups_whole(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(**HOWS[how](tmp_path)).steps(0, 1)
    before = [(id(group), list(map(id, group["params"]))) for group in run.optimizer.param_groups]

    def fail() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(run.optimizer, "step", fail)
        with pytest.raises(ZeroDivisionError):
            run.stepper.step(run.leaves, 1.0, 1)
    assert [(id(g), list(map(id, g["params"]))) for g in run.optimizer.param_groups] == before
    run.steps(1, 2)
    assert run.stepper.state(run.leaves[0])["step"] == 2


@pytest.mark.parametrize("how", HOWS)
def test_a_rank_without_a_leaf_steps_too(how: str, tmp_path: Path) -> None:
    optimizer = make_optimizer(torch.optim.AdamW, {}, [])
    options = HOWS[how](tmp_path)
    options.pop("masters", None)
    stepper = ChunkedOptimizer(optimizer, state_kinds(torch.optim.AdamW, {}), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    stepper.step([], 0.5, 0)
    schedule.step()  # warns, which is an error here, of an optimizer that has not stepped
    assert stepper.state_bytes == 0


MEMORY = """
import sys
from pathlib import Path
import torch
from plait.optim.flat_optimizer import FlatSlice, make_optimizer
from plait.optim.update_kinds import state_kinds
from plait.optim.disk_tensors import MappedFile, mapped_bytes
from plait.optim.stepper import ChunkedOptimizer
from plait.plan.memory import CHUNK

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def run(numel, folder):
    file = MappedFile(folder, mapped_bytes(numel, torch.float32)) if folder else None
    master = file.allocate(numel, torch.float32) if folder else torch.zeros(numel)
    gradient = torch.linspace(-1.0, 1.0, CHUNK)  # one for all leaves: only weights and states are large
    slices = [FlatSlice.from_views(0, piece, gradient[:piece.numel()]) for piece in master.split(CHUNK)]
    optimizer = make_optimizer(torch.optim.AdamW, {}, slices)
    stepper = ChunkedOptimizer(optimizer, state_kinds(torch.optim.AdamW, {}), folder=folder, masters=file)
    for number in range(3):
        stepper.step([piece.leaf for piece in slices], 1.0, number)
    return stepper, master, [piece.leaf for piece in slices]

torch.set_num_threads(1)
run(4 * CHUNK, None)
run(4 * CHUNK, Path(sys.argv[1]))  # what libraries load once is not of this rank's tensors
before = resident("VmHWM")
stepper, master, leaves = run(int(sys.argv[2]), Path(sys.argv[1]))
print(resident("VmHWM") - before, stepper.disk_bytes, stepper.state_bytes)
plain, other, others = run(int(sys.argv[2]), None)
same = torch.equal(master, other)
for leaf, theirs in zip(leaves, others):
    mine, right = stepper.state(leaf), plain.state(theirs)
    same &= mine.keys() == right.keys() and all(torch.equal(mine[key], right[key]) for key in mine)
print(same, bool((master != 0).any()))
"""


def test_states_several_times_larger_than_memory_may_be_step_within_it(tmp_path: Path) -> None:
    """400 MB of states and 200 MB of weights; the peak of the whole process, which the kernel keeps."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), "50000000"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    growth, on_disk, in_memory = map(int, first.split())
    assert on_disk >= 400_000_000
    assert in_memory == 0
    assert growth < 50_000_000
    assert second == "True True"
