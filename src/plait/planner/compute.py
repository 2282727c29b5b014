"""Seconds of computation: every product and memory-bound operator of a block, by its shape.

Symbols: m tokens of a micro-batch, t columns and r rows of the tp grid, h hidden, s sequence.

[Note: time of a product]
(m x k) times (k x n) is computed in tiles, one per SM at a time, in waves. A tile's loop over k has a start
and an end during which the matrix unit is idle. If there are fewer tiles than SMs, libraries split k. The
product is limited by its FLOPs at the device's highest measured rate or by reading and writing its matrices.
A grouped product, of the experts of a rank, has the tiles of all its groups in the same waves. In float8
the products of linear layers have the peak of float8, and their operands are cast (docs/precision.md).

[Note: fused attention]
A fused kernel computes products at a fraction of the peak, and for every score an exponential, a maximum, a
sum and conversions on the vector units, which grow with the number of SMs, not with the peak of the matrix
unit: so newer devices reach a smaller fraction of their peak (Shah et al. 2407.08608, section 3). Its
products use instructions of single warps, which on some devices are slower than others. Kernels made for
such a device run both at once, one group of warps its products and another its softmax (the same, section
3.1), so the longer of the two counts. The backward computes five products for the forward's two.

[Note: launch-bound blocks]
Operators are started one by one by the host. A block takes the longer of the device's time and of the host's.

[Note: measured operators]
A CPU rank is its own host: the starts of operators are part of their times, and rates depend on which cache
holds a tensor. `plait bench device` measures the parts of an eager block on such a device by size, forward
and backward. Per step, gradients are also moved into the buffer in which they accumulate.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from plait.plan import Plan
from plait.plan.context import TokenOrder
from plait.plan.devices import Device
from plait.plan.grid import expert_rows
from plait.plan.host_profile import OPERATORS
from plait.plan.memory import COMPUTE_BYTES
from plait.plan.plan import FLOAT8
from plait.plan.quantized import FORMATS
from plait.plan.schedule.generators import GENERATORS
from plait.planner.constants import Constants
from plait.planner.model_shape import ModelShape, attention_method
from plait.planner.workload import Software


class Rates(NamedTuple):
    """Rates of a device at one precision; hashable, for caches."""

    flops: float  # highest measured rate of products
    warp_flops: float  # the same by instructions of single warps
    memory_bytes_per_s: float  # of memory-bound operators
    num_sms: int
    launch_s: float
    itemsize: int
    linear_speed: float  # of the blocks' linear layers, by that of other products: above 1 in float8
    cast_bytes: float  # read and written for an element of their operands that is cast to float8
    product_rates: tuple[tuple[float, float], ...]  # measured (FLOPs, FLOP/s); (): the model's
    operator_rates: tuple[tuple[tuple[float, float], ...], ...]  # measured, by OPERATORS; (): the model's

    @classmethod
    @lru_cache(maxsize=1 << 6)
    def of(cls, device: Device, precision: str, tf32: bool, constants: Constants) -> "Rates":
        narrow = precision.partition("-")[0] if precision in FLOAT8 else None
        dtype = "bf16" if narrow else precision
        peak = device.peak_flops["tf32" if tf32 and "tf32" in device.peak_flops else dtype]
        products, operators = device.product_rates.get(dtype, ()), device.operator_rates.get(dtype, {})
        return cls(
            peak * device.matmul_fraction,
            peak * device.matmul_fraction * device.warp_fraction,
            device.memory_bytes_per_s * constants.memory_fraction,
            device.num_sms,
            constants.launch_s,
            COMPUTE_BYTES[dtype],
            device.peak_flops[narrow] / peak if narrow else 1.0,
            _CAST_BYTES[precision] if narrow else 0.0,
            tuple((flops, rate * constants.product_fraction) for flops, rate in products),
            tuple(
                tuple(
                    (
                        size,
                        rate
                        * (constants.product_fraction if name == "linear" else constants.memory_fraction),
                    )
                    for size, rate in operators[name]
                )
                for name in (OPERATORS if operators else ())
            ),
        )

    def operator_s(self, name: str, work: float, size: float | None = None) -> float:
        """Seconds of a measured operator; 0 if none was measured. `size`: of its rate, if not `work`."""
        if not self.operator_rates or not work:
            return 0.0
        return work / _interpolated(self.operator_rates[OPERATORS.index(name)], size or work)


class BlockWork(NamedTuple):
    """The part of a layer that a rank computes: columns and rows of the tp grid, and what it computes it
    for."""

    rows: int
    cols: int
    sp: bool
    batch: int  # sequences of a micro-batch
    sequence: int  # tokens of a complete one
    fused_attention: bool
    compiled: bool
    overlaps: bool  # collectives of the backward run during products
    overlaps_experts: bool
    graphs: bool
    splits: bool  # weight gradients are computed apart
    ranks: int  # of the job
    cp: int
    cp_method: str  # not `auto`
    ep: int
    capacity: str
    gathers_rows: bool
    eager: bool  # this product's program
    device_kernels: bool
    first_kernels: bool
    selective: str
    base: str  # format of frozen weights

    @classmethod
    def of(cls, model: ModelShape, plan: Plan, batch: int, sequence: int, software: Software) -> "BlockWork":
        generator = GENERATORS.get(plan.schedule)
        splits = generator is not None and generator.splits
        method = attention_method(model, plan.cols, plan.cp, plan.cp_method) if plan.cp > 1 else ""
        return cls(
            rows=plan.rows,
            cols=plan.cols,
            sp=plan.sp,
            batch=batch,
            sequence=sequence,
            fused_attention=software.fused_attention,
            compiled=plan.compile is True,
            overlaps=software.overlaps_tensor and not splits,
            overlaps_experts=software.overlaps_experts,
            graphs=software.graphs,
            splits=splits,
            ranks=plan.num_ranks,
            cp=plan.cp,
            cp_method=method,
            ep=plan.ep,
            capacity=plan.capacity,
            gathers_rows=software.gathers_rows,
            eager=software.eager,
            device_kernels=software.device_kernels,
            first_kernels=software.first_kernels,
            selective=software.selective,
            base=plan.base,
        )

    @property
    def tokens(self) -> int:
        order = TokenOrder.of_method(self.cp_method, self.sequence, self.cp) if self.cp > 1 else None
        return self.batch * (self.sequence if order is None else order.per_rank)


@dataclass(frozen=True)
class Seconds:
    """Seconds of a part of the model for one micro-batch, without communication.

    backward   of the input's gradient; `weight` of the parameters'
    shared_weight, shared_input   the gradients' seconds of the products whose input is on all columns
    selective  what recompute=selective computes again; full recompute repeats `forward`
    host       the host's time to start the forward's operators; a backward has twice as many
    """

    forward: float
    backward: float
    weight: float
    shared_weight: float = 0.0
    shared_input: float = 0.0
    selective: float = 0.0
    host: float = 0.0


@lru_cache(maxsize=1 << 16)
def product_s(
    rates: Rates, constants: Constants, m: int, n: int, k: int, groups: int = 1, speed: float = 1.0
) -> float:
    """Seconds of one product, or of `groups` together, at `speed` times the rate of the precision. See
    [Note: time of a product]."""
    flops = 2.0 * m * n * k
    if rates.operator_rates:
        return groups * rates.operator_s("linear", flops, min(m, n, k))
    if rates.product_rates:
        return groups * flops / (speed * _interpolated(rates.product_rates, flops))
    rate = rates.flops * constants.product_fraction * speed
    per_sm = rate / rates.num_sms
    best = float("inf")
    for tile_m, tile_n, speed in _TILES:
        tiles = groups * -(-m // tile_m) * -(-n // tile_n)
        splits = max(1, min(rates.num_sms // tiles, k // 512)) if tiles < rates.num_sms else 1
        waves = -(-tiles * splits // rates.num_sms)
        steps = k / splits + constants.product_start_k
        best = min(best, waves * 2.0 * tile_m * tile_n * steps / (per_sm * speed))
    moved = groups * rates.itemsize * (m * k + k * n + m * n)
    return max(best, moved / rates.memory_bytes_per_s)


# Rows and columns of a tile, and its speed: a smaller one reads its inputs more often.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 64, 0.6))


def _interpolated(points: tuple[tuple[float, float], ...], at: float) -> float:
    """Linear between measured points, in the logarithm; the ends beyond them."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if at <= high:
            part = math.log(at / low) / math.log(high / low)
            return low_rate * (high_rate / low_rate) ** part
    return points[-1][1]


