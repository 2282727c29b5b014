"""DistributedDataParallel on CUDA ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from plait import DistributedDataParallel
from plait.comm import connect
from support.pool import Pool
from support.virtual_cuda.races import Findings
from support.virtual_cuda.recording import recorded


class _TwoStreams(nn.Module):
    """Two branches, one of which runs on a stream of its own, in forward and so in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)
        self.stream = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            side = self.side(x)
        main = self.main(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        side.record_stream(torch.cuda.current_stream())
        return main + side


def _gradients(*, is_view: bool) -> tuple[dict[str, Tensor], Findings | None]:
    world = connect(device="cuda", timeout_s=40)
    torch.manual_seed(0)
    # DDP keeps the nodes that accumulate gradients, so they stay on its stream: autograd waits, and says so.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model = DistributedDataParallel(_TwoStreams().to(world.device), gradient_as_bucket_view=is_view)
    x = torch.full((4, 8), float(world.rank + 1), device=world.device)
    model(x).sum().backward()  # buckets are rebuilt after it
    model.zero_grad()
    with recorded() as recording:
        model(x).sum().backward()
    found = {name: p.grad.cpu() for name, p in model.module.named_parameters() if p.grad is not None}
    world.close()
    return found, None if recording is None else recording.findings


def test_gradients_of_several_streams_are_averaged_without_a_race(pool: Pool) -> None:
    for is_view in (False, True):
        for gradients, findings in pool.run(_gradients, 2, is_view=is_view):
            assert torch.equal(gradients["main.weight"], torch.full((8, 8), 4 * 1.5))
            assert torch.equal(gradients["side.bias"], torch.full((8,), 4.0))
            if findings is not None:
                assert not findings.races
                assert not findings.frees_in_use
