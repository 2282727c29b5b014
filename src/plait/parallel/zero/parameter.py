"""The parameters of an engine's model: torch's, which report the accesses that torch does not count.

[Note: parameters that users hold]
A model's own parameter objects become the units' (on the meta device, and for subclasses, new ones with their
hooks), so that lists, averages and optimizers that were made before see the engine's weights. Their class
tells the engine of two accesses; for operations they are plain parameters:
- reading `.grad` raises an error if a gradient has been accumulated, which is not there, or if the reader is
  an optimizer or torch's clipping: they would find no gradients, and do nothing;
- reading `.data` returns a tensor through which a script may write, which no version counter shows. The unit
  then compares its memory with the master weights when these are needed next: see `FlatParam.adopt_writes`.
  Without such reads it compares nothing.
An operation on a subclass of Parameter costs 0.35 us more, for a lookup of `__torch_function__`.
"""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError

_TENSOR: Any = torch.Tensor
read_data, write_data = _TENSOR.data.__get__, _TENSOR.data.__set__
read_grad, write_grad = _TENSOR.grad.__get__, _TENSOR.grad.__set__
_USES_GRADIENTS = ("torch.optim", "torch.nn.utils.clip_grad", "torch.amp")  # modules
_OWNER, _HOOK = "_plait_owner", "_plait_hook"


class UnitParameter(nn.Parameter):
    """A parameter of a unit. See [Note: parameters that users hold]."""

    @property
    def data(self) -> Tensor:
        data: Tensor = read_data(self)
        owner, name = owner_of(self)
        return data if owner is None else owner.expose(name, data)

    @data.setter
    def data(self, value: Tensor) -> None:
        owner, name = owner_of(self)
        if owner is not None and (_memory_of(value) != _memory_of(self)):
            raise changed_outside_engine(name)
        write_data(self, value)

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = read_grad(self)
        owner, name = owner_of(self)
        if gradient is None and owner is not None and torch._guards.TracingContext.try_get() is None:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if owner.has_gradient or reader.startswith(_USES_GRADIENTS):
                raise gradient_is_the_engines(f"{name}.grad is read in {reader}")
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        owner, name = owner_of(self)
        in_hook = read_grad(self) is not None
        if owner is not None and not in_hook and (value is not None or owner.has_gradient):
            raise gradient_is_the_engines(f"{name}.grad = {'None' if value is None else 'a tensor'}")
        write_grad(self, value)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        handle = super().register_post_accumulate_grad_hook(hook)
        hooks, engines = self._post_accumulate_grad_hooks, vars(self).get(_HOOK)
        if engines is not None and hooks is not None:
            hooks[engines.id] = hooks.pop(engines.id)  # last: it moves the gradient
        return handle

    def __repr__(self, **_: Any) -> Any:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self._plain().detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._plain()
        plain.__dict__.update({key: value for key, value in vars(self).items() if key not in (_OWNER, _HOOK)})
        return plain.__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        owner, name = owner_of(self)
        if owner is not None:
            owner.check_copy(name)
        return nn.Parameter(self.detach(), self.requires_grad)


def owner_of(parameter: Tensor) -> tuple[Any, str]:
    """The unit (`FlatParam`) of a parameter, None if its engine is gone, and its name."""
    reference, name = vars(parameter).get(_OWNER, (None, ""))
    return None if reference is None else reference(), name


def bind(old: nn.Parameter, values: Tensor, owner: object, name: str, *, is_copy: bool) -> UnitParameter:
    """Return `old` as the parameter of a unit, a view of its storage. It is a new one if torch cannot give
    `old` other memory, or if it `is_copy`: `old`, which has no hooks of the user, is of another stage."""
    parameter: Any = old
    if not is_copy and (handle := vars(old).pop(_HOOK, None)) is not None:  # of an older engine
        handle.remove()
    is_plain = type(old) in (nn.Parameter, UnitParameter) and not old.is_inference()
    if is_copy or not (is_plain and torch._has_compatible_shallow_copy_type(old, values)):
        parameter = nn.Parameter(values.new_empty(0), requires_grad=old.requires_grad)
        parameter.__dict__.update({key: value for key, value in vars(old).items() if key != _HOOK})
        if not is_copy:
            for hook in (old._backward_hooks or {}).values():
                parameter.register_hook(hook)
            for hook in (old._post_accumulate_grad_hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(hook)
    write_data(parameter, values)  # its version counter stays: all-gathers and updates are no edits
    write_grad(parameter, None)
    parameter.__class__ = UnitParameter
    setattr(parameter, _OWNER, (weakref.ref(owner), name))
    return parameter


def move_gradients(parameter: UnitParameter, hook: Any) -> None:
    """Run `hook` after the user's hooks, whenever a gradient is in `.grad`."""
    setattr(parameter, _HOOK, parameter.register_post_accumulate_grad_hook(hook))


def has_hooks(parameter: Any) -> bool:
    """Return whether a script has registered hooks on the parameter."""
    engines = getattr(vars(parameter).get(_HOOK), "id", None)
    return bool(parameter._backward_hooks) or any(
        key != engines for key in parameter._post_accumulate_grad_hooks or ()
    )


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.dtype


def gradient_is_the_engines(given: str) -> ModelError:
    """The error for a use of `.grad` of an engine's parameter."""
    return ModelError(
        "the gradients of an engine's parameters are not in .grad",
        given=given,
        expected="gradients that the engine accumulates, reduces and clips",
        hint="clip_norm= or clip_value= of parallelize, a hook that changes them, or to drop them "
        "engine.optimizer.zero_grad(); engine.full_gradients() after an update; no other optimizer",
    )


def changed_outside_engine(name: str) -> ModelError:
    """The error for a parameter that something other than the engine wrote."""
    return ModelError(
        "a parameter was changed outside the engine",
        given=name,
        expected="weights that only the engine changes: its master weights would overwrite other changes",
        hint="load weights before parallelize, or with engine.load_state; parameter.data.clamp_() and other "
        "writes in place through .data",
    )
