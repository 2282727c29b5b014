"""Numbers of all tokens of a micro-batch or a step, and not of a rank's: the auxiliary loss of routers, the
loads of experts, and the biases that follow from these.

# E experts  k experts of a token  L layers of experts

[Note: sums of stages and ranks]
The loss of routers is a product of counts and of sums of probabilities, each over all layers and over the
tokens of all data ranks (models/routers.py). A stage adds those of its layers to the (2, E) that it receives,
and sends them on with its activations. The last stage sums the counts over the ranks with other tokens of
the micro-batch, and takes the product with its own ranks' sums of probabilities: the terms of the ranks are
then the loss. The gradient of these sums is the counts of all ranks and stages, and returns to each stage
with those of its activations: no stage needs them before.

A step's loss is a sum over targets. So a micro-batch's auxiliary loss is multiplied by its targets, on all
ranks: the result is that of the loop over the same micro-batches in one process, in training and evaluation.

[Note: outputs of a forward alone]
Hooks of routers and experts keep what they see while the stage's forward runs, and not when a block runs
again in backward. They compute nothing: a recomputed block would have to save as much as the first time.
Logits are attached to the graph of the first forward.

[Note: biases of routers]
Some routers choose by scores to which a buffer is added (DeepSeek-V3, 2412.19437, section 2.1.2). After a
step, b += rate sign(mean load - load), from the tokens of all its micro-batches and ranks. All ranks have the
same sums, so they have the same biases. A step that is skipped leaves them as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.comm import Group, all_reduce
from plait.errors import ConfigError
from plait.models.experts import expert_layers
from plait.models.routers import RouterLoss, mark_router_loss
from plait.models.task import ROUTING
from plait.parallel.context.tokens import SharedTokens
from plait.parallel.experts.capacity import Capacity

_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class RouterFacts:
    """A model's routers. `loss`: the auxiliary one, which the engine adds; `layers`: the numbers of experts
    by the names of their modules; `bias_rate`: of [Note: biases of routers]; `capacities`: of layers, with
    the plan's key."""

    loss: RouterLoss | None
    layers: Mapping[str, int]
    bias_rate: float | None = None
    capacities: Mapping[str, Capacity] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: nn.Module, *, has_loss: bool, bias_rate: float | None) -> "RouterFacts":
        """Raises ModelError for an unknown auxiliary loss, ConfigError for a rate without biases."""
        layers = expert_layers(model)
        if bias_rate is not None and not any(
            _bias_of(model, name, of) is not None for name, of in layers.items()
        ):
            raise ConfigError(
                "the model's routers have no biases to update",
                given=f"router_bias_update={bias_rate}, {type(model).__name__}",
                expected=f"a mixture of transformers whose routers have a buffer {_BIAS}",
                hint="no router_bias_update",
            )
        return cls(mark_router_loss(model, has_loss=has_loss), layers, bias_rate)

    def of_step(self, totals: Sequence[float]) -> tuple[float | None, dict[str, list[int]], int | None]:
        """From `StageRouters.totals` of all ranks: targets times auxiliary losses, the loads of layers, which
        are empty where they are not counted, and with capacities the number of dropped choices."""
        numbers = iter(totals)
        aux_sum = None if self.loss is None else next(numbers)
        loads = {name: [round(load) for load in islice(numbers, of)] for name, of in self.layers.items()}
        dropped = round(next(numbers)) if self.capacities else None
        return aux_sum, {name: of for name, of in loads.items() if of}, dropped


def _bias_of(model: nn.Module, experts: str, number: int) -> Tensor | None:
    """The bias of the router next to a module of experts."""
    for name, buffer in model.get_submodule(experts.rpartition(".")[0]).named_buffers():
        if name.rpartition(".")[2] == _BIAS and buffer.numel() == number:
            return buffer
    return None


class Pass(NamedTuple):
    """A forward. `is_counted`: False for a micro-batch that other ranks alone have; `trains`: it is part of a
    step."""

    is_counted: bool = True
    trains: bool = False


PLAIN = Pass()


class Tap:
    """Keeps a tensor of each call of a module while it is open: an entry of its output, or of its arguments.
    A copied model has taps of its own, which nothing opens. Compiled code has no value of a tap in it, so
    that blocks of one kind still share it."""

    def __init__(self) -> None:
        self.is_open, self.seen = False, tuple[Tensor, ...]()

    def of_output(self, module: nn.Module, index: int) -> "Tap":
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if self.is_open:
                self.seen = (*self.seen, output[index] if isinstance(output, tuple) else output)

        module.register_forward_hook(keep)
        return self

    def of_argument(self, module: nn.Module, index: int) -> "Tap":
        def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_open:
                self.seen = (*self.seen, [*args, *kwargs.values()][index])

        module.register_forward_pre_hook(keep, with_kwargs=True)
        return self

    def close(self) -> tuple[Tensor, ...]:
        seen, self.seen, self.is_open = self.seen, (), False
        return seen


