"""A stage's module as hooks, copies and runs on meta see it."""

import copy
import warnings
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only

import plait
from plait.errors import ModelError
from plait.models import (
    BlockOutputs,
    StageModule,
    activation_bytes,
    copy_to_meta,
    forward_inputs,
    receiving,
    watch_activations,
)
from support import hf_models, programs, stages_by_hand

LAYERS = 4


def stages(family: str = "llama") -> tuple[nn.Module, list[StageModule]]:
    torch.manual_seed(2)
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS}
    model = hf_models.model_of(family, on_meta=False, exact=False, **layers)
    return model, stages_by_hand.stages_of(model, 2)[1]


def tokens(batch: int = 2, sequence: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(0, programs.VOCABULARY, (batch, sequence))
    return {"input_ids": ids, "labels": ids}


def test_hooks_of_a_stage_see_a_forward_that_returns() -> None:
    model, (first, _) = stages()
    seen: list[Any] = []
    first.module.register_forward_pre_hook(lambda *_: seen.append("before"))
    first.module.register_forward_hook(lambda *given: seen.append(given[-1]))
    first.module.register_forward_hook(lambda *given: seen.append(given[-1]), always_call=True)
    output = first.module(**forward_inputs(model, tokens()))
    assert seen[0] == "before"
    assert len(seen) == 3
    assert seen[1] is seen[2] is output
    assert output.shape == (2, 6, 48)


def test_a_blocks_own_forward_is_a_method_of_the_stages_last_block_too() -> None:
    """As libraries put one on an instance: what wraps forwards afterwards asks whose they are."""
    model, _ = stages()
    for block in model.model.layers:
        block.forward = MethodType(type(block).forward, block)
    _, parts = stages_by_hand.stages_of(model, 2)
    assert all(block.forward.__self__ is block for part in parts for _, block in part.blocks)
    batch = tokens()
    sent, _ = stages_by_hand.forward(model, parts, batch)
    assert torch.equal(sent[-1].logits, model(**forward_inputs(model, batch)).logits)


def test_hooks_of_the_last_block_run_whenever_they_came() -> None:
    """Also hooks that change the output, and those of backward, which torch runs after all others."""
    model, parts = stages()
    name, last = parts[0].blocks[-1]
    assert name == "model.layers.1"
    assert isinstance(last, type(model.model.layers[1]))
    gradients: list[Tensor] = []
    last.register_forward_hook(lambda *given: given[-1] * 2)
    last.register_full_backward_hook(lambda *given: gradients.append(given[-1][0]))
    batch = tokens()
    whole = model(**forward_inputs(model, batch))
    sent, received = stages_by_hand.forward(model, parts, batch)
    assert torch.equal(sent[-1].logits, whole.logits)
    sent[-1].logits.sum().backward()
    stages_by_hand.backward(sent[0], received[0])
    assert len(gradients) == 1
    assert torch.equal(gradients[0], received[0].grad)


def test_a_copy_of_a_stage_is_a_stage_of_its_own() -> None:
    model, parts = stages("gpt2")
    copied = copy.deepcopy(parts[1].module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    inputs = forward_inputs(model, tokens())
    arrived = torch.randn(2, 6, 48)
    with receiving(parts[1].module, arrived):
        outputs = parts[1].module(**inputs)
    with receiving(copied, arrived):
        assert not copied(**inputs).logits.any()
    assert outputs.logits.any()


def _lost(copied: nn.Module, loss: Any, batch: Any) -> None:
    loss(copied(**forward_inputs(copied, batch)), batch)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj", "gemma2", "opt"])
def test_bytes_a_stage_keeps_for_backward_are_estimated_on_meta(family: str) -> None:
    model, parts = stages(family)
    batch = tokens()
    inputs = forward_inputs(model, batch)
    on_meta = {key: torch.empty_like(value, device="meta") for key, value in batch.items()}
    losses = [lambda output, _: output, lambda output, _: output.logits.float().logsumexp(-1).sum()]
    sent, _ = stages_by_hand.forward(model, parts, batch)
    arrived = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(), sent[0])
    for stage, loss in zip(parts, losses, strict=True):
        copied = copy_to_meta(stage.module)
        assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
        run = partial(_lost, copied, loss, on_meta)
        if stage.number:
            stage_in, copied_in = receiving(stage.module, arrived), receiving(copied, _on_meta(arrived))
            with stage_in, watch_activations(stage.module) as watch:
                kept = loss(stage.module(**inputs), batch)
                real = watch.total
            with copied_in:
                estimated = activation_bytes(copied, run, stages_by_hand.CPU)
        else:
            with watch_activations(stage.module) as watch:
                kept = loss(stage.module(**inputs), batch)
                real = watch.total
            estimated = activation_bytes(copied, run, stages_by_hand.CPU)
        assert real == estimated > 0
        del kept


def _on_meta(structure: Any) -> Any:
    return tree_map_only(
        Tensor, lambda t: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad), structure
    )


