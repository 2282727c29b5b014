"""Random numbers under tensor parallelism: ranks with the same shard of an activation drop the same elements,
ranks with different shards drop different ones.

[Note: RNG streams]
All ranks of a tensor-parallel group enter a block with the same generator state. There they draw a seed, the
same on all ranks; while the block runs, the generator switches between streams, each seeded with that number
and with the rank's coordinates along the axes that the current activation is sharded over:

  residual stream                      row; and col under sequence parallelism
  a region's input                     row
  after a COLUMN layer                 col: heads, features of the feed-forward
  after a ROW layer                    as the residual stream, also within the region (gpt2, bloom drop there)
  features are full                    none; col under sequence parallelism
  dropout of an adapter (peft)         col if its A is a ROW layer, else as a region's input

Layers set the stream for what follows them, so dropout in the model's own code between two layers is covered,
whatever it is called. Each stream continues where it was left. When the block ends, the generator gets the
state that it had after the draw: shards of different sizes consume different amounts of random numbers, but
none of the common stream. Recompute restores the common state and runs the same forward again, which draws
the same seed.

Outside of blocks, dropout modules are wrapped in the same way. Functional dropout there uses the common
stream: rows get the same mask for different shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from plait.models import is_pretrained_model
from plait.models.init_weights import derive_seed
from plait.parallel.tensor.apply import own_forward, set_forward
from plait.plan.axes import FEATURES, HIDDEN, TENSOR, Axes
from plait.plan.sharding import LayerSharding, Style, TPPlan

_OF_ADAPTERS = ".lora_dropout."  # peft's, in the path of a module

StreamScope = Callable[[], AbstractContextManager[None]]


def install_rng_streams(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: TPPlan,
    coords: Mapping[str, int],
    *,
    sequence: bool,
    device: torch.device,
) -> None:
    """Wrap forwards so that dropout follows [Note: RNG streams].

    `coords`: this rank's along `row` and `col`. `sequence`: the residual stream between blocks is also
    sharded over `col`. Call it after `apply_tp_plan` and before `recompute_blocks`. Wraps nothing on a grid
    of one rank, or if a Hugging Face model has no dropout. Wrapped forwards change nothing in eval mode and
    on meta.
    """
    if plan.rows * plan.cols == 1 or not _may_use_rng(model):
        return
    streams = _RngStreams(coords, sequence, device)
    in_blocks = {inner for block in blocks for inner in block.modules()}
    for layer in plan.layers:
        module = model.get_submodule(layer.module)
        if module in in_blocks:
            _wrap(module, _stream_scope(layer, plan, streams))
    styles = {layer.module: layer for layer in plan.layers}
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module in in_blocks and _OF_ADAPTERS in name:
            reader = styles.get(name.replace(_OF_ADAPTERS, ".lora_A."))
            is_own = reader is not None and reader.style is Style.ROW and not reader.splits
            is_inside = any(name.startswith(f"{region}.") for region in plan.regions)
            axes = (FEATURES,) if is_own else (HIDDEN,) if is_inside else streams.residual
            _wrap(module, partial(streams.within, axes))
    for name in plan.regions:
        _wrap(model.get_submodule(name), streams.region)
    for block in blocks:
        _wrap(block, partial(streams.block, streams.residual), is_outermost=True)
    for module in model.modules():
        if isinstance(module, _DropoutNd) and module not in in_blocks:
            _wrap(module, partial(streams.block, (HIDDEN,)), is_outermost=True)  # sequences are full


def _stream_scope(layer: LayerSharding, plan: TPPlan, streams: "_RngStreams") -> "StreamScope":
    """Return the scope of a layer in a block: it sets the stream for the layer's output."""
    if layer.style in (Style.REPLICATE, Style.MLA_LATENT):
        inp, out = (None if dim is None else dim.axis for dim in (layer.inp, layer.out))
        return partial(streams.full_features, inp, out)
    region = next((name for name in plan.regions if layer.module.startswith(f"{name}.")), None)
    if layer.style is Style.COLUMN and layer.gathers:
        return partial(streams.switch_after, () if region is not None else _without(streams.residual, HIDDEN))
    if layer.style is Style.COLUMN:
        return partial(streams.switch_after, (FEATURES,))
    if layer.style in (Style.ROW, Style.EXPERTS):
        is_full = bool(layer.summed) or (region is not None and _runs_on_full_sequence(region, plan))
        return partial(streams.switch_after, (HIDDEN,) if is_full else streams.residual)
    return nullcontext


def _runs_on_full_sequence(region: str, plan: TPPlan) -> bool:
    """Return whether a region's output has full sequences: without a ROW layer, or with experts."""
    styles = {layer.style for layer in plan.layers if layer.module.startswith(f"{region}.")}
    return Style.ROW not in styles or Style.EXPERTS in styles


