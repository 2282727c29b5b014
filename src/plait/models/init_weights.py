"""Initial weights as a function of the seed and the module's name alone, the same under every plan.

[Note: initialization of a meta model]
The model stays on meta. Modules are visited children first, as in transformers, because a parent may
re-initialize its children's parameters (gpt2 scales its residual projections so). A visited module's own
parameters (not its children's) are replaced by real ones in float32, initialized, passed to the caller, which
copies what it needs, and dropped: one module is materialized at a time. Before each module the generator is
seeded with a hash of (seed, the module's name), so a module's values depend on no other module, on no rank
and on no plan. Buffers of a meta model are allocated for good; their module's own initialization fills them.
Parameters and buffers are poisoned first (NaN, the least integer). A parameter that no initialization set
gets the values of its constructor, if they were recorded ([Note: values of constructors]). Otherwise, and for
buffers, an error names it, instead of training garbage.

[Note: modules that initialize other modules' parameters]
The tensors that a module's initialization accesses are recorded. If it accesses parameters that are on meta
(a container its children's), these are materialized and it starts again, with the same seed. So no module
needs special treatment, and only accessed parameters are materialized. The values that such a parameter
already had were dropped; they are drawn again, by replaying the initializations that set them: the log
records which accessed what, and each is seeded by name. A tied parameter, which several modules own, is one
that is accessed several times. Each time it is stored again; the last time counts. Attributes that libraries
set on parameters (such as transformers' `_is_hf_initialized`) are replayed like values, since initializations
read them, and are on the model's parameters at the end.

[Note: skipped modules]
A pipeline stage does not draw other stages' weights, and gets the same values for those that it does draw. A
skipped module is deferred: it is drawn after all before a container that turns out to access a parameter of
it, since the container's further random numbers may depend on how many it drew for that one, and on its
attributes. A module that shares a parameter with one that is not skipped is not skipped: it may set the
parameter's final value.

[Note: values of constructors]
A library's own initialization may leave out parameters whose constructor gives them values: a bias that is
created as zeros. On meta these values are lost. So the calls that set them are recorded: a function that
creates a tensor with values, and in-place functions on all of a tensor, without other tensors. After any
other change, the values are unknown.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from plait.errors import ModelError
from plait.models.initial_adapters import adapter_resets
from plait.models.tensors import storage_key
from plait.models.trace.modes import Functions, watching_reads
from plait.models.transformers_types import is_pretrained_model

_Store = Callable[[str, Tensor], None]  # (name, values)
_CONSTRUCTED = "plait_constructed"  # of a parameter on meta: the values that its constructor gave it
_Model = TypeVar("_Model", bound=nn.Module)


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part, the same on every machine."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def seeded_rng(device: torch.device, *parts: object) -> Iterator[None]:
    """Seed the generators from `parts` inside the context, and restore them on exit."""
    with torch.random.fork_rng(_cuda_devices(device)):
        _seed(device, *parts)
        yield


def with_parameters_on_meta(model: _Model) -> _Model:
    """Move to meta the parameters that a constructor created elsewhere. Their values are kept as what they
    are before the model's own initialization."""
    on_meta: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in on_meta:
                empty = torch.empty_like(parameter, device="meta")
                on_meta[parameter] = nn.Parameter(empty, parameter.requires_grad)
                on_meta[parameter].__dict__.update(parameter.__dict__)
                setattr(on_meta[parameter], _CONSTRUCTED, parameter.detach())
            module._parameters[key] = on_meta[parameter]
    return model


