"""Memory arithmetic: bytes per rank by category, from the layout and the plan alone.

ZeRO's table (Rajbhandari et al. 1910.02054, section 3): mixed-precision Adam keeps 2 bytes of parameter, 2 of
gradient and 12 of master weight and moments per element, sharded by stage. Here gradients are summed in fp32,
which takes 4 bytes per element of the range that a rank owns; full gradients, at stages that keep them, take
2 bytes when reduced in bf16, else 4 including the owned range.

[Note: memory of a GPU besides tensors]
The CUDA context with torch's kernels takes 0.5 to 0.8 GB, cuBLAS 32 MB (on Hopper) for each of the two
threads that call it, a communicator of NCCL 100 to 400 MB by its channels. The caching allocator rounds
blocks, and holds what it cannot use for the next request: 5 to 15 % without expandable segments, of what is
allocated and freed within a step; states and gradients are allocated once, in large blocks. The
constants below are estimates within these ranges, not yet measured on a GPU; the values of the last step are
in the measured memory. Pinned host memory is rounded up to a power of two for each tensor.
"""

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter

from plait.plan.axes import UnitKind
from plait.plan.compression import (
    SUM_BYTES,
    code_bytes,
    compresses,
    message_buffer_bytes,
    reduces_over_all,
    residual_bytes,
)
from plait.plan.layout import Layout, UnitLayout
from plait.plan.plan import Plan
from plait.plan.prefetch import MAX_IN_FLIGHT
from plait.plan.servers import top_share

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}  # of master weights and gradient sums
# See [Note: memory of a GPU besides tensors]
_CONTEXT_BYTES = 600 * 2**20
_WORKSPACE_BYTES = 2 * 32 * 2**20
_COMMUNICATOR_BYTES = 200 * 2**20
_ALLOCATOR_FRACTION = 0.1
CODE_BLOCK = 256  # elements of optimizer states that share a scale, if they are stored in 8-bit codes
_OFFLOADED = ("host", "disk")
CHUNK = 2**18  # elements of the optimizer's parameters on a CPU, if their states are streamed
DISK_BUFFERS = 5  # blocks of files in memory: see `optim/disk_tensors.py`
_PAGE = 4096


@dataclass(frozen=True)
class MemoryUse:
    """Bytes held by one rank, by category. `activations` is None if they cannot be estimated. Printed with
    units.

    buffers       peak of gathered parameters and gradients in flight, staging buffers, blocks of files
    activations   peak of what micro-batches keep from their forwards to their backwards
    loss          logits of one chunk of tokens in the head's operator, and copies of logits in float32
    frozen        a reference or a teacher, which the loss asks in each step, and its buffers
    runtime       on GPUs: context, kernels, workspaces of libraries, communicators
    allocator     on GPUs: what the caching allocator holds besides tensors
    host, disk    offloaded bytes: not on the device, and in no other category
    """

    parameters: int
    gradients: int
    master: int
    optimizer: int
    buffers: int
    activations: int | None
    loss: int = 0
    frozen: int = 0
    runtime: int = 0
    allocator: int = 0
    host: int = 0
    disk: int = 0

    @cached_property
    def total(self) -> int:
        """Bytes on the device, without activations if they are unknown."""
        return sum([each or 0 for each in _on_device(self)])

    def with_activations(self, num_bytes: int | None, loss_bytes: int = 0) -> "MemoryUse":
        """Return the use of a rank that also holds these. This one has none."""
        temporary = self.buffers + (num_bytes or 0) + loss_bytes
        allocator = int(temporary * _ALLOCATOR_FRACTION) if self.runtime else 0
        return replace(self, activations=num_bytes, loss=loss_bytes, allocator=allocator)

    def text_of(self, category: str) -> str:
        """The bytes of a category, or the total, with their unit. A total says what it lacks."""
        text = format_bytes(getattr(self, category))
        lacks = category == "total" and self.activations is None
        return f"at least {text}, without activations" if lacks else text

    @property
    def temporary(self) -> int:
        """Bytes that the allocator hands out and takes back in a step: all but states and gradients."""
        return self.buffers + (self.activations or 0) + self.loss

    @property
    def tensors(self) -> int:
        """Bytes of tensors on the device, as torch.cuda.max_memory_allocated counts."""
        return self.total - self.runtime - self.allocator

    def __str__(self) -> str:
        on_device, offloaded = (
            [f"{name} {self.text_of(name)}" for name in names] for names in used_categories(self)
        )
        return "; ".join([", ".join(on_device), f"total {self.text_of('total')}", *offloaded])