def test_nothing_after_the_last_block_is_computed() -> None:
    model, parts = stages()
    calls: list[str] = []
    for name in ("model.norm", "lm_head", "model.rotary_emb"):
        module = parts[0].module.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    parts[0].module(**forward_inputs(model, tokens()))
    assert calls == ["model.rotary_emb"]


def test_an_error_in_a_stage_names_the_stage() -> None:
    model, parts = stages()
    with pytest.raises(IndexError) as error:
        parts[0].module(input_ids=torch.full((1, 3), 1000), use_cache=False)
    assert error.value.__notes__ == ["(raised in stage 0 of a model, which has no other stage's blocks)"]
    sent, _ = stages_by_hand.forward(model, parts, tokens())  # and the stage works on
    assert sent[-1].logits.isfinite().all()


def test_a_stage_knows_what_it_has_not_received() -> None:
    model, parts = stages()
    with pytest.raises(AssertionError, match="stage 1 runs with its received input"):
        parts[1].module(**forward_inputs(model, tokens()))


def test_nan_that_came_from_before_is_no_leak() -> None:
    model, parts = stages()
    arrived = torch.full((2, 6, 48), torch.nan)
    with receiving(parts[1].module, arrived):
        outputs = parts[1].module(**forward_inputs(model, tokens()))
    assert outputs.logits.isnan().all()
    parts[1].check_taint(outputs, arrived)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"of {tuple(self.blocks[0](x).shape)} no more can be made")


def test_each_stage_reports_why_the_full_models_forward_failed() -> None:
    outputs = BlockOutputs(copy_to_meta(Failing()), torch.device("cpu"))
    for block in ("blocks.0", "blocks.1"):
        with pytest.raises(ValueError, match="no more can be made"):
            outputs.output_of(block, {"x": torch.ones(2, 4, device="meta")})


class _Reparametrized(nn.Module):
    """Layers whose weights are computed by hooks, and are no leaves of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head, *blocks = (nn.Linear(4, 4) for _ in range(5))
        self.blocks = nn.ModuleList(blocks)
        with warnings.catch_warnings(action="ignore"):
            for layer in (self.enter, self.head, self.blocks[1]):
                nn.utils.weight_norm(layer)
        for layer in (self.enter, self.blocks[2]):
            prune.random_unstructured(layer, "bias", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_weights_that_hooks_compute_train_in_stages(num_stages: int) -> None:
    torch.manual_seed(3)
    model, x = _Reparametrized().double(), torch.randn(2, 4, dtype=torch.float64)
    engine = plait.parallelize(
        copied := copy_by_state(model),
        f"schedule=interleaved chunks={num_stages} precision=fp64" if num_stages > 1 else "precision=fp64",
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 0.5},
        loss=lambda outputs, _: (outputs.square().sum(), 1),
        blocks=list(copied.blocks),
        example_batch={"x": x},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        assert engine.step({"x": x}).loss == pytest.approx(loss.item(), rel=1e-9)


def copy_by_state(model: nn.Module) -> Any:
    copied = _Reparametrized().double()
    copied.load_state_dict(model.state_dict())
    return copied


@pytest.mark.parametrize("change", ["replaced", "wrapped"])
def test_blocks_replaced_after_the_split_are_refused(change: str) -> None:
    model, (first, second) = stages()
    for part in (first, second):
        assert part.modules is not None
        part.modules.refresh()  # nothing has changed
    layers = model.model.layers
    layers[3] = nn.Identity() if change == "replaced" else nn.Sequential(layers[3])
    for part in (first, second):
        with pytest.raises(ModelError, match="a block was replaced after the model was split") as caught:
            part.modules.refresh()
        assert "ModuleList.3 is a" in caught.value.given


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return torch.nn.functional.linear(x, self.enter.weight.t())


def test_a_weight_with_values_that_two_stages_of_a_rank_share_gets_both_gradients() -> None:
    (model := _Tied()).load_state_dict((copied := _Tied()).state_dict())
    x = torch.ones(2, 4)
    options: dict[str, Any] = {"optimizer_args": {"lr": 0.5}, "optimizer": torch.optim.SGD}
    engine = plait.parallelize(
        copied,
        "schedule=interleaved chunks=2",
        loss=lambda outputs, _: (outputs.square().sum(), 1),
        example_batch={"x": x},
        **options,
    )
    engine.step({"x": x})
    model(x).square().sum().backward()
    expected = model.enter.weight - 0.5 * model.enter.weight.grad
    torch.testing.assert_close(engine.full_parameters()["enter.weight"], expected.detach())


def test_a_split_leaves_the_modes_of_blocks_as_they_are() -> None:
    torch.manual_seed(2)
    model = hf_models.model_of("llama", on_meta=False, exact=False, num_hidden_layers=LAYERS).eval()
    first, _ = stages_by_hand.stages_of(model, 2)[1]
    assert not any(layer.training for layer in model.model.layers)
    first.module.train()
    assert all(layer.training for layer in model.model.layers)
