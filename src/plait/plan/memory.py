"""Memory arithmetic: bytes per rank by category, from the layout and the plan alone.

ZeRO's table (Rajbhandari et al. 1910.02054, section 3): mixed-precision Adam keeps 2 bytes of
parameter, 4 of fp32 gradient (2 there: we accumulate and reduce in fp32) and 12 of master weight and
moments per element.
"""

from dataclasses import dataclass, fields

from plait.plan.layout import Layout
from plait.plan.plan import Plan

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
MASTER_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}  # of master weights, gradients and optimizer state


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that one rank holds, by category. `activations` is None where nobody can say."""

    parameters: int
    gradients: int
    master: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) or 0 for field in fields(self))


def model_state_bytes(
    layout: Layout,
    plan: Plan,
    *,
    states_per_element: int,
    activation_bytes: int | None = 0,
    wire_bytes: int = 0,
) -> MemoryUse:
    """What a rank will hold. `states_per_element`: 2 for Adam, 1 for SGD with momentum, 0 without.

    `wire_bytes`: gradients that are held in the form in which they travel, where the transport asks for it.
    """
    compute, master = COMPUTE_BYTES[plan.precision], MASTER_BYTES[plan.precision]
    return MemoryUse(
        parameters=layout.numel * compute,
        gradients=layout.numel * master + wire_bytes,
        master=layout.numel * master if master != compute else 0,
        optimizer=layout.numel * master * states_per_element,
        activations=activation_bytes,
    )
