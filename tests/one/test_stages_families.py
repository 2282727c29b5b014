"""Hugging Face families in stages, in one process: loss and gradients of the whole model, in float64."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import hf_models, programs, stages_by_hand

LAYERS = 4
MORE: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": LAYERS},
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local"], LAYERS // 2]]},
}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(3)
    layers = "n_layer" if family in ("gpt2", "gptj") else "num_hidden_layers"
    more = {layers: LAYERS, **MORE.get(family, {})}
    model = hf_models.model_of(family, on_meta=False, **more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # ones and zeros tell little
                parameter += torch.randn_like(parameter) * 0.1
    return model


def batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Batches of two shapes: with padding and masked labels, and with positions if the family takes them."""
    ids = torch.randint(0, programs.VOCABULARY, (3, 12))
    lengths = torch.tensor([12, 7, 10])
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = ids.masked_fill((mask == 0) | (torch.rand(3, 12) < 0.3), -100)
    first = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    ids = torch.randint(0, programs.VOCABULARY, (2, 9))
    second = {"input_ids": ids, "labels": ids}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        second["position_ids"] = torch.stack([torch.arange(9), torch.arange(9) + 5])
    return [first, second]


def summed_loss(outputs: Any, batch: Any) -> Tensor:
    return programs.summed_loss(outputs, batch)[0]


def cases() -> list[Any]:
    """Every family in some number of stages; in all of them in the sweep."""
    found = []
    for index, family in enumerate(hf_models.CONFIGS):
        for place, num_stages in enumerate((2, 3, LAYERS)):
            marks = () if index % 3 == place else (pytest.mark.sweep,)
            found.append(pytest.param(family, num_stages, marks=marks, id=f"{family}-{num_stages}"))
    return found


@pytest.mark.parametrize(("family", "num_stages"), cases())
def test_stages_compute_what_the_whole_model_does(family: str, num_stages: int) -> None:
    model = model_of(family)
    data = batches(model)
    loss, gradients = stages_by_hand.whole(model, data, summed_loss)
    cut, stages = stages_by_hand.stages_of(model, num_stages)
    assert len(stages) == cut.num_stages == num_stages
    in_stages, found = stages_by_hand.in_stages(model, stages, data, summed_loss)
    assert float(in_stages) == pytest.approx(float(loss), rel=1e-9)
    assert stages_by_hand.max_difference(found, gradients) < 1e-9


@pytest.mark.parametrize("family", hf_models.CONFIGS)
def test_stages_without_blocks_compute_what_the_whole_model_does(family: str) -> None:
    model = model_of(family)
    data = batches(model)
    loss, gradients = stages_by_hand.whole(model, data, summed_loss)
    _, stages = stages_by_hand.stages_of(model, 4, given=(0, LAYERS // 2, LAYERS - LAYERS // 2, 0))
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    assert len({*(id(p) for table in tables for p in table.parameters())} & _ids(stages[1:3])) == 0
    in_stages, found = stages_by_hand.in_stages(model, stages, data, summed_loss)
    assert float(in_stages) == pytest.approx(float(loss), rel=1e-9)
    assert stages_by_hand.max_difference(found, gradients) < 1e-9


def _ids(stages: Any) -> set[int]:
    return {id(parameter) for stage in stages for parameter in stage.module.parameters()}


SOME = [
    pytest.param(family, marks=() if index % 2 else (pytest.mark.sweep,))
    for index, family in enumerate(hf_models.CONFIGS)
]


@pytest.mark.parametrize("family", SOME)
def test_each_parameter_is_of_the_stage_that_computes_with_it(family: str) -> None:
    model = model_of(family)
    cut, stages = stages_by_hand.stages_of(model, 3)
    tables = {"wte", "embed_in", "embed_tokens", "word_embeddings"}
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, _ in model.named_parameters():
        holders = [s.number for s in stages if name in dict(s.module.named_parameters())]
        assert tuple(holders) == cut.stages_with(name), name
        if name.split(".")[-2] in tables:
            assert holders == ([0, 2] if is_tied else [0]), name
        else:
            assert len(holders) == 1, name
    for stage, (start, stop) in zip(stages, cut.blocks, strict=True):
        assert [int(name.rpartition(".")[2]) for name, _ in stage.blocks] == list(range(start, stop))
