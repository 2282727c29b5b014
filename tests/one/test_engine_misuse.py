"""Mistakes in the use of `parallelize` and of an engine are errors, and leave the engine usable."""

import copy
import math
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from plait import parallelize
from plait.engine.engine import Engine
from plait.errors import CheckpointError, ConfigError, ModelError, PlaitError, PlanError, RunError

IDS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
GOOD = {"input_ids": IDS, "labels": IDS}


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def shared() -> Engine:
    return parallelize(llama(), "dp=1 micro=2")


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """An engine for tests that must leave it usable."""
    return shared


BATCHES: dict[str, Any] = {
    "None": None,
    "a number": 5,
    "text": "ab",
    "a set": {1, 2},
    "empty": {},
    "micro-batches of None": [None, None],
    "three micro-batches": [GOOD] * 3,
    "numbers as keys": {1: IDS, "labels": IDS},
    "None as key": {None: IDS, "labels": IDS},
    "lists": {"input_ids": IDS.tolist(), "labels": IDS},
    "numpy": {"input_ids": IDS.numpy(), "labels": IDS},
    "a number in it": {"input_ids": IDS[0, 0], "labels": IDS},
    "None in it": {**GOOD, "attention_mask": None},
    "meta": {"input_ids": IDS.to("meta"), "labels": IDS.to("meta")},
    "meta labels": {"input_ids": IDS, "labels": IDS.to("meta")},
    "sparse": {"input_ids": IDS.to_sparse(), "labels": IDS},
    "no rows": {"input_ids": IDS[:0], "labels": IDS[:0]},
    "no columns": {"input_ids": IDS[:, :0], "labels": IDS[:, :0]},
    "three rows": {"input_ids": IDS[:3], "labels": IDS[:3]},
    "other rows": {"input_ids": IDS, "labels": IDS[:2]},
    "one dim": {"input_ids": IDS[:, 0], "labels": IDS[:, 0]},
    "three dims": {"input_ids": IDS[..., None], "labels": IDS[..., None]},
    "real ids": {"input_ids": IDS.float(), "labels": IDS},
    "bool ids": {"input_ids": IDS > 3, "labels": IDS},
    "short ids": {"input_ids": IDS.short(), "labels": IDS},
    "complex ids": {"input_ids": IDS + 0j, "labels": IDS},
    "large ids": {"input_ids": IDS + 60, "labels": IDS},
    "negative ids": {"input_ids": IDS - 70, "labels": IDS},
    "no ids": {"labels": IDS},
    "no labels": {"input_ids": IDS},
    "short labels": {"input_ids": IDS, "labels": IDS[:, :4]},
    "labels of one dim": {"input_ids": IDS, "labels": IDS[:, 0]},
    "real labels": {"input_ids": IDS, "labels": IDS.float()},
    "bool labels": {"input_ids": IDS, "labels": IDS > 3},
    "large labels": {"input_ids": IDS, "labels": IDS + 60},
}


@pytest.mark.parametrize("name", BATCHES)
def test_an_invalid_batch_is_an_error_and_the_engine_goes_on(engine: Engine, name: str) -> None:
    steps = engine.num_steps
    for use in (engine.step, engine.evaluate):
        if use == engine.evaluate and name in ("three rows", "other rows"):
            continue  # shares may differ in size
        with pytest.raises(PlaitError) as caught:
            use(BATCHES[name])
        assert caught.value.given
    assert engine.num_steps == steps
    assert math.isfinite(engine.step(GOOD).loss)


def test_a_batch_that_does_not_fit_a_modules_forward_is_an_error() -> None:
    engine = parallelize(nn.Linear(4, 1), "dp=1", loss=lambda outputs, _: (outputs.sum(), len(outputs)))
    with pytest.raises(ModelError, match="the batch does not have"):
        engine.step({"x": torch.ones(2, 4)})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the model's own, unexplained
        engine.step({"input": torch.ones(2, 3)})


ARGUMENTS: list[dict[str, Any]] = [
    *({"plan": plan} for plan in (None, 5, b"dp=1", ["dp=1"], {})),
    *({"model": model} for model in (None, 5, "x", [], [5], {}, nn.Linear, [nn.Linear(2, 2), None])),
    *({"optimizer": value} for value in (None, "adam", nn.Linear)),
    *({"optimizer_args": value} for value in (5, [("lr", 1)], {5: 1}, {"lr": math.nan}, {"lr": "x"})),
    *({"param_groups": value} for value in (5, "x", [5], [{"params": 5}])),
    *({"clip_norm": value} for value in ("x", -1, math.nan, torch.ones(1))),
    *({"loss": value} for value in (5, "x")),
    *({"loss_scaling": value} for value in (5, {})),
    *({"blocks": value} for value in (5, "x", [5])),
    *({"tensor_plan": value} for value in (5, "x", {5: "colwise"}, {"a": 5})),
    *({"offload_dir": value} for value in (5, "a\0b", "a" * 300)),
    *({"weights": value} for value in (5, "a\0b", b"x", "nowhere")),
    *({"probe": value} for value in (None, 5, "x", {}, {"a": 1})),
    *({"example_batch": value} for value in (5, {"a": 1})),
    *({"seed": value} for value in (None, -1, 2**64, "x", 1.5, True)),
    {"world": 5},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda value: str(value)[:50])
