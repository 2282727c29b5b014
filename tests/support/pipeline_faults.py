"""Pipelines in which something is sent and not heard: without it, numbers have to be others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from plait.parallel.pipeline import executor as executor
from plait.parallel.zero import sharded_model

SHARED = "gradients of"  # how the label of a sum over stages begins; that of the norm has none


@contextmanager
def deaf_to(what: str) -> Iterator[None]:
    """`what`: activations or gradients (zeros arrive), shared (the gradients that stages add up) or norm."""
    if what in ("activations", "gradients"):
        patch = mock.patch.object(executor.Inbox, "post", _silent_inbox(what))
    else:
        patch = mock.patch.object(sharded_model, "all_reduce", _silent_sum(shared=what == "shared"))
    with patch:
        yield


def _silent_inbox(what: str) -> Any:
    post = executor.Inbox.post

    def silent(self: executor.Inbox, specs: Any) -> Any:
        posted = post(self, specs)
        if self._channel.label.startswith(what):
            wait = posted.wait
            posted.wait = lambda: [t.zero_() if t.is_floating_point() else t for t in wait()]  # type: ignore[method-assign]
        return posted

    return silent


def _silent_sum(*, shared: bool) -> Any:
    """Each rank keeps what it gave."""
    all_reduce = sharded_model.all_reduce

    def silent(tensor: Tensor, group: Any, *args: Any, label: str = "") -> None:
        if label.startswith(SHARED) != shared:
            all_reduce(tensor, group, *args, label=label)

    return silent
