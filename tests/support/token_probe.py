"""A measurement of whether a model's tokens meet outside of attention: with attention that gives each token
its own values, a sequence has the same outputs in one run and in two halves."""

import torch
from torch import Tensor, nn

from plait.models import forward_inputs, forward_names
from plait.models.attention import AttentionCall, attention_by, dispatch_attention
from plait.models.trace.modes import without_dropout

LENGTH = 12


class _OwnValues:
    def attend(self, call: AttentionCall) -> Tensor:
        mixes = call.q.mean(-1, keepdim=True) + call.k.mean((1, 3), keepdim=True)
        return call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1) + mixes


def difference(model: nn.Module, *, samples: int = 2) -> float:
    """The largest difference between the outputs of halves and of whole sequences, relative to the largest
    output. `model`: on the CPU, in float64; it gets random weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    ids = torch.randint(3, 50, (samples, LENGTH), generator=generator)
    batch = {"input_ids": ids}
    names = forward_names(model)
    if names is None or "position_ids" in names:
        batch["position_ids"] = torch.arange(LENGTH).expand(samples, -1)
    dispatch_attention(model)
    half = LENGTH // 2
    parts = [
        {key: value[:, part] for key, value in batch.items()} for part in (slice(half), slice(half, None))
    ]
    with torch.no_grad(), without_dropout(), attention_by(_OwnValues()):
        whole, *halves = (_logits(model, each) for each in (batch, *parts))
    error = (whole - torch.cat(halves, 1)).abs().max() / whole.abs().max()
    assert whole.std() > 0
    return float(error)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    result = model(**forward_inputs(model, batch))
    logits: Tensor = result if isinstance(result, Tensor) else result.logits
    return logits
