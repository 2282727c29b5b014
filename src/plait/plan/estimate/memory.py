"""Memory arithmetic: bytes per rank by category, from the layout and the plan alone.

ZeRO's table (Rajbhandari et al. 1910.02054, section 3): mixed-precision Adam keeps 2 bytes of
parameter, 2 of gradient and 12 of master weight and moments per element, cut as the stage says. Ours
adds up gradients in fp32, which takes 4 bytes per element of the range that a rank owns; whole gradients,
where the stage keeps them, take 2 where they travel in bf16, else 4 with the owned range among them.
"""

from dataclasses import dataclass, fields

from plait.plan.compression import compresses, message_buffer_bytes, reduces_over_all, residual_bytes
from plait.plan.layout import Layout
from plait.plan.plan import Plan
from plait.plan.prefetch import MAX_IN_FLIGHT

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}  # of master weights and sums of gradients


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that one rank holds, by category. `activations` is None where nobody can say.

    buffers       the most that is held at a time for gathered parameters and travelling gradients
    activations   the most that micro-batches keep at a time from their forwards to their backwards
    host, disk    what is offloaded: not on the device, and in no other category
    """

    parameters: int
    gradients: int
    master: int
    optimizer: int
    buffers: int
    activations: int | None
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        elsewhere = ("host", "disk")
        return sum(getattr(self, field.name) or 0 for field in fields(self) if field.name not in elsewhere)


def model_state_bytes(
    layout: Layout,
    plan: Plan,
    *,
    states_per_element: int,
    grad_itemsize: int,
    exchanges: bool = False,
    receives: bool = False,
    shares: bool = False,
    scratch_bytes: int = 0,
    activation_bytes: int | None = 0,
) -> MemoryUse:
    """What a rank will hold. `states_per_element`: 2 for Adam, 1 for SGD with momentum, 0 without.

    `grad_itemsize`: of an element of a whole gradient. What the transport asks for: `exchanges`, replicas
    send each other whole gradients; `receives`, who adds up holds what each peer sends; `shares`, parameters
    are one memory for the ranks of a shard group; `scratch_bytes`, what an algorithm keeps for what it has
    received and not yet added.
    """
    compute, master = COMPUTE_BYTES[plan.precision], MASTER_BYTES[plan.precision]
    shards = plan.shard_degree
    whole, trained = layout.numel, layout.trained_numel
    owned = trained // shards
    offloads = plan.offload == "cpu"
    stays = shares or _params_stay_full(plan)
    parts = {
        "parameters": compute * (whole // shards if plan.zero == 3 or shares else whole),
        "master": owned * master if master != compute or (offloads and stays) else 0,
        "optimizer": sum(stop - start for u in layout.units for _, start, stop in u.owned_group_ranges(0))
        * states_per_element
        * (2 if plan.optim_dtype == "bf16" else master),
        "gradients": 0,
    }
    in_place = plan.keeps_full_grads and grad_itemsize == master and not offloads
    sums = 0 if in_place else owned * master
    full_gradients = trained * grad_itemsize if plan.keeps_full_grads else 0
    parts["gradients"] = sums + full_gradients + residual_bytes(layout, plan)
    buffers = _buffers(layout, plan, grad_itemsize, exchanges=exchanges, receives=receives, stays=stays)
    buffers += scratch_bytes
    return _offloaded(parts, plan, sums, buffers, activation_bytes)


def _params_stay_full(plan: Plan) -> bool:
    """Whether parameters stay whole on the device."""
    return plan.zero < 3 or (plan.shard_degree == 1 and plan.offload != "cpu")


def _offloaded(
    parts: dict[str, int], plan: Plan, sums: int, buffers: int, activation_bytes: int | None
) -> MemoryUse:
    """Moves to host or disk what the plan offloads."""
    host = disk = 0
    if plan.offload == "cpu":
        host = parts["master"] + parts["optimizer"] + sums
        parts |= {"master": 0, "optimizer": 0, "gradients": parts["gradients"] - sums}
        if plan.zero == 3:
            host += parts["parameters"]
            parts["parameters"] = 0
    if plan.offload == "disk":
        disk = parts["master"] + parts["optimizer"]
        parts |= {"master": 0, "optimizer": 0}
    return MemoryUse(**parts, buffers=buffers, activations=activation_bytes, host=host, disk=disk)


def _buffers(
    layout: Layout, plan: Plan, grad_itemsize: int, *, exchanges: bool, receives: bool, stays: bool
) -> int:
    """The most that forward or backward holds at a time, walking the units in the layout's order.

    In backward, when unit k is complete and its reduction starts: its parameters and those gathered ahead,
    its gradient, those that travel, what peers have sent for all of them, copies that are rounded to travel,
    and on their way between replicas the ranges of those that have landed. Compressed gradients travel in
    place, their messages in rooms that are always there.
    """
    units = layout.units[::-1]
    per_element = grad_itemsize * (0 if plan.keeps_full_grads else 1)
    whole_received = float(plan.dp - 1) if exchanges else (plan.shard_degree - 1) / plan.shard_degree
    received = whole_received if receives and not compresses(plan) else 0.0
    exchanges = reduces_over_all(plan) if compresses(plan) else exchanges
    ahead = len(units) if plan.reshard == "step" else plan.prefetch
    travelling = len(units) if plan.keeps_full_grads else MAX_IN_FLIGHT
    wire = 2 if plan.reduce == "bf16" and plan.dp > 1 else grad_itemsize
    copies = wire if wire < grad_itemsize else 0
    between = 0 if exchanges or plan.algorithm_reduces_all else _copied_for_replicas(plan)
    waits = not stays and plan.reshard == "use"  # replicas add up after backward
    most = layout.trained_numel // plan.shard_degree * between
    for k in range(len(units)):
        # An embedding's gradient comes during the use before it: backward reads no row of its table.
        place = k - 1 if units[k].block == "embedding" and k else k
        window = units if plan.reshard == "step" else units[place : place + 1 + ahead]
        gathered = 0 if stays else sum(unit.numel for unit in window)
        gradients = [unit.numel for unit in units[: k + 1] if unit.trains]
        whole = sum(gradients[-travelling - 1 :])
        landed = 0 if waits else sum(gradients) - whole
        held = gathered * COMPUTE_BYTES[plan.precision] + whole * per_element
        held += int(whole * received) * wire + whole * copies + landed // plan.shard_degree * between
        most = max(most, held)
    return most + sum(message_buffer_bytes(layout, plan))


def _copied_for_replicas(plan: Plan) -> int:
    """Bytes per element of an owned range that travels between replicas in a copy."""
    if plan.dp == plan.shard_degree:
        return 0
    if plan.reduce == "bf16":
        return 2
    return MASTER_BYTES[plan.precision] if plan.offload == "cpu" else 0
