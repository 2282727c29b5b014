"""Choices of experts that a batch gives, in place of those of a mixture's routers.

# B samples  S tokens of each  T = B S  L layers with experts  k experts of a token  E experts of a layer

[Note: replayed choices]
A sampler rounds in another way than a step does, and its routers choose other experts for some tokens: the
step's probabilities are not those that the tokens were drawn with. So a batch can have the sampler's choices
(rollout routing replay, Ma et al. 2510.11370). Weights and gradients remain those of the model's router.

A router ends with a topk of its scores, and computes weights from its values, or from scores at its indices.
Until a layer's experts are called by the module around them, a torch mode returns, in place of that call, the
scores of the given experts, and their numbers. It is known by its shape: k of E scores, for each of T tokens.
A layer is refused unless there is one such call, and the experts get what was given.

A recomputed block needs the same choices: it enters `choices_by` again, with what `active_choices` was.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.errors import ModelError
from plait.models.task import ROUTING
from plait.plan.plan import show_value


class _Given(TorchFunctionMode):
    """The choices of a forward. `chosen`: (B, S, k) of `layer`, which runs; None: its experts are called."""

    def __init__(self, chosen_BSLk: Tensor) -> None:
        super().__init__()
        self.chosen_BSLk, self.is_open, self.num_calls = chosen_BSLk, False, 0
        self.chosen: Tensor | None = None
        self.layer: _Layer | None = None

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.chosen is None or self.layer is None or func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs or {})
        return self._topk(func, self.chosen, self.layer.number, *args, **kwargs or {})

    def _topk(
        self, func: Any, chosen: Tensor, of: int, input: Tensor, k: int, dim: int = -1, *rest: Any, **kw: Any
    ) -> Any:
        *rows, number = input.shape
        is_choice = dim in (-1, len(rows)) and (number, k) == (of, chosen.shape[-1])
        if not is_choice or rows not in ([chosen[..., 0].numel()], [*chosen.shape[:-1]]):
            return func(input, k, dim, *rest, **kw)
        self.num_calls += 1
        indices = chosen.reshape(*rows, k)
        return torch.return_types.topk((input.gather(-1, indices), indices))

    def close(self) -> None:
        if self.is_open:
            self.is_open, self.chosen = False, None
            self.__exit__(None, None, None)


_active: ContextVar[_Given | None] = ContextVar("choices of experts", default=None)


@contextmanager
def choices_by(chosen_BSLk: Tensor | None) -> Iterator[None]:
    """Forwards inside the context have these experts, in the layers of `take_choices`. None: those of
    routers."""
    given = None if chosen_BSLk is None else _Given(chosen_BSLk)
    token = _active.set(given)
    try:
        yield
    finally:
        _active.reset(token)
        if given is not None:
            given.close()  # after an exception that no hook sees


def active_choices() -> Tensor | None:
    given = _active.get(None)
    return None if given is None else given.chosen_BSLk


@dataclass
class _Layer:
    """Hooks of a layer's experts, and of the module around them. `place`: in L; `number`: E."""

    name: str
    place: int
    number: int
    is_compared: bool = False

    def begin(self, *_: Any) -> None:
        if (given := _active.get(None)) is not None:
            given.close()
            given.chosen = given.chosen_BSLk[:, :, self.place].long()
            given.layer, given.num_calls, given.is_open = self, 0, True
            given.__enter__()

    def check(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if (given := _active.get(None)) is None:
            return
        chosen, given.chosen, seen = given.chosen, None, [*args, *kwargs.values()][1]
        is_replaced = chosen is not None and given.layer is self and given.num_calls == 1
        if chosen is not None and is_replaced and not self.is_compared:  # once: on GPUs, the host waits here
            self.is_compared = is_replaced = torch.equal(seen.long().flatten(), chosen.flatten())
        if not is_replaced:
            raise ModelError(
                f"the choice of a router cannot be replaced by {ROUTING} of the batch",
                given=f"{self.name}: {given.num_calls} calls of topk that choose "
                f"{given.chosen_BSLk.shape[-1]} of {self.number}",
                expected="one, in the module around the experts, with the scores of all tokens",
                hint=f"as many experts of each token as the model chooses; or a batch without {ROUTING}",
            )

    def end(self, *_: Any) -> None:
        if (given := _active.get(None)) is not None:
            given.close()


def take_choices(model: nn.Module, layers: Mapping[str, int]) -> None:
    """Let `choices_by` replace the choices of those of these layers that the model (or stage) has. `layers`:
    numbers of experts by the names of their modules."""
    modules = dict(model.named_modules())
    for place, (name, number) in enumerate(layers.items()):
        if name in modules:
            layer, around = _Layer(name, place, number), modules[name.rpartition(".")[0]]
            around.register_forward_pre_hook(layer.begin)
            around.register_forward_hook(layer.end, always_call=True)
            modules[name].register_forward_pre_hook(layer.check, with_kwargs=True)


def check_choices(batch: Mapping[str, Tensor], layers: Mapping[str, int], compiles: bool | str) -> None:
    """Raise ModelError for choices that cannot be used. `compiles`: the plan's value."""
    chosen, problem = batch[ROUTING], f"compile={show_value('compile', compiles)}" if compiles else ""
    rows = next((batch[key].shape[:2] for key in ("input_ids", "inputs_embeds") if key in batch), ())
    if chosen.dtype.is_floating_point or (*chosen.shape[:-1],) != (*rows, len(layers)):
        problem = f"{chosen.dtype} of shape {tuple(chosen.shape)}"
    elif chosen.numel():
        least, most = chosen.amin((0, 1, 3)).tolist(), chosen.amax((0, 1, 3)).tolist()
        bounds = zip(layers, least, most, layers.values(), strict=True)
        outside = [
            f"{name}: {low} to {high}" for name, low, high, number in bounds if low < 0 or high >= number
        ]
        problem = problem or next(iter(outside), "")
    if problem:
        raise ModelError(
            f"{ROUTING} of the batch cannot be used",
            given=problem,
            expected=f"experts of each token, of shape {(*rows, len(layers), 'k')}, each from 0 to less than "
            f"{max(layers.values())}, the experts of a layer; and compile=false",
            hint="engine.routing(batch) returns the model's own choices in this form",
        )
