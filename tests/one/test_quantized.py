"""Codes of a quantized base: their formats, what is chosen and refused, loading, saving and memory."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.spec import Arguments, validate
from plait.errors import ModelError, PlaitError
from plait.parallel.zero.block_codes import dequantize, quantize
from plait.parallel.zero.flat_param import UnshardState
from plait.plan.quantized import BLOCK, FORMATS, splits_blocks
from plait.plan.sharding import Boxes
from support import programs, quantized_models
from support.compilers import compiles
from support.quantized_models import frozen_llama, lora_llama

BASES = pytest.mark.parametrize("base", FORMATS)


def restored(values: Tensor, base: str, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    dequantize(quantize(values.reshape(-1), base), base, out.view(-1))
    return out


def by_hand(values: Tensor, base: str) -> Tensor:
    """The nearest level times absmax, element by element."""
    blocks = values.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(FORMATS[base].levels)
    scaled = (blocks / absmax.clamp(min=1e-30)).double()
    return (levels[(scaled[..., None] - levels).abs().argmin(-1)] * absmax).view(values.shape)


@BASES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_becomes_the_nearest_levels_times_absmax(base: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 5 * BLOCK).to(dtype)
    values[1, :BLOCK] = 0
    assert torch.equal(restored(values, base, dtype), by_hand(values, base).to(dtype))


@BASES
def test_quantizing_a_dequantized_weight_gives_the_same_codes(base: str) -> None:
    torch.manual_seed(1)
    values = torch.randn(1000 * BLOCK) * torch.logspace(-6, 4, 1000).repeat_interleave(BLOCK)
    once = restored(values, base)
    assert torch.equal(quantize(once, base), quantize(values, base))
    assert (once - values).abs().max() > 0


@BASES
def test_bytes_of_a_block_are_its_codes_and_a_float32(base: str) -> None:
    stored = quantize(torch.ones(4 * BLOCK), base)
    assert len(stored) == 4 * ({"nf4": 32, "int8": 64}[base] + 4)
    assert FORMATS["nf4"].num_bytes(2**30) / 2**30 == 0.5625  # QLoRA without double quantization


def test_int8_is_off_by_at_most_half_a_step() -> None:
    torch.manual_seed(2)
    values = torch.randn(100, BLOCK)
    error = (restored(values, "int8") - values).abs()
    assert (error <= values.abs().amax(1, keepdim=True) / 127 / 2 * 1.001).all()


@pytest.mark.parametrize(
    ("shape", "ranges", "splits"),
    [
        ((4, 64), (((0, 1),), ((0, 64),)), False),
        ((4, 96), (((0, 1),), ((0, 96),)), True),
        ((4, 96), (((0, 2),), ((0, 96),)), False),
        ((4, 128), (((0, 4),), ((64, 128),)), False),
        ((4, 128), (((0, 4),), ((32, 96),)), True),
        ((2, 96), (((0, 2),), ((0, 64),)), True),
        ((4, 8, 16), (((1, 3),), ((0, 8),), ((0, 16),)), False),
        ((4, 8, 16), (((0, 4),), ((0, 4),), ((0, 16),)), False),
        ((4, 8, 16), (((0, 4),), ((0, 2), (4, 6)), ((0, 16),)), True),
    ],
)
def test_shards_that_have_parts_of_blocks_are_found(shape: Any, ranges: Any, splits: bool) -> None:
    held = torch.zeros(shape)
    for box in Boxes(ranges):
        held[tuple(map(slice, box.start, box.stop))] = 1
    counts = held.reshape(-1, BLOCK).sum(1)
    assert splits == bool(((counts > 0) & (counts < BLOCK)).any())
    assert splits_blocks(shape, Boxes(ranges)) == splits


def formats(model: nn.Module, plan: str) -> dict[str, str]:
    return dict(validate(Arguments(model, plan, loss=programs.summed_loss)).formats)  # type: ignore[arg-type]


def test_frozen_weights_of_linear_layers_in_blocks_are_chosen() -> None:
    chosen = formats(lora_llama(targets="q_proj up_proj"), "base=nf4")
    names = {name.removeprefix("base_model.model.model.layers.0.") for name in chosen if ".0." in name}
    attention = {"q_proj.base_layer", "k_proj", "v_proj", "o_proj"}
    mlp = {"up_proj.base_layer", "gate_proj", "down_proj"}
    assert names == {f"self_attn.{n}.weight" for n in attention} | {f"mlp.{n}.weight" for n in mlp}
    assert len(chosen) == 14
    experts = {name for name in formats(quantized_models.lora_mixtral(), "base=int8") if "experts" in name}
    assert len(experts) == 4


class Tied(nn.Module):
    """A table and a layer of a block with one weight, and a weight of 60 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(6, 10)})])
        self.table = nn.Embedding(64, 64)
        self.table.weight = self.blocks[0]["a"].weight  # type: ignore[index]
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("build", "plan", "facts"),
    [
        (programs.llama, "base=nf4", ["base has no effect: the model has no frozen weight", "no base"]),
        (Tied, "base=int8", ["base has no effect", "a multiple of 64 elements"]),
        (
            frozen_llama,
            "base=nf4 tp=4",
            ["would split a block of 64", "in shards of (128, 32)", "smaller tp"],
        ),
        (frozen_llama, "base=nf4 zero=3 reshard=step", ["reshard=step would keep", "reshard=use"]),
        (frozen_llama, "base=fp4", ["unknown value for base", "nf4"]),
        (frozen_llama, "dp=2 servers=1 base=nf4", ["parameter servers cannot be combined", "base=nf4"]),
        (lambda: nn.Linear(64, 64), "base=nf4", ["base=nf4 needs repeated blocks", "no base"]),
    ],
)
def test_a_base_without_effect_or_complete_blocks_is_refused(build: Any, plan: str, facts: list[str]) -> None:
    with pytest.raises(PlaitError) as error:
        formats(build(), plan)
    assert all(f"\n  {part}" in str(error.value) for part in ("given   :", "expected:", "try     :"))
    for fact in facts:
        assert fact in str(error.value)


