"""Pushes of gradients in part: what servers decode, and how many bytes are sent."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm.connection import Message
from plait.errors import ModelError
from plait.server.protocol import Chunk
from plait.server.push import GradientEncoder, Push, decode


def encoder_of(gradient: Tensor, reduce: str) -> GradientEncoder:
    unit: Any = SimpleNamespace(grad_shard=gradient)
    return GradientEncoder(reduce, [unit])


def message_of(push: Push) -> Message:
    return Message(0, payload=push.payload, value=push.block, count=push.count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("touched", [0, 10, 1000])
def test_rows_of_an_embedding_that_a_batch_does_not_use_are_not_sent(
    dtype: torch.dtype, touched: int
) -> None:
    rows, width = 1000, 64
    gradient = torch.zeros(rows, width, dtype=dtype)
    gradient[torch.randperm(rows)[:touched]] = torch.randn(touched, width, dtype=dtype)
    flat = gradient.view(-1).clone()
    push = encoder_of(flat, "fp32").encode(Chunk(0, 0, 0, rows * width))
    assert torch.equal(decode(message_of(push), flat.numel(), dtype, "fp32"), gradient.view(-1))
    assert push.payload.numel() <= min(gradient.nbytes, touched * (width * dtype.itemsize + 4))


def test_elements_that_topk_does_not_send_are_added_to_the_next_push() -> None:
    gradient, sent = torch.zeros(1000), torch.zeros(1000)
    encoder, total = encoder_of(gradient, "topk:0.05"), torch.zeros(1000)
    for _ in range(100):
        pushed = torch.randn(1000) + 1.0
        gradient.copy_(pushed)
        push = encoder.encode(Chunk(0, 0, 0, 1000))
        decoded = decode(message_of(push), 1000, torch.float32, "topk:0.05")
        assert torch.equal(decoded, gradient)
        assert push.payload.numel() == 50 * 8
        total += pushed
        sent += decoded
    torch.testing.assert_close(total - sent, encoder._residuals[0], rtol=1e-4, atol=1e-4)
    assert float((total - sent).abs().max()) < 60, "every element is sent sooner or later"


def test_a_sparse_push_of_blocks_outside_its_chunk_is_refused() -> None:
    numbers = torch.tensor([3, 8], dtype=torch.int32).view(torch.uint8)
    payload = torch.cat([torch.zeros(2 * 4, dtype=torch.uint8), numbers])
    for message in (
        Message(0, payload=payload, value=1, count=2),
        Message(0, payload=payload, value=1),
        Message(0, value=-1),
    ):
        with pytest.raises(ModelError, match="gradient of another shape"):
            decode(message, 8, torch.float32, "fp32")
