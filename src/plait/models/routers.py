"""The auxiliary loss of a mixture's routers, as the model's own code computes it, and the modules whose
outputs it reads; and the z loss of the same outputs.

# T tokens  E experts  k experts of a token  L layers with a router

[Note: loss of routers]
A model of transformers with `output_router_logits=True` adds to its loss, a mean over targets,

  coefficient E sum_i (C_i / LT) (P_i / LT)

with C_i the tokens that have expert i among their k most probable ones, and P_i the sum of its probabilities,
both over all layers; tokens that the attention mask hides are in neither, nor in T (Shazeer et al.
1701.06538; Fedus et al. 2101.03961, equations 4 to 6). C has no gradient. This is not a sum over tokens,
layers or ranks, but C and P are.

[Note: coefficient from the model's forward]
Sizes and coefficient have other names in each configuration, and wrappers keep them in another one. So the
model's own forward is run once, with stubs for its layers and a loss of zero: it calls the function of the
auxiliary loss with its sizes, and what it adds for a result of 1 is the coefficient. A forward that cannot be
run so, or a function with other results for random logits, is refused.

[Note: z loss of routers]
Large logits are rounded coarsely where a softmax follows, so ST-MoE adds the mean over tokens of the squared
logarithm of their normalizer (Zoph et al. 2202.08906, equation 5), for each layer: as there and in
Megatron-LM, layers are added up. Only one forward of transformers has such a term, that of
switch_transformers, as a mean over layers; that of nllb_moe reads its coefficient and has none.
"""

import copy
import inspect
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.task import ROUTER_LOSS, pretrained_base
from plait.models.transformers_types import is_pretrained_model

_FUNCTION, _KEY = "load_balancing_loss_func", "router_logits"
OF_BATCHES = ("NllbMoeTop2Router",)  # whose experts have a capacity of all tokens of a batch
_PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")  # what they record has been through softmax


@dataclass(frozen=True)
class RouterLoss:
    """The loss of [Note: loss of routers].

    number   E; `chosen`: k
    masks    the attention mask hides tokens from it
    routers  names of modules, and the index of the logits in their outputs
    """

    number: int
    chosen: int
    coefficient: float
    masks: bool = True
    routers: Mapping[str, int] = field(default_factory=dict)

    def sums(self, logits: Iterable[Tensor], weights_T: Tensor) -> Tensor:
        """Return (2, E): counts without a gradient, and sums of probabilities. `logits`: (T, E) of each
        layer; `weights_T`: of tokens, 0 for those that are hidden. Raises ModelError for other tokens."""
        sums = weights_T.new_zeros(2, self.number)
        for logits_TE in logits:
            _check_tokens(logits_TE, weights_T, self.number)
            probabilities_TE = torch.softmax(logits_TE, -1)
            chosen = probabilities_TE.topk(self.chosen, dim=-1).indices.flatten()
            each = weights_T.repeat_interleave(self.chosen)
            counts_E = each.new_zeros(self.number).scatter_add(0, chosen, each)
            of_layer = (probabilities_TE.to(sums.dtype) * weights_T[:, None]).sum(0)
            sums = sums + torch.stack([counts_E, of_layer])
        return sums

    def value(self, sums: Tensor, counts_E: Tensor) -> Tensor:
        """The loss of these sums of probabilities, without its coefficient, for the counts of all ranks."""
        rows = counts_E.sum() / self.chosen
        return self.number * (counts_E / rows * (sums[1] / rows)).sum()


def _check_tokens(logits_TE: Tensor, weights_T: Tensor, number: int) -> None:
    if logits_TE.shape != (*weights_T.shape, number):
        raise ModelError(
            "the logits of a router are not those of the micro-batch's tokens",
            given=f"{tuple(logits_TE.shape)}, and {weights_T.numel()} tokens",
            expected=f"(tokens, {number})",
            hint="output_router_logits=False in the model's configuration, and no router_z_loss",
        )


def z_sum(logits: Iterable[Tensor], weights_T: Tensor) -> Tensor:
    """The sum over tokens and layers of [Note: z loss of routers]: see `RouterLoss.sums`."""
    total = weights_T.new_zeros(())
    for logits_TE in logits:
        _check_tokens(logits_TE, weights_T, logits_TE.shape[-1])
        total = total + (torch.logsumexp(logits_TE.to(weights_T.dtype), -1).square() * weights_T).sum()
    return total


def routers_of(model: nn.Module) -> dict[str, int]:
    """The names of modules whose outputs transformers records as logits, and the index in the outputs."""
    return dict(_recorded(model))


def z_routers_of(model: nn.Module) -> frozenset[str]:
    """The names of routers whose logits a z loss reads, each once: jetmoe's attention records those of the
    router inside it, too. Empty if probabilities are recorded instead."""
    recorded = routers_of(model)
    around = {name for name in recorded if any(other.startswith(f"{name}.") for other in recorded)}
    own = frozenset(recorded.keys() - around)
    if any(type(model.get_submodule(name)).__name__ in _PROBABILITIES for name in own):
        return frozenset()
    return own


