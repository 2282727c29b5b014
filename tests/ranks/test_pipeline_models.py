"""Models that are cut into stages: frozen, with buffers, with dropout, a list, a Sequential, compiled, cut by
hand. They train as in one process."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from support import pipeline_models, pipeline_plans, programs
from support.pool import Pool

LAYERS, SEQUENCES = 5, 12


def check_parity(pool: Pool, task: programs.Task, words: str, timeout_s: float = 60.0) -> programs.Trace:
    """Returns the pipeline's trace."""
    plan = f"{words} precision=fp64"
    ranks = plait.Plan.parse(plan).num_ranks
    ours = pool.run(programs.train_task, ranks, task, plan, timeout_s=timeout_s)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))
    return ours


def task_of(build: Any, probe: Any = None) -> programs.Task:
    """Three steps of a model."""
    return programs.Task(
        build, functools.partial(programs.batches, sequences=SEQUENCES), steps=3, probe=probe
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("frozen", "pp=2 schedule=1f1b micro=3"),
        ("frozen", "pp=3 schedule=zb-h1 micro=3 dp=2 zero=2"),
        ("frozen", "pp=2 schedule=zbv micro=3 recompute=full"),
        ("frozen", "pp=2 dp=2 zero=2 micro=3 algorithm=ring"),
        ("frozen_tied_llama", "pp=2 schedule=1f1b micro=3"),
        ("frozen_tied_llama", "pp=5 schedule=zb-h1 micro=3"),
        ("frozen_tied_llama", "pp=2 schedule=dualpipev micro=3 dp=2 zero=3"),
    ],
)
def test_stages_with_frozen_parameters_train_the_others(pool: Pool, model: str, words: str) -> None:
    check_parity(pool, pipeline_plans.task(model, LAYERS, SEQUENCES), words)


def _trains(model: str, words: str) -> bool:
    engine = plait.parallelize(pipeline_plans.build_of(model, LAYERS)(), words, loss=programs.summed_loss)
    return not any(engine.step(programs.share_of(batch, engine)).skipped for batch in programs.batches(2))


@pytest.mark.parametrize("reduce", ["bf16", "int8", "powersgd"])
def test_compressed_gradients_pass_by_a_stage_with_nothing_to_train(pool: Pool, reduce: str) -> None:
    assert pool.run(_trains, 4, "frozen", f"pp=2 dp=2 micro=2 reduce={reduce}") == [True] * 4


@pytest.mark.parametrize(
    "words",
    [
        "pp=2 stages=1,4",
        "pp=2 stages=4,1 schedule=gpipe",
        "pp=2 stages=1,2,1,1 schedule=zbv",
        "pp=3 stages=1,3,1",
    ],
)
def test_stages_that_are_given_by_hand_train_the_same(pool: Pool, words: str) -> None:
    check_parity(pool, pipeline_plans.task("gpt2", LAYERS, SEQUENCES), f"{words} micro=3")


def chain(on_meta: bool = True) -> Any:
    """Modules one after the other; what passes is one tensor, two, and two again."""
    with torch.device("meta" if on_meta else "cpu"):
        model = pipeline_models.Pair(layers=4)
        return plait.Chain([_Embed(model), *model.blocks, _Head(model)])


class _Embed(nn.Module):
    def __init__(self, model: pipeline_models.Pair) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        return x, torch.cumsum(x[..., :8], 1)


class _Head(nn.Module):
    def __init__(self, model: pipeline_models.Pair) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.head(memory) + self.head.weight.sum(1) * self.norm(x).sum(-1, keepdim=True)


def sequential(on_meta: bool = True) -> nn.Module:
    with torch.device("meta" if on_meta else "cpu"):
        width = pipeline_models.WIDTH
        inner = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
        return _Fed(
            nn.Sequential(
                nn.Embedding(programs.VOCABULARY, width), *inner, nn.Linear(width, programs.VOCABULARY)
            )
        )


