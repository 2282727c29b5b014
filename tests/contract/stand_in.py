"""CPU in the place of GPUs, for cases that are about ranks and ask for GPUs by habit.

Most of torch's cases say `skip_if_lt_x_gpu` and `.cuda(rank)`, and then test what any device has. They run
here with each mention of a GPU led to the CPU. So do those that torch switched off for trouble in its own CI.
What needs a real GPU fails with torch's class, too, and is named in expected.py.
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

GATES = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu")  # they are called with a number
PLAIN_GATES = ("skip_if_no_gpu",)
ISSUES = "https://github.com/pytorch/pytorch/issues/"  # of cases that torch has switched off
IMAGE = (
    40  # a side: on 1000 x 1000, as torch's case of uneven inputs has it, a CPU convolves for half an hour
)

Function = Callable[..., Any]


class Gates:
    """Opens what torch's cases skip themselves by: for want of GPUs, or of peace in torch's own CI."""

    def __init__(self) -> None:
        self.open = False

    @contextlib.contextmanager
    def installed(self, common: ModuleType) -> Iterator[None]:
        """Within it, where the cases are imported, decorators that can be opened are in torch's place."""
        gates = [(common, name, self._with_arguments(getattr(common, name))) for name in GATES]
        gates += [(common, name, self._gate(getattr(common, name))) for name in PLAIN_GATES]
        gates += [(unittest, "skipIf", self._skip_if)]
        with contextlib.ExitStack() as stack:
            for gate in gates:
                stack.enter_context(mock.patch.object(*gate))
            yield

    def lets_in(self, reason: str) -> bool:
        """Whether a case that was skipped for this reason is not, with the gates open."""
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
    """Devices that are GPUs, in any way that torch lets one write them, are the CPU."""

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
    """Within it, `num_gpus` GPUs are there to be asked for, and all of them are the CPU."""
    module = torch.nn.Module
    replaced = (
        mock.patch.multiple(
            torch.cuda,  # by functions of their own: torch.compile has rules for each
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
            for replacement in (*replaced, OnCpu()):
                stack.enter_context(replacement)
            yield
    finally:
        gates.open = False


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class CompletedEvent:
    """A stream or an event of a CPU: what it would wait for has happened already."""

    def __init__(self, *_args: Any) -> None:
        self.wait = self.record = self.wait_stream = _nothing


def _module_cuda(module: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return module


def _module_to(to: Function) -> Function:
    def module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(_cpu(arg) for arg in args)
        return to(module, *args, **{key: _cpu(value) for key, value in kwargs.items()})

    return module_to
