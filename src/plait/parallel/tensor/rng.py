"""Random numbers under tensor parallelism: one mask for an activation, whoever holds it; another for another.

[Note: a stream for every way to be cut]
Ranks that hold the same piece of an activation must drop the same elements of it, and those with different
pieces should not. All ranks of a tensor group come to a block with the same state of the generator. There a
number is drawn, the same on all; and while the block runs, the generator follows one of several streams, each
seeded with that number and with the rank's coordinates along the axes that the activation at hand is cut
over:

  the residual stream                  row; and col, if its sequence is cut
  a region's input                     row
  after a COLUMN layer                 col: heads, features of the feed-forward
  after a ROW layer                    as the residual stream, also within the region (gpt2, bloom drop there)
  where features are whole             none of them; col, if the sequence is cut

Layers say what comes after them, so what a model's own code drops between two layers needs no names. Each
stream goes on where it was left. When the block ends, the generator is as it was after the draw: pieces of
different sizes take different amounts of random numbers, but never of the common ones. A drawn number is all
that recompute has to repeat: it restores the common state, and the forward that it runs again is ours.

Outside of blocks dropout modules are wrapped likewise. Dropout by a function there takes common numbers: rows
have the same mask for different pieces.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from plait.errors import ModelError
from plait.models.init_weights import derive_seed
from plait.plan.sharding import LayerSharding, Style, TPPlan

Axes = tuple[str, ...]  # that an activation is cut over, in this order:
_ORDER = ("row", "col")
StreamScope = Callable[[], AbstractContextManager[None]]


def install_rng_streams(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: TPPlan,
    *,
    row: int,
    col: int,
    sequence: bool,
    device: torch.device,
) -> None:
    """Wraps forwards so that dropout is as in [Note: a stream for every way to be cut].

    `row` and `col` are this rank's place; `sequence`: the residual stream between blocks is also cut over
    `col`. After the layers are installed and before `recompute_blocks`. Nothing is installed on a grid of
    one, or where a Hugging Face model has no dropout; in eval mode and on meta nothing is done.
    """
    if plan.rows * plan.cols == 1 or not _may_use_rng(model):
        return
    zones = _RngStreams({"row": row, "col": col}, sequence, device)
    in_blocks = {inner for block in blocks for inner in block.modules()}
    for layer in plan.layers:
        module = model.get_submodule(layer.module)
        if module in in_blocks:
            _wrap(module, _stream_scope(layer, plan, zones))
    for name in plan.regions:
        _wrap(model.get_submodule(name), zones.region)
    for block in blocks:
        _wrap(block, zones.block, begins=True)
    for module in model.modules():
        if isinstance(module, _DropoutNd) and module not in in_blocks:
            _wrap(module, zones.outside, begins=True)


def _stream_scope(layer: LayerSharding, plan: TPPlan, zones: "_RngStreams") -> "StreamScope":
    """What a layer in a block says of the activation behind it."""
    if layer.style in (Style.REPLICATE, Style.MLA_LATENT):
        inp, out = (None if cut is None else cut.axis for cut in (layer.inp, layer.out))
        return partial(zones.whole, inp, out)
    region = next((name for name in plan.regions if layer.module.startswith(f"{name}.")), None)
    stream = zones.residual
    if region is not None and _runs_on_full_sequence(region, plan):
        stream = ("row",)
    if layer.style is Style.COLUMN and layer.gathers:
        return partial(zones.then, () if region is not None else _without(zones.residual, "row"))
    if layer.style is Style.COLUMN:
        return partial(zones.then, ("col",))
    if layer.style in (Style.ROW, Style.EXPERTS):
        return partial(zones.then, stream)
    return nullcontext


def _runs_on_full_sequence(region: str, plan: TPPlan) -> bool:
    """Whether all of a region works on whole sequences: no ROW layer cuts them, or experts need them."""
    styles = {layer.style for layer in plan.layers if layer.module.startswith(f"{region}.")}
    return Style.ROW not in styles or Style.EXPERTS in styles


@dataclass
class _BlockCall:
    """One run of a block."""

    seed: int  # the same on all ranks
    now: Axes = ()  # whose stream the generator follows
    left_at: dict[Axes, Tensor] = field(default_factory=dict)  # the generator's state, of the other streams


class _RngStreams:
    """A rank's place, and the block that runs. One for a model and its copies, which do not run at one
    time."""

    def __init__(self, place: Mapping[str, int], sequence: bool, device: torch.device) -> None:
        self._place = place
        self.residual: Axes = ("row", "col") if sequence else ("row",)
        self._device = device
        self._call: _BlockCall | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        if self._call is not None:  # a block within a block
            yield
            return
        seed, generator = self._draw(), self._generator
        common = generator.get_state()
        self._call = _BlockCall(seed)
        try:
            self._begin(seed, self.residual)
            self._call.now = self.residual
            yield
        finally:
            self._call = None
            generator.set_state(common)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A module that drops elements of the residual stream, outside of blocks: its sequence is whole."""
        seed, generator = self._draw(), self._generator
        common = generator.get_state()
        try:
            self._begin(seed, ("row",))
            yield
        finally:
            generator.set_state(common)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Its input's sequence is whole. Layers in it say what its output is."""
        before = self._now()
        if before != self.residual:
            yield
            return
        self._follow(("row",))
        yield
        if self._now() == ("row",):
            self._follow(before)

    @contextmanager
    def whole(self, inp: str | None, out: str | None) -> Iterator[None]:
        """A layer that is given features whole which are cut over `inp`, and leaves them cut over `out`."""
        inside = _without(self._now(), inp)
        self._follow(inside)
        yield
        self._follow(inside if out is None else tuple(axis for axis in _ORDER if axis in (*inside, out)))

    @contextmanager
    def then(self, axes: Axes) -> Iterator[None]:
        """A layer that leaves an activation which is cut over these."""
        yield
        self._follow(axes)

    def _now(self) -> Axes:
        return () if self._call is None else self._call.now

    @torch.compiler.disable
    def _follow(self, axes: Axes) -> None:
        """Outside of a block, nothing."""
        call, generator = self._call, self._generator
        if call is None or call.now == axes:
            return
        call.left_at[call.now] = generator.get_state()
        if axes in call.left_at:
            generator.set_state(call.left_at[axes])
        else:
            self._begin(call.seed, axes)
        call.now = axes

    @torch.compiler.disable
    def _begin(self, seed: int, axes: Axes) -> None:
        place = (f"{axis}={self._place[axis]}" for axis in axes)
        self._generator.manual_seed(derive_seed("zone", seed, *place))

    @staticmethod
    @torch.compiler.disable
    def _draw() -> int:
        """A number of the common stream: the CPU's, which no GPU has to be waited for."""
        drawn = torch.empty((), dtype=torch.int64, device="cpu")
        return int(drawn.random_(generator=torch.default_generator))

    @property
    def _generator(self) -> torch.Generator:
        if self._device.type in ("cpu", "meta"):
            return torch.default_generator
        index = self._device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def _without(axes: Axes, axis: str | None) -> Axes:
    return tuple(each for each in axes if each != axis)


