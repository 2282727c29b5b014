"""Activation checkpointing: a block saves few of its activations and recomputes the others in backward.

`full` saves a block's inputs only (Chen et al. 1604.06174). `selective` also saves the outputs of its matrix
products, which are most of the FLOPs, and recomputes norms, activations, dropout and attention: scores grow
with the square of the sequence length, and fused attention is cheap compared with the memory it would save
(Korthikanti et al. 2205.05198, section 5). `every=k` is `full` for blocks 0, k, 2k ...

The implementation is torch's non-reentrant checkpoint. It restores the state of torch's random generators,
so dropout masks are equal both times and the results are those of `none`, bit for bit. A block's `forward`
is wrapped, not its call: module hooks stay outside and do not run again.

[Note: kept results]
Attention over ranks takes messages, and work by the square of the tokens. Its results are kept whatever is
recomputed: it hands outputs and log-sum-exps to `kept`, as much memory as a block's input.

[Note: state that a forward changes]
A forward may change BatchNorm's running statistics, counters or the vectors of spectral norm. A second
forward would change them twice, and compute with other values than the first. So a recomputation runs with
the values from before the forward, and the current ones are restored afterwards. The first forward in
training mode, and in evaluation mode, shows which buffers and attributes change, mostly none; later ones
copy only these. A buffer that changes for the first time later is an error: its old value is lost.

The same holds for random generators: `random`'s and NumPy's global ones, and those that are attributes of the
modules. (torch's default generators are torch.utils.checkpoint's.) Copying the state of the global ones takes
10 to 50 us, too long for each forward of blocks that do not draw from them. That of a torch generator takes
1.4 us: it is copied in each forward, as a rate of dropout may be zero in the first.

[Note: recomputed outputs]
A block may draw from a generator that is found nowhere, or read the time or a global variable. So the first
`COMPARED` recomputations in training mode, and in evaluation mode, compare the block's output with that of
its forward: a norm, and a projection that is not zero if they differ. torch stops a recomputation early,
when all saved tensors are there; these run to their ends, and compute saved products too. A block that
changes its input in place cannot be recomputed.

[Note: random state of the device]
torch's checkpoint keeps the random state of the CPU, and of the devices of its positional tensors. Of a block
called as `block(hidden_states=x)` it would keep the CPU's alone, and on a GPU the recomputed dropout mask
would be another one, without an error. So the function gets an empty tensor of the device as its first
argument.

[Note: own modes for saved products]
torch's selective contexts raise, in backward, for a saved output that was changed in place. That is common
(`ReLU(inplace=True)` after a linear layer; a bias that `F.linear` adds in place if its input is not
contiguous). Here such a product is recomputed, like everything that is not saved. Our modes can also report
saved tensors to a byte counter. Under torch.compile torch's contexts are needed: they mark the traced graph
for the partitioner, and a traced graph has no in-place changes.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from plait.errors import ModelError
from plait.models.attention import active_handler, attention_by
from plait.models.routing import active_choices, choices_by
from plait.models.tensors import summary
from plait.parallel.experts.capacity import active_sizes, sizes_of

# Matrix products as dispatched to a device; bmm and baddbmm belong to attention.
_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "aten::mkldnn_linear",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "transformers::grouped_mm_fallback",
        "aten::convolution",
        "plait::summed_product",  # parallel/tensor/linear.py
        "plait_float8::emulated_scaled_mm",  # parallel/linear_products.py
    }
)
COMPARED = 4  # of a block: an element of chance, such as a dropped layer, may be equal by chance


def recompute_blocks(blocks: Sequence[nn.Module], recompute: str) -> None:
    """Wrap the forward of the blocks that `recompute` (the plan's key) selects; `none` selects none.

    A block that is an embedding saves its ids only, and its backward reads no weight: it stays as it is.
    """
    if recompute == "none":
        return
    step = int(recompute.removeprefix("every=")) if recompute.startswith("every=") else 1
    for block in blocks[::step]:
        if block.__class__ is nn.Embedding:
            continue
        block.forward = RecomputedForward(block, selective=recompute == "selective")


class RecomputedForward:
    """A block's forward that is recomputed in backward. A deep copy of the block gets its own.

    `on_save` is called with every tensor that is saved outside autograd; see `models/trace/saved.py`.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self.forward = block.forward
        self.selective = selective
        self._name = type(block).__name__
        self._num_compared = {True: 0, False: 0}  # by training mode
        self._state = _ModuleState(block)
        self.on_save: Callable[[Tensor], object] | None = None

    def add_context(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the block in `context()` from now on, in forward and in recomputation."""
        self.forward = functools.partial(_run_in, context, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_compiling()
        if traced:
            contexts = _TRACED_CONTEXTS if self.selective else noop_context_fn
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if self.on_save is not None:
            for value in inputs:
                self.on_save(value)
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        versions = [value._version for value in inputs]
        with self._state.recorded() as before:
            is_on_meta = any(value.is_meta for value in inputs)
            is_compared = self._num_compared[training := self._state.training] < COMPARED and not is_on_meta
            self._num_compared[training] += is_compared
            contexts = functools.partial(self._contexts, before, replays=not is_compared)
            run: Callable[..., Any] = functools.partial(_run_without_marker, self.forward)
            run = _Compared(run, self._name) if is_compared else run
            given = (_device_marker(inputs), *args)
            options: Any = {"use_reentrant": False, "context_fn": contexts, "early_stop": not is_compared}
            output = checkpoint(run, *given, **options, **kwargs)
        if [value._version for value in inputs] != versions:
            raise _in_place_error(self._name)
        return output

    def _contexts(
        self, before: Mapping[Any, Any], *, replays: bool
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        results = _KeptResults(self.on_save)
        if not self.selective:
            return results, _Recomputation(before, results)
        saved: list[_SavedProduct | None] = []
        modes = _SaveMode(saved, self.on_save), _ReplayMode(saved, replays=replays)
        return _Recomputation({}, results, modes[0]), _Recomputation(before, results, modes[1])


class _Recomputation(AbstractContextManager[None]):
    """The context of a forward in backward, which a retained graph may enter more than once."""

    def __init__(self, before: Mapping[Any, Any], *modes: AbstractContextManager[Any]) -> None:
        """`before`: what the forward changed; see [Note: state that a forward changes]."""
        self._before = before
        self._modes = modes
        # Of the micro-batch; another one's may run during its backward.
        self._handler, self._choices, self._sizes = active_handler(), active_choices(), active_sizes()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(_put_back(self._before))
        self._stack.enter_context(attention_by(self._handler))
        self._stack.enter_context(choices_by(self._choices))
        self._stack.enter_context(sizes_of(self._sizes))
        for mode in self._modes:
            self._stack.enter_context(mode)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _KeptResults(AbstractContextManager[None]):
    """The results that a block hands to `kept`: recorded where it is entered first, returned later."""

    def __init__(self, on_save: Callable[[Tensor], object] | None) -> None:
        self._on_save = on_save
        self._entered = self._next = 0
        self._results: list[tuple[tuple[Tensor, int], ...]] = []  # tensors, and their versions when kept
        self._tokens: list[Token[_KeptResults | None]] = []

    def __enter__(self) -> None:
        self._entered += 1
        self._next = 0
        self._tokens.append(_kept.set(self))

    def __exit__(self, *error: object) -> None:
        _kept.reset(self._tokens.pop())

    def of(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._entered > 1:
            index, self._next = self._next, self._next + 1
            found = self._results[index]
            self._results[index] = ()  # autograd owns them from here on
            if found and all(tensor._version == version for tensor, version in found):
                return tuple(tensor for tensor, _ in found)
            return compute()
        results = compute()
        aliases = [result.detach() for result in results]  # `results` become part of a graph
        self._results.append(tuple((alias, alias._version) for alias in aliases))
        if self._on_save is not None:
            for alias in aliases:
                self._on_save(alias)
        return results


_kept: ContextVar[_KeptResults | None] = ContextVar("kept results", default=None)


def kept(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what `compute` returns, without running it again where a block is recomputed. For the forward
    of an autograd function: see [Note: kept results]."""
    results = _kept.get(None)
    return compute() if results is None else results.of(compute)


class _Compared:
    """A forward whose later runs must return what the first one did. See [Note: recomputed outputs]."""

    def __init__(self, run: Callable[..., Any], name: str) -> None:
        self._run = run
        self._name = name
        self._first: list[list[float]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._run(*args, **kwargs)
        tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and not value.is_meta]
        values = [value for value in tensors if value.is_floating_point()]
        summaries = [summary(value).tolist() for value in values]
        if self._first is None:
            self._first = summaries
        elif len(self._first) != len(values) or any(map(_differ, self._first, summaries, values)):
            raise ModelError(
                "a recomputed block returned other values in backward than in forward",
                given=f"a {self._name}: random numbers of a generator that is unknown, or another thing that "
                "changes between calls",
                expected="random numbers of torch's default generators, of `random`, of numpy.random, or of "
                "a generator that is an attribute of a module in the block",
                hint="such a generator; or recompute=none",
            )
        return output


def _differ(first: list[float], second: list[float], values: Tensor) -> bool:
    """Compare with a limit between the rounding of sums in another order, and the difference of two masks."""
    limit: float = torch.finfo(values.dtype).eps ** 0.75 * first[1]
    return any(abs(mine - other) > limit for mine, other in zip(first, second, strict=True))


def _in_place_error(name: str) -> ModelError:
    return ModelError(
        "with recompute, a block changes its input in place: it cannot run again",
        given=f"a {name}, such as one with x += f(x)",
        expected="blocks that leave their inputs as they are",
        hint="x = x + f(x); or recompute=none",
    )


def _device_marker(inputs: Sequence[Tensor]) -> Tensor | None:
    """Return an empty tensor of the accelerator among the inputs' devices; None if all are on the CPU. See
    [Note: random state of the device]."""
    first = next((value for value in inputs if value.device.type != "cpu"), None)
    return None if first is None else torch.empty(0, device=first.device)


def _run_without_marker(forward: Callable[..., Any], _: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _run_in(
    context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with context():
        return forward(*args, **kwargs)


@dataclass(frozen=True)
class _SavedProduct:
    operator: Callable[..., Any]
    output: Tensor
    version: int  # the output's version counter when saved; another one later means an in-place change


class _SaveMode(TorchDispatchMode):
    """In forward: saves the outputs of products, in order."""

    def __init__(self, saved: list[_SavedProduct | None], on_save: Callable[[Tensor], object] | None) -> None:
        super().__init__()
        self._saved = saved
        self._on_save = on_save

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_product(func):
            alias = _without_graph(output)
            self._saved.append(_SavedProduct(func, alias, alias._version))
            if self._on_save is not None:
                self._on_save(alias)
        return output


class _ReplayMode(TorchDispatchMode):
    """In backward: returns the saved outputs in the same order, each once, and recomputes those that are
    gone; all of them, if the block's output will be compared."""

    def __init__(self, saved: list[_SavedProduct | None], *, replays: bool) -> None:
        super().__init__()
        self._saved = saved
        self._replays = replays
        self._next = 0

    def __enter__(self) -> "_ReplayMode":
        self._next = 0  # a retained graph may run backward more than once
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        saved = self._pop(func) if _is_product(func) else None
        if saved is None or not self._replays or saved.output._version != saved.version:
            return func(*args, **(kwargs or {}))
        return saved.output

    def _pop(self, func: Callable[..., Any]) -> _SavedProduct | None:
        index, self._next = self._next, self._next + 1
        saved = self._saved[index] if index < len(self._saved) else None
        if index >= len(self._saved) or (saved is not None and saved.operator is not func):
            raise ModelError(
                "a recomputed block ran differently in backward than in forward",
                given=f"product {index + 1}: {func}, but {saved.operator if saved else 'none'} in forward",
                expected="a forward that depends only on its inputs and torch's random generators",
                hint="recompute=none",
            )
        self._saved[index] = None  # autograd owns it from here on, and frees it
        return saved


@functools.cache
def _is_product(func: Callable[..., Any]) -> bool:
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    return schema is not None and schema.name in _PRODUCTS and not schema.is_mutable


def _without_graph(tensor: Tensor) -> Tensor:
    """The same bytes and the same version counter, but no graph that would keep the block alive."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _save_products(_: Any, func: Callable[..., Any], *__: Any, **___: Any) -> CheckpointPolicy:
    """Also save what operators of plait return: see [Note: order of collectives in compiled graphs] in
    parallel/tensor/operators.py."""
    is_saved = _is_product(func) or getattr(func, "namespace", "") == "plait"
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


# See [Note: own modes for saved products]
_TRACED_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _save_products)


# --- state that a forward changes

_STATE = ""  # not the name of an attribute
_Cell = tuple[Any, str]  # a buffer or an attribute of a module; a random generator and `_STATE`
_CONTAINERS = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))


class _ModuleState:
    """Records the buffers and attributes of a module and its submodules that a forward changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By training mode; unknown before its first forward.
        self._changing: dict[bool, tuple[_Cell, ...]] = {}

    @property
    def training(self) -> bool:
        return self._module.training

    @contextmanager
    def recorded(self) -> Iterator[Mapping[_Cell, Any]]:
        """Run a forward inside the context. Yields a mapping that is filled at its end: what changes, and its
        value from before."""
        modules = list(self._module.modules())
        buffers = {(m, key): b for m in modules for key, b in m._buffers.items() if b is not None}
        versions = {cell: buffer._version for cell, buffer in buffers.items()}
        changing = self._changing.get(self.training)
        cells = _all_cells(modules, buffers) if changing is None else changing
        before = {cell: _copied(_read(cell), is_buffer=cell in buffers) for cell in cells}
        recorded: dict[_Cell, Any] = {}
        yield recorded
        changed = [c for c, b in buffers.items() if _read(c) is not b or b._version != versions[c]]
        if changing is None:
            # BatchNorm's kernel does not increase `_version`.
            changed += [c for c, b in buffers.items() if c not in changed and not _equal(b, before[c])]
            others = [c for c in cells if c not in buffers]
            changed += [c for c in others if isinstance(c[0], torch.Generator) or _differs(c, before[c])]
            changing = self._changing[self.training] = tuple(changed)
        elif late := [key for module, key in changed if (module, key) not in changing]:
            raise ModelError(
                "with recompute, a buffer changed for the first time after the first forward",
                given=f"{late[0]} of a block",
                expected="buffers that every forward in training changes, or none",
                hint="recompute=none",
            )
        recorded.update({cell: before[cell] for cell in changing})


def _all_cells(modules: Sequence[nn.Module], buffers: Iterable[_Cell]) -> tuple[_Cell, ...]:
    attributes = [(m, key) for m in modules for key in vars(m) if key not in _OF_TORCH]
    of_python: Any = random.getstate  # a method of the generator of Python's functions
    found = [of_python.__self__, *(vars(m)[key] for m, key in attributes)]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found.append(numpy.get_state.__self__)
    generators = dict.fromkeys(value for value in found if _is_generator(value))
    return (*buffers, *attributes, *((generator, _STATE) for generator in generators))


def _is_generator(value: Any) -> bool:
    cls = type(value)
    is_numpys = cls.__module__.startswith("numpy.random") and cls.__name__ in ("Generator", "RandomState")
    return is_numpys or isinstance(value, torch.Generator | random.Random)


@contextmanager
def _put_back(recorded: Mapping[_Cell, Any]) -> Iterator[None]:
    """Set buffers and attributes to the recorded values inside the context."""
    now = {cell: _read(cell) for cell in recorded}
    for cell, value in recorded.items():
        _write(cell, _copied(value, is_buffer=_is_buffer(cell)))
    try:
        yield
    finally:
        for cell, value in now.items():
            _write(cell, value)


def _is_buffer(cell: _Cell) -> bool:
    owner, key = cell
    return key != _STATE and key in owner._buffers


def _values(cell: _Cell) -> dict[str, Any]:
    owner: nn.Module = cell[0]
    return owner._buffers if _is_buffer(cell) else vars(owner)


def _read(cell: _Cell) -> Any:
    owner, key = cell
    if key != _STATE:
        return _values(cell).get(key)
    if isinstance(owner, random.Random):
        return owner.getstate()
    return owner.bit_generator.state if hasattr(owner, "bit_generator") else owner.get_state()


def _write(cell: _Cell, value: Any) -> None:
    owner, key = cell
    if key != _STATE:
        _values(cell)[key] = value
    elif isinstance(owner, random.Random):
        owner.setstate(value)
    elif hasattr(owner, "bit_generator"):
        owner.bit_generator.state = value
    else:
        owner.set_state(value)


def _copied(value: Any, *, is_buffer: bool) -> Any:
    """A copy of what a forward may change in place."""
    if is_buffer and isinstance(value, Tensor):
        return value.clone()
    return value.copy() if type(value) in _CONTAINERS else value


def _equal(buffer: Tensor, before: Tensor) -> bool:
    return buffer.is_meta or torch.equal(buffer, before)


def _differs(cell: _Cell, before: Any) -> bool:
    value = _read(cell)
    if cell[1] == _STATE:
        return not torch.equal(value, before) if isinstance(value, Tensor) else repr(value) != repr(before)
    if type(value) is not type(before) or type(value) not in _CONTAINERS:
        return value is not before
    return _identities(value) != _identities(before)


def _identities(container: Any) -> Any:
    """The items of a container, compared as objects: comparing tensors gives tensors."""
    if type(container) is dict:
        return {key: id(value) for key, value in container.items()}
    return container if type(container) is set else [id(item) for item in container]
