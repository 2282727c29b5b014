"""Pipelines with dropped messages: their results must be wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from plait.parallel.pipeline import executor as executor
from plait.parallel.zero import sharded_model

SHARED = "gradients of"  # label prefix of a sum over stages; that of the norm has none


@contextmanager
def muted(kind: str) -> Iterator[None]:
    """Drop messages. `kind`: activations or gradients (received as zeros), shared (gradients summed over
    stages) or norm."""
    if kind in ("activations", "gradients"):
        patch = mock.patch.object(executor.Inbox, "post", _muted_inbox(kind))
    else:
        patch = mock.patch.object(sharded_model, "all_reduce", _muted_all_reduce(shared=kind == "shared"))
    with patch:
        yield


def _muted_inbox(kind: str) -> Any:
    post = executor.Inbox.post

    def silent(self: executor.Inbox, specs: Any) -> Any:
        posted = post(self, specs)
        if self._channel.label.startswith(kind):
            wait = posted.wait
            posted.wait = lambda: [t.zero_() if t.is_floating_point() else t for t in wait()]  # type: ignore[method-assign]
        return posted

    return silent


def _muted_all_reduce(*, shared: bool) -> Any:
    """Replace the all-reduce: each rank keeps its own values."""
    all_reduce = sharded_model.all_reduce

    def silent(tensor: Tensor, group: Any, *args: Any, label: str = "") -> None:
        if label.startswith(SHARED) != shared:
            all_reduce(tensor, group, *args, label=label)

    return silent