def _wrap(module: nn.Module, zone: StreamScope, *, begins: bool = False) -> None:
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        module.forward = MethodType(_StreamForward(forward.__func__, zone, begins), module)
        return
    raise ModelError(
        "a forward that is not its module's method cannot be given random numbers of its own",
        given=f"{type(module).__name__}.forward is a {type(forward).__name__}",
        expected="types.MethodType(function, module)",
    )


class _StreamForward:
    """Is made a method of its module, and in a copy of the copy: so it knows a function, and no module."""

    def __init__(self, forward: Callable[..., Any], zone: StreamScope, begins: bool) -> None:
        self._forward = forward
        self._zone = zone
        self._begins = begins  # it is not in a block: whether numbers are drawn is decided here

    @torch.compiler.disable(recursive=False)  # the module's own forward may be compiled
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._begins and not (module.training and _has_values(args, kwargs)):
            return self._forward(module, *args, **kwargs)
        with self._zone():
            return self._forward(module, *args, **kwargs)


def _has_values(args: Any, kwargs: Any) -> bool:
    """Rather than a twin's tensors, which are on meta: it shall use up no random numbers."""
    return not any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs)))


def _may_use_rng(model: nn.Module) -> bool:
    """A Hugging Face model says so, in its configuration or its modules. Of others nothing is known."""
    if not isinstance(model, PreTrainedModel):
        return True
    named = [model.config.to_dict(), *(vars(module) for module in model.modules())]
    dropouts = (module.p for module in model.modules() if isinstance(module, _DropoutNd))
    return any(p > 0 for p in dropouts) or any(map(_sets_dropout, named))


def _sets_dropout(values: Mapping[str, Any]) -> bool:
    for key, value in values.items():
        if isinstance(value, dict) and not str(key).startswith("_") and _sets_dropout(value):
            return True
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value > 0 and any(word in str(key) for word in ("drop", "jitter")):
            return True
    return False
