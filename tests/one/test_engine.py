"""The engine in one process: optimizers, state, memory, evaluation, bad batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.checkpoint import Saver
from plait.comm import connect
from plait.errors import CheckpointError, ConfigError, ModelError, PlanError
from plait.parallel.zero import sharded_model
from plait.parallel.zero.state_dict import scalar_device
from support import programs

BATCH = programs.batches(1)[0]


def engine_of(plan: str = "dp=1 precision=fp64", **options: Any) -> plait.Engine:
    options.setdefault("optimizer_args", programs.ADAMW)
    return plait.parallelize(programs.llama(), plan, seed=3, **options)


def weights_of(engine: plait.Engine) -> dict[str, Tensor]:
    return engine.full_parameters()


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_on_the_cpu_pin_no_memory_where_there_are_gpus(
    zero: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = connect(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # pinning would raise here
    engine = engine_of(f"dp=1 zero={zero} offload=cpu precision=bf16", world=world)
    engine.step(BATCH)
    saver = Saver(tmp_path, world, background=True)
    saver.save(1, engine.state_shards(), {})
    saver.finish()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("Adam", {"lr": 1e-3}),
        ("AdamW", {"lr": 1e-3, "amsgrad": True}),
        ("RMSprop", {"lr": 1e-3}),
        ("Adagrad", {"lr": 1e-2}),
        ("NAdam", {"lr": 1e-3}),
        ("RAdam", {"lr": 1e-3}),
        ("Rprop", {"lr": 1e-3}),
    ],
)
def test_torchs_optimizers_do_to_flat_pieces_what_they_do_to_parameters(
    kind: str, arguments: dict[str, Any]
) -> None:
    chosen = getattr(torch.optim, kind)
    engine = engine_of(optimizer=chosen, optimizer_args=arguments, loss=programs.summed_loss)
    model = programs.llama(on_meta=False).double()
    model.load_state_dict(weights_of(engine), strict=False)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    no_decay = {"weight_decay": 0.0} if kind != "Rprop" else {}
    plain = chosen([{"params": matrices}, {"params": vectors, **no_decay}], **arguments)
    for batch in programs.batches(3):
        engine.step(batch)
        total, count = programs.summed_loss(model(batch["input_ids"]), batch)
        plain.zero_grad()
        (total / count).backward()
        plain.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    difference, name = programs.largest_difference(weights_of(engine), expected)
    assert difference < 1e-9, name


def test_an_optimizer_that_searches_over_all_parameters_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS .*\n.*direction"):
        engine_of(optimizer=torch.optim.LBFGS, optimizer_args={})


def test_arguments_that_an_optimizer_does_not_take_are_an_error() -> None:
    with pytest.raises(ConfigError, match="does not take these arguments"):
        engine_of(optimizer_args={"learning_rate": 1.0})


Given = Callable[[nn.Module], Any]


@pytest.mark.parametrize(
    "given",
    [nn.Module.parameters, nn.Module.named_parameters, lambda model: iter([{"params": model.parameters()}])],
    ids=["parameters", "named parameters", "a group"],
)
def test_all_parameters_in_one_group_all_decay_however_they_are_given(given: Given) -> None:
    arguments = {"lr": 1e-3, "weight_decay": 0.5}
    model = programs.llama(on_meta=False).double()
    plain = torch.optim.AdamW(model.parameters(), **arguments)
    mine = programs.llama(on_meta=False).double()
    mine.load_state_dict(model.state_dict())
    engine = plait.parallelize(
        mine,
        "precision=fp64",
        param_groups=given(mine),
        optimizer_args=arguments,
        loss=programs.summed_loss,
    )
    engine.step(BATCH)
    total, count = programs.summed_loss(model(BATCH["input_ids"]), BATCH)
    (total / count).backward()
    plain.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    difference, name = programs.largest_difference(weights_of(engine), expected)
    assert difference < 1e-9, name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: [*model.parameters(), {"params": []}], "mixes parameters and dicts"),
        (lambda model: [{"params": [*model.parameters()]}] * 2, "in two param_groups"),
        (lambda model: [next(model.parameters())], "no group contains model.layers.0"),
        (lambda _: programs.llama(on_meta=False).parameters(), "do not match"),
    ],
    ids=["both", "twice", "too few", "another model's"],
)
def test_groups_that_are_not_the_models_parameters_once_are_an_error(given: Given, message: str) -> None:
    model = programs.llama(on_meta=False)
    with pytest.raises(ConfigError, match=message):
        plait.parallelize(model, "dp=1", param_groups=given(model), optimizer_args=programs.ADAMW)


@pytest.mark.parametrize("plan", ["precision=fp64", "micro=3", "precision=bf16 recompute=full"])
def test_state_taken_and_given_back_continues_bit_for_bit(plan: str) -> None:
    first, second = engine_of(plan), engine_of(plan)
    batches = programs.batches(4)
    for batch in batches[:2]:
        first.step(batch)
    second.load_state({key: tensor.clone() for key, tensor in first.state().items()})
    for batch in batches[2:]:
        assert first.step(batch) == second.step(batch)
    assert second.num_steps == 4
    mine, theirs = first.state(), second.state()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_state_of_another_model_is_refused_before_anything_changes() -> None:
    engine = engine_of()
    before = weights_of(engine)
    state = {key: tensor.clone() + 1 for key, tensor in engine.state().items()}
    state["weights/lm_head.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match="of another model"):
        engine.load_state(state)
    state.pop("weights/lm_head.weight")
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_state(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_estimated_within_two_percent(precision: str, recompute: str) -> None:
    engine = engine_of(f"dp=1 precision={precision} recompute={recompute}")
    predicted = engine.estimated_memory((programs.SEQUENCES, programs.LENGTH))
    engine.step({**BATCH, "labels": BATCH["input_ids"]})  # an estimate is for a target at each position
    measured = engine.memory()
    for category in ("parameters", "gradients", "master", "optimizer", "activations"):
        assert getattr(measured, category) == pytest.approx(getattr(predicted, category), rel=0.02), category


def test_recompute_keeps_less_for_backward() -> None:
    shape = (programs.SEQUENCES, programs.LENGTH)
    plain = engine_of("dp=1").estimated_memory(shape).activations
    assert engine_of("dp=1 recompute=full").estimated_memory(shape).activations < 0.6 * plain


def test_evaluation_changes_nothing_that_training_sees() -> None:
    watched, plain = engine_of(), engine_of()
    batches = programs.batches(3)
    for batch in batches:
        result = watched.evaluate(batch)
        assert result.num_tokens == int((batch["labels"][:, 1:] != -100).sum())
        mean = result.loss_sum / result.num_tokens
        step = watched.step(batch)
        assert step.loss == pytest.approx(mean, rel=1e-12)  # the loss of a step is that before its update
        assert step == plain.step(batch)
        assert watched.model.training


class _Rescaling(nn.Linear):
    """Divides its weight in place before its first forward in eval mode, as RWKV does."""

    is_rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not self.is_rescaled:
            with torch.no_grad():
                self.weight.div_(2)
            self.is_rescaled = True
        return super().forward(x)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_forward_that_changes_weights_in_eval_mode_is_refused(zero: int) -> None:
    def squares(outputs: Any, _: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), outputs.numel()

    engine = plait.parallelize(nn.Sequential(_Rescaling(8, 8)), f"dp=1 zero={zero}", loss=squares)
    batch = {"input": torch.ones(2, 8)}
    assert engine.step(batch).num_tokens == 16
    with pytest.raises(ModelError, match="forward changes a parameter in eval mode") as caught:
        engine.evaluate(batch)
    assert caught.value.given == "0.weight"


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.nn.functional.dropout(block(x), 0.5, self.training)
        return x


def test_dropout_is_a_function_of_seed_and_step_and_leaves_the_users_generator_alone() -> None:
    def run(seed: int) -> list[float]:
        torch.manual_seed(0)
        engine = plait.parallelize(
            _Dropping(), "dp=1 micro=2", loss=lambda out, _: (out.square().sum(), out.shape[0]), seed=seed
        )
        x = torch.ones(4, 8)
        losses = [engine.step({"x": x}).loss for _ in range(3)]
        return [*losses, torch.rand(()).item()]

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]
    assert run(1)[-1] == run(2)[-1]


@pytest.mark.parametrize("sizes", [(5, 5), (4, 6)])
def test_a_batch_that_does_not_split_is_refused_and_the_engine_goes_on(sizes: tuple[int, int]) -> None:
    engine = engine_of("dp=1 micro=2")
    ids, labels = (torch.zeros(size, 8, dtype=torch.long) for size in sizes)
    with pytest.raises(PlanError, match="does not split into micro-batches"):
        engine.step({"input_ids": ids, "labels": labels})
    assert not engine.step(BATCH).skipped


def test_a_share_without_samples_is_refused_and_the_engine_goes_on() -> None:
    engine = engine_of("dp=1")
    empty = {key: value[:0] for key, value in BATCH.items()}
    for call in (engine.step, engine.evaluate, engine.loss):
        with pytest.raises(PlanError, match="has no samples"):
            call(empty)
    assert not engine.step(BATCH).skipped


def test_a_step_without_targets_is_skipped() -> None:
    engine = engine_of("dp=1")
    before = weights_of(engine)
    result = engine.step({**BATCH, "labels": torch.full_like(BATCH["labels"], -100)})
    assert result.skipped
    assert result.num_tokens == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


def test_a_plain_module_that_was_built_on_meta_gets_its_own_initial_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    engine = plait.parallelize(model, "dp=1", loss=lambda out, _: (out.sum(), 1))
    weights = engine.full_parameters()
    assert torch.equal(weights["1.weight"], torch.ones(8))
    assert 0 < weights["0.weight"].abs().max() <= 8**-0.5


def test_evaluation_runs_in_parts_no_larger_than_trainings_and_leaves_every_mode() -> None:
    whole, parts = engine_of("dp=1 precision=fp64"), engine_of("dp=1 micro=3 precision=fp64")
    parts.model.model.layers[0].eval()  # frozen by its user
    sizes: list[int] = []
    hook = lambda _, inputs: sizes.append(inputs[0].shape[0])  # noqa: E731
    parts.model.model.embed_tokens.register_forward_pre_hook(hook)
    one, three = whole.evaluate(BATCH), parts.evaluate(BATCH)
    assert three.loss_sum == pytest.approx(one.loss_sum, rel=1e-12)
    assert three.num_tokens == one.num_tokens
    assert max(sizes) <= programs.SEQUENCES // 3
    assert not parts.model.model.layers[0].training
    assert parts.model.model.layers[1].training


def test_state_of_another_optimizer_is_refused() -> None:
    first = engine_of(optimizer=torch.optim.SGD, optimizer_args={"lr": 0.1, "momentum": 0.9})
    first.step(BATCH)
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        engine_of().load_state(first.state())


def test_counters_of_fused_kernels_live_where_the_kernel_reads_them() -> None:
    on_gpu = torch.empty(0, device="meta")  # in place of any device that is not the CPU
    assert scalar_device({"fused": True}, on_gpu) == on_gpu.device
    assert scalar_device({"capturable": True}, on_gpu) == on_gpu.device
    assert scalar_device({"fused": None}, on_gpu) == torch.device("cpu")


def test_mistakes_in_a_custom_loop_are_errors() -> None:
    engine = engine_of("dp=1")
    ids = BATCH["input_ids"]
    with pytest.raises(PlanError, match="update without a gradient"):
        engine.update()
    engine.backward(engine.model(input_ids=ids, labels=ids).loss)
    with pytest.raises(PlanError, match=r"more micro-batches than plan\.micro"):
        engine.backward(engine.model(input_ids=ids, labels=ids).loss)
    assert not engine.update().skipped
    with pytest.raises(ModelError, match="no labels"):
        engine.step({"input_ids": ids})


def real_optimizer(engine: plait.Engine) -> torch.optim.Optimizer:
    """The one that steps: scripts hold another, which does not."""
    return engine._parts.optimizer.optimizer


def test_an_exception_in_the_optimizer_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("dp=1 micro=3")

    def fail() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(real_optimizer(engine), "step", fail)
        with pytest.raises(ZeroDivisionError):
            engine.step(BATCH)
    assert not engine.step(BATCH).skipped


def test_an_update_that_is_interrupted_half_way_is_not_built_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_model, "_UPDATED_TOGETHER", 0)  # a call for each unit
    engine = engine_of("dp=1 micro=3")
    engine.step(BATCH)
    saved, step, calls = engine.state(), real_optimizer(engine).step, []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        step()

    with monkeypatch.context() as broken:
        broken.setattr(real_optimizer(engine), "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(BATCH)
    with pytest.raises(ModelError, match="interrupted"):
        engine.step(BATCH)
    engine.load_state(saved)
    assert not engine.step(BATCH).skipped


def test_floating_inputs_come_in_the_plans_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = plait.parallelize(
        model, "dp=1 precision=bf16", loss=lambda out, b: (out.sum(), len(b["labels"]))
    )
    assert not engine.step({"input": torch.ones(3, 4), "labels": torch.ones(3)}).skipped


def test_an_invalid_limit_is_refused() -> None:
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="clip_norm"):
            engine_of("dp=1", clip_norm=limit)


def test_a_batch_that_is_no_dict_and_a_loss_that_is_no_sum_are_errors() -> None:
    engine = engine_of("dp=1")
    with pytest.raises(ModelError, match="a batch is a dict"):
        engine.step(BATCH["input_ids"])
    with pytest.raises(ModelError, match="a batch is a dict"):
        engine.evaluate([BATCH["input_ids"]])
    mean = plait.parallelize(nn.Linear(4, 1), "dp=1", loss=lambda out, _: out.mean())
    with pytest.raises(ModelError, match="and their number"):
        mean.step({"input": torch.ones(3, 4)})


@pytest.mark.parametrize(
    ("plan", "options"),
    [("dp=8 zer=3", {}), ("dp=8", {"optimizer": "AdamW"}), ("dp=8", {"clip_norm": 1.0, "clip_value": 1.0})],
)
def test_wrong_arguments_are_an_error_before_ranks_connect(
    plan: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.api.connect", lambda: pytest.fail("connected"))
    with pytest.raises((PlanError, ConfigError)):
        plait.parallelize(nn.Linear(2, 2), plan, **options)
