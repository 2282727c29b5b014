"""Numbers of all tokens of a micro-batch or a step, and not of a rank's: the auxiliary loss of routers, their
z loss, the loads of experts, and the biases that follow from these.

# E experts  k experts of a token  L layers of experts

[Note: sums of stages and ranks]
The loss of routers is a product of counts and of sums of probabilities, each over all layers and over the
tokens of all data ranks (models/routers.py). A stage adds those of its layers to the (2, E) that it receives,
and sends them on with its activations. With a z loss there is one more column: the number of tokens that the
attention mask does not hide, from the first stage, and the sum over tokens and layers. The last stage sums
the counts over the ranks with other tokens of the micro-batch, and takes the product with its own ranks' sums
of probabilities: the terms of the ranks are then the loss. The gradient of these sums is the counts of all
ranks and stages, and returns to each stage with those of its activations: no stage needs them before.

A step's loss is a sum over targets. So a micro-batch's auxiliary loss is multiplied by its targets, on all
ranks: the result is that of the loop over the same micro-batches in one process, in training and evaluation.
The same holds for the z loss, a mean over the micro-batch's tokens, which training alone has.

[Note: counts of the step]
With `router_balance=step` the counts, tokens and targets are those of all micro-batches of the step, as if it
had one. They are needed before the first backward, so forwards of all micro-batches run first. These count,
and keep nothing else: they draw the same random numbers, and buffers are as before. Counts have no gradient,
and with those of the step the loss is a sum over micro-batches, as its gradients are.

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
from plait.models.routers import RouterLoss, mark_router_loss, routers_of, z_routers_of, z_sum
from plait.models.task import ROUTING
from plait.parallel.context.tokens import SharedTokens
from plait.parallel.experts.capacity import Capacity

_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class RouterFacts:
    """A model's routers. `loss`: the auxiliary one, which the engine adds; `layers`: the numbers of experts
    by the names of their modules; `bias_rate`: of [Note: biases of routers]; `z_loss`: the coefficient;
    `logits`: what losses read, as in `RouterLoss.routers`; `z_routers`: the z loss, of these;
    `capacities`: of layers, with the plan's key."""

    loss: RouterLoss | None
    layers: Mapping[str, int]
    bias_rate: float | None = None
    z_loss: float | None = None
    logits: Mapping[str, int] = field(default_factory=dict)
    z_routers: frozenset[str] = frozenset()
    capacities: Mapping[str, Capacity] = field(default_factory=dict)

    @classmethod
    def of_model(
        cls, model: nn.Module, *, has_loss: bool, bias_rate: float | None, z_loss: float | None
    ) -> "RouterFacts":
        """Raises ModelError for an unknown auxiliary loss, ConfigError for a rate without biases, or a
        coefficient without logits."""
        layers, logits = expert_layers(model), {} if z_loss is None else routers_of(model)
        z_routers = z_routers_of(model) if logits else frozenset[str]()
        if z_loss is not None and not z_routers:
            raise ConfigError(
                "the model has no routers whose z loss could be added",
                given=f"router_z_loss={z_loss}, {type(model).__name__}",
                expected="a mixture of transformers that can record router_logits, and not probabilities",
                hint="no router_z_loss",
            )
        if bias_rate is not None and not any(
            _bias_of(model, name, of) is not None for name, of in layers.items()
        ):
            raise ConfigError(
                "the model's routers have no biases to update",
                given=f"router_bias_update={bias_rate}, {type(model).__name__}",
                expected=f"a mixture of transformers whose routers have a buffer {_BIAS}",
                hint="no router_bias_update",
            )
        loss = mark_router_loss(model, has_loss=has_loss)
        return cls(loss, layers, bias_rate, z_loss, logits if loss is None else loss.routers, z_routers)

    @property
    def losses(self) -> list[str]:
        """The names of the losses of routers, in a result."""
        names = {"aux_loss": self.loss, "router_z_loss": self.z_loss}
        return [name for name, of in names.items() if of is not None]

    def of_step(self, totals: Sequence[float], num_targets: float) -> dict[str, Any]:
        """Entries of a result from `StageRouters.totals` of all ranks: losses, the loads of layers, which are
        empty where they are not counted, and with capacities the number of dropped choices."""
        numbers = iter(totals)
        losses = {name: next(numbers) / num_targets if num_targets else None for name in self.losses}
        loads = {name: [round(load) for load in islice(numbers, of)] for name, of in self.layers.items()}
        dropped = {"dropped_choices": round(next(numbers))} if self.capacities else {}
        return {**losses, "expert_loads": {name: of for name, of in loads.items() if of}, **dropped}


def _bias_of(model: nn.Module, experts: str, number: int) -> Tensor | None:
    """The bias of the router next to a module of experts."""
    for name, buffer in model.get_submodule(experts.rpartition(".")[0]).named_buffers():
        if name.rpartition(".")[2] == _BIAS and buffer.numel() == number:
            return buffer
    return None