def mark_router_loss(model: nn.Module, *, has_loss: bool) -> RouterLoss | None:
    """Return the loss of routers that the model's own loss has, unless there is a user's loss. The model's
    forward, by `forward_inputs`, then does not compute it. Raises ModelError."""
    base = pretrained_base(model)
    if base is None:
        return None
    vars(base).pop(ROUTER_LOSS, None)
    found = None if has_loss else router_loss(model)
    if found is not None:
        vars(base)[ROUTER_LOSS] = found
    return found


def router_loss(model: nn.Module) -> RouterLoss | None:
    """The loss of routers that the model's own loss has: None without `output_router_logits`. Raises
    ModelError for a formula that is not that of [Note: loss of routers]."""
    base: Any = pretrained_base(model)
    if base is None or not getattr(base.config, "output_router_logits", False):
        return None
    if ROUTER_LOSS in vars(base):
        marked: RouterLoss = vars(base)[ROUTER_LOSS]
        return marked
    problem = "its forward does not call " + _FUNCTION
    forward: Any = inspect.unwrap(type(base).forward)
    if _FUNCTION in forward.__code__.co_names:
        try:
            return _of_forward(base, forward, routers_of(model))
        except Exception as error:  # any error of the model's code
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    raise ModelError(
        "the model's auxiliary router loss is not known, and no sum over tokens",
        given=f"output_router_logits=True, {type(base).__name__}: {problem}",
        expected=f"transformers' {_FUNCTION} of the logits of all layers, and a coefficient",
        hint="output_router_logits=False, or loss= with the auxiliary term in it",
    )


def _of_forward(base: Any, forward: Any, routers: Mapping[str, int]) -> RouterLoss:
    """See [Note: coefficient from the model's forward]."""
    function, calls = forward.__globals__[_FUNCTION], list[inspect.BoundArguments]()

    def one(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(inspect.signature(function).bind(*args, **kwargs))
        return torch.ones((), dtype=torch.float64)

    probe = copy.copy(base)
    vars(probe)["_modules"] = {name: _Stub() for name, _ in base.named_children()}
    vars(probe)["_loss_function"] = lambda *_, **__: torch.zeros((), dtype=torch.float64)
    run = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _FUNCTION: one},
        None,
        forward.__defaults__,
        forward.__closure__,
    )
    run.__kwdefaults__ = forward.__kwdefaults__
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 1, 0]])
    outputs = run(probe, input_ids=ids, labels=ids, attention_mask=mask, output_router_logits=True)
    _, number, chosen, *others = calls[0].args
    assert len(others) == len(calls) == 1, f"other arguments of {_FUNCTION}"
    assert routers, "no module whose logits are recorded"
    found = RouterLoss(number, chosen, float(outputs.loss), others[0] is mask, routers)
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(2, 6, number, generator=generator, dtype=torch.float32))
    for given in (None, mask):
        weights = torch.ones_like(mask) if given is None else given
        sums = found.sums(logits, weights.flatten().float())
        theirs, ours = float(function(logits, number, chosen, given)), float(found.value(sums, sums[0]))
        assert math.isclose(theirs, ours, rel_tol=1e-5), f"another formula: {theirs:.6g}, not {ours:.6g}"
    return found


class _Stub(nn.Module):
    """In place of layers: outputs without values."""

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Outputs()


class _Outputs(Tensor):
    """A tensor whose other attributes are tensors, or None."""

    last_hidden_state = property(lambda _: torch.zeros(2, 3, 1))
    router_logits = property(lambda _: (torch.zeros(6, 1),))

    def __new__(cls) -> "_Outputs":
        return torch.zeros(2, 3, 1).as_subclass(cls)

    def __getattr__(self, _: str) -> None:
        return None


def _recorded(model: nn.Module, name: str = "", specs: Iterable[Any] = ()) -> Iterator[tuple[str, int]]:
    if is_pretrained_model(model):
        given: Any = (getattr(model, "_can_record_outputs", None) or {}).get(_KEY, ())
        specs = given if isinstance(given, list | tuple) else (given,)
    for spec in specs:
        target, suffix = getattr(spec, "target_class", spec), getattr(spec, "class_name", None)
        layer = getattr(spec, "layer_name", None)
        is_it = isinstance(target, type) and isinstance(model, target)
        is_it = is_it or (isinstance(suffix, str) and name.endswith(suffix))
        if is_it and (layer is None or f".{layer.strip('.')}." in f".{name}."):
            yield name, getattr(spec, "index", 1)
    for key, child in model.named_children():
        yield from _recorded(child, f"{name}.{key}" if name else key, specs)
