"""Memory of a plan's fullest rank: model states as the engine counts them, activations in closed form.

[Note: activations of a block]
Bytes that one token keeps from a block's forward to its backward, in 2-byte elements (Korthikanti et al.
2205.05198, section 4): inputs of the two norms and of the products after them, on every column unless
sequence parallel; inside, on the columns, queries, keys, values, the input of the output projection and of
the activation, and that of the last product. Programs with dropout keep its masks, those without fused
attention scores, their softmax and its dropout.
"""

from dataclasses import replace
from functools import lru_cache

from plait.plan import MemoryUse, Plan
from plait.plan.communicators import num_communicators
from plait.plan.estimate.memory import COMPUTE_BYTES, MASTER_BYTES, model_state_bytes
from plait.plan.layout import RANGE_ALIGNMENT, Layout, UnitLayout
from plait.planner import timeline
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape
from plait.planner.stages import block_counts
from plait.planner.workload import Software, Workload


def peak_memory(
    model: ModelShape, plan: Plan, cluster: Cluster, work: Workload, software: Software
) -> tuple[MemoryUse, float]:
    """Return the bytes of the fullest rank, and the upper end of their interval."""
    batch = work.batch // (plan.data_ranks * plan.micro)
    on_gpu = "cpu" not in cluster.device.name.lower()
    ranks = sorted({0, min(1, plan.pp - 1), plan.pp - 1})

    def fullest(program: Software) -> MemoryUse:
        uses = [_rank_memory(model, plan, rank, batch, work.sequence, program, on_gpu) for rank in ranks]
        return max(uses, key=lambda use: use.total)

    # The upper end is for wide gradients, whatever the report says of the program.
    wide = fullest(replace(software, narrow_gradients=False) if software.narrow_gradients else software)
    use = fullest(software) if software.narrow_gradients else wide
    return use, wide.total * (1 + _UNCERTAINTY)


_UNCERTAINTY = 0.13  # the largest by which published runs with the same columns differ, without outliers


@lru_cache(maxsize=1 << 14)
def _rank_memory(
    model: ModelShape, plan: Plan, rank: int, batch: int, sequence: int, software: Software, on_gpu: bool
) -> MemoryUse:
    counts = block_counts(model, plan, software)
    ranks = timeline.stages_of(plan.schedule, plan.pp, plan.num_chunks)
    own = [stage for stage, of in enumerate(ranks) if of == rank]
    units: list[UnitLayout] = []
    for stage in own:
        units += stage_units(model, plan.rows, plan.cols, plan.shard_degree, counts[stage], stage, len(ranks))
    activations = kept_bytes(model, plan, rank, batch, sequence, software)
    if len(ranks) - 1 in own:
        activations += _logit_bytes(model, plan, batch, sequence)
    activations += _working(model, plan, batch, sequence, software)
    return model_state_bytes(
        Layout(tuple(units)),
        plan,
        states_per_element=2,
        grad_itemsize=COMPUTE_BYTES[plan.precision]
        if software.narrow_gradients
        else _grad_itemsize(plan, on_gpu),
        activation_bytes=int(activations),
        num_communicators=num_communicators(plan, dict(enumerate(ranks))) if on_gpu else None,
    )


def kept_bytes(
    model: ModelShape, plan: Plan, rank: int, batch: int, sequence: int, software: Software
) -> float:
    """Bytes that a pipeline rank keeps of all micro-batches between their forwards and backwards, at most."""
    counts = block_counts(model, plan, software)
    ranks = timeline.stages_of(plan.schedule, plan.pp, plan.num_chunks)
    own = [counts[stage] for stage, of in enumerate(ranks) if of == rank]
    in_flight = timeline.in_flight(plan.schedule, plan.pp, plan.micro, plan.num_chunks)[rank]
    return sum(
        micros * _kept(model, plan, blocks, batch, sequence, software)
        for blocks, micros in zip(own, in_flight, strict=True)
    )


