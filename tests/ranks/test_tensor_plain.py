"""Modules of one's own with a tensor plan, and what cannot be sharded: errors on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import plait
from plait.errors import PlaitError
from support import hf_models, programs
from support.own_gpt import CUTS, GPT
from support.pool import Pool
from support.programs import Task


def num_ranks(plan: str) -> int:
    return plait.Plan.parse(plan).num_ranks


# --- a GPT of one's own


def gpt(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return GPT()


def tied_gpt(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return GPT(tied=True)


def three_heads(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return GPT(3)


def _trained(task: Task, plan: str, words: dict[str, str] | None) -> programs.Trace:
    """As `programs.train_task` does, with a tensor plan."""
    torch.set_default_dtype(torch.float64)
    try:
        model = task.build()
    finally:
        torch.set_default_dtype(torch.float32)
    engine = plait.parallelize(
        model,
        plan,
        optimizer_args=task.arguments,
        clip_norm=task.clip_norm,
        loss=programs.summed_loss,
        tensor_plan=words,
        probe=task.data(1)[0],
    )
    trace = programs.Trace(first_weights=engine.full_parameters())
    for batch in task.data(task.steps):
        result = engine.step(programs.share_of(batch, engine))
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append(engine.full_gradients())
    trace.weights = engine.full_parameters()
    return trace


@pytest.mark.parametrize("plan", ["tp=2", "tp=2x1", "tp=2x2", "tp=2 sp=true", "tp=2 sp=true dp=2 zero=3"])
@pytest.mark.parametrize("build", [pytest.param(gpt, marks=pytest.mark.quick), tied_gpt])
def test_a_custom_gpt_gives_the_one_process_programs_numbers(pool: Pool, build: Any, plan: str) -> None:
    task = Task(build)
    ours = pool.run(_trained, num_ranks(plan), task, f"{plan} precision=fp64", CUTS)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


NAMES = {
    "layout": "batch:dp vocab:col heads:col ffn:col hidden:row",
    "tokens": "vocab hidden",
    "blocks.*.attention.qkv": "(3 heads 8) hidden",
    "blocks.*.attention.out": "hidden (heads 8)",
    "blocks.*.attention.heads": "heads",
    "blocks.*.mlp.0": "ffn hidden",
    "blocks.*.mlp.2": "hidden ffn",
    "head": "vocab hidden",
}


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("tp=2x2", NAMES),
        ("tp=2", {**NAMES, "layout": "hidden:col", "tokens": "replicate", "head": "replicate"}),
    ],
    ids=["rows and columns", "columns of the hidden dim"],
)
def test_a_layout_of_named_dims_does_not_change_the_numbers(
    pool: Pool, plan: str, names: dict[str, str]
) -> None:
    task = Task(gpt)
    ours = pool.run(_trained, num_ranks(plan), task, f"{plan} precision=fp64", names)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def test_a_custom_gpt_without_a_plan_gets_one_with_the_same_numbers(pool: Pool) -> None:
    task = Task(gpt)
    ours = pool.run(_trained, 4, task, "tp=2 pp=2 micro=2 precision=fp64", None)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 2))


def gpt_with_norms(on_meta: bool = False) -> nn.Module:
    model: Any = gpt()
    for block in model.blocks:
        norms = [nn.LayerNorm(block.mlp[0].in_features) for _ in range(2)]
        block.mlp = nn.Sequential(norms[0], *block.mlp, norms[1])
    return model


def test_norms_of_the_stream_in_a_sharded_module_give_the_same_numbers(pool: Pool) -> None:
    moved = {"blocks.*.mlp.0": "blocks.*.mlp.1", "blocks.*.mlp.2": "blocks.*.mlp.3"}
    styles = {moved.get(pattern, pattern): style for pattern, style in CUTS.items()}
    task = Task(gpt_with_norms)
    ours = pool.run(_trained, 2, task, "tp=2 sp=true precision=fp64", styles)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


class Layers(nn.Module):
    """Its blocks are linear layers, one of which computes its weight from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.tokens = nn.Embedding(programs.VOCABULARY, width)
        normed = parametrizations.weight_norm(nn.Linear(2 * width, 2 * width))
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), normed, nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(input_ids)))


def layers(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return Layers()


@pytest.mark.parametrize("plan", ["tp=2", "pp=2 tp=2 micro=3"])
def test_blocks_that_are_linear_layers_one_with_a_computed_weight_train_as_one_process(
    pool: Pool, plan: str
) -> None:
    task = Task(layers)
    ours = pool.run(programs.train_task, num_ranks(plan), task, f"{plan} precision=fp64")[0]
    programs.assert_same(
        ours, programs.one_process_task(task, ours.first_weights, 3 if "micro" in plan else 1)
    )


class Convolution(nn.Module):
    """A mixer of channels of one's own, whose numbers are others in evaluation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.mix(x).transpose(1, 2).chunk(2, 1)
        found = gate * self.conv(x)[..., : x.shape[-1]] * (0.5 if self.training else 1.0)
        return self.out(found.transpose(1, 2))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(programs.VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(Convolution(32)) for _ in range(2))
        self.head = nn.Linear(32, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def convolutions(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return Convolutions()


def test_channels_of_a_convolution_of_ones_own_train_as_one_process(pool: Pool) -> None:
    task = Task(convolutions)
    ours = pool.run(programs.train_task, 2, task, "tp=2 precision=fp64")[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def test_heads_that_do_not_divide_are_cut_unevenly(pool: Pool) -> None:
    task = Task(three_heads)
    ours = pool.run(_trained, 2, task, "tp=2 precision=fp64", CUTS)[0]
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


# --- errors


def _message(build: Any, plan: str, words: dict[str, str] | None) -> str:
    with pytest.raises(PlaitError) as caught:
        plait.parallelize(build(), plan, loss=programs.summed_loss, tensor_plan=words)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("build", "plan", "words", "says"),
    [
        (
            hf_models.builder("llama"),
            "tp=6",
            None,
            [
                "PlanError: cannot shard the heads of model.layers.0.self_attn",
                "heads=4",
                "columns=6",
                "tp=1x4 or tp=1x2",
            ],
        ),
        (gpt, "tp=6", CUTS, ["PlanError: cannot shard the heads of blocks.0.attention", "heads=4", "tp=1x4"]),
        (
            gpt,
            "tp=2",
            CUTS | {"blocks.*.atention.qkv": "colwise"},
            [
                "ModelError: the tensor plan has a pattern that matches nothing",
                "blocks.*.atention.qkv",
                "blocks.*.attention.qkv",
            ],
        ),
        (
            gpt,
            "tp=2",
            CUTS | {"head": "heda"},
            ["ModelError: the tensor plan has an unknown style", "for head", "heda"],
        ),
        (
            gpt,
            "tp=2 sp=true",
            {key: word for key, word in CUTS.items() if "mlp" not in key},
            ["ModelError: blocks.0.mlp.0 may need all tokens", "tp=1x2 without sp"],
        ),
        (
            gpt,
            "tp=2x1",
            {key: word for key, word in CUTS.items() if key != "head"},
            ["ModelError: head does not support hidden features that are sharded", "tp=1x2"],
        ),
    ],
)
def test_models_that_cannot_be_sharded_are_errors_on_every_rank(
    pool: Pool, build: Any, plan: str, words: dict[str, str] | None, says: list[str]
) -> None:
    messages = pool.run(_message, num_ranks(plan), build, plan, words)
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in says), messages[0]
