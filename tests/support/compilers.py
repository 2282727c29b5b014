"""Compilers for tests of compiled models: torch's own, and one that makes the same graphs in less time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_COMPILE = torch.compile


def _compile_graphs(forward: Any, *, options: Any = None, fullgraph: bool = False) -> Any:
    return _COMPILE(forward, fullgraph=fullgraph, backend="aot_eager")


@contextmanager
def compiles(*, in_cpp: bool) -> Iterator[None]:
    """Compile as users do, or run the traced graphs without C++, which takes most of the time."""
    with mock.patch.object(torch, "compile", _COMPILE if in_cpp else _compile_graphs):
        yield
