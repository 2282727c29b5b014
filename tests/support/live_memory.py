"""Live memory: bytes of all storages that operations allocate and that are still referenced."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.parallel.pipeline import executor as executor
from plait.plan.schedule import Action


class LiveBytes(TorchDispatchMode):
    """Tracks every storage that an operation of this thread allocates, except on meta, until it is freed,
    whether referenced by Python, by autograd or by a Function's context. Each counts once; earlier storages
    do not count."""

    def __init__(self, before: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in before}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {storage._cdata for leaf in tree_leaves((args, kwargs)) for storage in _storages(leaf)}
        result = func(*args, **(kwargs or {}))
        made = [storage for leaf in tree_leaves(result) for storage in _storages(leaf)]
        self._sweep()
        for storage in made:
            key = storage._cdata
            if key not in given and key not in self._known and key not in self._alive:
                self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
                self.bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return result

    def now(self) -> int:
        self._sweep()
        return self.bytes

    def part(self, tensors: Iterable[Tensor]) -> int:
        """Tracked bytes of these tensors: memory from a transport is not allocated by operations."""
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({s._cdata: s.nbytes() for s in storages if s._cdata in self._alive}.values())

    def _sweep(self) -> None:
        for key in [key for key, (storage, _) in self._alive.items() if storage.expired()]:
            self.bytes -= self._alive.pop(key)[1]


def _storages(leaf: object) -> list[Any]:
    if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
        return []
    parts = (leaf._indices(), leaf._values()) if leaf.is_sparse else (leaf,)
    return [part.untyped_storage() for part in parts]


@contextmanager
def after_actions(on_action: Callable[[Action, Any], object]) -> Iterator[None]:
    """Call `on_action(action, run)` after each action of this rank's schedule."""
    do = executor._ScheduleRun.do

    def do_and_tell(run: Any, action: Action, timed: Any) -> None:
        do(run, action, timed)
        on_action(action, run)

    with mock.patch.object(executor._ScheduleRun, "do", do_and_tell):
        yield