_on_device = attrgetter(*(each.name for each in fields(MemoryUse) if each.name not in _OFFLOADED))


def used_categories(*uses: MemoryUse) -> tuple[list[str], list[str]]:
    """Return the categories with bytes, or unknown ones, in any of `uses`: on the device, and offloaded."""
    used = [field.name for field in fields(MemoryUse) if any(getattr(use, field.name) != 0 for use in uses)]
    return [name for name in used if name not in _OFFLOADED], [name for name in used if name in _OFFLOADED]


def format_bytes(num_bytes: int | None) -> str:
    """Format bytes in the largest unit in which the value is at least 1; None as unknown."""
    if num_bytes is None:
        return "unknown"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes} B"


def model_state_bytes(
    layout: Layout,
    plan: Plan,
    *,
    states_per_element: int | Sequence[int],
    coded_groups: Set[int] = frozenset(),
    grad_itemsize: int,
    full_tensor_bytes: tuple[int, int] = (0, 0),
    exchanges: bool = False,
    receives: bool = False,
    shares: bool = False,
    scratch_bytes: int = 0,
    num_communicators: int | None = None,
) -> MemoryUse:
    """Estimate the bytes of a rank without activations. `states_per_element`: 2 for Adam, 1 for SGD with
    momentum; or by group.

    coded_groups        optimizer groups whose states are stored in 8-bit codes
    grad_itemsize       bytes per element of a full gradient
    full_tensor_bytes   of the states of full tensors that the rank owns, and of buffers during their update
    exchanges           replicas send each other full gradients
    receives            the owner of a sum buffers what each peer sends
    shares              the ranks of a shard group share one parameter memory
    scratch_bytes       buffer of a named algorithm for received data that is not yet added
    num_communicators   of NCCL, on this rank; None: the rank has no GPU
    """
    in_files, plan = plan.offload == "disk", plan.placed_on("cpu" if num_communicators is None else "cuda")
    compute, master = COMPUTE_BYTES[plan.dtype], MASTER_BYTES[plan.dtype]
    trained, owned = layout.trained_numel, layout.owned_numel
    offloads, persistent = plan.offload == "cpu", shares or params_stay_full(plan)
    parts = {
        "parameters": sum(
            times * unit.num_bytes(unit.range_numel if plan.zero == 3 or shares else unit.numel, compute)
            for unit, times in layout.equal_units
        ),
        "master": owned * master if master != compute or (offloads and persistent) else 0,
        "optimizer": _state_bytes(layout, plan, states_per_element, coded_groups) + full_tensor_bytes[0],
        "gradients": 0,
    }
    in_place = plan.keeps_full_grads and grad_itemsize == master and not offloads
    sums = 0 if in_place else owned * master
    full_gradients = trained * grad_itemsize if plan.keeps_full_grads else 0
    parts["gradients"] = sums + full_gradients + residual_bytes(layout, plan)
    buffers = _buffers(
        layout, plan, grad_itemsize, exchanges=exchanges, receives=receives, persistent=persistent
    )
    buffers += scratch_bytes + _exchange_bytes(layout, plan)
    buffers = max(buffers, full_tensor_bytes[1])
    blocks = _block_bytes(layout, plan, states_per_element, coded_groups) if in_files else 0
    buffers += 0 if offloads else blocks
    if offloads and num_communicators is not None:
        buffers += _staged_gradient_bytes(layout, plan)
    use = _offloaded(parts, plan, sums, buffers, in_files=in_files)
    if num_communicators is None:
        return use
    use = replace(use, host=use.host + (blocks if offloads else 0))
    return _on_gpu(use, layout, plan, num_communicators, in_files=in_files)


