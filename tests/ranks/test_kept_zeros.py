"""With keep_zeros, the zeros of pruned weights stay zero under every plan, and all else trains as in one
process that sets them to zero after each step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.checkpoint.compress import Compression, Sparsity
from plait.errors import ModelError, PlanError
from plait.models import causal_lm_on_meta
from plait.models.linear_weights import block_linears
from plait.plan import Plan
from plait.train.export import export_folder
from support import programs
from support.compressed_models import MODELS, saved
from support.pool import Pool

OPTIONS: dict[str, Any] = {"keep_zeros": True, "clip_norm": programs.CLIP, "loss": programs.summed_loss}


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama in float64, pruned to 2:4."""
    folder = tmp_path_factory.mktemp("pruned")
    torch.manual_seed(2)
    model: Any = programs.llama(on_meta=False)
    model.double().save_pretrained(folder / "in")
    export_folder(folder / "in", folder / "out", "fp64", Compression(None, Sparsity.parse("2:4")))
    return folder / "out"


def _trained(
    folder: Path, plan: str, optimizer: str = "AdamW", saves: Path | None = None, keeps: bool = True
) -> programs.Trace:
    """`saves`: where a checkpoint is saved after two steps, from which another engine goes on."""
    arguments = programs.ADAMW if optimizer == "AdamW" else {"lr": 3e-3}
    options = OPTIONS | {"optimizer": getattr(torch.optim, optimizer), "optimizer_args": arguments}
    options["keep_zeros"] = keeps
    if optimizer == "Muon":
        model = programs.llama()
        matrices = [layer.weight for layer in block_linears(model).values()]
        others = [p for p in model.parameters() if not any(p is one for one in matrices)]
        options["optimizer"] = torch.optim.AdamW
        options["param_groups"] = [{"params": matrices, "optimizer": torch.optim.Muon}, {"params": others}]
        engine = plait.parallelize(model, plan, weights=folder, **options)
    else:
        engine = plait.parallelize(programs.llama(), plan, weights=folder, **options)
    trace = programs.Trace(first_weights=engine.full_parameters())
    for number, batch in enumerate(programs.batches()):
        if saves is not None and number == 2:
            path = engine.save(saves, {})
            engine = plait.parallelize(programs.llama(), plan, **options)
            engine.load(path)
        result = engine.step(programs.share_of(batch, engine))
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append(engine.full_gradients())
    trace.weights = engine.full_parameters()
    return trace


def _masked_adamw(named: Mapping[str, nn.Parameter], groups: Any) -> torch.optim.Optimizer:
    linears = block_linears(programs.llama())
    masks = {name: named[name].detach() == 0 for name in linears}
    assert all((mask.view(-1, 4).sum(1) == 2).all() for mask in masks.values())
    optimizer = torch.optim.AdamW(groups, foreach=False, **programs.ADAMW)

    def mask(*_: object) -> None:
        for name, zeros in masks.items():
            named[name].data[zeros] = 0

    optimizer.register_step_post_hook(mask)
    return optimizer


@pytest.fixture(scope="module")
def reference(pool: Pool, pruned: Path) -> programs.Trace:
    first = pool.run(_trained, 1, pruned, "precision=fp64")[0].first_weights
    return programs.one_process_task(
        programs.Task(programs.llama, steps=programs.STEPS), first, 1, stepper_of=_masked_adamw
    )


def assert_zeros_stay(trace: programs.Trace) -> None:
    for name in block_linears(programs.llama()):
        assert ((trace.weights[name] == 0).view(-1, 4).sum(1) == 2).all(), name
        assert torch.equal(trace.weights[name] == 0, trace.first_weights[name] == 0), name


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2",
        "dp=2 zero=1",
        "dp=2 zero=2 micro=2",
        pytest.param("dp=2 zero=3", marks=pytest.mark.quick),
        "tp=2",
        "tp=2x1",
        "pp=2 micro=2",
        "dp=2 zero=3 tp=2",
        "dp=2 zero=3 offload=cpu",
        "dp=2 local_steps=1",
    ],
)
def test_a_pruned_model_trains_as_in_one_process_that_masks_it(
    pool: Pool, pruned: Path, reference: programs.Trace, plan: str
) -> None:
    ours = pool.run(_trained, Plan.parse(plan).num_ranks, pruned, f"{plan} precision=fp64")[0]
    assert_zeros_stay(ours)
    if "local_steps" not in plan:
        programs.assert_same(ours, reference)


def test_a_run_that_resumes_keeps_the_same_zeros(
    pool: Pool, pruned: Path, reference: programs.Trace, tmp_path: Path
) -> None:
    for plan in ("dp=2 zero=3 precision=fp64", "tp=2 precision=fp64"):
        ours = pool.run(_trained, 2, pruned, plan, "AdamW", tmp_path / plan[:2])[0]
        assert_zeros_stay(ours)
        programs.assert_same(ours, reference)


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("dp=2 zero=1", "Muon"), ("dp=2 precision=bf16", "AdamW"), ("dp=2 zero=2 optim_dtype=bf16", "SGD")],
)
def test_zeros_stay_with_other_optimizers_and_dtypes(
    pool: Pool, pruned: Path, plan: str, optimizer: str
) -> None:
    trace = pool.run(_trained, 2, pruned, plan, optimizer)[0]
    assert_zeros_stay(trace)
    assert all(not torch.equal(trace.weights[name], first) for name, first in trace.first_weights.items())


def test_without_keep_zeros_the_zeros_are_trained(pool: Pool, pruned: Path) -> None:
    weights = pool.run(_trained, 2, pruned, "dp=2", "AdamW", None, False)[0].weights
    assert all((weights[name] != 0).all() for name in block_linears(programs.llama()))


def _experts(folder: Path, plan: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = plait.parallelize(causal_lm_on_meta(folder), plan, weights=folder, keep_zeros=True)
    first = engine.full_parameters()
    ids = torch.randint(0, 60, (4, 16), generator=torch.Generator().manual_seed(engine.data_rank))
    engine.step({"input_ids": ids, "labels": ids})
    return first, engine.full_parameters()


def test_zeros_of_experts_stay_too(pool: Pool, tmp_path: Path) -> None:
    saved(tmp_path / "in", MODELS["mixtral"])
    export_folder(tmp_path / "in", tmp_path / "out", None, Compression(None, Sparsity.parse("2:4")))
    first, last = pool.run(_experts, 2, tmp_path / "out", "dp=2 ep=2")[0]
    for name in (name for name in first if "experts" in name):
        assert (first[name] == 0).double().mean() == 0.5
        assert torch.equal(first[name] == 0, last[name] == 0)
        assert not torch.equal(first[name], last[name])


def _frozen() -> nn.Module:
    return programs.llama().requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "plan", "error", "words"),
    [
        (programs.llama, "servers=1", PlanError, "keep_zeros"),
        (programs.llama, "offload=disk", PlanError, "not kept in weights on a disk"),
        (_frozen, "dp=1", ModelError, "no effect"),
    ],
)
def test_plans_and_models_that_cannot_keep_zeros_are_errors(
    build: Callable[[], nn.Module], plan: str, error: type[Exception], words: str
) -> None:
    from plait.engine.spec import Arguments, validate  # noqa: PLC0415

    with pytest.raises(error, match=words):
        validate(Arguments(build(), Plan.parse(plan), keep_zeros=True))
