"""Initial weights: a function of the seed and the module's name alone, the same under every plan.

[Note: how a meta model comes to life]
The model stays on meta. Modules are visited children first, as transformers does, because a parent may
re-initialise what its children hold (gpt2 scales its residual projections so). A visited module gets real
parameters in float32 in the place of its own (not its children's), its values are drawn, handed to the
caller, who keeps what is his, and dropped: one module is alive at a time. Before each module the generator
is seeded with a hash of (seed, the module's name), so a module's values depend on no other module, on no
rank and on no plan. Buffers of a meta model are allocated for good; their module's own initialisation
fills them. Parameters and buffers are poisoned first (NaN, the least integer): what no initialisation
touched is found and named instead of being trained as garbage.

[Note: modules that touch what is not their own]
What a module's initialisation does to tensors is watched. If it reaches for parameters that are on meta
(a container for its children's), it is given real ones and begins again, with the same seed. So no module
has to be understood, and only what is touched becomes real. The values that such a parameter already has
were dropped; they are drawn again, by replaying the initialisations that made them: `log` says which
touched what, and each is seeded by name. A tied parameter, which several modules own, is one that is
touched several times. Whoever touches a parameter hands it over anew; the last time counts. Marks
that libraries leave on parameters (attributes, such as transformers' `_is_hf_initialized`) are replayed
like values, since initialisations ask for them, and are on the model's parameters in the end.

[Note: modules that are skipped]
A pipeline's stage does not draw what other stages hold, and gets the same values for what it does draw. A
skipped module is put off: it is drawn after all, before a container that turns out to touch a parameter of
it, since what the container draws next may depend on how much it drew for that one, and its marks. One that
shares a parameter with what is not skipped is not skipped: it may have the last word on it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from plait.errors import ModelError


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part, the same on every machine."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def seeded_rng(device: torch.device, *parts: object) -> Iterator[None]:
    """Random numbers inside depend on `parts` alone; afterwards the generators are as they were."""
    with torch.random.fork_rng(_cuda_devices(device)):
        _seed(device, *parts)
        yield


def initialize_weights(
    model: nn.Module,
    seed: int,
    device: torch.device,
    store: Callable[[str, Tensor], None],
    *,
    skip: Set[nn.Module] = frozenset(),
) -> None:
    """Draws the first weights of a model on meta, at no time more of them than one module touches.

    `store(name, values)` is called for every parameter, frozen ones too, under its first name, with the
    whole tensor on `device`: in float32, or in the parameter's own dtype if that is not a floating one.
    It must copy what it keeps. It is called again when another module changes the values: the last call
    counts. Calls come in the same order on every rank.

    `skip`: modules that are not drawn, with all that is in them: their parameters are not stored, and their
    buffers may stay on meta. All else gets the values that it gets without. See [Note: modules that are
    skipped].

    Buffers on meta are allocated on `device` and filled. The parameters are the same objects as before, on
    meta, also when this raises. Changes no global generator. Raises ModelError naming a parameter or
    buffer that the model's own code leaves without a value, or a parameter that it replaces.
    """
    assert all(p.is_meta for p in model.parameters()), "only a model on meta is given first weights"
    visit = _ModelInitializer(model, seed, device, store, skip)
    with torch.no_grad(), torch.random.fork_rng(_cuda_devices(device)):
        try:
            visit.down(model, "", _init_fn_of(model))
        finally:
            visit.bind(visit.parameters)
    buffers = [name for name, b in model.named_buffers() if b in visit.own_buffers and _is_poisoned(b)]
    for name in (*visit.unset(), *buffers):
        raise ModelError(
            "the model's own code leaves a parameter or buffer without an initial value",
            given=name,
            hint="give the module that owns it a reset_parameters(), or build the model off meta",
        )


def parameter_only_modules(model: nn.Module) -> set[nn.Module]:
    """The modules in which there is nothing but floating parameters: with `skip`, nothing of them has to be
    drawn if their weights come from elsewhere. Buffers, most of which are in no file, have to be made."""
    return {
        module
        for module in model.modules()
        if not any(True for _ in module.buffers())
        and all(parameter.is_floating_point() for parameter in module.parameters())
    }


@dataclass(frozen=True)
class _InitStep:
    """What gives one module's parameters their values, and perhaps others'."""

    module: nn.Module
    name: str
    apply: Callable[[Any], None]

    def run(self, seed: int, device: torch.device) -> None:
        _seed(device, "initial weights", seed, self.name)
        self.apply(self.module)


class _ModelInitializer:
    """One way through a model, children first. See [Note: modules that touch what is not their own].

    Parameters go by their first name. Between initialisations all of them are on meta.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        store: Callable[[str, Tensor], None],
        skip: Set[nn.Module],
    ) -> None:
        self.seed, self.device, self.store = seed, device, store
        self.parameters = dict(model.named_parameters())
        self._name_of = {parameter: name for name, parameter in self.parameters.items()}
        self._stored_at: dict[int, set[str]] = {}  # addresses on meta
        for name, parameter in self.parameters.items():
            self._stored_at.setdefault(parameter.untyped_storage()._cdata, set()).add(name)
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.parameters}
        for module in model.modules():
            for key, held in module._parameters.items():
                if held is not None:
                    self._slots[self._name_of[held]].append((module, key))
        self._first_marks = self._marks_of(self.parameters)
        self._buffers: set[Tensor] = set()  # those allocated here
        self._log: list[tuple[_InitStep, Set[str]]] = []  # what ran, with all that it touched
        self._touches: dict[str, list[int]] = {name: [] for name in self.parameters}  # places in the log
        self._has_value: set[str] = set()
        self._modules = list(_modules_without(model, skip))
        own = {p for module in self._modules for p in module._parameters.values() if p is not None}
        self._own = {self._name_of[parameter] for parameter in own}
        self._skip = {module for module in skip if own.isdisjoint(module.parameters())}
        self._put_off: dict[str, tuple[nn.Module, Callable[[Any], None]]] = {}  # skipped so far, by name

    @property
    def own_buffers(self) -> set[Tensor]:
        """Those of modules that are not skipped."""
        return {b for module in self._modules for b in module._buffers.values() if b is not None}

    def down(self, module: nn.Module, name: str, apply: Callable[[Any], None]) -> None:
        """Gives values to all that lies below a module, then to its own parameters and buffers."""
        for key, child in module.named_children():
            inner = _init_fn_of(child) if isinstance(child, PreTrainedModel) else apply
            full = f"{name}.{key}" if name else key
            if child in self._skip:
                self._put_off[full] = child, inner
            else:
                self.down(child, full, inner)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = allocated = _poisoned(torch.empty_like(buffer, device=self.device))
                self._buffers.add(allocated)
        self._initialise(_InitStep(module, name, apply))

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The model's modules hold these under their names."""
        for name, parameter in parameters.items():
            for module, key in self._slots[name]:
                module._parameters[key] = parameter

    def unset(self) -> list[str]:
        """Parameters that nothing gave a value."""
        return [name for name in self.parameters if name in self._own and name not in self._has_value]

    def _initialise(self, this: _InitStep) -> None:
        """Runs it, again and again, until all that it touches is real; hands that over."""
        below = {self._name_of[p] for p in this.module.parameters()}
        touched = {self._name_of[p] for p in this.module.parameters(recurse=False)}
        marks, buffers = self._marks_of(below), self._copies_of_buffers([this.module])
        while True:
            real = self._values_of(touched, marks)
            missing = self._attempt(this, real, below)
            if not missing:
                break
            real.clear()  # before others are made
            touched |= missing
            _restore(buffers)
            for name in marks:
                _set_attributes(self.parameters[name], marks[name])
            self._draw_put_off(missing)
            marks, buffers = self._marks_of(below), self._copies_of_buffers([this.module])
        if real:
            self._hand_over(this, real)

    def _draw_put_off(self, missing: Set[str]) -> None:
        """Skipped modules that hold one of these, as if they had not been skipped."""
        for name, (module, apply) in list(self._put_off.items()):
            if not missing.isdisjoint(self._name_of[p] for p in module.parameters()):
                del self._put_off[name]
                self.down(module, name, apply)

    def _attempt(self, this: _InitStep, real: Mapping[str, nn.Parameter], below: Set[str]) -> Set[str]:
        """Runs it with these parameters real. Returns those that it touches besides; then it was in vain."""
        watch = _MetaAccessRecorder(self._stored_at)
        with self._bound(real):
            try:
                with watch:
                    this.run(self.seed, self.device)
            except Exception:  # perhaps because it met a tensor on meta
                missing = (watch.seen - real.keys()) or (below - real.keys())
                if not missing:
                    raise
                return missing
            self._refuse_new_parameters(this, real)
        return watch.seen - real.keys()

    def _hand_over(self, this: _InitStep, real: dict[str, nn.Parameter]) -> None:
        self._log.append((this, frozenset(real)))
        for name in list(real):
            parameter = real.pop(name)
            self._touches[name].append(len(self._log) - 1)
            _set_attributes(self.parameters[name], parameter.__dict__)
            if _is_poisoned(parameter):  # may get its value later
                self._has_value.discard(name)
            else:
                self._has_value.add(name)
                if name in self._own:
                    self.store(name, parameter.detach())

    def _values_of(self, names: Set[str], marks: Mapping[str, Any]) -> dict[str, nn.Parameter]:
        """Real parameters with the values they have by now (poison, if none) and these marks, in order."""
        history, needed = self._history_of(names)
        real = {name: self._unset(name) for name in needed}
        buffers = self._copies_of_buffers(past.module for past in history)
        with self._bound(real):
            for past in history:
                past.run(self.seed, self.device)
        _restore(buffers)
        for name in names:
            _set_attributes(real[name], marks.get(name, self.parameters[name].__dict__))
        return {name: real[name] for name in sorted(names)}

    def _history_of(self, names: Set[str]) -> tuple[list[_InitStep], Set[str]]:
        """The initialisations that made these parameters' values, in order, and all that they touched."""
        needed = set(names)
        places = {place for name in names for place in self._touches[name]}
        history = []
        while places:
            place = max(places)
            places.remove(place)
            past, touched = self._log[place]
            history.append(past)
            for name in touched - needed:
                places.update(earlier for earlier in self._touches[name] if earlier < place)
            needed |= touched
        return history[::-1], needed

    @contextmanager
    def _bound(self, real: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """While inside, the model holds these parameters instead of its own."""
        self.bind(real)
        try:
            yield
        finally:
            self.bind({name: self.parameters[name] for name in real})

    def _unset(self, name: str) -> nn.Parameter:
        meta = self.parameters[name]
        # float32 for all: generators draw other numbers in other dtypes
        dtype = torch.float32 if meta.is_floating_point() else meta.dtype
        values = _poisoned(torch.empty(meta.shape, dtype=dtype, device=self.device))
        real = nn.Parameter(values, requires_grad=meta.requires_grad)
        _set_attributes(real, self._first_marks[name])
        return real

    def _refuse_new_parameters(self, this: _InitStep, real: Mapping[str, nn.Parameter]) -> None:
        known = set(real.values())
        for name, parameter in this.module.named_parameters(this.name):
            if parameter not in known and parameter not in self._name_of:
                raise ModelError(
                    "the model's own code puts a new parameter in the place of one that it should fill",
                    given=name,
                    hint="write the first values into the old parameter, in place",
                )

    def _marks_of(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {name: dict(self.parameters[name].__dict__) for name in names}

    def _copies_of_buffers(self, modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
        """For `_restore`: initialisations that run twice find buffers as they were."""
        buffers = {b for module in modules for b in module.buffers() if b in self._buffers}
        return [(buffer, buffer.clone()) for buffer in buffers]


class _MetaAccessRecorder(TorchDispatchMode):
    """Collects the names of the parameters on meta that operations read or write, views of them included."""

    def __init__(self, stored_at: Mapping[int, Set[str]]) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._stored_at = stored_at

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.is_meta:
                self.seen |= self._stored_at.get(value.untyped_storage()._cdata, set())
        return func(*args, **(kwargs or {}))


def _modules_without(module: nn.Module, skip: Set[nn.Module]) -> Iterator[nn.Module]:
    """The module and what is in it, but for what is skipped."""
    yield module
    for child in module.children():
        if child not in skip:
            yield from _modules_without(child, skip)


def _restore(copies: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, copy in copies:
        tensor.copy_(copy)


def _set_attributes(parameter: nn.Parameter, marks: Mapping[str, Any]) -> None:
    """The parameter has these attributes and no others."""
    marks = dict(marks)
    parameter.__dict__.clear()
    parameter.__dict__.update(marks)


def _init_fn_of(model: nn.Module) -> Callable[[Any], None]:
    """What gives a module its values: the Hugging Face model's own way, else `reset_parameters`."""
    if isinstance(model, PreTrainedModel):
        return model._init_weights
    return _reset_parameters


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _poisoned(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: Tensor) -> bool:
    """Any NaN, or integers none of which was touched. A bool cannot tell; its neighbours do."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _seed(device: torch.device, *parts: object) -> None:
    """Seeds the generators of the CPU and of `device`, and no other device's."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