class StageRouters:
    """The routers of a stage.

    loss    the auxiliary loss of the model; None: it has none
    layers  those of the model: numbers of experts by the names of their modules
    totals  of a step so far, on this rank: targets times auxiliary losses, with a loss; and the loads of all
            layers of the model; and with capacities, dropped choices
    """

    def __init__(
        self, module: nn.Module, facts: RouterFacts, data_ranks: Group, device: torch.device, *, counts: bool
    ) -> None:
        """`data_ranks`: with other tokens of a step. `counts`: loads of experts."""
        self.loss, self._group, self._rate = facts.loss, data_ranks, facts.bias_rate
        self.layers, self._capacities = facts.layers, facts.capacities
        self._module, self._sums = module, torch.zeros(0)
        self._recorded: list[Tensor] | None = None
        modules, stop = dict(module.named_modules()), int(facts.loss is not None)
        recorded = {} if facts.loss is None else facts.loss.routers
        self._logits = [Tap().of_output(modules[n], at) for n, at in recorded.items() if n in modules]
        self._choices: list[tuple[str, slice, Tap]] = []
        for name, number in facts.layers.items() if counts else ():
            start, stop = stop, stop + number
            if name in modules:
                self._choices.append((name, slice(start, stop), Tap().of_argument(modules[name], 1)))
        stop += bool(facts.capacities)
        self.totals = torch.zeros(stop, dtype=torch.float64, device=device)

    def received(self, message: Any) -> Any:
        """Return what the stage received, without the sums of earlier stages, which it keeps."""
        self._sums = torch.zeros(2, 0)
        if self.loss is None or message is None:
            return message
        message, self._sums = message
        return message

    def without_choices(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entries.items() if key != ROUTING or not self.layers}

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Forwards inside the context record the choices (T, k) of each layer, in order."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def watching(self, micro: Mapping[str, Tensor], kind: Pass) -> Iterator[None]:
        """The context of a forward, after `received`: afterwards the sums, and in training the totals,
        include those of its layers."""
        watches = kind.trains or self._recorded is not None
        taps = [*self._logits, *(tap for *_, tap in self._choices if watches)]
        for tap in taps:
            tap.is_open = True
        try:
            yield
        finally:
            seen = {tap: tap.close() for tap in taps}
        if self._recorded is not None:
            self._recorded += [chosen for *_, tap in self._choices for chosen in seen[tap]]
        if not taps and self.loss is None:
            return
        weights_T = _weights(micro) * kind.is_counted
        if self.loss is not None:
            logits = [each for tap in self._logits for each in seen[tap]]
            mask = _mask(micro) if self.loss.masks else None
            hidden_T = weights_T if mask is None else weights_T * mask.to(weights_T)
            wide = torch.promote_types(logits[0].dtype if logits else torch.float32, torch.float32)
            own = self.loss.sums(logits, hidden_T.to(wide))
            self._sums = self._sums + own if self._sums.numel() else own
        for name, own_range, tap in self._choices if kind.trains else ():
            for chosen_Tk in seen[tap]:
                load_E = self.totals[own_range]
                is_expert_Tk = self._add_load(load_E, chosen_Tk, weights_T)
                if (capacity := self._capacities.get(name)) is not None:
                    self.totals[-1] += (is_expert_Tk * ~capacity.kept(chosen_Tk, len(load_E))).sum()

    def _add_load(self, load_E: Tensor, chosen_Tk: Tensor, weights_T: Tensor) -> Tensor:
        is_expert_Tk = (chosen_Tk >= 0) & (chosen_Tk < len(load_E))  # some models choose none for padding
        if not weights_T.ndim or len(weights_T) == len(chosen_Tk):
            is_expert_Tk = is_expert_Tk * weights_T[..., None]
        chosen = chosen_Tk.clamp(0, len(load_E) - 1).flatten()
        load_E.scatter_add_(0, chosen.long(), is_expert_Tk.flatten().to(load_E.dtype))
        return is_expert_Tk

    def take_totals(self) -> Tensor:
        """Return the totals, and begin at zero."""
        taken, self.totals = self.totals, torch.zeros_like(self.totals)
        return taken

    def message(self, outputs: Any) -> Any:
        """Return what the stage sends: its outputs, and the sums."""
        return outputs if self.loss is None else (outputs, self._sums)

    def added(self, total: Tensor, count: int | Tensor, kind: Pass) -> Tensor:
        """On the last stage: a micro-batch's summed loss, with this rank's part of the auxiliary loss. See
        [Note: sums of stages and ranks]. Collective."""
        if self.loss is None:
            return total
        sums, self._sums = self._sums, torch.zeros(0)
        targets = torch.as_tensor(count * kind.is_counted, device=sums.device).reshape(1)
        of_all = torch.cat([sums[0].detach().double(), targets.double()])
        all_reduce(of_all, self._group, label="counts of routers")
        *_, num_targets = of_all = of_all.to(sums.dtype)
        part = num_targets * self.loss.value(sums, of_all[:-1])
        if kind.trains:
            self.totals[0] += part.detach()
        return total + self.loss.coefficient * part

    def update_biases(self, loads: Tensor) -> None:
        """After a step: see [Note: biases of routers]. `loads`: `totals` of all ranks."""
        if (rate := self._rate) is None:
            return
        for name, own, _ in self._choices:
            load_E = loads[own]
            if (bias := _bias_of(self._module, name, len(load_E))) is not None:
                step = rate * torch.sign(load_E.mean() - load_E)
                bias.add_(step.to(bias.dtype).view(bias.shape))


def _weights(micro: Mapping[str, Tensor]) -> Tensor:
    """1 for tokens of the row, 0 for those that only fill up a rank's runs; () for inputs of another kind."""
    tokens = next((micro[key] for key in ("input_ids", "inputs_embeds") if key in micro), None)
    if tokens is None:
        return torch.ones(())
    weights_BS = torch.ones(tokens.shape[:2], device=tokens.device)
    if isinstance(micro, SharedTokens) and micro.num_filled:
        weights_BS[:, -micro.num_filled :] = 0
    return weights_BS.flatten()


def _mask(micro: Mapping[str, Tensor]) -> Tensor | None:
    mask = micro.get("attention_mask")
    return None if mask is None else mask.flatten()