def engine_of(build: Any, plan: str) -> plait.Engine:
    return programs.engine_of(programs.Task(build), plan)


def quantized(engine: plait.Engine) -> list[Any]:
    return [unit for unit in engine._parts.sharded.units if unit.layout.format]


@BASES
def test_weights_are_those_of_the_files_in_codes(tmp_path: Path, base: str) -> None:
    torch.manual_seed(3)
    model: Any = programs.llama(on_meta=False, **quantized_models.SIZES)
    model.bfloat16().save_pretrained(tmp_path)
    engine = plait.parallelize(
        frozen_llama(), f"precision=bf16 base={base}", weights=tmp_path, loss=programs.summed_loss
    )
    weights, original = engine.full_parameters(), dict(model.named_parameters())
    for unit in quantized(engine):
        for shard in unit.layout.params:
            assert torch.equal(weights[shard.name], by_hand(original[shard.name], base)), shard.name
    assert torch.equal(weights["model.embed_tokens.weight"], original["model.embed_tokens.weight"].float())


@BASES
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path, base: str) -> None:
    plan, batches = f"precision=bf16 base={base}", programs.batches(2)
    first = engine_of(frozen_llama, plan)
    first.step(batches[0])
    first.save(tmp_path)
    state = first.state()
    second = programs.engine_of(programs.Task(frozen_llama), plan, seed=4)
    second.load(tmp_path / "step-00000001")
    third = programs.engine_of(programs.Task(frozen_llama), plan, seed=5)
    third.load_state(state)
    for mine, other in zip(quantized(first), quantized(second), strict=True):
        assert torch.equal(mine.shard, other.shard)
    losses = [engine.step(batches[1]).loss for engine in (first, second, third)]
    assert losses[0] == losses[1] == losses[2]


@BASES
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_between_uses_no_weight_is_dequantized(base: str, recompute: str) -> None:
    """After a forward only that of the last block is, which is the first of backward."""
    engine = engine_of(frozen_llama, f"base={base} recompute={recompute}")
    units = quantized(engine)
    assert not any(unit.unsharded.is_allocated for unit in units)
    batch = programs.batches(1)[0]
    for _ in range(2):  # the first step looks for the order
        outputs = engine.model(input_ids=batch["input_ids"])
        loss, count = programs.summed_loss(outputs, batch)
        assert [unit.unsharded.is_allocated for unit in units] in ([False, True], [False, False])
        engine.backward(loss, count)
        engine.update()
        assert {unit.state for unit in units} == {UnshardState.SHARDED}
    largest = max(unit.unsharded.nbytes for unit in units)
    assert engine._parts.context.tracker.peak_bytes == largest


def test_a_compiled_run_is_the_uncompiled_one() -> None:
    batch = programs.batches(1)[0]
    losses = []
    for words in ("", "compile=true"):
        with compiles(in_cpp=False):
            engine = engine_of(functools.partial(programs_rough), f"base=nf4 {words}")
            losses.append([engine.step(batch).loss for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def programs_rough() -> nn.Module:
    model = programs.llama(exact=False, **quantized_models.SIZES)
    for block in model.model.layers:  # type: ignore[union-attr,attr-defined]
        block.mlp.requires_grad_(False)
    return model


def test_dora_reads_the_dequantized_weight() -> None:
    task = programs.Task(functools.partial(lora_llama, use_dora=True), steps=2)
    ours = programs.train_task(task, "base=nf4 precision=fp64")
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


def test_a_write_to_a_quantized_weight_is_refused() -> None:
    engine = engine_of(frozen_llama, "base=nf4")
    weight = engine.model.model.layers[0].mlp.up_proj.weight

    def clamp(*_: Any) -> None:
        weight.data.zero_()

    engine.model.model.layers[0].register_forward_pre_hook(clamp)
    with pytest.raises(ModelError, match="a quantized parameter was written"):
        engine.step(programs.batches(1)[0])


CAPPED = """
import resource, sys
import torch
import plait
from plait.models import causal_lm_on_meta

def engine_of(hidden, layers, plan):
    model = causal_lm_on_meta({"model_type": "llama", "vocab_size": 64, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4})
    for block in model.model.layers:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.requires_grad_(False)
    return plait.parallelize(model, plan + " precision=bf16")

def train(engine):
    ids = torch.arange(32).view(2, 16)
    return [engine.step({"input_ids": ids, "labels": ids}).loss for _ in range(3)]

torch.set_num_threads(1)
plan = sys.argv[1]
train(engine_of(64, 2, plan))  # what libraries allocate once
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + int(sys.argv[2]),) * 2)
print(*train(engine_of(512, 12, plan)))
"""


@pytest.mark.parametrize(("plan", "trains"), [("base=nf4", True), ("dp=1", False)])
def test_a_model_that_does_not_fit_in_bf16_trains_in_4_bits(plan: str, trains: bool) -> None:
    """50 million frozen weights: 101 MB in bf16, 28 MB in codes. The cap is below the former."""
    run = subprocess.run(
        [sys.executable, "-c", CAPPED, plan, str(96 * 10**6)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (run.returncode == 0) == trains, run.stderr
    if trains:
        first, *_, last = map(float, run.stdout.split())
        assert last < first
    else:
        assert "allocate memory" in run.stderr