def _linear(
    rates: Rates,
    constants: Constants,
    m: int,
    n: int,
    k: int,
    groups: int = 1,
    *,
    narrow: bool = False,
    fuses_casts: bool = False,
) -> tuple[float, float, float]:
    """Forward, gradient of the input, gradient of the weight. `narrow`: in float8, if the plan has it."""
    speed, cast = (rates.linear_speed, rates.cast_bytes) if narrow else (1.0, 0.0)
    # Fused casts write a value, and a transposed one.
    bytes_of = (_COPY_BYTES, 0.0) if cast and fuses_casts else (cast, cast and _COPY_BYTES)
    cast_s, copy_s = (groups * each / rates.memory_bytes_per_s for each in bytes_of)
    accumulate = groups * rates.operator_s("accumulate", n * k)
    return (
        product_s(rates, constants, m, n, k, groups, speed) + cast_s * (m * k + k * n),
        product_s(rates, constants, m, k, n, groups, speed) + cast_s * m * n,
        product_s(rates, constants, k, n, m, groups, speed) + copy_s * (m * k + m * n) + accumulate,
    )


# Read and written per element: its magnitude, then the element and its float8 value; a scale per row of each
# product's operand needs two casts. The weight gradient's product needs both operands transposed.
_CAST_BYTES = {"fp8": 5.0, "fp8-rowwise": 10.0}
_COPY_BYTES = 2.0


