"""Tokens are sent to the ranks of their experts, and the results back.

# T tokens of this rank  k experts of each  H hidden  E experts of the layer  P ranks  e experts of a rank
# S rows that this rank sends: a token for each of its experts  R rows that it receives

[Note: tokens to experts and back]
  order      rows by expert, and so by rank; of an expert in the order of tokens
  counts     (P, e) numbers of rows for each expert, and the layer's: an all-to-all, of 1 + e to each rank
  dispatch   all-to-all of rows, as many as there are: none is dropped, and none is added
  order      rows from all ranks by expert; their numbers tell where each is
  experts    the module's own forward, with one expert for each row and 1 as its weight
  combine    the same all-to-all reversed
  sum        of a token's results, by the router's weights, where the token is

The backward of dispatch is combine of gradients, and the reverse, with as many rows as in the forward. The
counts alone tell a rank how many rows it receives: on GPUs the host waits for them, once in each forward of a
layer (`tolist` in `Rows.exchanged`). Every order is a permutation with its reverse: backward selects rows
too, and adds none to others in memory.

[Note: tokens of columns]
Under tp all columns have the same tokens. If the experts of a rank along EXPERTS divide by the columns, each
column has some of these, complete ones, and sends its share of the tokens: each row is sent once. Results are
all-gathered over columns, in backward the gradients of tokens and of the router's weights. So outside of
the module columns are equal, and gradients complete. Otherwise a column has a part of every expert's width
and sends every row to its peer column: `ParallelExperts` around this forward sums their results.

[Note: gradients of experts]
A loss is a sum over the tokens of all ranks, divided once. So the gradient of an expert on its rank, for rows
from all ranks along EXPERTS, is complete but for the tokens of ranks with the same experts: a plain sum over
these, `Roles.gradient_sum` of units of kind EXPERT. The router and all other layers see the tokens of this
rank.

[Note: ranks without tokens]
A rank that receives no rows computes with one of zeros, and uses nothing of its result. So it takes part in
both all-to-alls of backward, and its experts' gradients, zeros, arrive at the same point of the program as on
other ranks. Otherwise their reductions, and those of units after them, would start when backward is over, and
in another order with messages of experts than on other ranks (see [Note: two channels] in
`zero/sharded_model.py`).

[Note: balanced routing]
On meta there are no counts. Estimates are for rows that are evenly distributed over ranks or, in `all_rows`,
for a rank that receives all. Under a capacity there is one number of rows, and no counts: `Rows.fixed`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group, Mesh, all_to_all_list
from plait.errors import ModelError
from plait.models.experts import Experts, Form, Sizes
from plait.parallel.experts.capacity import largest_tokens, slots
from plait.parallel.tensor.apply import own_forward, set_forward
from plait.parallel.tensor.functional import gather, split
from plait.parallel.tensor.shards import TokenShards
from plait.plan.axes import EXPERTS, FEATURES
from plait.plan.grid import expert_rows, share
from plait.plan.sharding import TPPlan

_receives_all: ContextVar[bool] = ContextVar("_receives_all", default=False)


@contextmanager
def all_rows() -> Iterator[None]:
    """Give this rank's experts, on meta, the rows of all ranks of the group."""
    token = _receives_all.set(True)
    try:
        yield
    finally:
        _receives_all.reset(token)


def distribute_experts(
    model: nn.Module, layers: Iterable[Experts], plan: TPPlan, mesh: Mesh, capacity: str = "none"
) -> None:
    """Replace the forwards of these modules of experts, those that the model (or stage) has, by ones that
    compute with the experts of all ranks along EXPERTS and, where the plan divides tokens, of all columns.
    Their parameters are this rank's shards already."""
    modules = dict(model.named_modules())
    for layer, experts in enumerate(layers):
        if (module := modules.get(experts.name)) is not None:
            over = (FEATURES,) if experts.name in plan.own_experts else ()
            group, columns = mesh.group(*EXPERTS, *over), mesh.group(*over)
            forward = own_forward(experts.name, module)
            signature = inspect.signature(forward)
            given = experts.name, layer, forward, group, columns, experts.number, signature, experts.form
            set_forward(module, DistributedExperts(*given, capacity))
            module.num_experts = experts.number // group.size
            if experts.form.caller is not None:
                set_forward(modules[experts.name.rpartition(".")[0]], experts.form.caller)