def initialize_weights(
    model: nn.Module,
    seed: int,
    device: torch.device,
    store: _Store,
    *,
    skip: Set[nn.Module] = frozenset(),
    stored: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Draw the initial weights of a model on meta, at any time only those that one module accesses.

    `store(name, values)` is called for every parameter, frozen ones too, under its first name, with the
    full tensor on `device`: in float32, or in the parameter's own dtype if that is not floating-point. It
    must copy what it keeps. It is called again if another module changes the values: the last call counts.
    The order of calls is the same on every rank.

    `stored(name, values)` returns the values that a frozen weight has in forward, if these are others.

    `skip`: modules that are not drawn, with their submodules: their parameters are not stored, and their
    buffers may stay on meta. All others get the same values as without `skip`. See [Note: skipped modules].

    Buffers on meta are allocated on `device` and filled. The parameters are the same objects as before, on
    meta, also if this raises. No global generator changes. Raises ModelError naming a parameter or buffer
    that the model's own code does not initialize, or a parameter that it replaces.
    """
    assert all(p.is_meta for p in model.parameters()), "initial weights are drawn for models on meta only"
    initializer = _ModelInitializer(model, seed, device, store, skip)
    initializer.adapter_resets = adapter_resets(model, stored)
    with torch.no_grad(), torch.random.fork_rng(_cuda_devices(device)):
        try:
            initializer.init_subtree(model, "", _init_fn_of(model))
            initializer.use_constructors()
        finally:
            initializer.bind(initializer.parameters)
    if (name := next(initializer.uninitialized(), None)) is not None:
        raise ModelError(
            "the model's own code leaves a parameter or buffer without an initial value",
            given=name,
            expected="a value for each of them",
            hint="give the module that owns it a reset_parameters(), or build the model on the CPU",
        )


def parameter_only_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that contain nothing but floating-point parameters: if their weights come from elsewhere,
    these can be skipped. Buffers, most of which are in no file, have to be computed."""
    return {
        module
        for module in model.modules()
        if not any(True for _ in module.buffers())
        and all(parameter.is_floating_point() for parameter in module.parameters())
    }


@dataclass(frozen=True)
class _InitStep:
    """The initialization of one module, which may set other modules' parameters too."""

    module: nn.Module
    name: str
    apply: Callable[[Any], None]

    def run(self, seed: int, device: torch.device) -> None:
        _seed(device, "initial weights", seed, self.name)
        self.apply(self.module)


class _ModelInitializer:
    """A traversal of a model, children first: [Note: modules that initialize other modules' parameters].

    Parameters are identified by their first name. Between initializations all of them are on meta.
    """

    def __init__(
        self, model: nn.Module, seed: int, device: torch.device, store: _Store, skip: Set[nn.Module]
    ) -> None:
        self._model, self.seed, self.device, self.store = model, seed, device, store
        self.parameters = dict(model.named_parameters())
        self._name_of = {parameter: name for name, parameter in self.parameters.items()}
        self._names_at: dict[int, set[str]] = {}  # by storage address on meta
        for name, parameter in self.parameters.items():
            self._names_at.setdefault(storage_key(parameter), set()).add(name)
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.parameters}
        for module in model.modules():
            for key, owned in module._parameters.items():
                if owned is not None:
                    self._slots[self._name_of[owned]].append((module, key))
        self._original_attributes = self._attributes_of(self.parameters)
        self._buffers: set[Tensor] = set()  # allocated here
        self._log: list[tuple[_InitStep, Set[str]]] = []  # with the parameters that each accessed
        self._accesses: dict[str, list[int]] = {name: [] for name in self.parameters}  # indices in the log
        self._has_value: set[str] = set()
        self._from_constructor: set[str] = set()
        self._modules = list(_modules_without(model, skip))
        own = {p for module in self._modules for p in module._parameters.values() if p is not None}
        self._own = {self._name_of[parameter] for parameter in own}
        self._skip = {module for module in skip if own.isdisjoint(module.parameters())}
        self.adapter_resets: Mapping[nn.Module, Callable[[Any], None]] = {}
        self._deferred: dict[str, tuple[nn.Module, Callable[[Any], None]]] = {}  # skipped so far, by name

    def init_subtree(self, module: nn.Module, name: str, apply: Callable[[Any], None]) -> None:
        """Initialize a module's submodules, then its own parameters and buffers."""
        for key, child in module.named_children():
            inner = _init_fn_of(child) if is_pretrained_model(child) else apply
            full = f"{name}.{key}" if name else key
            if child in self._skip:
                self._deferred[full] = child, inner
            else:
                self.init_subtree(child, full, inner)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = allocated = _poisoned(torch.empty_like(buffer, device=self.device))
                self._buffers.add(allocated)
        self._initialize(_InitStep(module, name, self.adapter_resets.get(module, apply)))

    def use_constructors(self) -> None:
        """Give parameters that have no value the one that their constructor gave them, if it is known, and
        what initializations make of it."""
        for name in [name for name in self.uninitialized() if name in self.parameters]:
            self._from_constructor.add(name)
            values = self._values_of({name}, {})[name]
            if not _is_poisoned(values):
                self._has_value.add(name)
                self.store(name, values.detach())

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Assign these to the model's modules under their names."""
        for name, parameter in parameters.items():
            for module, key in self._slots[name]:
                module._parameters[key] = parameter

    def uninitialized(self) -> Iterator[str]:
        """Yield the parameters and buffers, of modules that are not skipped, that have no value."""
        yield from (name for name in self.parameters if name in self._own and name not in self._has_value)
        own = {buffer for module in self._modules for buffer in module._buffers.values()}
        yield from (name for name, b in self._model.named_buffers() if b in own and _is_poisoned(b))

    def _initialize(self, init: _InitStep) -> None:
        """Run it repeatedly until all accessed parameters are materialized, then store them."""
        below = {self._name_of[p] for p in init.module.parameters()}
        accessed = {self._name_of[p] for p in init.module.parameters(recurse=False)}
        while True:
            attributes, buffers = self._attributes_of(below), self._copies_of_buffers([init.module])
            real = self._values_of(accessed, attributes)
            missing = self._attempt(init, real, below)
            if not missing:
                break
            real.clear()  # before others are allocated
            accessed |= missing
            _restore(buffers)
            for name in attributes:
                _set_attributes(self.parameters[name], attributes[name])
            for name, (module, apply) in list(self._deferred.items()):
                if not missing.isdisjoint(self._name_of[p] for p in module.parameters()):
                    del self._deferred[name]  # it owns one of these: draw it as if it had not been skipped
                    self.init_subtree(module, name, apply)
        if real:
            self._store_values(init, real)

    def _attempt(self, init: _InitStep, real: Mapping[str, nn.Parameter], below: Set[str]) -> Set[str]:
        """Run it with these parameters materialized. Return the others accessed: if any, it has to rerun."""
        seen: set[str] = set()  # names of the parameters on meta that operators read or write, also by views
        with self._bound(real):
            try:
                with watching_reads(lambda key: seen.update(self._names_at.get(key, ()))):
                    init.run(self.seed, self.device)
            except Exception:  # perhaps because of a tensor on meta
                missing = (seen - real.keys()) or (below - real.keys())
                if not missing:
                    raise
                return missing
            self._check_not_replaced(init, real)
        return seen - real.keys()

    def _store_values(self, init: _InitStep, real: dict[str, nn.Parameter]) -> None:
        self._log.append((init, frozenset(real)))
        for name in list(real):
            parameter = real.pop(name)
            self._accesses[name].append(len(self._log) - 1)
            _set_attributes(self.parameters[name], parameter.__dict__)
            if _is_poisoned(parameter):  # a later initialization may set it
                self._has_value.discard(name)
            else:
                self._has_value.add(name)
                if name in self._own:
                    self.store(name, parameter.detach())

    def _values_of(self, names: Set[str], attributes: Mapping[str, Any]) -> dict[str, nn.Parameter]:
        """Materialize parameters with their current values (poison if none) and attributes, in order."""
        history, needed = self._history_of(names)
        real = {name: self._materialize(name) for name in needed}
        buffers = self._copies_of_buffers(past.module for past in history)
        with self._bound(real):
            for past in history:
                past.run(self.seed, self.device)
        _restore(buffers)
        for name in names:
            _set_attributes(real[name], attributes.get(name, self.parameters[name].__dict__))
        return {name: real[name] for name in sorted(names)}

    def _history_of(self, names: Set[str]) -> tuple[list[_InitStep], Set[str]]:
        """The initializations that set these parameters, in order, and all parameters they accessed."""
        needed = set(names)
        indices = {index for name in names for index in self._accesses[name]}
        history = []
        while indices:
            index = max(indices)
            indices.remove(index)
            past, accessed = self._log[index]
            history.append(past)
            for name in accessed - needed:
                indices.update(earlier for earlier in self._accesses[name] if earlier < index)
            needed |= accessed
        return history[::-1], needed

    @contextmanager
    def _bound(self, real: Mapping[str, nn.Parameter]) -> Iterator[None]:
        self.bind(real)
        try:
            yield
        finally:
            self.bind({name: self.parameters[name] for name in real})

    def _materialize(self, name: str) -> nn.Parameter:
        meta = self.parameters[name]
        # float32 for all: generators draw different numbers in other dtypes
        dtype = torch.float32 if meta.is_floating_point() else meta.dtype
        values = _poisoned(torch.empty(meta.shape, dtype=dtype, device=self.device))
        if (constructed := getattr(meta, _CONSTRUCTED, None)) is not None:
            values.copy_(constructed)
        if name in self._from_constructor:
            _seed(self.device, "constructed", self.seed, name)
            repeat_construction(meta, values)
        real = nn.Parameter(values, requires_grad=meta.requires_grad)
        _set_attributes(real, self._original_attributes[name])
        return real

    def _check_not_replaced(self, init: _InitStep, real: Mapping[str, nn.Parameter]) -> None:
        known = set(real.values())
        for name, parameter in init.module.named_parameters(init.name):
            if parameter not in known and parameter not in self._name_of:
                raise ModelError(
                    "the model's own code replaces a parameter that it should initialize",
                    given=name,
                    expected="the same parameters before and after",
                    hint="write the initial values into the existing parameter, in place",
                )

    def _attributes_of(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {name: dict(self.parameters[name].__dict__) for name in names}

    def _copies_of_buffers(self, modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
        """Copies for `_restore`, so that an initialization that reruns starts from the same buffers."""
        buffers = {b for module in modules for b in module.buffers() if b in self._buffers}
        return [(buffer, buffer.clone()) for buffer in buffers]


def _modules_without(module: nn.Module, skip: Set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the module and its submodules, except skipped ones."""
    yield module
    for child in module.children():
        if child not in skip:
            yield from _modules_without(child, skip)


def _restore(copies: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, copy in copies:
        tensor.copy_(copy)


def _set_attributes(parameter: nn.Parameter, attributes: Mapping[str, Any]) -> None:
    parameter.__dict__ = dict(attributes)


def _init_fn_of(model: nn.Module) -> Callable[[Any], None]:
    """The function that initializes a module: the Hugging Face model's own, else `reset_parameters`."""
    return model._init_weights if is_pretrained_model(model) else _reset_parameters


def _reset_parameters(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _poisoned(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: Tensor) -> bool:
    """Return whether it has any NaN, or only integers that were never written; False for bools."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _seed(device: torch.device, *parts: object) -> None:
    """Seed the generators of the CPU and of `device`, and no others."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


# --- values of constructors

_RECORDED = "plait_recorded"  # of a parameter on meta: the calls that set its values
_CREATORS = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace)
_CHANGED = object()


@dataclass(frozen=True)
class _RecordedCall:
    """A call of a function that creates a tensor, or that changes one in place, which is _CHANGED here."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def apply(self, values: Tensor) -> None:
        if self.func in _CREATORS:
            kwargs = {**self.kwargs, "device": values.device, "dtype": values.dtype}
            values.copy_(self.func(*self.args, **kwargs))
        else:
            given = (self.args, self.kwargs)
            args, kwargs = tree_map(lambda leaf: values if leaf is _CHANGED else leaf, given)
            self.func(*args, **kwargs)


class RecordedConstruction:
    """Inside the context, record the calls that set values of tensors on meta; and create scalars on the CPU
    instead: constants, which no initialization knows."""

    def __init__(self) -> None:
        self._mode = Functions(self._record)
        self._calls: dict[int, list[_RecordedCall]] = {}  # by storage
        self._unknown: set[int] = set()  # storages with other changes
        self._alive: list[Any] = []  # storages, so that no address is reused

    def __enter__(self) -> "RecordedConstruction":
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.tensor and args and isinstance(args[0], int | float):
            kwargs = {"device": "cpu", **kwargs}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        if func in _CREATORS:
            self._add(result, func, args, kwargs, is_known=True)
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                is_known = len(tensors) == 1 and _is_all_of_its_storage(tensor)
                self._add(tensor, func, args, kwargs, is_known=is_known)
        return result

    def attach(self, model: nn.Module) -> None:
        """Store the calls on the model's parameters."""
        for parameter in model.parameters():
            storage = storage_key(parameter)
            if storage in self._calls.keys() - self._unknown and _is_all_of_its_storage(parameter):
                setattr(parameter, _RECORDED, tuple(self._calls[storage]))

    def _add(self, tensor: Tensor, func: Any, args: Any, kwargs: Any, *, is_known: bool) -> None:
        if tensor.is_meta:
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            args, kwargs = tree_map_only(Tensor, lambda _: _CHANGED, (args, kwargs))
            self._calls.setdefault(storage._cdata, []).append(_RecordedCall(func, args, kwargs))
            self._unknown |= set() if is_known else {storage._cdata}


def repeat_construction(parameter: Tensor, values: Tensor) -> None:
    """Set values as the constructor of this parameter on meta did, as far as recorded."""
    calls: Sequence[_RecordedCall] = getattr(parameter, _RECORDED, ())
    for call in calls:
        call.apply(values)


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    num_bytes = math.prod(tensor.shape) * tensor.element_size()
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == num_bytes
