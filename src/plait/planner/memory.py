"""Memory of a plan's fullest rank: model states as the engine counts them, activations in closed form.

[Note: activations of a block]
Bytes that one token keeps from a block's forward to its backward, in 2-byte elements (Korthikanti et al.
2205.05198, section 4): inputs of the two norms and of the products after them, on every column unless
sequence parallel; inside, on the columns, queries, keys, values, and the inputs of the output projection, of
the activation and of the last product. Programs with dropout keep its masks, those without fused
attention scores, their softmax and its dropout.

Eager models keep more: a norm its input in float32 as well, an activation every intermediate result. A test
compares their counts with those of a dry run of `plait explain`.
"""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain

from plait.plan import MemoryUse, Plan
from plait.plan.axes import UnitKind
from plait.plan.communicators import num_communicators
from plait.plan.compression import full_grad_dtype
from plait.plan.context import (
    TokenOrder,
    gathered_kv_heads,
    heads_degree,
    recomputed_share,
    ulysses_kv_heads,
)
from plait.plan.layout import RANGE_ALIGNMENT, Layout, ParamShard, UnitLayout
from plait.plan.memory import (
    COMPUTE_BYTES,
    MASTER_BYTES,
    head_chunk,
    model_state_bytes,
    server_memory,
    wide_chunk,
    worker_memory,
)
from plait.plan.schedule.load import in_flight, stages_by_rank, stages_of
from plait.plan.sharding import Boxes
from plait.planner.cluster import Cluster
from plait.planner.compute import rows_of_choices
from plait.planner.model_shape import ModelShape, attention_method
from plait.planner.space import SHARDING, with_defaults
from plait.planner.stages import StageKind, block_counts, stage_kinds
from plait.planner.workload import Software, Workload


def with_method(model: ModelShape, plan: Plan, host_size: int) -> Plan:
    """The plan with what `cp_method=auto` means on hosts of so many ranks."""
    if plan.cp == 1 or plan.cp_method != "auto":
        return plan
    hosts = plan.cp_on_host(host_size), recomputed_share(plan.recompute)
    method = attention_method(model, plan.cols, plan.cp, "auto", *hosts)
    return replace(plan, cp_method=method)


def tokens_of_rank(model: ModelShape, plan: Plan, sequence: int) -> int:
    """Tokens of a sequence on each rank of `cp`."""
    if plan.cp == 1:
        return sequence
    method = attention_method(model, plan.cols, plan.cp, plan.cp_method)
    return TokenOrder.of_method(method, sequence, plan.cp).per_rank


def peak_memory(
    model: ModelShape,
    plan: Plan,
    cluster: Cluster,
    work: Workload,
    software: Software,
    *,
    only_first: bool = False,
) -> tuple[MemoryUse, float]:
    """Return the bytes of the fullest rank, and the upper end of their interval. `only_first`: of the
    first rank only, which is almost always the fullest."""
    plan = with_method(model, plan, cluster.host_size)
    batch = work.batch // (plan.data_ranks * plan.micro)
    on_gpu = "cpu" not in cluster.device.name.lower()
    ranks = {0} if only_first else {0, min(1, plan.pp - 1), plan.pp - 1}

    uses = [rank_memory(model, plan, rank, batch, work.sequence, software, on_gpu) for rank in ranks]
    use = max(uses, key=lambda use: use.total)
    others = use.temporary + use.allocator + use.runtime
    return use, upper_bytes(use.total - others, others)


def upper_bytes(states: int, others: int) -> float:
    """Return the upper end of the interval of a rank's memory: bytes of states and gradients are exact."""
    return states + others + _UNCERTAINTY * others


_STATES = 2  # of Adam, per element
_UNCERTAINTY = 0.13  # the largest by which published runs with the same columns differ, without outliers


def fullest_process(plan: Plan, use: MemoryUse, high: float, numel: int) -> tuple[MemoryUse, float]:
    """Return the bytes of the fullest process, and the upper end of their interval. `use`, `high`: of a rank
    with the full model and its optimizer's states, which they are without servers."""
    if not plan.num_servers:
        return use, high
    uses = [worker_memory(plan, use, numel, _STATES)]
    if plan.servers:
        uses.append(server_memory(plan, numel, _STATES))
    largest = max(uses, key=lambda each: each.total)
    return largest, high / use.total * largest.total


