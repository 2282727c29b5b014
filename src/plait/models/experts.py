"""Mixtures of experts: modules with tensors for all experts, and how they are called.

# T tokens  k experts of each  H hidden  R rows, each for one expert

[Note: experts as transformers dispatches them]
Most mixtures of transformers have a module with parameters of an expert in each element of dim 0, whose
forward takes the tokens (T, H), the experts chosen for each (T, k) and the weights of these (T, k). A
decorator of its class, `use_experts_implementation`, makes the forward call the function that the model's
configuration names: a loop over experts, or products of groups (read in transformers 5.23). All of them read
the number of experts from `num_experts`. So a module with fewer experts computes with these, by the same
functions and for any family, and a router is a module of its own, which nothing here changes. A module
without the decorator, but with such parameters and such a forward, is the same.

[Note: grouped products]
Rows arrive in the order of experts. transformers' function of grouped products sorts them, copies them into
that order and back, and multiplies by weights, which are 1 here: 5 ms of a layer's forward and backward, for
4,096 rows of 256 features. So its products are called without it. Other functions are called as they are.

[Note: experts with forwards of their own]
Other families have the parameters of experts along dim 0, too, and other forwards. FORMS says by class what
their arguments mean, and how rows for some experts are computed:

  dbrx      the common forward; parameters in a module of its own, with the rows of all experts in one dim
  jetmoe    rows in the order of experts, and how many are for each. It is a linear layer; a block has one
            before and one after the activation, or attention, so each has messages of its own
  llama4    every token for every expert, zeros where it is not chosen. The mixture around the experts calls
            them with rows for the chosen ones instead

[Note: lists of experts]
Older families have a module for each expert, in a subclass of `nn.ModuleList` or `nn.ModuleDict`. Its forward
has tokens, choices and weights (switch_transformers: choices as numbers 0 and 1). A rank has the parameters
of its experts, and empty ones of the others. The forward is called for a copy of the list that has these
experts as its first ones. It skips an expert without tokens; but its gradient has to be there, as zeros, at
the same point of the program on all ranks. So each is called with no token, too.
"""

import copy
import inspect
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.models.parameter_adapters import parameter_adapters
from plait.plan.sharding import ExpertDim, TPPlan

_DECORATED = "_is_expert_parallel"  # an attribute that the decorator gives to modules
_ARGUMENTS = 3  # of a forward, next to the module: see the note above