def head_chunk(num_tokens: int, num_columns: int, *, on_gpu: bool, sum_features: int = 0) -> int:
    """Tokens whose logits, of a rank's columns, exist at a time in the head's operator. Chunks are equal.

    `sum_features`: hidden features, where several chunks need a sum of the weight's gradient in float32; then
    one chunk may have as many bytes more as that, in 16 bits.
    """
    columns = max(1, num_columns)
    most = max(1, (1 << 27) // columns if on_gpu else min(1024, (1 << 25) // columns))
    if num_tokens <= most + 2 * sum_features:
        return num_tokens
    return -(-num_tokens // max(1, -(-num_tokens // most)))


def wide_chunk(num_columns: int) -> int:
    """Tokens whose logits are copied to float32 at a time on a GPU, where a chunk is a few launches and a
    product of few rows is slow: 1,024, or 2^23 logits, but at most 1 GiB."""
    return min(max(1024, (1 << 23) // num_columns), (1 << 28) // num_columns)


def _state_bytes(layout: Layout, plan: Plan, per_element: int | Sequence[int], coded_groups: Set[int]) -> int:
    """Bytes of the states of what the first rank of a shard group updates, and of the outer optimizer."""
    itemsize = 2 if plan.optim_dtype == "bf16" else MASTER_BYTES[plan.dtype]
    num_bytes = _outer_bytes(layout.owned_numel, plan)
    for unit, times in layout.equal_units:
        for group, start, stop in unit.owned_groups(0):
            of_state = code_block_bytes(start, stop) if group in coded_groups else (stop - start) * itemsize
            states = per_element if isinstance(per_element, int) else per_element[group]
            num_bytes += times * states * of_state
    return num_bytes


def code_block_bytes(start: int, stop: int) -> int:
    """Bytes of a state of elements [start, stop) of a unit, in 8-bit codes with a float32 scale per block."""
    num_blocks = -(-stop // CODE_BLOCK) - start // CODE_BLOCK if stop > start else 0
    return stop - start + 4 * num_blocks


def _outer_bytes(owned: int, plan: Plan) -> int:
    """Bytes of the outer optimizer of local steps: global weights, momentum, errors of codes, and a part that
    is exchanged during steps."""
    master = MASTER_BYTES[plan.dtype]
    if not plan.local_steps:
        return 0
    num_states = 1 if plan.local.learning_rate is None else 2
    errors = SUM_BYTES * owned if plan.exchange == "int8" else 0
    in_flight = master * owned // plan.exchange_parts if plan.local.delay else 0
    return num_states * master * owned + errors + in_flight


def _exchange_bytes(layout: Layout, plan: Plan) -> int:
    """Bytes of the codes that islands exchange."""
    if not plan.local_steps or plan.exchange == "fp32":
        return 0
    largest = max((unit.range_numel for unit in layout.units if unit.trains), default=0)
    return code_bytes(largest, plan.num_islands, plan.exchange)


def _on_gpu(
    use: MemoryUse, layout: Layout, plan: Plan, num_communicators: int, *, in_files: bool
) -> MemoryUse:
    """Add the memory of a GPU besides tensors, and the rounding of pinned host memory."""
    host = use.host
    if plan.offload == "cpu":
        sums = [unit.range_numel * MASTER_BYTES[plan.dtype] for unit in layout.units if unit.trains]
        params = [unit.num_bytes(unit.range_numel, COMPUTE_BYTES[plan.dtype]) for unit in layout.units]
        are_pinned = not in_files if _has_wide_masters(plan) else params_stay_full(plan)
        masters = sums if are_pinned else []
        pinned = [*sums, *masters, *(params if plan.zero == 3 else ())]
        host += sum(pinned_bytes(size) - size for size in pinned)
        if params_stay_full(plan):  # rounded on the host, in two staging buffers
            compute = COMPUTE_BYTES[plan.dtype]
            host += 2 * pinned_bytes(_largest_range(layout) * compute)
    return replace(
        use,
        runtime=_CONTEXT_BYTES + _WORKSPACE_BYTES + num_communicators * _COMMUNICATOR_BYTES,
        allocator=int(use.temporary * _ALLOCATOR_FRACTION),
        host=host,
    )


def _largest_range(layout: Layout) -> int:
    return max((unit.range_numel for unit in layout.units if unit.trains), default=0)


def _staged_gradient_bytes(layout: Layout, plan: Plan) -> int:
    """Bytes of the two buffers on the device for sums that are copied to the host. Sums over replicas that
    start during backward have memory of their own instead."""
    has_replicas = plan.token_ranks > plan.shard_degree and not (compresses(plan) and reduces_over_all(plan))
    defers = not params_stay_full(plan) and plan.reshard == "use" and not plan.keeps_full_grads
    sums_often = plan.micro > 1 and not plan.accumulates_full
    if has_replicas and not defers and not sums_often:
        return 0
    return 2 * _largest_range(layout) * MASTER_BYTES[plan.dtype]


def _block_bytes(
    layout: Layout, plan: Plan, states_per_element: int | Sequence[int], coded_groups: Set[int]
) -> int:
    """Bytes of the blocks of files in memory: master weights and states of a chunk. (All groups are of one
    optimizer.)"""
    per_element = states_per_element if isinstance(states_per_element, int) else max(states_per_element)
    owned = [stop - start for u in layout.units if u.trains for _, start, stop in u.owned_groups(0)]
    num_blocks, numel = sum(-(-each // CHUNK) for each in owned), min(CHUNK, max(owned, default=0))
    itemsize = 2 if plan.optim_dtype == "bf16" else MASTER_BYTES[plan.dtype]
    parts = [code_block_bytes(0, numel) if coded_groups else numel * itemsize] * per_element
    parts += [numel * MASTER_BYTES[plan.dtype]] if _has_wide_masters(plan) else []
    return min(DISK_BUFFERS, num_blocks) * sum(-(-part // _PAGE) * _PAGE for part in parts)


def pinned_bytes(num_bytes: int) -> int:
    """Bytes that torch allocates for a pinned tensor of this size."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def params_stay_full(plan: Plan) -> bool:
    """True if full parameters stay on the device."""
    return plan.zero < 3 or (plan.shard_degree == 1 and plan.offload != "cpu")


def _stays_full(unit: UnitLayout, plan: Plan) -> bool:
    """True if the unit is in one range, and so is never freed."""
    return unit.num_shards == 1 and plan.offload != "cpu"


def _has_wide_masters(plan: Plan) -> bool:
    return COMPUTE_BYTES[plan.dtype] != MASTER_BYTES[plan.dtype]


def _offloaded(parts: dict[str, int], plan: Plan, sums: int, buffers: int, *, in_files: bool) -> MemoryUse:
    """Move to host or disk what the plan offloads."""
    host = disk = 0
    if in_files:
        masters = parts["master"] if _has_wide_masters(plan) else 0
        disk = masters + parts["optimizer"]
        parts |= {"master": parts["master"] - masters, "optimizer": 0}
    if plan.offload == "cpu":
        host = parts["master"] + parts["optimizer"] + sums
        parts |= {"master": 0, "optimizer": 0, "gradients": parts["gradients"] - sums}
        if plan.zero == 3:
            host += parts["parameters"]
            parts["parameters"] = 0
    return MemoryUse(**parts, buffers=buffers, activations=0, host=host, disk=disk)


def _buffers(
    layout: Layout, plan: Plan, grad_itemsize: int, *, exchanges: bool, receives: bool, persistent: bool
) -> int:
    """Peak bytes of buffers in forward or backward, walking the units in the layout's order.

    Counted in backward when unit k is complete and its reduction starts: its parameters and the prefetched
    ones, its gradient, gradients in flight, what peers have sent for them, copies rounded for sending, and,
    in flight between replicas, the ranges of finished reductions. Compressed gradients are compressed in
    place; their message buffers are persistent. Of quantized units, one at a time is dequantized.
    """
    units, compute = layout.units[::-1], COMPUTE_BYTES[plan.dtype]
    per_element = grad_itemsize * (0 if plan.keeps_full_grads else 1)
    peers = {kind: plan.reduced_ranks // (plan.ep if kind is UnitKind.EXPERT else 1) - 1 for kind in UnitKind}
    received = receives and not compresses(plan)
    from_peers = [
        (u.numel * peers[u.kind] if exchanges else u.numel - u.range_numel) * received for u in units
    ]
    exchanges = reduces_over_all(plan) if compresses(plan) else exchanges
    ahead = len(units) if plan.reshard == "step" else plan.prefetch
    in_flight = len(units) if plan.keeps_full_grads else MAX_IN_FLIGHT
    sent_itemsize = 2 if plan.reduce == "bf16" and plan.reduced_ranks > 1 else grad_itemsize
    copies = sent_itemsize if sent_itemsize < grad_itemsize else 0
    replica_itemsize = 0 if exchanges or plan.algorithm_reduces_all else _replica_copy_itemsize(plan)
    defers = not persistent and plan.reshard == "use"  # replicas are reduced after backward
    peak = layout.owned_numel * replica_itemsize
    values_of = [unit.numel * compute if unit.format else 0 for unit in units]  # dequantized
    if persistent and not (per_element or received or copies):
        return peak + max(values_of, default=0) + sum(message_buffer_bytes(layout, plan))
    gathered_of = [
        0 if persistent or _stays_full(unit, plan) else unit.num_bytes(unit.numel, compute) for unit in units
    ]
    up_to = [0, *accumulate(gathered_of)]
    # Units of one block are gathered together. (The planner has a block's units several times.)
    edges, names = [0], set[str]()
    for k, (before, unit) in enumerate(pairwise(units), 1):
        names.add(before.name)
        if unit.block != before.block or unit.name in names:
            edges.append(k)
            names.clear()
    edges.append(len(units))
    trained = [(0, 0, 0)]  # elements of the units so far, of what peers have sent for them, and of own ranges
    for k, unit in enumerate(units):
        # An embedding's gradient arrives during the previous use: backward does not read its weight.
        use = bisect_right(edges, k - 1 if unit.block == "embedding" and k else k) - 1
        first, last = (0, -1) if plan.reshard == "step" else (use, min(use + 1 + ahead, len(edges) - 1))
        if unit.trains:
            numel, sent, owned = trained[-1]
            trained.append((numel + unit.numel, sent + from_peers[k], owned + unit.range_numel))
        earlier = trained[max(0, len(trained) - 2 - in_flight)]
        unreduced, sent = trained[-1][0] - earlier[0], trained[-1][1] - earlier[1]
        held = up_to[edges[last]] - up_to[edges[first]] + unreduced * (per_element + copies)
        held += (
            sum(values_of[edges[use] : edges[use + 1]])
            + sent * sent_itemsize
            + (0 if defers else earlier[2]) * replica_itemsize
        )
        peak = max(peak, held)
    return peak + sum(message_buffer_bytes(layout, plan))


def _replica_copy_itemsize(plan: Plan) -> int:
    """Bytes per element of the copies of owned ranges that are sent between replicas."""
    if plan.reduced_ranks == plan.shard_degree:
        return 0
    if plan.reduce == "bf16":
        return 2
    return MASTER_BYTES[plan.dtype] if plan.offload == "cpu" else 0


def server_memory(plan: Plan, numel: int, states_per_element: int) -> MemoryUse:
    """Bytes of a server, and what a colocated one adds to its worker: weights, sums of gradients, states.
    `states_per_element`: of the engine's optimizer."""
    if plan.local_steps:  # the servers' is the outer one
        states_per_element = int(plan.local.momentum > 0)
    held = -(-numel // plan.num_servers) * MASTER_BYTES[plan.dtype] * (1 + (plan.server == "replicated"))
    return MemoryUse(0, held, held, states_per_element * held, 0, 0)


def worker_memory(plan: Plan, use: MemoryUse, numel: int, states_per_element: int) -> MemoryUse:
    """Bytes of a worker of the plan. `use`: of a process that trains alone, by `Plan.of_worker`."""
    has_residuals = plan.push_format == "int8" or top_share(plan.push_format)  # what pushes have not sent
    residuals = numel * MASTER_BYTES[plan.dtype] if has_residuals else 0
    kept = use.optimizer + numel * MASTER_BYTES[plan.dtype] if plan.local_steps else 0  # global weights
    use = replace(use, optimizer=kept, gradients=use.gradients + residuals)
    if plan.server != "colocated":
        return use
    own = server_memory(plan, numel, states_per_element)
    return replace(
        use,
        optimizer=use.optimizer + own.optimizer,
        master=use.master + own.master,
        gradients=use.gradients + own.gradients,
    )
