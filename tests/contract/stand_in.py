"""Run cases that request GPUs on the CPU.

Most of torch's cases say `skip_if_lt_x_gpu` and `.cuda(rank)`, and then test device-independent behaviour.
They run here with each GPU replaced by the CPU, and so do those that torch disabled for problems in its own
CI. Cases that need a real GPU also fail with torch's class, and are listed in expected.py.
"""

import contextlib
import functools
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

GATES = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu")  # called with a number
PLAIN_GATES = ("skip_if_no_gpu",)
ISSUES = "https://github.com/pytorch/pytorch/issues/"  # in skip reasons of cases that torch has disabled
# A side: on 1000 x 1000, as torch's case of uneven inputs has it, a CPU convolves for half an hour. Its three
# convolutions need 13.
IMAGE = 16

Function = Callable[..., Any]


class Gates:
    """Overrides the skip decorators of torch's cases: missing GPUs, and problems in torch's CI."""

    def __init__(self) -> None:
        self.open = False

    @contextlib.contextmanager
    def installed(self, common: ModuleType) -> Iterator[None]:
        """Replace the skip decorators by ones that can be opened, while the cases are imported."""
        gates = [(common, name, self._with_arguments(getattr(common, name))) for name in GATES]
        gates += [(common, name, self._gate(getattr(common, name))) for name in PLAIN_GATES]
        gates += [(unittest, "skipIf", self._skip_if)]
        with contextlib.ExitStack() as stack:
            for gate in gates:
                stack.enter_context(mock.patch.object(*gate))
            yield

    def can_open(self, reason: str) -> bool:
        """True if a case skipped for this reason runs once the gates are open."""
        return "CUDA" in reason or reason.startswith(ISSUES)

    def _skip_if(self, condition: object, reason: str) -> Function:
        skip = unittest.skip(reason) if condition else lambda case: case
        return self._gate(skip) if condition and reason.startswith(ISSUES) else skip

    def _with_arguments(self, decorator: Function) -> Function:
        return lambda *args, **kwargs: self._gate(decorator(*args, **kwargs))

    def _gate(self, decorator: Function) -> Function:
        def decorated(case: Function) -> Function:
            gated = decorator(case)

            @functools.wraps(case)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return case(*args, **kwargs) if self.open else gated(*args, **kwargs)

            return wrapper

        return decorated


class OnCpu(TorchFunctionMode):
    """Replaces GPU devices, in every spelling that torch allows, by the CPU."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _cpu(args[1]), *args[2:])
        if func is torch.ones and len(args) == 4:
            args = tuple(min(size, IMAGE) for size in args)
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_gpu = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_index or is_gpu else device


@contextlib.contextmanager
def cpu_for_gpus(gates: Gates, num_gpus: int) -> Iterator[None]:
    """Pretend that there are `num_gpus` GPUs; all of them are the CPU."""
    module = torch.nn.Module
    patches = (
        mock.patch.multiple(
            torch.cuda,  # separate functions: torch.compile has rules for each
            set_device=lambda *_: None,
            synchronize=lambda *_, **__: None,
            manual_seed=torch.manual_seed,
            device_count=lambda: num_gpus,
            current_device=lambda: "cpu",
        ),
        mock.patch.multiple(module, cuda=_module_cuda, to=_module_to(module.to)),
        mock.patch.object(torch.accelerator, "current_stream", CompletedEvent),
        mock.patch.object(torch, "Event", CompletedEvent),
    )
    gates.open = True
    try:
        with contextlib.ExitStack() as stack:
            for patch in (*patches, OnCpu()):
                stack.enter_context(patch)
            yield
    finally:
        gates.open = False


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class CompletedEvent:
    """CPU stream or event: already complete."""

    def __init__(self, *_args: Any) -> None:
        self.wait = self.record = self.wait_stream = _nothing


def _module_cuda(module: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return module


def _module_to(to: Function) -> Function:
    def module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(_cpu(arg) for arg in args)
        return to(module, *args, **{key: _cpu(value) for key, value in kwargs.items()})

    return module_to