def _given(x: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, experts_Tk, weights_Tk


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows, in the order of a rank's experts, for each: (e,), on the device and on the host."""

    per_expert: Tensor
    on_host: Sequence[int]

    def experts(self) -> Tensor:
        """The expert of each row: (R, 1)."""
        if self.per_expert.is_meta:
            return self.per_expert.new_empty(sum(self.on_host), 1)
        experts_e = torch.arange(len(self.on_host), device=self.per_expert.device)
        return experts_e.repeat_interleave(self.per_expert, output_size=sum(self.on_host))[:, None]


def _by_module(forward: Callable[..., Tensor], module: Any, x_RH: Tensor, sizes: Sizes) -> Tensor:
    linear = getattr(forward, "__globals__", {}).get("_grouped_linear")  # the decorator's function has it
    if linear is not None and module.config._experts_implementation == "grouped_mm":
        return _grouped(linear, module, x_RH, sizes)
    return forward(module, x_RH, sizes.experts(), x_RH.new_ones(len(x_RH), 1)).flatten(0, -2)


def _grouped(linear: Callable[..., Tensor], module: Any, x_RH: Tensor, sizes: Sizes) -> Tensor:
    """See [Note: grouped products]."""
    ends_e = sizes.per_expert.cumsum(0, dtype=torch.int32)

    def product(x: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias")[sizes.experts()[:, 0]] if module.has_bias else None
        return linear(x, getattr(module, name), ends_e, bias=bias, is_transposed=module.is_transposed)

    if module.has_gate:
        hidden = module._apply_gate(product(x_RH, "gate_up_proj"))
    else:
        hidden = module.act_fn(product(x_RH, "up_proj"))
    y_RH = product(hidden, "down_proj")
    return module.post_expert_norm(y_RH) if module.has_post_expert_norm else y_RH


@dataclass(frozen=True)
class Form:
    """How modules of a class are called. See [Note: experts with forwards of their own].

    read      from its arguments: tokens (..., H), and for each k experts and their weights
    compute   from the module's forward, the module and rows in the order of experts: the results (R, H)
    caller    forward of the module around it, if that has to call it in another way
    """

    read: Callable[..., tuple[Tensor, Tensor, Tensor]] = _given
    compute: Callable[[Callable[..., Tensor], Any, Tensor, Sizes], Tensor] = _by_module
    caller: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Experts:
    """A module of experts. `parameters`: where they have experts, by their names in the model; those of
    adapters too."""

    name: str
    number: int
    parameters: Mapping[str, ExpertDim]
    form: Form = Form()


def _jetmoe_rows(inputs: Tensor, expert_size: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    sizes, experts = torch.tensor(expert_size), torch.arange(len(expert_size))
    experts_T = experts.repeat_interleave(sizes, output_size=len(inputs)).to(inputs.device)
    return inputs, experts_T[:, None], inputs.new_ones(len(inputs), 1)


def _jetmoe_linear(forward: Callable[..., Tensor], module: Any, x_RH: Tensor, sizes: Sizes) -> Tensor:
    return forward(module, x_RH, sizes.on_host)


def _llama4_mlps(_: Any, module: Any, x_RH: Tensor, sizes: Sizes) -> Tensor:
    weights = zip(x_RH.split(list(sizes.on_host)), module.gate_up_proj, module.down_proj, strict=True)
    halves = [((x @ gate_up).chunk(2, -1), down) for x, gate_up, down in weights]
    return torch.cat([(up * module.act_fn(gate)) @ down for (gate, up), down in halves])


def _llama4_mixture(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x_TH = hidden_states.reshape(-1, module.hidden_dim)
    scores_TE, logits_TE = module.router(x_TH)
    experts_Tk = logits_TE.topk(module.top_k, 1).indices
    x_TkH = x_TH[:, None] * scores_TE.gather(1, experts_Tk)[..., None]  # scores weigh inputs
    rows = x_TkH.flatten(0, 1)
    y_RH = module.experts(rows, experts_Tk.reshape(-1, 1), rows.new_ones(len(rows), 1))
    return module.shared_expert(x_TH) + y_RH.view(x_TkH.shape).sum(1), logits_TE


def _of_list(forward: Callable[..., Tensor], module: Any, x_RH: Tensor, sizes: Sizes) -> Tensor:
    """See [Note: lists of experts]."""
    listed, local = _listed(module), copy.copy(module)
    own = [expert for expert in listed.values() if any(p.numel() for p in expert.parameters())]
    others = {key: child for key, child in module.named_children() if key not in listed}
    local._modules = {**dict(zip(listed, own, strict=False)), **others}
    y_RH = _by_module(forward, local, x_RH, sizes)
    return y_RH + torch.stack([expert(x_RH[:0]).sum() for expert in own]).sum()


def _listed(module: nn.Module) -> dict[str, nn.Module]:
    """The experts of a list, without modules that they share."""
    return {key: child for key, child in module.named_children() if any(True for _ in child.parameters())}


def _switch_rows(x_TH: Tensor, chosen_T1E: Tensor, weights_T1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    none = chosen_T1E.shape[-1]  # beyond the capacity of its expert
    return x_TH, torch.where(chosen_T1E.any(-1), chosen_T1E.argmax(-1), none), weights_T1


def _switch_mlps(forward: Callable[..., Tensor], module: Any, x_RH: Tensor, sizes: Sizes) -> Tensor:
    def with_numbers(local: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return forward(local, x, nn.functional.one_hot(experts, module.num_experts), weights)

    return _of_list(with_numbers, module, x_RH, sizes)


_LIST = Form(compute=_of_list)
FORMS = {
    "DbrxExperts": Form(),
    "JetMoeParallelExperts": Form(_jetmoe_rows, _jetmoe_linear),
    "Llama4TextExperts": Form(_given, _llama4_mlps, _llama4_mixture),
    "SwitchTransformersExperts": Form(_switch_rows, _switch_mlps),
}


def expert_layers(model: nn.Module) -> dict[str, int]:
    """The numbers of experts by the names of modules that are in the form of the note above."""
    return {name: int(m.num_experts) for name, m in model.named_modules() if hasattr(m, _DECORATED)}


def experts_of(model: nn.Module, ranks: int) -> tuple[Experts, ...]:
    """Return the model's experts, to be divided over so many ranks. Raises ModelError for a model without
    any, or with experts that are not in the form of the note above, and PlanError if they do not divide."""
    found = tuple(_experts(model))
    if not found:
        lists = [name for name, module in model.named_modules() if name.endswith("experts")]
        raise ModelError(
            "the model has no experts that ep divides",
            given=f"{type(model).__name__}: {lists[0] + ', of its own code' if lists else 'no experts'}",
            expected="experts in tensors of three dims, or in a list of a class with a forward of tokens, "
            "choices and weights: docs/experts.md",
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
    that have those of each of `ranks` in one tensor, divisible by the columns. Elsewhere columns have parts
    of each expert."""
    for experts in found:
        shapes = {name: model.get_parameter(name).shape for name in experts.parameters}
        own = [shape for name, shape in shapes.items() if name.startswith(f"{experts.name}.")]
        if all(shape[0] == experts.number for shape in own):
            plan = plan.with_own_experts(experts.name, experts.parameters, shapes, experts.number, ranks)
    return plan


def _experts(model: nn.Module) -> Iterator[Experts]:
    seen: set[int] = set()
    adapters = [*parameter_adapters(model)]
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and _is_common(module)
        form = FORMS.get(type(module).__name__) or (_LIST if is_list else None)
        if form is None and not (hasattr(module, _DECORATED) or _is_plain(module)):
            continue
        own = dict(module.named_parameters())
        listed = [*_listed(module)] if is_list else []
        number = len(listed) or getattr(module, "num_experts", 0)
        problem = None
        if any(True for _ in module.buffers()) or (form is None and any("." in key for key in own)):
            problem = "parameters or buffers of other modules in it"
        elif not is_list and any(
            len(p) % number or (form is None and len(p) != number) for p in own.values()
        ):
            problem = f"a parameter without dim 0 of its {number} experts"
        elif form is None and not _is_common(module):
            problem = "a forward with other arguments"
        elif seen & {id(parameter) for parameter in own.values()}:
            problem = "parameters of another module"
        if problem is not None:
            raise ModelError(
                "the experts of this model cannot be divided over ranks",
                given=f"{name} ({type(module).__name__}): {problem}",
                expected="parameters of each expert in dim 0, and a forward of tokens, choices and weights",
                hint="a plan without ep",
            )
        seen |= {id(parameter) for parameter in own.values()}
        at = {
            f"{name}.{key}": ExpertDim(*(listed.index(key.partition(".")[0]), number) if is_list else ())
            for key in own
        }
        of_adapters = (adapter.parts for adapter in adapters if adapter.module == name)
        yield Experts(name, number, dict(ChainMap(at, *of_adapters)), form or Form())


def _is_common(module: nn.Module) -> bool:
    """Return whether its forward has as many arguments as [Note: experts as transformers dispatches them]
    says."""
    return len(inspect.signature(type(module).forward).parameters) == 1 + _ARGUMENTS


def _is_plain(module: nn.Module) -> bool:
    """Return whether it is like a module with the decorator."""
    own, number = list(module.parameters(recurse=False)), getattr(module, "num_experts", None)
    return (
        bool(own)
        and all(parameter.ndim == 3 and len(parameter) == number for parameter in own)
        and _is_common(module)
    )
