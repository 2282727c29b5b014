"""Horovod's DistributedOptimizer: a subclass of the optimizer's class, whose gradients DDP reduces."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group, empty
from plait.compat.horovod.job import OPERATIONS, job
from plait.compat.horovod.verbs import (
    Average,
    Compression,
    NoneCompressor,
    Op,
    Sum,
    check_op,
    check_process_set,
)
from plait.errors import CompatError
from plait.parallel.ddp.allreduce import Options, Reduction
from plait.parallel.ddp.reducer import Reducer

_REPEATED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The "
    "gradients are not reduced again."
)
_BUCKET_BYTES = (1 << 20, 25 << 20)  # DDP's: the first bucket, and the following ones


class GradientRanks:
    """All ranks, with connections for one optimizer's gradients: see [Note: announcements] in `job.py`."""

    def __init__(self) -> None:
        world = job().world
        self.group: Group = world.new_group(tuple(range(world.size)), "gradients")
        self.rank = world.rank

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(numel, dtype, device, self.group)


class Gradients:
    """The gradients of one optimizer."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], options: Options, *, are_sparse: bool, densify: bool
    ) -> None:
        names = {index: name for index, (name, _) in enumerate(named)}
        parameters = [parameter for _, parameter in named]
        own = job()
        if any(parameter.device.type != own.world.device.type for parameter in parameters):
            raise CompatError(
                "the parameters are not on the device of the ranks",
                given=", ".join(sorted({str(parameter.device) for parameter in parameters})),
                expected=own.world.device,
                hint="model.to(hvd.local_rank()), or an empty CUDA_VISIBLE_DEVICES to train on the CPU",
            )
        for name, parameter in named:
            if densify:
                parameter.register_post_accumulate_grad_hook(_densify)  # runs before the reducer's hook
            else:
                parameter.register_hook(_sparse_check(name, are_sparse))
        self.reducer = Reducer(parameters, [are_sparse] * len(parameters), names, options, GradientRanks())
        self._number = len(own.zero_steps)
        own.zero_steps.append(self.reducer.contribute_zeros)
        self.reducer.begin()
        self.is_synchronized = False

    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        job().announce(OPERATIONS[1], self._number)
        self.reducer.finish()
        self.reducer.begin()
        self.is_synchronized = True


def _densify(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def _sparse_check(name: str, are_sparse: bool) -> Callable[[Tensor], None]:
    def check(gradient: Tensor) -> None:
        if gradient.is_sparse and not are_sparse:
            raise CompatError(
                "a sparse gradient in an optimizer of dense ones",
                given=f"the gradient of {name}",
                expected="dense gradients, or an optimizer of its own (SparseAdam) for sparse ones",
                hint="sparse_as_dense=True",
            )

    return check


_EARLY_ZERO_GRAD = (  # Horovod's text
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize()"
)


@cache
def _subclass(base: Any) -> Any:
    """Return Horovod's subclass of an optimizer's class."""

    class Distributed(base):
        _gradients: Gradients
        _should_synchronize: bool

        def synchronize(self) -> None:
            """Wait until all gradients are reduced. Then clip, and step in `skip_synchronize()`."""
            self._gradients.synchronize()

        @contextlib.contextmanager
        def skip_synchronize(self) -> Iterator[None]:
            """Make `step` use the gradients as they are, after `synchronize()`."""
            self._should_synchronize = False
            try:
                yield
            finally:
                self._should_synchronize = True

        def step(self, closure: Any = None) -> Any:
            """Reduce the gradients, of a closure each time it is called, and update the parameters."""
            if self._should_synchronize and closure is None:
                if self._gradients.is_synchronized and not self._gradients.reducer.has_gradients:
                    warnings.warn(_REPEATED, stacklevel=2)
                else:
                    self.synchronize()
            self._gradients.is_synchronized = False
            return super().step(*([] if closure is None else [self._reducing(closure)]))

        def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            return run if self._should_synchronize else closure

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Clear the gradients. Raises CompatError between a backward and the step."""
            if self._gradients.reducer.has_gradients:
                raise CompatError(
                    _EARLY_ZERO_GRAD,
                    given="gradients in reduction",
                    expected="zero_grad() before backward or after step()",
                    hint="optimizer.step() first; backward_passes_per_step=N to accumulate gradients",
                )
            super().zero_grad(set_to_none)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if hasattr(self, "_gradients"):
                raise _late_group()
            super().add_param_group(param_group)

    Distributed.__name__ = Distributed.__qualname__ = base.__name__
    return Distributed