def test_an_invalid_argument_is_an_error(arguments: dict[str, Any]) -> None:
    given = {"model": llama(), "plan": "dp=1", **arguments}
    with pytest.raises(PlaitError) as caught:
        parallelize(**given)
    assert caught.value.given


def squared(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return ((outputs - batch["labels"]) ** 2).sum()


COUNTS: dict[str, Any] = {
    "negative": -4,
    "negative tensor": torch.tensor(-4),
    "nan": math.nan,
    "inf": math.inf,
    "nan tensor": torch.tensor(math.nan),
    "text": "4",
    "list": [4],
    "vector": torch.tensor([4, 4]),
    "complex": 4j,
    "complex tensor": torch.tensor(4j),
    "meta": torch.tensor(4, device="meta"),
    "too large": 10**400,
}
INPUTS = {"input": torch.ones(4, 4), "labels": torch.ones(4, 1)}


@pytest.mark.parametrize("name", COUNTS)
def test_an_invalid_number_of_targets_is_an_error_and_no_weight_changes(name: str) -> None:
    counts = iter(
        [4, COUNTS[name], 4, COUNTS[name], 4, 4]
    )  # of two micro-batches: a sum hides a negative one
    engine = parallelize(nn.Linear(4, 1), "dp=1 micro=2", loss=lambda o, b: (squared(o, b), next(counts)))
    before = engine.full_parameters()
    for use in (engine.step, engine.evaluate):
        with pytest.raises(ModelError, match="number of targets"):
            use(INPUTS)
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.full_parameters().items())
    assert engine.step(INPUTS).num_tokens == 8


LOSSES: dict[str, Callable[[Tensor, Any], Any]] = {
    "None": lambda *_: None,
    "one value": squared,
    "three values": lambda outputs, batch: (squared(outputs, batch), 4, 5),
    "complex": lambda outputs, batch: (squared(outputs, batch) + 0j, 4),
    "vector": lambda outputs, _: (outputs, 4),
    "text": lambda *_: ("x", 4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_invalid_loss_is_an_error(name: str) -> None:
    engine = parallelize(nn.Linear(4, 1), "dp=1 micro=2", loss=LOSSES[name])
    for use in (engine.step, engine.evaluate):
        with pytest.raises(ModelError):
            use(INPUTS)


@pytest.mark.parametrize(
    "value", [math.nan, -1.0, math.inf, "x", None, torch.tensor(math.nan), [1.0], 1j, True]
)
def test_an_invalid_learning_rate_is_an_error_at_the_step(engine: Engine, value: object) -> None:
    group = engine.optimizer.param_groups[0]
    rate = group["lr"]
    before = engine.full_parameters()
    try:
        group["lr"] = value
        with pytest.raises(ConfigError, match="cannot step with this lr"):
            engine.step(GOOD)
    finally:
        group["lr"] = rate
    engine.backward(*engine.loss({key: entry[:2] for key, entry in GOOD.items()}))
    engine.backward(*engine.loss({key: entry[:2] for key, entry in GOOD.items()}))
    group["lr"] = value
    with pytest.raises(ConfigError, match="cannot step with this lr"):
        engine.update()
    group["lr"] = rate
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.full_parameters().items())


@pytest.mark.parametrize(
    ("option", "value"),
    [("betas", (math.nan, 0.9)), ("betas", 5), ("betas", (0.9,)), ("eps", -1.0), ("weight_decay", math.inf)],
)
def test_other_hyperparameters_are_checked_too(engine: Engine, option: str, value: object) -> None:
    group = engine.optimizer.param_groups[1]
    present = group[option]
    try:
        group[option] = value
        with pytest.raises(ConfigError, match=option):
            engine.step(GOOD)
        del group[option]
        with pytest.raises(ConfigError, match=option):
            engine.step(GOOD)
    finally:
        group[option] = present
    group["lr"] = torch.tensor(1e-3)
    engine.step(GOOD)
    group["lr"] = 1e-3


def test_an_option_too_large_for_an_integer_of_64_bits_is_saved_as_a_real_number(engine: Engine) -> None:
    group = engine.optimizer.param_groups[0]
    rate = group["lr"]
    group["lr"], group["other"] = 2**64, 10**400
    assert engine.state()["engine/param_groups.0.lr"] == 2.0**64
    group["lr"] = rate
    del group["other"]


@pytest.mark.parametrize("size", [2**40, 2**60], ids=["this memory", "any memory"])
def test_a_model_too_large_for_memory_is_an_error(size: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(2**10, size // 2**10)
    with pytest.raises(ModelError, match="does not fit into memory"):
        parallelize(model, "dp=1", loss=lambda *_: (torch.ones(()), 1))


def test_a_state_of_other_dtypes_or_types_is_refused_before_anything_changes(engine: Engine) -> None:
    engine.step(GOOD)
    state = engine.state()
    weight, moment = "weights/lm_head.weight", "exp_avg/lm_head.weight"
    changed: list[Any] = [
        *({**state, key: change(state[key])} for key in (weight, moment) for change in (
            Tensor.long, Tensor.bool, lambda tensor: tensor + 0j, lambda tensor: tensor.to("meta"),
            Tensor.to_sparse, Tensor.tolist, Tensor.numpy, lambda tensor: tensor[:1], lambda _: None,
        )),
        *({**state, "engine/num_steps": torch.tensor(value)} for value in (math.nan, -3.0, 1j, 1e300)),
        *(None, 5, [], "x", {}, {5: torch.ones(1)}, {"a": 5}, {**state, 5: torch.ones(1)}),
    ]  # fmt: skip
    for number, wrong in enumerate(changed):
        with pytest.raises(CheckpointError):
            engine.load_state(wrong)
        if number < 18:
            assert all(torch.equal(tensor, state[key]) for key, tensor in engine.state().items())
    engine.load_state({key: each.double() if key == weight else each for key, each in state.items()})
    assert math.isfinite(engine.step(GOOD).loss)


def test_an_engine_is_not_copied(engine: Engine) -> None:
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ModelError, match="cannot be pickled or copied"):
            make(engine)


def test_facts_that_are_not_json_are_refused(engine: Engine, tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    cycle: list[Any] = []
    cycle.append(cycle)
    wrong = (5, [1], "x", {5: 1}, {"a": object()}, {"a": {1}}, {"a": deep}, {"a": cycle}, {"a": 10**30})
    for facts in wrong:
        with pytest.raises(CheckpointError, match="not JSON"):
            engine.save(tmp_path, facts)
    with pytest.raises(CheckpointError, match="the engine's own") as error:
        engine.save(tmp_path, {"plan": "mine"})
    assert error.value.given == "facts={'plan': ...}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a\0b", "a\ud800", "a" * 300, 5, None, b"x"], ids=repr)
def test_an_invalid_path_is_an_error(engine: Engine, path: Any) -> None:
    for use in (engine.save, engine.load):
        with pytest.raises(ConfigError, match="not a valid path"):
            use(path)
    engine.start_trace()
    with pytest.raises(ConfigError, match="not a valid path"):
        engine.write_trace(path)


def test_two_threads_cannot_be_in_one_engine() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        inside.set()
        assert go_on.wait(60)
        return squared(outputs, batch), 4

    engine = parallelize(nn.Linear(4, 1), "dp=1", loss=loss)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.step(INPUTS)))
    thread.start()
    try:
        assert inside.wait(60)
        for use in (engine.step, engine.evaluate, engine.outputs):
            with pytest.raises(RunError, match="two threads"):
                use(INPUTS)
    finally:
        go_on.set()
        thread.join()
    assert [math.isfinite(result.loss) for result in results] == [True]
    assert math.isfinite(engine.step(INPUTS).loss)