def expert_columns(model: ModelShape, part: BlockWork) -> int:
    """Return the columns over which complete experts of a rank of ep are divided."""
    return 1 if part.gathers_rows else model.expert_columns(part.cols, part.ep)


def rows_of_choices(model: ModelShape, capacity: str, choices: int, columns: int) -> float:
    """Return the rows that a rank sends, and receives, for each choice of its tokens, of which each of so
    many columns has a share: 1 without a capacity, else those of all experts."""
    if capacity == "none" or not model.experts:
        return 1.0
    own = -(-choices // columns)
    return expert_rows(capacity, own, model.experts) * model.experts / own


@lru_cache(maxsize=1 << 14)
def block_seconds(model: ModelShape, part: BlockWork, rates: Rates, constants: Constants) -> Seconds:
    """Seconds of one block for one micro-batch on one rank."""
    m, h = part.tokens, -(-model.hidden // part.rows)
    heads, d = -(-model.heads // part.cols), model.attention_width // model.heads
    kv_heads = -(-model.kv_heads // part.cols)
    ffn, ups = -(-model.ffn // part.cols), model.mlp_matrices - 1
    linear = partial(_linear, rates, constants, narrow=True, fuses_casts=part.device_kernels)
    # Rows of an expert, and experts of a rank: the choices of all tokens are spread evenly.
    own = expert_columns(model, part)
    experts, expert_ffn = max(1, model.experts // (part.ep * own)), ffn * own
    choices = m * max(1, model.experts_per_token)
    rows = -(-choices // (experts * own))
    if part.capacity != "none" and model.experts:
        rows = part.ep * own * expert_rows(part.capacity, -(-choices // own), model.experts)
    # In turn, products whose input is on all columns, and products whose output is summed over them.
    *first, last = (linear(m, *each) for each in model.attention_products(h, heads, kv_heads))
    products = [([sum(times) for times in zip(*first, strict=True)], 1), (last, 1)]
    # This product's experts are no linear layers.
    grouped = partial(
        linear,
        narrow=not (model.experts and part.eager),
        fuses_casts=part.device_kernels and (part.graphs or not model.experts),
    )
    products += [(grouped(rows, expert_ffn, h, experts), ups), (grouped(rows, h, expert_ffn, experts), 1)]
    if model.shared_ffn:
        shared = -(-model.shared_ffn // part.cols)
        products += [(linear(m, shared, h), ups), (linear(m, h, shared), 1)]
    forward, backward, weight = (sum(times[i] * count for times, count in products) for i in range(3))
    attention, attention_back = _attention(part, heads, d, rates, constants)
    vector, vector_back = _elementwise(model, part, heads, kv_heads, ffn, h, rates)
    launches = _FORWARD_OPERATORS + (0 if part.fused_attention else 4)
    launches += (_EXPERT_OPERATORS + _DISPATCH_OPERATORS * (part.ep > 1)) if model.experts else 0
    if model.experts and part.device_kernels:
        launches += 2 * experts * (2 if rates.cast_bytes else 1)
    gathered = products[:1] if model.experts else products[::2]  # the others' messages are not hidden
    shared_input, shared_weight = (sum(times[i] * count for times, count in gathered) for i in (1, 2))
    if model.adapter_rank:  # no gradients of the frozen weights
        adapters = _adapter_seconds(model, part, rates, constants)
        forward, backward = forward + adapters.forward, backward + adapters.backward
        weight, shared_weight = adapters.weight, 0.0
        launches += _ADAPTER_OPERATORS * len(model.linear_layers())
    host = launches * rates.launch_s * (0.5 if part.compiled else 1.0)
    host = 0.0 if rates.operator_rates else host  # see [Note: measured operators]
    device_forward = forward + attention + vector
    device_backward = backward + attention_back + vector_back
    again = attention * (part.selective != "elementwise") + vector * (part.selective != "attention")
    return Seconds(device_forward, device_backward, weight, shared_weight, shared_input, again, host)


def _adapter_seconds(model: ModelShape, part: BlockWork, rates: Rates, constants: Constants) -> Seconds:
    """LoRA on the linear layers of a block: two products of few columns each, a scaled sum; and a quantized
    base's values, which are made before a forward and before a backward."""
    m, rank, moved, moved_back = part.tokens, model.adapter_rank, 0.0, 0.0
    times = []
    for n, k in model.linear_layers(part.cols):
        times += [_linear(rates, constants, m, *each) for each in ((rank, k), (n, rank))]
        moved += 5.0 * m * n  # scaled, and added to the layer's output
        moved_back += m * (2.0 * n + 3.0 * k)
    forward, backward, weight = map(sum, zip(*times, strict=True))
    per_byte = 1 / rates.memory_bytes_per_s
    values = 0.0
    if part.base != "none":  # read, made in float32, multiplied in place, and cast
        frozen = sum(n * k for n, k in model.linear_layers(part.cols))
        values = (FORMATS[part.base].num_bytes(frozen) + (4 + 8 + 4 + rates.itemsize) * frozen) * per_byte
    return Seconds(
        forward + moved * rates.itemsize * per_byte + values,
        backward + moved_back * rates.itemsize * per_byte + values,
        weight,
    )


_ADAPTER_OPERATORS = 4  # of a layer: two products, a scale and a sum
COLLECTIVE_OPERATORS = 2  # host time of a collective, in operators: the call and its wait
# Of an eager block: 4 products and their biases, 2 norms, attention with the views around it, residuals.
_FORWARD_OPERATORS = 32
# Of experts: the router and its choice, the order of rows, products, rows of a token. Of ep: the counts.
# TransformerEngine starts the products of each expert, and its casts, by themselves (GroupedLinear).
_EXPERT_OPERATORS, _DISPATCH_OPERATORS = 26, 20


def _attention(
    part: BlockWork, heads: int, d: int, rates: Rates, constants: Constants
) -> tuple[float, float]:
    """Forward and backward of scores, softmax and values."""
    scores = float(part.tokens) * heads * part.sequence  # ranks of cp have equal parts of a triangle
    if rates.operator_rates:
        forward, backward = (
            rates.operator_s("attention" + suffix, scores * d, part.sequence) for suffix in ("", " backward")
        )
        return forward, backward
    if part.fused_attention:
        scores /= 2  # causal
        vector = scores * constants.softmax_sm_s / rates.num_sms
        if part.device_kernels:
            products = 4.0 * scores * d / (rates.flops * constants.product_fraction)
            return max(products, vector), max(2.5 * products, 2 * vector)
        products = 4.0 * scores * d / (rates.warp_flops * constants.attention_fraction)
        slowdown = _FIRST_KERNELS if part.first_kernels else 1.0
        return slowdown * (products + vector), slowdown * (2.5 * products + 2 * vector)
    slowdown = constants.unaligned_slowdown if d % 8 else 1.0
    queries, s = part.tokens * heads, part.sequence
    one = product_s(rates, constants, queries, s, d) + product_s(rates, constants, queries, d, s)
    per_byte = scores / rates.memory_bytes_per_s * rates.itemsize / 2
    # Bytes per score: softmax and dropout of the forward, read and written; their backward.
    return one * slowdown + 9 * per_byte, 2 * one * slowdown + 11 * per_byte


_FIRST_KERNELS = 1.3  # FlashAttention in Triton by FlashAttention-2: 1.3 to 2.5 (Dao 2307.08691, section 4.1)


def _elementwise(
    model: ModelShape, part: BlockWork, heads: int, kv_heads: int, ffn: int, h: int, rates: Rates
) -> tuple[float, float]:
    """Forward and backward of a block's memory-bound operators: norms, residual additions and dropout on the
    residual stream; activations, rotary embeddings and biases inside. Unless they are measured, by the bytes
    of 2-byte elements that the forward reads and writes."""
    stream = part.tokens * h / (part.cols if part.sp else 1)
    of_token, own = model.experts_per_token, expert_columns(model, part)
    chosen = of_token * rows_of_choices(model, part.capacity, part.tokens * of_token, own)
    width = ffn * max(1, chosen) + model.shared_ffn / part.cols
    if rates.operator_rates:
        numels = (stream, stream, part.tokens * (heads + kv_heads) * model.head_dim, part.tokens * width)
        forward, backward = (
            sum(
                rates.operator_s(name + suffix, numel)
                for name, numel in zip(("norm", "norm", "rotary", "activation"), numels, strict=True)
            )
            for suffix in ("", " backward")
        )
        return forward, backward
    inside = 4.0 * (heads + 2 * kv_heads) * model.head_dim
    # Rows by expert, back, and the sum of a token's. Megatron-LM sorts what it received by expert, and back.
    sorts = 8.0 * (part.gathers_rows and not part.graphs and model.experts > part.ep > 1)
    inside += (10.0 + sorts) * chosen * h / own
    moved = 20.0 * stream + part.tokens * (inside + (2.0 + 2.0 * (model.mlp_matrices - 1)) * width)
    forward = moved * rates.itemsize / 2 / rates.memory_bytes_per_s
    return forward, 2 * forward


@lru_cache(maxsize=1 << 12)
def head_seconds(model: ModelShape, part: BlockWork, rates: Rates, constants: Constants) -> Seconds:
    """The head and the loss. This product's operator computes the gradients in the forward."""
    vocab = -(-model.vocab // part.cols)
    forward, backward, weight = _linear(rates, constants, part.tokens, vocab, -(-model.hidden // part.rows))
    weight = 0.0 if model.adapter_rank else weight  # frozen
    logits = part.tokens * vocab
    if rates.operator_rates:
        loss, loss_back = (rates.operator_s(name, logits) for name in ("loss", "loss backward"))
    else:
        loss, loss_back = (num_bytes * logits / rates.memory_bytes_per_s for num_bytes in (10, 6))
    if part.eager:
        return Seconds(forward + loss + backward + loss_back + weight, 0.0, 0.0)
    return Seconds(forward + loss, backward + loss_back, weight)


@lru_cache(maxsize=1 << 12)
def embedding_seconds(model: ModelShape, part: BlockWork, rates: Rates) -> Seconds:
    """The look-up: reading and writing the tokens' vectors."""
    moved = part.tokens * model.hidden / part.rows * rates.itemsize
    read = 2 * moved / rates.memory_bytes_per_s
    if model.adapter_rank:  # frozen
        return Seconds(read, 0.0, 0.0)
    # The gradient of the table is dense: written with zeros, added to, and moved.
    numel = model.vocab / part.cols * model.hidden / part.rows
    return Seconds(read, 0.0, 2 * read + 2 * rates.operator_s("accumulate", numel))


def optimizer_s(owned: float, blocks: int, rates: Rates, optimizer: str = "AdamW") -> float:
    """Adam on the owned elements: reads gradient, weight and two moments, writes weight, moments and the
    copy in the precision of the computation, and the gradient norm reads the gradients once more. Each
    block's tensors are also checked, scaled and copied one by one. AdamW8bit reads and writes codes of 8
    bits, and both moments in float32 before and after the update."""
    if rates.operator_rates:
        return rates.operator_s("update", owned)
    codes = 2 * 2 + 2 * 2 * 4 if optimizer == "AdamW8bit" else 0
    moved = owned * (4 * 4 + 3 * 4 + rates.itemsize + 4 + codes) / rates.memory_bytes_per_s
    return max(moved, blocks * _OPTIMIZER_OPERATORS * rates.launch_s)


_OPTIMIZER_OPERATORS = 5  # per unit: norm, scale, update, copy, zero