def _late_group() -> CompatError:
    return CompatError(
        "a DistributedOptimizer does not take another group",
        given="add_param_group()",
        expected="all parameters when it is created",
        hint="add the group to the optimizer, then hvd.DistributedOptimizer(optimizer)",
    )


def DistributedOptimizer(  # Horovod's name: it makes an instance of a class
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: type[NoneCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: object = None,
) -> Any:
    """Return an optimizer that reduces its gradients over all ranks before it updates the parameters.

    It shares groups and state with `optimizer`, and is an instance of its class. Reductions overlap with the
    last of `backward_passes_per_step` backwards. Parameters without a gradient are reduced as zeros in `step`
    or `synchronize`, which all ranks call alike. `groups`: lists of parameters (or a number of lists) that
    are reduced together. Raises CompatError.
    """
    check_process_set(process_set)
    if check_op(op) not in (Average, Sum):
        raise CompatError(
            "gradients cannot be reduced by this op",
            given=op.name,
            expected="Average or Sum",
            hint="op=hvd.Average",
        )
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise CompatError(
            "gradient_predivide_factor is for averages",
            given=f"gradient_predivide_factor={gradient_predivide_factor}, op={op.name}",
            expected="op=hvd.Average",
            hint="gradient_predivide_factor=1.0",
        )
    named = _named(optimizer, named_parameters)
    if backward_passes_per_step < 1 or not named:
        raise CompatError(
            "nothing to reduce",
            given=f"backward_passes_per_step={backward_passes_per_step}, {len(named)} trained parameters",
            expected="at least one of each",
            hint="parameters that require gradients, and backward_passes_per_step=1",
        )
    factor, size = gradient_predivide_factor, job().world.size
    scale = (1.0, 1.0) if op is Sum else None if factor == 1.0 else (1.0 / factor, factor / size)
    options = Options(
        _BUCKET_BYTES,
        passes=backward_passes_per_step,
        groups=_group_numbers([parameter for _, parameter in named], groups or num_groups),
        reduction=Reduction(scale, compression.dtype),
    )
    are_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    base: Any = type(optimizer)
    kind = _subclass(base)
    distributed = kind.__new__(kind)
    # A learning-rate schedule has replaced `step` by one that is bound to the other object.
    distributed.__dict__.update((key, value) for key, value in vars(optimizer).items() if key != "step")
    distributed._should_synchronize = True
    distributed._gradients = Gradients(named, options, are_sparse=are_sparse, densify=sparse_as_dense)
    return distributed


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's trained parameters with their names. Raises CompatError for unusable names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        names = {id(parameter): f"parameter {number}" for number, parameter in enumerate(parameters)}
    else:
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise CompatError(
                "named_parameters does not have pairs",
                given=next(
                    type(pair).__name__ for pair in pairs if not (isinstance(pair, tuple) and len(pair) == 2)
                ),
                expected="pairs of a name and a parameter",
                hint="model.named_parameters()",
            )
        names = {id(parameter): name for name, parameter in pairs}
        if len({name for name, _ in pairs}) < len(pairs) or any(id(p) not in names for p in parameters):
            raise CompatError(
                "named_parameters does not name every parameter of the optimizer once",
                given=f"{len(pairs)} names for {len(parameters)} parameters",
                expected="a name for each",
                hint="model.named_parameters()",
            )
    return [(names[id(parameter)], parameter) for parameter in parameters if parameter.requires_grad]


def _group_numbers(parameters: Sequence[nn.Parameter], groups: Any) -> list[int]:
    """Return each parameter's group, or -1."""
    if isinstance(groups, int):
        count = min(groups, len(parameters))
        return [index * count // len(parameters) if count > 0 else -1 for index in range(len(parameters))]
    number = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
    return [number.get(id(parameter), -1) for parameter in parameters]