@lru_cache(maxsize=1 << 14)
def rank_memory(
    model: ModelShape, plan: Plan, rank: int, batch: int, sequence: int, software: Software, on_gpu: bool
) -> MemoryUse:
    """Return the bytes of a pipeline rank, for micro-batches of `batch` sequences."""
    loss = 0
    if software.eager and _has_head(plan, rank):
        loss = _loss_bytes(model, plan, batch * tokens_of_rank(model, plan, sequence), on_gpu=on_gpu)
    activations = _activation_bytes(model, without_sharding(plan), rank, batch, sequence, software)
    rank_of, counts = stages_of(plan.schedule, plan.pp, plan.num_chunks), block_counts(model, plan, software)
    own = _own_kinds(model, counts, stages_by_rank(plan.schedule, plan.pp, plan.num_chunks)[rank])
    states = _state_bytes(model, _of_states[plan.micro > 1](plan), own, rank_of, software, on_gpu)
    use = states.with_activations(int(activations), loss)
    if plan.zero == 3 and not software.keeps_copies:
        use = replace(use, parameters=0)
    return replace(use, buffers=use.buffers + software.bucket_bytes) if software.bucket_bytes else use


# States do not depend on what is computed, but on whether there are several micro-batches.
_COMPUTATION = ("sp", "cp_method", "recompute", "schedule", "chunks", "stages", "compile")
_of_states = tuple(with_defaults(*_COMPUTATION, micro=micro) for micro in (1, 2))


@lru_cache(maxsize=1 << 14)
def _state_bytes(
    model: ModelShape,
    plan: Plan,
    own: tuple[StageKind, ...],
    rank_of: tuple[int, ...],
    software: Software,
    on_gpu: bool,
) -> MemoryUse:
    """Return the bytes of a rank with these of the stages, which are on these ranks; without activations."""
    own_plan = plan.of_worker
    dtype = plan.dtype if software.narrow_gradients else full_grad_dtype(own_plan, receives=not on_gpu)
    return model_state_bytes(
        layout_of(model, unit_sizes(plan), own),
        own_plan,
        states_per_element=_STATES,
        coded_groups={0} if software.optimizer == "AdamW8bit" else frozenset(),
        grad_itemsize=COMPUTE_BYTES[dtype],
        num_communicators=_num_communicators(plan, rank_of) if on_gpu else None,
    )


@lru_cache(maxsize=1 << 10)  # the same for the ranks of a plan
def _num_communicators(plan: Plan, rank_of: tuple[int, ...]) -> int:
    return num_communicators(plan, dict(enumerate(rank_of)))


without_sharding = with_defaults(*SHARDING)  # activations do not depend on it


@lru_cache(maxsize=1 << 14)
def _activation_bytes(
    model: ModelShape, plan: Plan, rank: int, batch: int, sequence: int, software: Software
) -> float:
    tokens = batch * tokens_of_rank(model, plan, sequence) * COMPUTE_BYTES[plan.dtype] / 2
    num_bytes = kept_bytes(model, plan, rank, batch, sequence, software)
    if not software.eager and _has_head(plan, rank):  # the gradient of the logits
        num_bytes += 0 if software.fused_loss else tokens * 2 * model.vocab / plan.cols
    # One recomputed block, or its largest gradients.
    num_bytes += tokens * block_activation_bytes(model, plan, "none", sequence, software)
    return num_bytes + batch * sequence * _gathered_bytes(model, plan)


def _has_head(plan: Plan, rank: int) -> bool:
    return stages_of(plan.schedule, plan.pp, plan.num_chunks)[-1] == rank


