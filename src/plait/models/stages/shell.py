"""Shells: a stage's own objects for the modules outside of blocks.

[Note: state that stages share with the model]
A stage has other parameters than the model (placeholders for those of other stages), other children (other
stages' blocks are pass-throughs), and hooks and forwards of its own. All else is the user's: attributes,
buffers, configurations, training mode. So a shell is a second object with the same `__dict__` as the user's
module. What differs is in slots of its class, which Python reads before `__dict__`. What a loop sets on the
model reaches the stage at once, and loop and loss read what the stage's forward sets.

Modules that are replaced, parameters, and hooks of the user are copied into the slots by `refresh`, before
each pass. An attribute that refers to modules of the model (a list, a bound method) is translated when it is
read: it refers to the stage's objects.

[Note: several stages on one rank]
Each stage runs the model's code outside of blocks, and may change its state: a counter counts a micro-batch
once in each stage, and a BatchNorm of the first stage normalizes NaN in the others. So only one stage of a
rank shares its state with the model; others have a `__dict__` and buffers of their own. `refresh` copies into
these what was changed since the last pass, whose own changes are not the user's.

[Note: placeholders]
In place of other stages' parameters there is NaN of the right shape, dtype and device, without storage. The
model's code before its first block (embeddings, positions, scaling) runs on it unmodified; its results are
replaced by the received tensors. NaN reveals a result that is not replaced.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.stages.inbox import StageInbox
from plait.models.trace.prepare import meta_like

_OUTPUT_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_HOOKS = (
    *_OUTPUT_HOOKS,
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)
_OWN = ("_parameters", "_modules", *_HOOKS)  # of each shell
_COPIED = (*_OWN, "_stage_forward", "_stage_users_forward", "_stage_placeholders", "_stage_modules")
_ABSENT = object()


class StageModules:
    """The modules of one stage by those of the model, for which it makes shells."""

    def __init__(
        self,
        inbox: StageInbox,
        modules: Mapping[nn.Module, nn.Module],
        blocks: set[nn.Module],
        placeholders: Mapping[int, Tensor],
        *,
        shares_state: bool,
    ) -> None:
        """`modules`: those that are no shells: of blocks, and the model's own ones. `blocks`: of the model.
        `placeholders`: of other stages' parameters, by their ids."""
        self.inbox = inbox
        self._modules = dict(modules)
        self._blocks = blocks
        self._placeholders = dict(placeholders)
        self._shares_state = shares_state

    def __deepcopy__(self, memo: dict[int, Any]) -> "StageModules":
        """For a copied stage, which translates nothing."""
        inbox = copy.deepcopy(self.inbox, memo)
        return StageModules(inbox, {}, set(), {}, shares_state=True)

    @property
    def shells(self) -> list["Shell"]:
        return [module for module in self._modules.values() if isinstance(module, Shell)]

    def of(self, module: nn.Module) -> nn.Module:
        """The stage's module for one of the model, which may have been added after the split."""
        if module not in self._modules:
            self._modules[module] = shell = _new_shell(module, self, shares_state=self._shares_state)
            shell._modules.update({k: m and self.of(m) for k, m in vars(module)["_modules"].items()})
        return self._modules[module]

    def translate_attributes(self) -> None:
        """Translate attributes of all shells, when they are read, that refer to modules now."""
        for shell in self.shells:
            for key, value in vars(shell).items():
                if key not in (*_OWN, "_buffers", "forward") and self.translated(value) is not value:
                    setattr(type(shell), key, _Reference(key))

    def of_added(self, old: nn.Module | None, new: nn.Module | None, name: str) -> nn.Module | None:
        """The same for a module that replaces another one."""
        changed = {*(old.modules() if old else ()), *(new.modules() if new else ())}
        if not self._blocks.isdisjoint(changed):
            raise ModelError(
                "a block was replaced after the model was split into stages",
                given=f"{name} is a {type(new).__name__}, or contains one",
                expected="blocks that stay where they are; modules within a block may be replaced",
                hint="replace it before parallelize; or no pipeline",
            )
        known = any(
            self._modules.get(module, module) is not module for module in (new.modules() if new else ())
        )
        return self.of(new) if new is not None and known else new

    def parameters_of(self, module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The stage's own parameters of a module, and placeholders for others."""
        parameters, placeholders = vars(module)["_parameters"], self._placeholders
        own = {key: p for key, p in parameters.items() if id(p) not in placeholders}
        return own, {key: placeholders[id(p)] for key, p in parameters.items() if key not in own}

    @staticmethod
    def publish(stages: "Sequence[StageModules]") -> None:
        """Give the model the parameters of this rank's stages, once they are bound."""
        for stage in stages:
            stage._placeholders.clear()  # their ids may be reused
        shells = [shell for stage in stages for shell in stage.shells]
        for shell in shells:
            own = {key: parameter for key, parameter in shell._parameters.items() if parameter is not None}
            shell._stage_users["_parameters"].update(own)
        for shell in shells:
            shell.record()

    def end_pass(self) -> None:
        """See [Note: several stages on one rank]."""
        for shell in () if self._shares_state else self.shells:
            shell.record()

    def refresh(self) -> None:
        """Adopt what was changed on the model since the last pass. Raises ModelError for a replaced block."""
        for shell in self.shells:
            shell.refresh()

    def translated(self, value: Any) -> Any:
        """The value with the stage's modules in place of the model's; itself if it refers to none."""
        if isinstance(value, nn.Module):
            return self._modules.get(value, value)
        if isinstance(value, MethodType):
            owner = self.translated(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            old: Any = (value.func, value.args, value.keywords)
            function, args, keywords = new = self.translated(old)
            return value if new is old else partial(function, *args, **keywords)
        items: list[Any] = []
        if type(value) in (list, tuple):
            items = list(value)
        elif type(value) is dict:
            items = list(value.values())
        new_items = [self.translated(item) for item in items]
        if all(new is old for new, old in zip(new_items, items, strict=True)):
            return value
        return dict(zip(value, new_items, strict=True)) if type(value) is dict else type(value)(new_items)


class _Forward:
    """The forward of a shell: one set on the shell, or on the user's module, or that of its class."""

    def __get__(self, shell: "Shell | None", owner: type) -> Any:
        if shell is None:
            return super(Shell, owner).forward  # type: ignore[misc]
        return shell._stage_forward or shell.plain_forward()

    def __set__(self, shell: "Shell", forward: Any) -> None:
        shell._stage_forward = forward

    def __delete__(self, shell: "Shell") -> None:
        shell._stage_forward = None


class Shell(nn.Module):
    """A module of a stage that shares the `__dict__` of the user's module. See [Note: state that stages share
    with the model]. Shells have classes of their own, which derive from this and from the module's class."""

    __slots__ = (*_COPIED, "_stage_users", "_stage_seen")
    _stage_forward: Any  # set on the shell
    _stage_users_forward: Any  # set on the user's module, by the user
    _stage_placeholders: dict[str, Tensor]
    _stage_modules: StageModules
    _stage_users: dict[str, Any]  # the `__dict__` of the user's module
    _stage_seen: dict[str, Any]  # that `__dict__` at the end of the last pass, with copies of containers
    forward: Any = _Forward()

    @property  # type: ignore[override]
    def __class__(self) -> type[nn.Module]:
        """The class of the user's module: a slice of an nn.ModuleList makes another one."""
        bases = type(self).__mro__
        return bases[bases.index(Shell) + 1]

    @__class__.setter
    def __class__(self, extended: type[nn.Module]) -> None:
        vars(object)["__class__"].__set__(self, extended)

    def plain_forward(self) -> Any:
        """The forward as it is without stages."""
        if self._stage_users_forward is not None:
            return self._stage_modules.translated(self._stage_users_forward)
        return super().forward

    def __getattr__(self, name: str) -> Any:
        for values in (self._parameters, self._stage_placeholders, self._modules):
            if name in values:
                return values[name]
        return super().__getattr__(name)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield placeholders to the model's code if there are no others: it may read the dtype or the
        device of the first."""
        is_empty = True
        for parameter in super().parameters(recurse):
            is_empty = False
            yield parameter
        if is_empty and self._stage_modules.inbox.is_filled:
            yield from (tensor for name, tensor in placeholders(self) if recurse or "." not in name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shell":
        copied: Shell = object.__new__(type(self))
        memo[id(self)] = copied
        values = {key: getattr(self, key) for key in vars(self) if key not in _OWN and key != "forward"}
        own = {key: getattr(self, key) for key in _COPIED}
        own["_stage_users_forward"] = self._stage_modules.translated(own["_stage_users_forward"])
        for key, value in own.items():
            object.__setattr__(copied, key, copy.deepcopy(value, memo))
        vars(copied).update(copy.deepcopy(values, memo))
        copied._stage_users, copied._stage_seen = vars(copied), {}
        return copied

    def drop_output_hooks(self) -> None:
        """Leave the hooks of the model's output to the last stage: this one's is a message."""
        for key in _OUTPUT_HOOKS:
            getattr(self, key).clear()

    # --- changes of the user's module

    def record(self) -> None:
        """Record the state of the user's module, with which `refresh` compares."""
        users = self._stage_users
        seen = {key: dict(users[key]) for key in _OWN} | {"forward": users.get("forward")}
        if users is not vars(self):
            versions = {key: (b, -1 if b is None else b._version) for key, b in users["_buffers"].items()}
            seen = dict(users) | seen | {"_buffers": versions}
        self._stage_seen = seen

    def refresh(self) -> None:
        """Adopt what was changed on the user's module since `record`. Raises ModelError for a replaced
        block."""
        users, seen = self._stage_users, self._stage_seen
        changed = [key for key in _OWN if not _same(users[key], seen[key])]
        sends = getattr(self._stage_forward, "ends", False)
        for key in (key for key in changed if not (sends and key in _OUTPUT_HOOKS)):
            self._adopt(key, users[key], seen[key])
        if users.get("forward") is not seen["forward"]:
            self._stage_users_forward = users.get("forward")
            changed.append("forward")
        if users is not vars(self):
            self._follow(users, seen)
        elif changed:
            self.record()

    def _adopt(self, key: str, users: Mapping[Any, Any], seen: Mapping[Any, Any]) -> None:
        own = getattr(self, key)
        for name in seen.keys() - users.keys():
            own.pop(name, None)
        for name, value in users.items():
            if seen.get(name, _ABSENT) is value or (
                key == "_parameters" and name in self._stage_placeholders
            ):
                continue
            if key == "_modules":
                value = self._stage_modules.of_added(seen.get(name), value, f"{type(self).__name__}.{name}")
            own[name] = value

    def _follow(self, users: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
        """See [Note: several stages on one rank]."""
        own, versions = vars(self), seen["_buffers"]
        for key in seen.keys() - users.keys():
            own.pop(key, None)
        for key in users.keys() - {*_OWN, "_buffers"}:
            if seen.get(key, _ABSENT) is not users[key]:
                own[key] = users[key]
        for key, buffer in users["_buffers"].items():
            last, version = versions.get(key, (_ABSENT, 0))
            if buffer is None or last is not buffer or version != buffer._version:
                own["_buffers"][key] = None if buffer is None else buffer.clone()


def _same(users: Mapping[Any, Any], seen: Mapping[Any, Any]) -> bool:
    return users.keys() == seen.keys() and all(seen[key] is value for key, value in users.items())


def _new_shell(module: nn.Module, modules: StageModules, *, shares_state: bool) -> Shell:
    cls: Any = type(module)
    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    shell: Shell = object.__new__(type(cls)(cls.__name__, (Shell, cls), names))
    users = vars(module)
    own, foreign = modules.parameters_of(module)
    slots = {
        **{key: copy.copy(users[key]) for key in _HOOKS},
        "_parameters": own,
        "_modules": {},
        "_stage_placeholders": foreign,
        "_stage_forward": None,
        "_stage_users_forward": users.get("forward"),
        "_stage_modules": modules,
        "_stage_users": users,
        "_stage_seen": {},
    }
    for key, value in slots.items():
        object.__setattr__(shell, key, value)
    if shares_state:
        shell.__dict__ = users
    else:
        vars(shell).update({key: value for key, value in users.items() if key not in _OWN}, _buffers={})
        shell._follow(users, {**users, "_buffers": {}})
    shell.record()
    return shell


class _Reference:
    """An attribute that refers to modules of the model."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __get__(self, shell: Shell | None, _: type) -> Any:
        if shell is None or self._key not in vars(shell):
            raise AttributeError(self._key)
        return shell._stage_modules.translated(vars(shell)[self._key])

    def __set__(self, shell: Shell, value: Any) -> None:
        vars(shell)[self._key] = value

    def __delete__(self, shell: Shell) -> None:
        del vars(shell)[self._key]


# --- see [Note: placeholders]


def placeholder_like(parameter: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return one NaN (zero for integers), expanded to the parameter's shape."""
    is_floating = parameter.is_floating_point() or parameter.is_complex()
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    value = torch.full((), torch.nan if is_floating else 0, dtype=dtype, device=device)
    return value.expand(parameter.shape)


def placeholders_of(module: nn.Module) -> dict[str, Tensor]:
    """The placeholders that a stage's module has in place of direct parameters, by key."""
    found: Any = module._stage_placeholders if hasattr(type(module), "_stage_placeholders") else {}
    return cast(dict[str, Tensor], found)


def placeholders(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all placeholders with their names, tied ones under each name."""
    for name, module in model.named_modules():
        for key, placeholder in placeholders_of(module).items():
            yield f"{name}.{key}" if name else key, placeholder


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model, or of a stage, with parameters and buffers on meta, in the same dtypes."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = [t for t in attributes if isinstance(t, Tensor) and not t.is_leaf]  # as by nn.utils.prune
    given = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in placeholders(model))]
    memo: dict[int, Any] = {id(tensor): meta_like(tensor) for tensor in (*given, *computed)}
    return copy.deepcopy(model, memo)
