"""Modules outside of the blocks must not run between them while a rank has its tokens only.

A norm that lies beside the blocks sees a part of the tokens there, and its gradients are parts that nobody
knows of. A module without parameters of its own may run.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.parallel.tensor.tokens import TokenCut


def watch_outside(model: nn.Module, blocks: Sequence[str], tokens: TokenCut) -> None:
    """Hooks, also of copies: a function is not copied, so theirs knows the same tokens."""
    model.register_forward_pre_hook(lambda *_: tokens.leave())  # a forward that failed may have left them cut
    for name, module in model.named_modules():
        is_inside = any(not block or name == block or name.startswith(f"{block}.") for block in blocks)
        if name and not is_inside and any(True for _ in module.parameters(recurse=False)):
            _watch(name, module, tokens)


def _watch(name: str, module: nn.Module, tokens: TokenCut) -> None:
    def check(*_: Any) -> None:
        if tokens.is_cut:
            raise ModelError(
                f"{name} is outside of the blocks and runs between them, on tokens of one rank alone",
                given=f"{type(module).__name__} with parameters of its own, sp=true",
                expected="between blocks nothing that has parameters",
                hint="sp=false",
            )

    module.register_forward_pre_hook(check)