def _loss_bytes(model: ModelShape, plan: Plan, num_tokens: int, *, on_gpu: bool) -> int:
    """Bytes of the head's operator on a GPU: a chunk's logits, their copies in float32, and the sum of the
    weight's gradient in float32 for 16 bits. On CPUs the copies fit the cache."""
    columns, itemsize = -(-model.vocab // plan.cols), COMPUTE_BYTES[plan.dtype]
    is_bf16 = itemsize == 2 and plan.precision != "fp16"
    hidden = model.hidden // plan.rows
    sum_features = 0 if model.adapter_rank else hidden * is_bf16
    tokens = head_chunk(num_tokens, columns, on_gpu=on_gpu, sum_features=sum_features)
    is_wide = not model.adapter_rank and (plan.precision == "fp16" or (is_bf16 and tokens < num_tokens))
    copied = min(tokens, wide_chunk(columns)) * (8 if itemsize == 2 else itemsize) if on_gpu else 0
    return columns * (tokens * itemsize + copied + is_wide * 4 * hidden)


def _exchanged_bytes(model: ModelShape, plan: Plan) -> float:
    """Bytes that one token keeps, on all columns, because heads were exchanged for tokens: outputs before and
    after it, and copies of kv heads."""
    method = attention_method(model, plan.cols, plan.cp, plan.cp_method) if plan.cp > 1 else "allgather"
    inner = heads_degree(method, plan.cp)
    if inner == 1:
        return 0.0
    copies = ulysses_kv_heads(*model.heads_of_column(plan.cols)[:2], inner) or 0
    return 2.0 * model.attention_width + 4.0 * max(0, copies * plan.cols - model.kv_heads) * model.head_dim


def _gathered_bytes(model: ModelShape, plan: Plan) -> float:
    """Bytes of a token's keys and values, in the backward of an attention that gathers those of all ranks: in
    the row's order, sent and received; and their gradients, wide, by kind and together."""
    if plan.cp == 1 or attention_method(model, plan.cols, plan.cp, plan.cp_method) != "allgather":
        return 0.0
    heads, kv_heads, width = model.heads_of_column(plan.cols)
    elements = gathered_kv_heads(heads, kv_heads, plan.cp) * width
    return elements * (3.0 * COMPUTE_BYTES[plan.dtype] + 2.0 * MASTER_BYTES[plan.dtype])


def rank_layouts(model: ModelShape, plan: Plan, software: Software) -> tuple[Layout, ...]:
    """Return the units of each pipeline rank's stages, with the number of elements that a rank stores."""
    counts = block_counts(model, plan, software)
    of_ranks = stages_by_rank(plan.schedule, plan.pp, plan.num_chunks)
    return _layouts(model, unit_sizes(plan), counts, of_ranks)


UnitKey = tuple[int, int, int, int, str]


def unit_sizes(plan: Plan) -> UnitKey:
    """Return the sizes that decide units: rows, columns, shards, ranks of ep; and the format of a base."""
    return plan.rows, plan.cols, plan.shard_degree, plan.ep, plan.base


@lru_cache(maxsize=1 << 12)
def _layouts(
    model: ModelShape,
    sizes: UnitKey,
    counts: tuple[int, ...],
    of_ranks: tuple[tuple[int, ...], ...],
) -> tuple[Layout, ...]:
    return tuple(layout_of(model, sizes, _own_kinds(model, counts, stages)) for stages in of_ranks)


@lru_cache(maxsize=1 << 12)
def _own_kinds(model: ModelShape, counts: tuple[int, ...], stages: tuple[int, ...]) -> tuple[StageKind, ...]:
    """Return the kinds of a rank's stages: most ranks are equal."""
    kinds = stage_kinds(model, counts)
    return tuple([kinds[stage] for stage in stages])


@lru_cache(maxsize=1 << 12)
def layout_of(model: ModelShape, sizes: UnitKey, own: tuple[StageKind, ...]) -> Layout:
    """Return the units of these stages, with the number of elements that a rank stores."""
    units = (stage_units(model, sizes, stage) for stage in own)
    return Layout(tuple(chain.from_iterable(units)))


def kept_bytes(
    model: ModelShape, plan: Plan, rank: int, batch: int, sequence: int, software: Software
) -> float:
    """Bytes that a pipeline rank keeps of all micro-batches between their forwards and backwards, at most."""
    sizes = micro_bytes(model, plan, batch, sequence, software)
    own = [sizes[stage] for stage in stages_by_rank(plan.schedule, plan.pp, plan.num_chunks)[rank]]
    return max(
        sum(a * saved + b * later for (a, b), (saved, later) in zip(held, own, strict=True))
        for held in in_flight(plan.schedule, plan.pp, plan.micro, plan.num_chunks, rank)
    )


def micro_bytes(
    model: ModelShape, plan: Plan, batch: int, sequence: int, software: Software
) -> list[tuple[float, float]]:
    """Bytes that each stage keeps of a micro-batch from its forward to its backward, and from that to the
    weight gradients if they are split off."""
    counts = block_counts(model, plan, software)
    num_tokens = batch * tokens_of_rank(model, plan, sequence)
    if plan.capacity != "none":  # one number of rows, for all routing
        choices, own = num_tokens * model.experts_per_token, model.expert_columns(plan.cols, plan.ep)
        software = replace(software, expert_rows=rows_of_choices(model, plan.capacity, choices, own))
    tokens = num_tokens * COMPUTE_BYTES[plan.dtype] / 2
    policy, _, every = plan.recompute.partition("=")
    kinds = ("full", "none") if every else (policy, policy)
    # Deferred weight gradients need the inputs of products and the gradients of their results.
    fused = Software(eager=False, expert_rows=software.expert_rows)
    of_blocks = []
    for blocks in (model, model.dense_block) if model.dense_layers else (model, model):
        one, other = (block_activation_bytes(blocks, plan, kind, sequence, software) for kind in kinds)
        of_blocks.append((one, other, block_activation_bytes(blocks, plan, "none", sequence, fused)))
    sizes: dict[StageKind, tuple[float, float]] = {}
    kinds_of_stages = stage_kinds(model, counts)
    for kind in dict.fromkeys(kinds_of_stages):
        saved, deferred = _head_bytes(model, plan, software, num_tokens) if kind.is_last else 0.0, 0.0
        for number, (one, other, later) in zip(
            (kind.blocks - kind.dense, kind.dense), of_blocks, strict=True
        ):
            full = number // int(every or 1)
            saved += full * one + (number - full) * other
            deferred += number * later
        sizes[kind] = tokens * saved, tokens * deferred
    return [sizes[kind] for kind in kinds_of_stages]


@lru_cache(maxsize=1 << 12)
def stage_units(model: ModelShape, sizes: UnitKey, stage: StageKind) -> tuple[UnitLayout, ...]:
    """The units of a stage with the number of elements that a rank stores. Under adapters, all others are
    frozen."""
    units, (blocks, is_first, is_last, dense) = list[UnitLayout](), stage
    rows, cols, shards, ep, base = sizes
    trains = not model.adapter_rank
    words = model.vocab * model.hidden / (rows * cols)
    table = model.vocab // cols, model.hidden // rows
    if is_first:  # positions and norms are on every column
        rest = model.embedding_params - model.vocab * model.hidden
        units.append(_unit("embedding", words + rest / rows, shards, (table,), trains=trains))
    if trains:
        first = _block_units(model.dense_block, rows, cols, shards, 1) * dense if dense else []
        units += [*first, *_block_units(model, rows, cols, shards, ep) * (blocks - dense)]
    else:
        units += _adapted_units(model, cols, shards, base) * blocks
    if is_last:  # a tied embedding is on both ends of a pipeline
        own = not (model.tied and is_first)
        numel = own * words + model.norm_params / rows
        units.append(_unit("head", numel, shards, (table,) * own, trains=trains))
    return tuple(units)


def _block_units(model: ModelShape, rows: int, cols: int, shards: int, ep: int) -> list[UnitLayout]:
    """A block's unit and, with ep, that of its experts."""
    matrices, experts = _block_matrices(model, rows, cols), _expert_matrices(model, rows, cols, ep)
    numel, of_experts = _block_numel(model, rows, cols), model.experts * model.expert_params / (rows * cols)
    if ep == 1:
        return [_unit("block", numel, shards, (*matrices, *experts))]
    dense = _unit("block", numel - of_experts, shards, matrices)
    return [dense, _unit("block", of_experts / ep, max(1, shards // ep), experts, UnitKind.EXPERT)]


def _adapted_units(model: ModelShape, cols: int, shards: int, base: str) -> list[UnitLayout]:
    """A block's adapters, and its frozen weights: those of linear layers may be quantized."""
    numel, form = _block_numel(model, 1, cols), "" if base == "none" else base
    matrices = _block_matrices(model, 1, cols) if form else ()
    linear = sum(map(math.prod, matrices))
    frozen = [_unit("block", numel - linear, shards, trains=False)]
    frozen += [_unit("block", linear, shards, matrices, trains=False, form=form)] if form else []
    return [_unit("block", model.adapter_params(cols), shards), *frozen]


def _block_numel(model: ModelShape, rows: int, cols: int) -> float:
    kv_cols = min(cols, model.kv_heads)  # fewer kv heads than columns are replicated
    kv = 0 if model.latent else model.hidden * model.kv_width
    vectors = (4 if model.biases else 2) * model.hidden + model.latent_params
    rest = model.block_params - kv - vectors
    return rest / (rows * cols) + kv / (rows * kv_cols) + vectors / rows


def _block_matrices(model: ModelShape, rows: int, cols: int) -> tuple[tuple[int, int], ...]:
    """The sizes on a rank of a block's matrices, without experts."""
    hidden, kv = model.hidden // rows, model.kv_heads * model.head_dim // min(cols, model.kv_heads)
    heads, ffn, shared = (width // cols for width in (model.attention_width, model.ffn, model.shared_ffn))
    widths = [shared] * (shared > 0) if model.experts else [ffn]
    ups = [(width, hidden) for width in widths] * (model.mlp_matrices - 1)
    downs = [(hidden, width) for width in widths]
    if model.latent:
        return (*model.attention_products(hidden, model.heads // cols, model.heads // cols), *ups, *downs)
    return ((heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads), *ups, *downs)


def _expert_matrices(model: ModelShape, rows: int, cols: int, ep: int) -> tuple[tuple[int, int], ...]:
    """The same of the experts of a rank: two, with a row for each expert."""
    each = model.ffn // cols * (model.hidden // rows)
    number = model.experts // ep
    return ((number, (model.mlp_matrices - 1) * each), (number, each)) if number else ()


@lru_cache(maxsize=1 << 12)
def _unit(
    name: str,
    numel: float,
    shards: int,
    matrices: tuple[tuple[int, int], ...] = (),
    kind: UnitKind = UnitKind.DENSE,
    *,
    trains: bool = True,
    form: str = "",
) -> UnitLayout:
    """A unit of these matrices and, for the rest of its elements, one vector. `form`: if it is
    quantized."""
    multiple = shards * RANGE_ALIGNMENT
    padded = -(-round(numel) // multiple) * multiple
    starts = [0, *accumulate(map(math.prod, matrices))]
    shapes = (*matrices, (max(0, round(numel) - starts[-1]),))
    params = tuple(
        ParamShard(name, shape, Boxes.full(shape), start) for shape, start in zip(shapes, starts, strict=True)
    )
    named = f"{name} (experts)" if kind is UnitKind.EXPERT else name
    named += "" if trains else f" ({form or 'frozen'})"
    groups = ((0, 0, round(numel)),) if trains else ()
    return UnitLayout(named, name, params, groups, padded, shards, kind, form)


def block_activation_bytes(
    model: ModelShape, plan: Plan, recompute: str, sequence: int, software: Software
) -> float:
    """Bytes that one token keeps for one block, with 2-byte elements. See [Note: activations of a block]."""
    h, cols = model.hidden / plan.rows, plan.cols
    across = cols if plan.sp else 1  # what the residual stream is sharded over
    # What recomputed blocks keep of attention over ranks: outputs, and a float32 log-sum-exp of each head.
    results = (2.0 * model.attention_width + 4.0 * model.heads) / cols if plan.cp > 1 else 0.0
    if recompute == "full":
        return 2 * h / across + results
    # Of adapters, inputs of second products and, of selected results, the sums' terms.
    layers = model.linear_layers(cols) if model.adapter_rank else []
    adapters = 2.0 * model.adapter_rank * len(layers)
    adapters += 4 * h * (1 - 1 / across) if layers else 0.0  # inputs of the first ones are complete
    if recompute == "selective":
        adapters += 2.0 * sum(outputs for outputs, _ in layers)
    kv = 2.0 * model.kv_width
    gated = model.mlp_matrices == 3
    chosen = model.experts_per_token
    rows = chosen * software.expert_rows
    own = (
        1 if software.gathers_rows else model.expert_columns(cols, plan.ep)
    )  # each has its share of the rows
    # Tokens that routers get.
    gathered = 2 * h if plan.sp and model.experts and not software.gathers_rows else 0.0
    width = rows * model.ffn + model.shared_ffn if model.experts else model.ffn
    if software.eager and recompute == "selective":  # the results of products
        return (
            (6 - 2 * (rows > 0)) * h / across
            + 2 * rows * h / own
            + 2 * sum(model.latent or ())
            + (2.0 * model.attention_width + kv + 2.0 * (model.mlp_matrices - 1) * width) / cols
            + results
            + adapters
        )
    if software.eager:
        heads = 4.0 * model.attention_width + 4.0 * model.heads  # and float32 sums of softmax
        heads += _exchanged_bytes(model, plan) + _NORM_OF_HEADS * model.normed_width
        # Of rows, inputs; results of all rows where the experts are or, wide, where the tokens are.
        routed = (2 * rows + (4 if plan.ep > 1 else 2) * chosen) * h / own + 4 * model.experts + gathered
        if model.latent:  # norms of ranks, and copies of heads with and without positions
            routed += 8 * sum(model.latent[:2])
            heads += 2 * model.heads * (2 * model.head_dim - model.latent[2])
        inside = (heads + kv + _ACTIVATIONS[gated] * width) / cols
        return _norms(model) * h / across + routed + inside + adapters
    # Inputs of products, which norms, attention and activations computed: not kept, or in float8.
    repeats = recompute == "selective" and software.selective == "elementwise"
    size = 0.0 if repeats else 1.0 if plan.is_float8 and software.device_kernels else 2.0
    # Of rows, inputs; and results, unless their weights are multiplied before the last product.
    routed = (size if software.device_kernels else 4.0) * rows * h / own + gathered
    residual = (4 + 2 * size if software.fused_attention else 10) * h / across + routed
    kept = 1.0 if plan.is_float8 and software.device_kernels else 2.0  # of attention
    inside = (2.0 + kept) * model.attention_width + kv + (2.0 * (model.mlp_matrices - 1) + size) * width
    inside += _exchanged_bytes(model, plan)
    if not software.fused_attention and recompute != "selective":
        inside += 5.0 * model.heads * sequence
    return residual + inside / cols


# Bytes per element that two norms, and an activation, keep in eager models: of two and of three matrices.
_NORMS, _ACTIVATIONS = (12, 16), (10, 8)


def _norms(model: ModelShape) -> int:
    """Bytes per element that two norms keep. One with a frozen weight need not keep what that multiplies."""
    gated = model.mlp_matrices == 3
    return _NORMS[gated] - (4 if gated and model.adapter_rank else 0)


_NORM_OF_HEADS = 6  # and per element of normed queries and keys


def _head_bytes(model: ModelShape, plan: Plan, software: Software, num_tokens: int) -> float:
    """Bytes that one token keeps of the head, with 2-byte elements: the final norm's and, in place of its
    result, that of the result's gradient; and its share of the weight's gradient, which is wide in fp16.
    Other programs keep logits, in float32 too."""
    if not software.eager:
        return (2 if software.fused_loss else 6) * model.vocab / plan.cols
    hidden = model.hidden / plan.rows
    weight = (4 if plan.precision == "fp16" else 2) * model.vocab / plan.cols * hidden
    weight = 0.0 if model.adapter_rank else weight
    return weight / num_tokens + _norms(model) / 2 * hidden
