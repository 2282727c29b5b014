"""Recomputed blocks on CUDA ranks draw the random numbers of their forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.parallel.activation_checkpoint import recompute_blocks
from support.pool import Pool


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), 0.5)


def _gradients(how: str) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Block() for _ in range(3)).to("cuda")
    recompute_blocks(list(blocks), how)
    x = torch.ones(8, 16, device="cuda")
    for block in blocks:
        x = block(x=x)
    torch.rand(3, device="cuda")  # the generator is elsewhere when backward begins
    x.square().sum().backward()
    return [parameter.grad.cpu() for parameter in blocks.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("how", ["full", "selective", "every=2"])
def test_dropout_of_a_block_that_gets_its_tensors_by_keyword_is_recomputed(pool: Pool, how: str) -> None:
    [expected], [found] = (pool.run(_gradients, 1, each) for each in ("none", how))
    assert len(found) == len(expected) == 6
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
