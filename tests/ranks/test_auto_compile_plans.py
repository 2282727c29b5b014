"""compile=auto under plans of ranks: the numbers of one process, and one choice for all ranks."""

import time

import pytest
import torch

import plait
from plait.verify import Outcome
from support import compiled_plans, programs
from support.covering import Case
from support.pool import Pool


def check_case(pool: Pool, case: Case, *, in_cpp: bool, reason: str = "") -> None:
    """The numbers are those of one process within the tolerance of `plait verify`; blocks are compiled, or
    are not for this reason."""
    found = pool.run(compiled_plans.verified, compiled_plans.num_ranks(case), case, in_cpp, timeout_s=240.0)
    verdict, choice, _ = found[0]
    assert (verdict.outcome, verdict.message) == (Outcome.SAME, ""), verdict
    assert choice.startswith("off: " if reason else "on: "), choice
    assert reason in choice
    for _, other, num_graphs in found:
        assert other == choice
        assert reason or num_graphs


@pytest.mark.parametrize(
    ("case", "in_cpp"),
    [
        *((case, False) for case in compiled_plans.few_cases()),
        *(pytest.param(case, True, marks=pytest.mark.sweep) for case in compiled_plans.few_cases()),
    ],
    ids=lambda value: "" if isinstance(value, bool) else compiled_plans.name_of(value),
)
def test_plans_that_auto_compiles_train_as_in_one_process(pool: Pool, case: Case, in_cpp: bool) -> None:
    check_case(pool, case, in_cpp=in_cpp)


@pytest.mark.sweep
@pytest.mark.parametrize("case", compiled_plans.many_cases(), ids=compiled_plans.name_of)
def test_every_pair_of_compiled_options_trains_as_in_one_process(pool: Pool, case: Case) -> None:
    check_case(pool, case, in_cpp=False)


REFUSED = {
    "schedule=zb-h1 splits backwards": {"pp": "2", "schedule": "zb-h1", "micro": "2"},
    "compiles no block with attention over ranks": {"cp": "2", "recompute": "selective"},
    "counts no experts in compiled blocks": {"model": "mixtral", "dp": "2", "recompute": "selective"},
    "LlamaDecoderLayer: a norm over sharded features": {"tp": "2x1", "recompute": "selective"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_plans_that_auto_does_not_compile_say_why_and_train_as_in_one_process(
    pool: Pool, reason: str
) -> None:
    case = {"model": "llama", "adapter": "none", "precision": "fp64", **REFUSED[reason]}
    assert compiled_plans.reason_of({"tp": "1", "cp": "1", "recompute": "none", **case})
    check_case(pool, case, in_cpp=False, reason=reason)


def _choice(plan: str, gains: tuple[float, ...], hidden: int = 32) -> tuple[str, bool, str, str]:
    """Return what this rank chose, the plan that it runs, and the choice's key. `gains`: by rank, what counts
    as one."""
    torch.manual_seed(0)
    model = programs.llama(on_meta=False, exact=False, hidden=hidden)
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, seed=3)
    ids = (torch.arange(64) % programs.VOCABULARY).view(4, 16)
    with compiled_plans.choosing(gain=gains[engine.world.rank]):
        engine.step(programs.share_of({"input_ids": ids, "labels": ids}, engine))
    choice = engine.compile_choice
    assert choice is not None
    return str(choice), choice.is_on, str(engine.plan), choice.key


@pytest.mark.parametrize("gains", [(-1e9, 1.0), (1.0, -1e9)])
def test_all_ranks_do_as_rank_0_has_measured(pool: Pool, gains: tuple[float, float]) -> None:
    ours, other = pool.run(_choice, 2, "dp=2 zero=3 compile=auto", gains)
    assert ours == other
    assert ours[1] == (gains[0] < 0)


@pytest.mark.parametrize("stages", ["0,2", "0,2,0"])
def test_ranks_without_blocks_do_as_those_with_blocks(pool: Pool, stages: str) -> None:
    """The first rank, which decides, has none; times of other models are not this one's."""
    ranks = stages.count(",") + 1
    plan = f"pp={ranks} micro=2 stages={stages} compile=auto"
    ours, *others = pool.run(_choice, ranks, plan, (-1e9,) * ranks)
    assert ours[1], ours[0]
    assert others == [ours] * (ranks - 1)
    wider = pool.run(_choice, ranks, plan, (1.0,) * ranks, 64)
    assert {key for *_, key in wider}.isdisjoint({ours[3]})


def _slow_blocks(plan: str) -> tuple[str, float]:
    """Return what this rank chose, and the processor time of its blocks in a step at least."""
    slow_s = 0.05

    def slow(*_: object) -> None:
        begin_s = time.process_time()
        while time.process_time() - begin_s < slow_s:
            pass

    model = programs.llama(on_meta=False, exact=False)
    for block in model.model.layers:  # type: ignore[union-attr]
        block.register_forward_pre_hook(slow)
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, seed=3)
    ids = (torch.arange(64) % programs.VOCABULARY).view(4, 16)
    with compiled_plans.choosing(gain=-1e9):
        engine.step(programs.share_of({"input_ids": ids, "labels": ids}, engine))
    assert engine.compile_choice is not None
    return str(engine.compile_choice), 2 * 2 * slow_s / torch.get_num_threads()


def test_the_times_are_those_of_the_slowest_rank(pool: Pool) -> None:
    (choice, least_s), _ = pool.run(_slow_blocks, 2, "pp=2 micro=2 stages=0,2 compile=auto")
    times = [float(word) for word in choice.replace(" s ", " ").split() if word[0].isdigit()]
    assert times[0] >= least_s, choice
    assert times[1] >= least_s, choice
