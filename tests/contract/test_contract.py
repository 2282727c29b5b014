"""torch's own test cases on plait's DistributedDataParallel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from contract.cases import is_unit
from contract.expected import exceptions, torch_fails
from contract.ranks import Variant
from contract.runner import Result, Runner, run_all, start_runner

MIN_PASSED = 75  # fewer passing cases on ranks mean a broken runner

Runners = Callable[[int], Runner]


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    """One runner per number of ranks, started on first use."""
    runners_by_size: dict[int, Runner] = {}
    with ExitStack() as stack:
        yield (
            lambda size: (
                runners_by_size.get(size)
                or runners_by_size.setdefault(size, stack.enter_context(start_runner(size)))
            )
        )


@pytest.mark.parametrize(
    ("world_size", "transport", "compiler"),
    [
        (2, "auto", "aot_eager"),
        pytest.param(2, "auto", "inductor", marks=pytest.mark.sweep),
        pytest.param(2, "group", "inductor", marks=pytest.mark.sweep),
        pytest.param(3, "auto", "inductor", marks=pytest.mark.sweep),
        pytest.param(3, "group", "inductor", marks=pytest.mark.sweep),
    ],
)
def test_plaits_class_passes_the_tests_that_torchs_passes(
    runners: Runners, world_size: int, transport: str, compiler: str
) -> None:
    runner = runners(world_size)
    results = run_all(runner, runner.names(), Variant("plait", transport, compiler))
    assert not (messages := unexpected_outcomes(results, world_size, transport)), "\n\n".join(messages)
    passed = [it for it in results if it.status == "passed" and not is_unit(it.name)]
    assert len(passed) >= MIN_PASSED
    assert all(it.num_built for it in passed), "a case has used another class than plait's"


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_class_fails_the_listed_tests_only(runners: Runners, world_size: int) -> None:
    runner = runners(world_size)
    results = run_all(runner, runner.names(), Variant("torch"))
    assert {it.name for it in results if it.status in ("failed", "hung")} == {*torch_fails(world_size)}


@pytest.mark.parametrize(
    "name",
    ["test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync", "test_ddp_hook_parity_powerSGD"],
)
def test_a_class_that_never_averages_gradients_is_caught(runners: Runners, name: str) -> None:
    assert runners(2).run(name, Variant("torch")).status == "passed"
    assert runners(2).run(name, Variant("unsynced")).status == "failed"


def unexpected_outcomes(results: Sequence[Result], world_size: int, transport: str) -> list[str]:
    """One message per unexpected outcome: failures, and exceptions that no longer fail."""
    exceptional = exceptions(transport)
    excused = torch_fails(world_size) | exceptional
    failed = [it for it in results if it.status in ("failed", "hung")]
    messages = [f"{it.name} {it.status}\n{it.text}" for it in failed if it.name not in excused]
    stale = exceptional.keys() - {it.name for it in failed}
    return messages + [f"{name} does not fail: remove it from expected.py" for name in sorted(stale)]