@dataclass(frozen=True)
class Rows:
    """Numbers of rows. `sent`: to each rank; `received`: from each; `sizes`: received for each of this rank's
    experts; `per_expert`: (P, e), received; `slots`: under a capacity, of `capacity.slots`."""

    sent: Sequence[int]
    received: Sequence[int]
    sizes: Sequence[int]
    per_expert: Tensor
    slots: Tensor | None = None

    @classmethod
    def fixed(
        cls, sorted_S: Tensor, order_S: Tensor, group: Group, number: int, limit: int, size: int
    ) -> "Rows":
        """As many rows for each expert on all ranks. See [Note: sizes of messages] in `capacity.py`."""
        own = number // group.size
        per_expert = sorted_S.new_full((group.size, own), size)
        of_rank = [own * size] * group.size
        sizes = [group.size * size] * own
        return cls(of_rank, of_rank, sizes, per_expert, slots(sorted_S, order_S, number, limit, size))

    @classmethod
    def exchanged(cls, sorted_S: Tensor, group: Group, number: int, layer: int, name: str) -> "Rows":
        """Count the rows of these experts, in order, and tell each rank what it receives. Raises ModelError
        if ranks are in different layers."""
        own, label = number // group.size, f"counts of {name}"
        if sorted_S.is_meta:  # see [Note: balanced routing]
            unknown = sorted_S.new_empty(group.size, 1 + own).unbind()
            all_to_all_list(unknown, unknown, group, label=label)
            even = _even(len(sorted_S), group.size)
            arriving = [len(sorted_S)] * group.size if _receives_all.get(False) else even
            return cls(even, arriving, _even(sum(arriving), own), sorted_S.new_empty(group.size, own))
        experts_E = torch.arange(number, dtype=sorted_S.dtype, device=sorted_S.device)
        ends_E = torch.searchsorted(sorted_S, experts_E, right=True)
        before_1 = torch.searchsorted(sorted_S, experts_E[:1])  # choices below 0
        counts = torch.diff(ends_E, prepend=before_1).view(group.size, own)
        sent = torch.cat([counts.new_full((group.size, 1), layer), counts], 1)
        received = torch.empty_like(sent)
        all_to_all_list(received.unbind(), sent.unbind(), group, label=label)
        per_expert = received[:, 1:]
        sums = [counts.sum(1), per_expert.sum(1), received[:, 0], per_expert.sum(0), before_1]
        values = torch.cat(sums).tolist()  # on GPUs, the host waits here
        if num_negative := values.pop():
            raise ModelError(
                "a router chose experts below 0",
                given=f"{name}: {num_negative} choices",
                expected=f"0 to {number - 1}, or {number} for no expert",
                hint="a plan without ep",
            )
        sending, receiving, layers = (values[at * group.size : (at + 1) * group.size] for at in range(3))
        if {*layers} != {layer}:
            raise ModelError(
                "the ranks of ep are not in the same layer",
                given=f"{name}: layers with experts, by rank: {layers}",
                expected="the same layers in the same order on every rank",
                hint="a plan without ep; or calls with zeros on ranks without data for a layer",
            )
        return cls(sending, receiving, values[3 * group.size :], per_expert)

    def permutations(self, order_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return the choice of each row to send, and the row of each choice; S and the number of rows for
        none."""
        num_rows = sum(self.sent)
        numbers_S = torch.arange(len(order_S), device=order_S.device)
        if self.slots is None:
            choices, rows_S = order_S[:num_rows], torch.full_like(order_S, num_rows)
            return choices, rows_S.scatter_(0, choices, numbers_S[:num_rows])
        choices = order_S.new_full((num_rows + 1,), len(order_S))
        return choices.scatter_(0, self.slots, numbers_S)[:num_rows], self.slots

    def by_expert(self) -> tuple[Tensor, Tensor]:
        """Return the place, as it arrives, of each row by expert, and the reverse. Rows arrive by rank, and
        of a rank by expert."""
        places_R = torch.arange(sum(self.received), device=self.per_expert.device)
        if self.per_expert.is_meta:
            return places_R, places_R
        ways = self.per_expert, self.per_expert.T
        first, to = ((way.flatten().cumsum(0) - way.flatten()).view(way.shape) for way in ways)
        further, back = (
            places_R + by.flatten().repeat_interleave(way.flatten(), output_size=len(places_R))
            for by, way in ((first.T - to, ways[1]), (to.T - first, ways[0]))
        )
        return further, back


def _even(total: int, number: int) -> list[int]:
    parts = [share(total, one, number) for one in range(number)]
    return [part.stop - part.start for part in parts]


@dataclass(frozen=True)
class DistributedExperts:
    """Forward of a module that has this rank's experts. See [Note: tokens to experts and back]."""

    name: str
    layer: int  # its number among those with experts
    forward: Callable[..., Any]
    group: Group
    columns: Group  # ranks of `group` with the same tokens
    number: int  # of the layer's experts
    signature: inspect.Signature
    form: Form
    capacity: str = "none"

    @torch.compiler.disable(reason="experts of other ranks")
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            args = self.signature.bind(module, *args, **kwargs).args[1:]
        x, experts_Tk, weights_Tk = self.form.read(*args)
        x_TH = x.flatten(0, -2)
        shares = [share(len(x_TH), rank, self.columns.size) for rank in range(self.columns.size)]
        tokens = TokenShards(self.columns, tuple(part.stop - part.start for part in shares))
        x_tH, weights_tk = split(x_TH, tokens), split(weights_Tk, tokens)
        y_TH = gather(self._of_tokens(module, x_tH, tokens.shard(experts_Tk), weights_tk), tokens)
        return y_TH.unflatten(0, x.shape[:-1])

    def _of_tokens(self, module: nn.Module, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The sums of the results of each token's experts."""
        k, label = experts_Tk.shape[-1], f"tokens of {self.name}"
        sorted_S, order_S = torch.sort(experts_Tk.flatten(), stable=True)
        rows = self._rows(sorted_S, order_S, k)
        choices, row_of_S = rows.permutations(order_S)
        by_expert, by_rank = rows.by_expert()
        # Choices of no expert, which some models have for padding, or beyond a capacity.
        is_partial = rows.slots is not None or len(choices) < len(order_S)
        x_SH = _Permuted.apply(x_TH, choices, row_of_S, k, is_partial)
        x_RH = _Exchange.apply(x_SH, rows.sent, rows.received, self.group, label)
        x_RH = _Permuted.apply(x_RH, by_expert, by_rank, 1)
        y_RH = self._computed(module, x_RH, Sizes(rows.per_expert.sum(0), rows.sizes))
        y_RH = _Permuted.apply(y_RH, by_rank, by_expert, 1)
        y_SH = _Exchange.apply(y_RH, rows.received, rows.sent, self.group, label)
        y_TkH = _Permuted.apply(y_SH, row_of_S, choices, 1, is_partial).unflatten(0, experts_Tk.shape)
        dtype = torch.promote_types(y_TkH.dtype, weights_Tk.dtype)
        return torch.bmm(weights_Tk.to(dtype)[:, None], y_TkH.to(dtype))[:, 0].to(x_TH.dtype)

    def _rows(self, sorted_S: Tensor, order_S: Tensor, k: int) -> Rows:
        if self.capacity == "none":
            return Rows.exchanged(sorted_S, self.group, self.number, self.layer, self.name)
        largest = largest_tokens(self.name, len(sorted_S) // k, self.group, sorted_S.device)
        sizes = (expert_rows(self.capacity, choices, self.number) for choices in (len(sorted_S), largest * k))
        return Rows.fixed(sorted_S, order_S, self.group, self.number, *sizes)

    def _computed(self, module: nn.Module, x_RH: Tensor, sizes: Sizes) -> Tensor:
        """The results of this rank's experts, for rows in their order."""
        if len(x_RH):
            return self.form.compute(self.forward, module, x_RH, sizes)
        # See [Note: ranks without tokens]
        one = Sizes(torch.cat([sizes.per_expert[:1] + 1, sizes.per_expert[1:]]), [1, *sizes.on_host[1:]])
        return self.form.compute(self.forward, module, _with_zeros(x_RH), one)[:0]


def _with_zeros(x_RH: Tensor) -> Tensor:
    return torch.cat([x_RH, x_RH.new_zeros(1, x_RH.shape[-1])])


class _Permuted(torch.autograd.Function):
    """Rows of as many `copies` of each of `x`, in an order. `reverse`: the place in it of each copy. If it
    `is_partial`, the place after the last one is for zeros, and for copies that are not in the order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, reverse: Tensor, copies: int, is_partial: bool = False
    ) -> Tensor:
        ctx.save_for_backward(reverse)
        ctx.copies, ctx.is_partial = copies, is_partial
        rows = _with_zeros(x) if is_partial else x
        return rows.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (reverse,) = gradients, ctx.saved_tensors
        rows = _with_zeros(gradient) if ctx.is_partial else gradient
        gradient = rows.index_select(0, reverse)
        if ctx.copies > 1:
            gradient = gradient.unflatten(0, (-1, ctx.copies)).sum(1)
        return gradient, None, None, None, None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, `sent` to each rank and `received` from each. Its backward is the reverse."""

    @staticmethod
    def forward(
        ctx: Any, x_SH: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, label: str
    ) -> Tensor:
        ctx.rows, ctx.group, ctx.label = (received, sent), group, label
        return _exchanged(x_SH, sent, received, group, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.rows
        gradient = _exchanged(gradients[0], sent, received, ctx.group, f"gradients of {ctx.label}")
        return gradient, None, None, None, None


def _exchanged(
    x_SH: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, label: str
) -> Tensor:
    x_RH = x_SH.new_empty(sum(received), x_SH.shape[-1])
    if not _receives_all.get(False):  # in which no messages are counted
        all_to_all_list(x_RH.split(list(received)), x_SH.contiguous().split(list(sent)), group, label=label)
    return x_RH