class _Fed(nn.Module):
    """A Sequential takes one nameless argument."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layers(input_ids)


class Separate(nn.Module):
    """Blocks that no list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, pipeline_models.WIDTH)
        self.one, self.two, self.three = (pipeline_models.PairBlock() for _ in range(3))
        self.head = nn.Linear(pipeline_models.WIDTH, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x, memory = self.three(*self.two(*self.one(x, x[..., :8])))
        return self.head(x) * (1 + memory.mean(-1, keepdim=True))


def separate(on_meta: bool = True) -> nn.Module:
    with torch.device("meta" if on_meta else "cpu"):
        return Separate()


def by_list(model: Any) -> list[nn.Module]:
    return [model.one, model.two, model.three]


def by_class(model: Any) -> type[nn.Module]:
    return pipeline_models.PairBlock


@pytest.mark.parametrize(
    "words", ["pp=2 schedule=1f1b", "pp=3 schedule=zb-h1 recompute=full", "pp=2 dp=2 zero=3 schedule=gpipe"]
)
@pytest.mark.parametrize(
    ("build", "blocks"), [(chain, None), (sequential, None), (separate, by_list), (separate, by_class)]
)
def test_lists_of_modules_and_named_blocks_are_cut_and_train_the_same(
    pool: Pool, build: Any, blocks: Any, words: str
) -> None:
    data = functools.partial(programs.batches, sequences=SEQUENCES, length=pipeline_plans.LENGTH)
    check_parity(pool, programs.Task(build, data, steps=3, blocks=blocks), f"{words} micro=3")


# --- buffers and parameters that are not floating


class _Normed(nn.Module):
    """A block whose forward changes buffers, and reads what does not float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(pipeline_models.WIDTH, pipeline_models.WIDTH)
        self.norm = nn.BatchNorm1d(pipeline_models.WIDTH)
        self.order = nn.Parameter(torch.randperm(pipeline_models.WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x).mT).mT[..., self.order])


class Buffered(nn.Module):
    """Persistent buffers in blocks, before the first and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, pipeline_models.WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("spread", torch.linspace(0.5, 1.5, pipeline_models.WIDTH))
        self.blocks = nn.ModuleList([_Normed() for _ in range(4)])
        self.last = nn.BatchNorm1d(pipeline_models.WIDTH)
        self.head = nn.Linear(pipeline_models.WIDTH, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.embedding(input_ids) * self.spread
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x.mT).mT)


