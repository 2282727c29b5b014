"""Preparation of a run that shows facts about a model: its batch, its tensors, and what is restored after it.

[Note: run on borrowed modules]
The model itself runs, not a copy, with its tensors replaced by ones on meta: a loss or a hook may hold a
reference to the model or to a list, and the values that blocks store there must be traced too. Afterwards all
attributes of its modules are restored, and the contents of their lists, dicts and sets. Once the model is
split for ranks, only a copy can run, for a batch with other entries. Hooks do not run on the copy.

[Note: values in a traced batch]
A model may read values of its batch on the host, such as the sizes of images. So if the run on meta fails, it
is repeated with the values of the batch's integers: operators compute with values while all their tensors
have them, and on meta from there on. A model may also read what it has computed: how many tokens each expert
has, where patches of bytes end. So if that fails too, the last run is on the CPU, with zeros for weights,
which take no memory. What flows where must not depend on the values; `StageForward` and `DataflowCheck` raise
an error where it does.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn

from plait.models.parameter_adapters import adapted_output, is_wrapper
from plait.models.task import cast_entries, forward_names
from plait.models.trace.modes import Operators, device_kernels

_TOKENS = (2, 8)  # batch and sequence of a run without an example


def token_batch(sequences: int, tokens: int) -> dict[str, Tensor]:
    """Return token ids on meta, which are the labels too."""
    ids = torch.zeros(sequences, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def traced_batches(model: nn.Module, batch: Mapping[str, Tensor] | None) -> Iterator[dict[str, Tensor]]:
    """Yield the batch to run the model with on meta, and if that fails: [Note: values in a traced batch].
    `batch`: an example; None: token ids. Floating-point inputs have the dtype of the model, as in a step."""
    if batch is None:
        yield token_batch(*_TOKENS)
        return
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    casts = cast_entries(batch, forward_names(model))
    on_meta = {
        key: torch.empty_like(value, dtype=dtype if key in casts else value.dtype, device="meta")
        for key, value in batch.items()
    }
    yield on_meta
    yield {k: on_meta[k] if v.is_floating_point() or v.is_meta else v.cpu() for k, v in batch.items()}


def batch_with_values(model: nn.Module, batch: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the batch to run the model with on the CPU, with values of integers."""
    *_, traced = traced_batches(model, batch)
    return {
        key: torch.zeros_like(value, device="cpu") if value.is_meta else value
        for key, value in traced.items()
    }


def meta_like(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer of the same kind on meta."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def zeros_like(tensor: Tensor) -> Tensor:
    """Return a buffer's values, or zeros; of a parameter one zero, expanded."""
    if not isinstance(tensor, nn.Parameter):
        return (
            torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu", copy=True)
        )
    zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(zeros, tensor.requires_grad)


@contextmanager
def prepared(model: nn.Module, make: Callable[[Tensor], Tensor] = meta_like) -> Iterator[None]:
    """Run the model inside the context without gradients, its parameters and buffers replaced by what `make`
    returns for each; afterwards restore its modules and all generators. See [Note: run on borrowed modules].
    """
    # nonzero and masks: on meta, as if every condition were true.
    config: Any = torch.fx.experimental._config
    assumed = config.patch(meta_nonzero_assume_all_nonzero=True)
    kernels = device_kernels(torch.device("cpu"))
    with _borrowed(model, make), torch.random.fork_rng(devices=[]), torch.no_grad(), assumed, kernels:
        yield


@contextmanager
def _borrowed(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    contents = [
        (value, _copied(value))
        for _, values in attributes
        for value in values.values()
        if isinstance(value, list | dict | set | deque)
    ]
    generators = {v for _, values in attributes for v in values.values() if isinstance(v, torch.Generator)}
    drawn = [(generator, generator.get_state()) for generator in generators]
    made: dict[int, Tensor] = {}
    for module, _ in attributes:
        registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in registered:
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = make(tensor)
                if tensor is not None:
                    tensors[key] = made[id(tensor)]
        if is_wrapper(module):
            module.forward = partial(adapted_output, module)
    try:
        yield
    finally:
        for generator, state in drawn:
            generator.set_state(state)
        for value, copied in contents:
            value.clear()
            value.extend(copied) if isinstance(value, list | deque) else value.update(copied)
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else type(value)(value)


@contextmanager
def running_on_meta(device: torch.device) -> Iterator[None]:
    """Run the forward of a meta copy inside the context, as it would run on `device`."""
    with Operators(), device_kernels(device):
        yield