class Pass(NamedTuple):
    """A forward. `is_counted`: False for a micro-batch that other ranks alone have; `trains`: it is part of a
    step; `is_first`: it is one of [Note: counts of the step]."""

    is_counted: bool = True
    trains: bool = False
    is_first: bool = False


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
    adds    there is a loss of routers
    totals  of a step so far, on this rank: targets times each loss of routers; the loads of all layers of the
            model; and with capacities, dropped choices
    """

    def __init__(
        self, module: nn.Module, facts: RouterFacts, data_ranks: Group, device: torch.device, *, counts: bool
    ) -> None:
        """`data_ranks`: with other tokens of a step. `counts`: loads of experts."""
        self.loss, self._group, self._rate = facts.loss, data_ranks, facts.bias_rate
        self.layers, self._capacities = facts.layers, facts.capacities
        self._module, self._sums = module, torch.zeros(0)
        self._recorded: list[Tensor] | None = None
        self._of_step: Tensor | None = None  # from the first forward of its first pass to the step's end
        self._z_loss, self.adds = facts.z_loss, bool(facts.losses)
        modules, stop = dict(module.named_modules()), len(facts.losses)
        own = {name: at for name, at in facts.logits.items() if name in modules}
        self._logits = {name: Tap().of_output(modules[name], at) for name, at in own.items()}
        self._z_routers = facts.z_routers
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
        if not self.adds or message is None:
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
        taps = [*self._logits.values(), *(tap for *_, tap in self._choices if watches)]
        for tap in taps:
            tap.is_open = True
        try:
            yield
        finally:
            seen = {tap: tap.close() for tap in taps}
        if self._recorded is not None:
            self._recorded += [chosen for *_, tap in self._choices for chosen in seen[tap]]
        if not taps and not self.adds:
            return
        weights_T = _weights(micro) * kind.is_counted
        if self.adds:
            logits = {name: seen[tap] for name, tap in self._logits.items()}
            own = self._own_sums(logits, weights_T, _mask(micro))
            self._sums = self._sums + own if self._sums.numel() else own
        for name, own_range, tap in self._choices if kind.trains else ():
            for chosen_Tk in seen[tap]:
                load_E = self.totals[own_range]
                is_expert_Tk = self._add_load(load_E, chosen_Tk, weights_T)
                if (capacity := self._capacities.get(name)) is not None:
                    self.totals[-1] += (is_expert_Tk * ~capacity.kept(chosen_Tk, len(load_E))).sum()

    def _own_sums(
        self, by_router: Mapping[str, Sequence[Tensor]], weights_T: Tensor, mask_T: Tensor | None
    ) -> Tensor:
        """See [Note: sums of stages and ranks]."""
        logits = [each for of in by_router.values() for each in of]
        wide = torch.promote_types(logits[0].dtype if logits else torch.float32, torch.float32)
        all_T = weights_T.to(wide)
        seen_T = all_T if mask_T is None else all_T * mask_T.to(all_T)
        columns = []
        if self.loss is not None:
            columns.append(self.loss.sums(logits, seen_T if self.loss.masks else all_T))
        if self._z_loss is not None:
            is_first_stage = not self._sums.numel()
            of_z = [each for name, of in by_router.items() if name in self._z_routers for each in of]
            columns.append(torch.stack([seen_T.sum() * is_first_stage, z_sum(of_z, seen_T)])[:, None])
        return torch.cat(columns, 1)

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
        self._of_step = None
        return taken

    @property
    def counted_bytes(self) -> int:
        """Bytes of what `end_first_pass` sums."""
        return 0 if self._of_step is None else self._of_step.nbytes

    def end_first_pass(self) -> None:
        """See [Note: counts of the step]. Collective, on the last stage."""
        if self._of_step is not None:
            all_reduce(self._of_step, self._group, label="counts of routers")

    def message(self, outputs: Any) -> Any:
        """Return what the stage sends: its outputs, and the sums."""
        return (outputs, self._sums) if self.adds else outputs

    def added(self, total: Tensor, count: int | Tensor, kind: Pass) -> Tensor:
        """On the last stage: a micro-batch's summed loss, with this rank's part of the losses of routers. See
        [Note: sums of stages and ranks]. Collective."""
        if not self.adds:
            return total
        sums, self._sums = self._sums, torch.zeros(0)
        targets = torch.as_tensor(count * kind.is_counted, device=sums.device).reshape(1)
        of_all = torch.cat([sums[0].detach().double(), targets.double()])
        if kind.is_first:
            self._of_step = of_all if self._of_step is None else self._of_step + of_all
            return total
        if self._of_step is not None:
            of_all = self._of_step
        else:
            all_reduce(of_all, self._group, label="counts of routers")
        *_, num_targets = of_all = of_all.to(sums.dtype)
        parts = list[tuple[float, Tensor]]()
        if self.loss is not None:
            number = self.loss.number
            parts.append((self.loss.coefficient, self.loss.value(sums[:, :number], of_all[:number])))
        if self._z_loss is not None:
            parts.append((self._z_loss * kind.trains, sums[1, -1] / of_all[-2].clamp(min=1)))
        for index, (coefficient, mean) in enumerate(parts):
            part = num_targets * mean
            if kind.trains:
                self.totals[index] += part.detach()
            total = total + coefficient * part
        return total

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