@lru_cache(maxsize=1 << 12)
def stage_units(
    model: ModelShape, rows: int, cols: int, shards: int, blocks: int, stage: int, stages: int
) -> tuple[UnitLayout, ...]:
    """The units of a stage with the number of elements that a rank stores."""
    units = []
    if stage == 0:
        units.append(_unit("embedding", model.embedding_params / (rows * cols), shards))
    units += [_unit("block", _block_numel(model, rows, cols), shards)] * blocks
    if stage == stages - 1:
        tied = model.vocab * model.hidden if model.tied and stages > 1 else 0
        units.append(_unit("head", (model.head_params + tied) / (rows * cols), shards))
    return tuple(units)


def _block_numel(model: ModelShape, rows: int, cols: int) -> float:
    kv_cols = min(cols, model.kv_heads)  # fewer kv heads than columns are replicated
    kv = 2 * model.hidden * model.kv_heads * model.head_dim
    vectors = (4 if model.biases else 2) * model.hidden
    rest = model.block_params - kv - vectors
    return rest / (rows * cols) + kv / (rows * kv_cols) + vectors / rows


@lru_cache(maxsize=1 << 12)
def _unit(name: str, numel: float, shards: int) -> UnitLayout:
    multiple = shards * RANGE_ALIGNMENT
    padded = -(-round(numel) // multiple) * multiple
    return UnitLayout(name, name, (), ((0, 0, round(numel)),), padded, shards)


def _grad_itemsize(plan: Plan, on_gpu: bool) -> int:
    """Bytes per element of a full gradient, see `RankContext.grad_buffer_dtype`."""
    if plan.accumulates_full and plan.micro > 1:
        return MASTER_BYTES[plan.precision]
    if plan.reduce == "bf16" and plan.dp > 1:
        return 2
    return MASTER_BYTES[plan.precision] if on_gpu else COMPUTE_BYTES[plan.precision]


def block_activation_bytes(
    model: ModelShape, cols: int, rows: int, sp: bool, recompute: str, sequence: int, software: Software
) -> float:
    """Bytes that one token keeps for one block, with 2-byte elements. See [Note: activations of a block]."""
    h = model.hidden / rows
    across = cols if sp else 1  # what the residual stream is sharded over
    if recompute == "full":
        return 2 * h / across
    fused = software.fused_attention
    residual = (8 if fused else 10) * h / across
    inside = (4.0 * model.attention_width + 4.0 * model.kv_heads * model.head_dim) / cols
    width = model.active_ffn / cols
    inside += 2.0 * model.mlp_matrices * width
    if not fused and recompute != "selective":
        inside += 5.0 * model.heads * sequence / cols
    return residual + inside


def _kept(model: ModelShape, plan: Plan, blocks: int, batch: int, sequence: int, software: Software) -> float:
    """Bytes that a stage keeps of one micro-batch."""
    tokens = batch * sequence * COMPUTE_BYTES[plan.precision] / 2
    recompute = plan.recompute
    kinds: tuple[tuple[str, int], ...] = ((recompute, blocks),)
    if recompute.startswith("every="):
        full = blocks // int(recompute.removeprefix("every="))
        kinds = (("full", full), ("none", blocks - full))
    each = {
        kind: block_activation_bytes(model, plan.cols, plan.rows, plan.sp, kind, sequence, software)
        for kind, _ in kinds
    }
    return tokens * sum(each[kind] * number for kind, number in kinds)


def _working(model: ModelShape, plan: Plan, batch: int, sequence: int, software: Software) -> float:
    """Bytes of one recomputed block, or of its largest gradients."""
    tokens = batch * sequence * COMPUTE_BYTES[plan.precision] / 2
    return tokens * block_activation_bytes(model, plan.cols, plan.rows, plan.sp, "none", sequence, software)


def _logit_bytes(model: ModelShape, plan: Plan, batch: int, sequence: int) -> float:
    """Logits, in the computation's precision and in float32, and the gradient."""
    itemsize = COMPUTE_BYTES[plan.precision]
    return batch * sequence * model.vocab / plan.cols * (2 * itemsize + max(4, itemsize))
