"""What torch promises of DistributedDataParallel, checked by torch's own cases on the class of ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from contract.cases import is_unit
from contract.expected import exceptions, torch_fails
from contract.ranks import Variant
from contract.runner import Result, Runner, run_all, runner

SMALLEST = 75  # fewer cases that pass on ranks than this, and it is the runner that found nothing to do

Runners = Callable[[int], Runner]


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    """A runner per number of ranks, made at first use."""
    made: dict[int, Runner] = {}
    with ExitStack() as stack:
        yield lambda size: made.get(size) or made.setdefault(size, stack.enter_context(runner(size)))


@pytest.mark.parametrize(
    ("world_size", "transport"),
    [
        (2, "auto"),
        pytest.param(2, "group", marks=pytest.mark.sweep),
        pytest.param(3, "auto", marks=pytest.mark.sweep),
        pytest.param(3, "group", marks=pytest.mark.sweep),
    ],
)
def test_what_torchs_class_passes_plaits_does(runners: Runners, world_size: int, transport: str) -> None:
    on = runners(world_size)
    results = run_all(on, on.names(), Variant("plait", transport))
    assert not (said := complaints(results, world_size, transport)), "\n\n".join(said)
    passed = [it for it in results if it.status == "passed" and not is_unit(it.name)]
    assert len(passed) >= SMALLEST
    assert all(it.num_built for it in passed), "a case has found another class than ours"


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_class_fails_what_the_list_says_and_nothing_else(runners: Runners, world_size: int) -> None:
    on = runners(world_size)
    results = run_all(on, on.names(), Variant("torch"))
    assert {it.name for it in results if it.status in ("failed", "hung")} == {*torch_fails(world_size)}


@pytest.mark.parametrize(
    "name",
    ["test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync", "test_ddp_hook_parity_powerSGD"],
)
def test_a_class_that_never_averages_gradients_is_caught(runners: Runners, name: str) -> None:
    assert runners(2).run(name, Variant("torch")).status == "passed"
    assert runners(2).run(name, Variant("unsynced")).status == "failed"


def complaints(results: Sequence[Result], world_size: int, transport: str) -> list[str]:
    """What is not as torch's class has it, a case each: failures, and exceptions that are none any more."""
    exceptional = exceptions(transport)
    excused = torch_fails(world_size) | exceptional
    failed = [it for it in results if it.status in ("failed", "hung")]
    said = [f"{it.name} {it.status}\n{it.text}" for it in failed if it.name not in excused]
    stale = exceptional.keys() - {it.name for it in failed}
    return said + [f"{name} does not fail: it is no exception" for name in sorted(stale)]
