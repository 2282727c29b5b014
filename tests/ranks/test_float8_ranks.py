"""Float8 products on ranks: the numbers of one process.

Everything else computes in float64 here, sums of emulated products too. In float32 another order of sums
moves a few values across a boundary of float8's rounding, whose steps are a million times as large: 1e-7
becomes 1e-3.
"""

import functools
import warnings
from unittest import mock

import pytest
from torch import nn

from plait.errors import PlanError
from plait.parallel import linear_products
from plait.plan import Plan
from support import float8, programs
from support.compilers import compiles
from support.pool import Pool

BOUND = 1e-8  # scales are float32 numbers
PRECISIONS = ("fp8", "fp8-rowwise")


def task_of(layers: int = 2) -> programs.Task:
    return programs.Task(functools.partial(programs.llama, hidden=64, ffn=96, layers=layers), steps=2)


def train(task: programs.Task, plan: str, muted: bool = False) -> programs.Trace:
    reduce = programs.MUTED["all_reduce"] if muted else linear_products.all_reduce
    with mock.patch.object(Plan, "dtype", "fp64"), mock.patch.object(linear_products, "all_reduce", reduce):
        return programs.train_task(task, plan)


def reference(task: programs.Task, plan: str, ours: programs.Trace) -> programs.Trace:
    parsed = Plan.parse(plan)

    def convert(model: nn.Module) -> None:
        float8.convert(model.get_submodule("model.layers"), parsed.precision)

    task = programs.Task(task.build, steps=task.steps, prepare=convert)
    micros = parsed.dp * parsed.micro
    return programs.one_process_task(task, ours.first_weights, micros, divides_gradients=True)


@pytest.mark.parametrize(
    "words",
    [
        "dp=2 zero=0",
        "dp=2 zero=1 tp=2",
        "dp=2 zero=2 micro=2 recompute=selective",
        "dp=2 zero=3 micro=2 recompute=full",
        pytest.param("tp=2", marks=pytest.mark.quick),
        "tp=2 sp=true recompute=selective",
        "tp=2x2",
        "pp=2 schedule=zb-h1 micro=3",
        "pp=2 tp=2 sp=true schedule=zb-h1 micro=2 recompute=full",
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_float8_layers_train_as_in_one_process(pool: Pool, words: str, precision: str) -> None:
    plan, task = f"{words} precision={precision}", task_of(3 if "pp" in words else 2)
    ours = pool.run(train, Plan.parse(plan).num_ranks, task, plan)[0]
    programs.assert_same(ours, reference(task, plan, ours), BOUND)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_that_do_not_agree_on_scales_train_another_function(pool: Pool, precision: str) -> None:
    plan = f"tp=2 precision={precision}"
    ours = pool.run(train, 2, task_of(), plan, True)[0]
    with pytest.raises(AssertionError, match=r"differs by|loss or norm"):
        programs.assert_same(ours, reference(task_of(), plan, ours), BOUND)


# --- compiled


def compiled_and_not(plan: str, hidden: int, in_cpp: bool) -> tuple[float, str]:
    """How far gradients of the compiled model are from those of the uncompiled one, and the warnings."""
    task = programs.Task(functools.partial(programs.llama, hidden=hidden, ffn=96), steps=1)
    expected = train(task, plan)
    with warnings.catch_warnings(record=True) as caught, compiles(in_cpp=in_cpp):
        warnings.simplefilter("always", UserWarning)
        found = train(task, f"{plan} compile=true")
    text = "\n".join(str(warning.message) for warning in caught)
    if not found.gradients[0]:  # rank 0 has them
        return 0.0, text
    return programs.largest_difference(found.gradients[0], expected.gradients[0])[0], text


@pytest.mark.parametrize(
    ("sp", "hidden"),
    [
        ("true", 64),
        ("false", 96),
        pytest.param("false", 64, marks=pytest.mark.sweep),
        pytest.param("true", 96, marks=pytest.mark.sweep),
    ],
)
def test_compiled_blocks_run_their_float8_layers_uncompiled_and_say_so(
    pool: Pool, sp: str, hidden: int
) -> None:
    """With 96 features, shards of k and v have 24: next to q in float8 they are traced."""
    in_cpp = (sp, hidden) == ("true", 96)  # as users compile, for one of the four
    results = pool.run(compiled_and_not, 2, f"tp=2 sp={sp} precision=fp8", hidden, in_cpp, timeout_s=240.0)
    assert max(gap for gap, _ in results) < BOUND
    assert "torch.compile cannot trace products in float8 on a tensor-parallel grid" in results[0][1]


def refusal(plan: str) -> str:
    task = task_of()
    engine = programs.engine_of(task, plan)
    with pytest.raises(PlanError, match="cannot be compiled as one graph") as caught:
        engine.step(programs.share_of(next(iter(task.data(1))), engine))
    return str(caught.value)


def test_selective_recompute_of_compiled_float8_blocks_on_a_grid_is_an_error(pool: Pool) -> None:
    plan = "tp=2 precision=fp8 compile=true recompute=selective"
    for text in pool.run(refusal, 2, plan, timeout_s=240.0):
        assert "products in float8 on a tensor-parallel grid" in text