@dataclass
class _BlockCall:
    """One run of a block."""

    seed: int  # the same on all ranks
    current: Axes  # the stream in use
    states: dict[Axes, Tensor] = field(default_factory=dict)  # the generator's state, of the other streams


class _RngStreams:
    """A rank's coordinates, and the running block. Shared by a model and its copies, which do not run
    concurrently."""

    def __init__(self, coords: Mapping[str, int], sequence: bool, device: torch.device) -> None:
        self._coords = coords
        self.residual: Axes = TENSOR if sequence else (HIDDEN,)
        self._device = device
        self._call: _BlockCall | None = None

    @contextmanager
    def block(self, axes: Axes) -> Iterator[None]:
        """Scope of a block, or of a dropout outside of blocks, whose input is sharded over `axes`."""
        if self._call is not None:  # a block within a block
            yield
            return
        seed, generator = self._draw_seed(), self._generator
        common = generator.get_state()
        self._call = _BlockCall(seed, axes)
        try:
            self._start_stream(seed, axes)
            yield
        finally:
            self._call = None
            generator.set_state(common)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Scope of a region: its input has full sequences. Layers in it set the stream of its output."""
        before = self._current()
        if before != self.residual:
            yield
            return
        self._switch((HIDDEN,))
        yield
        if self._current() == (HIDDEN,):
            self._switch(before)

    @contextmanager
    def full_features(self, inp: str | None, out: str | None) -> Iterator[None]:
        """Scope of a layer that gathers features sharded over `inp`, and returns them sharded over `out`."""
        inside = _without(self._current(), inp)
        self._switch(inside)
        yield
        self._switch(inside if out is None else tuple(axis for axis in TENSOR if axis in (*inside, out)))

    @contextmanager
    def within(self, axes: Axes) -> Iterator[None]:
        """Scope of a dropout in the model's code whose input is sharded over `axes`."""
        before = self._current()
        self._switch(axes)
        yield
        self._switch(before)

    @contextmanager
    def switch_after(self, axes: Axes) -> Iterator[None]:
        """Scope of a layer whose output is sharded over `axes`."""
        yield
        self._switch(axes)

    def _current(self) -> Axes:
        return () if self._call is None else self._call.current

    @torch.compiler.disable
    def _switch(self, axes: Axes) -> None:
        """Continue or start the stream of `axes`; outside of a block, do nothing."""
        call, generator = self._call, self._generator
        if call is None or call.current == axes:
            return
        call.states[call.current] = generator.get_state()
        if axes in call.states:
            generator.set_state(call.states[axes])
        else:
            self._start_stream(call.seed, axes)
        call.current = axes

    @torch.compiler.disable
    def _start_stream(self, seed: int, axes: Axes) -> None:
        coords = (f"{axis}={self._coords[axis]}" for axis in axes)
        self._generator.manual_seed(derive_seed("zone", seed, *coords))

    @staticmethod
    @torch.compiler.disable
    def _draw_seed() -> int:
        """Draw from the common stream; the CPU's, so that a GPU need not synchronize."""
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


def _wrap(module: nn.Module, scope: StreamScope, *, is_outermost: bool = False) -> None:
    forward = own_forward(f"a {type(module).__name__}", module)
    set_forward(module, _StreamForward(forward, scope, is_outermost))


@dataclass(frozen=True)
class _StreamForward:
    """A forward within a scope. `is_outermost`: in no other scope; decides whether streams are used."""

    forward: Callable[..., Any]
    scope: StreamScope
    is_outermost: bool

    @torch.compiler.disable(
        recursive=False, reason="dropout on a tensor-parallel grid"
    )  # the module's own forward may be compiled
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.is_outermost and not (module.training and _has_values(args, kwargs)):
            return self.forward(module, *args, **kwargs)
        with self.scope():
            return self.forward(module, *args, **kwargs)


def _has_values(args: Any, kwargs: Any) -> bool:
    """Return whether no tensor is on meta: a meta copy must not consume random numbers."""
    return not any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs)))


def _may_use_rng(model: nn.Module) -> bool:
    """Return whether a Hugging Face model sets a dropout, in its config or modules; True for other models."""
    if not is_pretrained_model(model):
        return True
    settings = [model.config.to_dict(), *(vars(module) for module in model.modules())]
    dropouts = (module.p for module in model.modules() if isinstance(module, _DropoutNd))
    return any(p > 0 for p in dropouts) or any(map(_sets_dropout, settings))


def _sets_dropout(values: Mapping[str, Any]) -> bool:
    for key, value in values.items():
        if isinstance(value, dict) and not str(key).startswith("_") and _sets_dropout(value):
            return True
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value > 0 and any(word in str(key) for word in ("drop", "jitter")):
            return True
    return False
