"""How many bytes a forward pass keeps for backward: measured on a real pass, or seen before on meta."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plait.models.placeholder import placeholders


@runtime_checkable
class ReportsSavedTensors(Protocol):
    """A module's forward that keeps tensors for backward without autograd's knowledge, as recompute does."""

    on_hold: Callable[[Tensor], object] | None  # told of each


class ActivationBytes:
    """Bytes of the storages that autograd holds on to, each counted once."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {p.untyped_storage()._cdata for p in model.parameters()}
        self._known |= {b.untyped_storage()._cdata for b in model.buffers()}
        self._alive: list[Tensor] = []  # keeps storages alive, so that no address is counted twice
        self.total = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            self.total += storage.nbytes()
        return tensor

    def release(self) -> None:
        self._alive.clear()


class _ScalarReadsOnMeta(TorchDispatchMode):
    """Answers 1 where the program looks at a value: meta tensors have none.

    Hugging Face models ask "is no sequence packed?" and "does every position attend?", to leave out the
    mask; plain batches answer yes.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


class DeviceKernelsOnMeta(TorchFunctionMode):
    """Keeps on meta what the device's kernels would keep.

    Attention: on meta torch takes the unfused one, which saves scores; devices take a fused one (none where
    one key head is broadcast, as in Falcon; the CPU's knows no dropout). Grouped products of experts: on meta
    they exist for bf16 only; one expert's product with all tokens saves the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._fused_dropout = device.type != "cpu"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch._grouped_mm and args[1].is_meta and args[1].ndim == 3:
            return args[0] @ args[1][0]
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        named = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        grouped = named.pop("enable_gqa", False)  # the fused kernel reads fewer kv heads by itself
        is_broadcast = not grouped and named["query"].shape[:-2] != named["key"].shape[:-2]
        if is_broadcast or (named.get("dropout_p", 0.0) and not self._fused_dropout):
            return func(*args, **kwargs)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**named)[0]


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@contextmanager
def watch_activations(model: nn.Module) -> Iterator[ActivationBytes]:
    """Counts what is kept for backward inside; parameters and buffers do not count."""
    watch = ActivationBytes(model)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    holders = [forward for forward in forwards if isinstance(forward, ReportsSavedTensors)]
    for holder in holders:
        holder.on_hold = watch.pack
    try:
        with saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            yield watch
    finally:
        watch.release()
        for holder in holders:
            holder.on_hold = None


@contextmanager
def running_on_meta(device: torch.device) -> Iterator[None]:
    """A twin's forward runs inside, as it would on `device`."""
    with _ScalarReadsOnMeta(), DeviceKernelsOnMeta(device):
        yield


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy of the model without its bytes: parameters and buffers are on meta, in the same dtypes."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *(hollow for _, hollow in placeholders(model))):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def activation_bytes(twin: nn.Module, run: Callable[[], object], device: torch.device) -> int:
    """Bytes that a forward of `twin`, which is on meta, will keep for backward on `device`: costs nothing.

    `run` is the forward, of meta tensors of a micro-batch's shapes. What torch.compile will keep is not known
    before it has compiled. A twin runs uncompiled: exact where blocks keep their inputs only, else commonly
    more than what the compiler's partitioner leaves.
    """
    with running_on_meta(device), watch_activations(twin) as watch:
        run()
    return watch.total


class BlockOutputs:
    """What blocks of a whole model's twin return, on meta: of one forward, which the first question takes."""

    def __init__(self, twin: nn.Module, device: torch.device) -> None:
        self._twin = twin
        self._device = device
        self._found: dict[str, Any] = {}  # of a forward that came to its end

    def of(self, block: str, inputs: dict[str, Any]) -> Any:
        """As if its numbers needed gradients. `inputs`: the same each time."""
        if not self._found:
            self._found = self._run(inputs)
        return tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), self._found[block]
        )

    def _run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What each module returned last."""
        found: dict[str, Any] = {}
        handles = [
            module.register_forward_hook(functools.partial(_record_output, found, name))
            for name, module in self._twin.named_modules()
        ]
        try:
            with running_on_meta(self._device), torch.no_grad():
                self._twin(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        return found


def _record_output(found: dict[str, Any], name: str, *call: Any) -> None:
    found[name] = call[-1]