def buffered(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return Buffered()


def _with_buffers(words: str, state: dict[str, Tensor] | None = None, build: Any = buffered) -> Any:
    """Three steps, or the last one after a state of before it: what came of them."""
    task = task_of(build)
    with programs.ignoring_batch_statistics():
        engine = programs.engine_of(task, f"{words} precision=fp64")
    results, saved = [], {}
    for step, batch in enumerate(task.data(3)):
        if step == 2:
            saved = {key: tensor.clone() for key, tensor in engine.state().items()}
        if state is not None and step < 2:
            continue
        if state is not None:
            engine.load_state(state)
        results.append(engine.step(programs.share_of(batch, engine)))
    evaluated = engine.evaluate(programs.share_of(batch, engine))
    return saved, results[-1], evaluated, {key: tensor.clone() for key, tensor in engine.state().items()}


def test_buffers_and_integer_tensors_are_saved_and_load_under_other_plans(pool: Pool) -> None:
    """With the same micro-batches, as the statistics are theirs."""
    plans = [
        "micro=3",
        "pp=2 schedule=1f1b micro=3",
        "pp=2 schedule=zbv micro=3",
        "pp=3 schedule=zb-h1 micro=3",
    ]
    found = [pool.run(_with_buffers, plait.Plan.parse(plan).num_ranks, plan)[0] for plan in plans]
    _, result, evaluated, after = found[0]
    assert int(after["buffers/calls"]) == 9
    assert float(after["buffers/blocks.3.norm.running_mean"].abs().max()) > 0
    resumed = [
        pool.run(_with_buffers, plait.Plan.parse(plan).num_ranks, plan, source[0])[0]
        for plan, source in zip(plans, [*found[1:], found[0]], strict=True)
    ]
    for _, mine, measured, state in (*found, *resumed):
        assert mine.loss == pytest.approx(result.loss, rel=1e-9)
        assert measured.loss_sum == pytest.approx(evaluated.loss_sum, rel=1e-9)
        assert list(state) == list(after)
        for key, tensor in after.items():
            assert state[key].dtype == tensor.dtype, key
            assert torch.allclose(state[key].double(), tensor.double(), rtol=1e-9, atol=1e-11), key


def test_a_buffer_that_all_blocks_hold_is_in_the_state_under_each_name_and_goes_on(pool: Pool) -> None:
    """Its value in a state is the one that is computed with, under either plan and from either's state."""
    build, names = pipeline_models.one_buffer, [f"buffers/blocks.{number}.gain" for number in range(4)]
    plans = {"micro=2": 1, "pp=2 micro=2": 2}
    for words in plans:
        check_parity(pool, task_of(build), words)
    states = [pool.run(_with_buffers, ranks, words, None, build)[0][0] for words, ranks in plans.items()]
    assert list(states[0]) == list(states[1])
    assert [name for name in states[0] if name.startswith("buffers/")] == names
    found = []
    for state in states:
        doubled = {key: 2 * tensor if key in names else tensor for key, tensor in state.items()}
        for words, ranks in plans.items():
            plain, other = (
                pool.run(_with_buffers, ranks, words, given, build)[0] for given in (state, doubled)
            )
            assert all(torch.equal(other[3][name], 2 * states[0][name]) for name in names)
            assert abs(other[1].loss - plain[1].loss) > 1e-3 * plain[1].loss
            found.append((plain[1].loss, plain[2].loss_sum, other[1].loss, other[2].loss_sum))
    for numbers in found[1:]:
        assert numbers == pytest.approx(found[0], rel=1e-9)


# --- parameters of several blocks, of what encloses blocks, and stages with nothing to train

CHUNKED = "schedule=interleaved chunks=2"


@pytest.mark.parametrize(
    "words", ["pp=2", f"pp=1 {CHUNKED}", f"dp=2 zero=2 {CHUNKED}", "dp=2 zero=2 pp=2 schedule=zbv"]
)
def test_a_layer_that_all_blocks_share_trains_the_same(pool: Pool, words: str) -> None:
    check_parity(pool, task_of(pipeline_models.one_layer), f"{words} micro=2")


@pytest.mark.parametrize("prefetch", ["", "prefetch=0"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_parameter_of_a_module_around_the_blocks_trains_the_same_in_stages_that_gather(
    pool: Pool, pp: int, prefetch: str
) -> None:
    """Over a transport that copies what it gathers."""
    words = f"pp={pp} dp=2 zero=3 {CHUNKED} micro=2 {prefetch}"
    check_parity(pool.over("gloo"), task_of(pipeline_models.enclosed), words)


@pytest.mark.parametrize(("transport", "offload"), [("gloo", "none"), ("host", "cpu")])
def test_a_first_stage_with_nothing_to_train_gathers_and_the_second_trains_the_same(
    pool: Pool, transport: str, offload: str
) -> None:
    words = f"dp=2 zero=3 offload={offload} {CHUNKED} stages=2,2 micro=2"
    check_parity(pool.over(transport), task_of(pipeline_models.half_frozen), words)


# --- dropout


class _Dropped(nn.Module):
    """Remembers the mask that it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(pipeline_models.WIDTH, pipeline_models.WIDTH)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(mask.detach())
        return x + self.linear(x) * mask


def dropping() -> nn.Module:
    with torch.device("meta"):
        inner = [_Dropped() for _ in range(4)]
        width = pipeline_models.WIDTH
        return _Fed(
            nn.Sequential(
                nn.Embedding(programs.VOCABULARY, width), *inner, nn.Linear(width, programs.VOCABULARY)
            )
        )


def _drops(words: str) -> Any:
    data = functools.partial(programs.batches, sequences=SEQUENCES)
    engine = programs.engine_of(programs.Task(dropping, data, steps=2), f"{words} precision=fp64")
    results = [engine.step(programs.share_of(batch, engine)) for batch in data(2)]
    stages = [stage.module_part for stage in engine._parts.stages.values()]
    masks = {
        name: list(block.masks)
        for stage in stages
        for name, block in stage.blocks
        if isinstance(block, _Dropped)
    }
    return results, engine.full_parameters(), masks


@pytest.mark.parametrize(
    "words", ["pp=2 schedule=1f1b", "pp=2 schedule=zbv", "pp=2 dp=2 zero=2 schedule=zb-h1"]
)
def test_dropout_repeats_bit_for_bit_and_no_two_masks_are_the_same(pool: Pool, words: str) -> None:
    """Masks of blocks, stages, micro-batches, steps and data ranks."""
    ranks = plait.Plan.parse(words).num_ranks
    one, two = (pool.run(_drops, ranks, f"{words} micro=3") for _ in range(2))
    assert [found[0] for found in one] == [found[0] for found in two]
    assert all(torch.equal(one[0][1][name], two[0][1][name]) for name in one[0][1])
    masks = [mask for _, _, drawn in one for of_block in drawn.values() for mask in of_block]
    assert len(masks) == 4 * 2 * 3 * plait.Plan.parse(words).dp
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_recomputed_blocks_drop_in_backward_what_they_dropped_in_forward(pool: Pool) -> None:
    plain, again = (pool.run(_drops, 2, f"pp=2 micro=3 recompute={how}")[0] for how in ("none", "full"))
    assert plain[0] == again[0]
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


# --- compiled


@pytest.mark.sweep
def test_compiled_blocks_train_the_same_on_two_stages(pool: Pool) -> None:
    task = pipeline_plans.task("llama", 2, 4)
    check_parity(pool, task, "pp=2 schedule=1f1b micro=2 compile=true", timeout_s=180)


# --- probed


def test_blocks_that_return_less_in_evaluation_train_the_same_after_a_probe(pool: Pool) -> None:
    """A probe evaluates: what travels then says nothing of what will in training."""
    [batch] = programs.batches(1, sequences=SEQUENCES // 2)  # as long as a micro-batch
    check_parity(pool, task_of(pipeline_models.advised, probe=batch), "pp=2 micro=2")
