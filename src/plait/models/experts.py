"""Mixtures of experts as transformers stores them: modules with one tensor for all experts.

[Note: experts as transformers dispatches them]
Most mixtures of transformers have a module with parameters of an expert in each element of dim 0, whose
forward takes the tokens (T, H), the experts chosen for each (T, k) and the weights of these (T, k). A
decorator of its class, `use_experts_implementation`, makes the forward call the function that the model's
configuration names: a loop over experts, or products of groups (read in transformers 5.23). All of them read
the number of experts from `num_experts`. So a module with fewer experts computes with these, by the same
functions and for any family, and a router is a module of its own, which nothing here changes.
"""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from plait.errors import ModelError, PlanError
from plait.plan.sharding import TPPlan

_DECORATED = "_is_expert_parallel"  # an attribute that the decorator gives to modules
_ARGUMENTS = 3  # of a forward, next to the module: see the note above


@dataclass(frozen=True)
class Experts:
    """A module of experts. `parameters`: their names in the model."""

    name: str
    number: int
    parameters: tuple[str, ...]


def experts_of(model: nn.Module, ranks: int) -> tuple[Experts, ...]:
    """Return the model's experts, to be divided over so many ranks. Raises ModelError for a model without
    any, or with experts that are not in the form of the note above, and PlanError if they do not divide."""
    found = tuple(_experts(model))
    if not found:
        lists = [name for name, module in model.named_modules() if name.endswith("experts")]
        raise ModelError(
            "the model has no experts that ep divides",
            given=f"{type(model).__name__}: {lists[0] + ', of its own code' if lists else 'no experts'}",
            expected="a mixture of transformers whose experts are one module, by use_experts_implementation",
            hint="a plan without ep",
        )
    for experts in found:
        if experts.number % ranks:
            divisors = [d for d in range(2, experts.number + 1) if experts.number % d == ranks % d == 0]
            raise PlanError(
                "the experts do not divide over ep",
                given=f"ep={ranks}, {experts.name} with {experts.number} experts",
                expected="a divisor of the number of experts",
                hint=" or ".join([*(f"ep={d}" for d in divisors[:4]), "a plan without ep"]),
            )
    return found


def divide_over_columns(plan: TPPlan, model: nn.Module, found: Iterable[Experts], ranks: int) -> TPPlan:
    """Return the plan in which each column has other experts, so that tokens are sent once, of the modules
    where those of each of `ranks` divide by the columns. Elsewhere columns have parts of each expert."""
    for experts in found:
        dims = {name: model.get_parameter(name).ndim for name in experts.parameters}
        plan = plan.with_own_experts(experts.name, dims, experts.number, ranks)
    return plan


def _experts(model: nn.Module) -> Iterator[Experts]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not hasattr(module, _DECORATED):
            continue
        number, own = getattr(module, "num_experts", 0), list(module.named_parameters())
        problem = None
        if any("." in key for key, _ in own) or any(True for _ in module.buffers()):
            problem = "parameters or buffers of other modules in it"
        elif any(parameter.ndim < 2 or len(parameter) != number for _, parameter in own):
            problem = f"a parameter without dim 0 of its {number} experts"
        elif len(inspect.signature(type(module).forward).parameters) != 1 + _ARGUMENTS:
            problem = "a forward with other arguments"
        elif seen & {id(parameter) for _, parameter in own}:
            problem = "parameters of another module"
        if problem is not None:
            raise ModelError(
                "the experts of this model cannot be divided over ranks",
                given=f"{name} ({type(module).__name__}): {problem}",
                expected="parameters of each expert in dim 0, and a forward of tokens, choices and weights",
                hint="a plan without ep",
            )
        seen |= {id(parameter) for _, parameter in own}
        yield Experts(name, number, tuple(f"{name}.{key}" for key, _ in own))