@pytest.mark.parametrize("shape", [None, "x", (4,), (4, -1), (4.5, 8), (4, 8, 2)], ids=str)
def test_the_shape_of_a_micro_batch_is_checked(engine: Engine, shape: Any) -> None:
    with pytest.raises(ConfigError, match="shape of a micro-batch"):
        engine.estimated_memory(shape)


def test_a_plan_given_to_parallelize_is_a_plan_or_its_text() -> None:
    with pytest.raises(PlanError, match="a plan is text"):
        parallelize(llama(), None)  # type: ignore[arg-type]


def test_a_second_backward_of_a_loss_is_an_error(engine: Engine) -> None:
    loss, num_targets = engine.loss({key: entry[:2] for key, entry in GOOD.items()})
    engine.backward(loss, num_targets)
    with pytest.raises(ModelError, match="has had its backward already"):
        engine.backward(loss, num_targets)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight of Sequential"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3))), "0 of Sequential"),
    ],
)
def test_lazy_and_scripted_modules_are_refused(model: Any, fact: str) -> None:
    with pytest.raises(ModelError, match=r"no shape yet|cannot be sharded") as caught:
        parallelize(model(), "dp=1")
    assert caught.value.given == fact


def test_complex_parameters_are_refused_if_they_are_trained() -> None:
    class Spectral(nn.Module):
        def __init__(self, *, trained: bool) -> None:
            super().__init__()
            values = torch.randn(4, dtype=torch.complex64)
            self.weight = nn.Parameter(values, requires_grad=trained)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).real * self.scale

    def loss(outputs: Tensor, _: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), outputs.numel()

    with pytest.raises(ModelError, match="a complex parameter cannot be trained") as error:
        parallelize(Spectral(trained=True), "dp=1", loss=loss)
    assert "weight, complex64" in str(error.value)
    engine = parallelize(Spectral(trained=False), "dp=1", loss=loss)
    assert not engine.step({"x": torch.ones(2, 4)}).skipped
