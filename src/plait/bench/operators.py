"""The parts of an eager decoder block and of a step, as `plait.plan.device_speed.OPERATORS`, on CPU ranks.

[Note: seconds of a core]
A case's time is the processor's, not the clock's: other programs of the host do not count, but what they and
the other ranks take of caches and memory does. Ranks that share a core get it in turns.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.parallel.tensor.cross_entropy import SINGLE_RANK, cross_entropy

_VISIT_S = 0.02
_HIDDEN, _HEADS, _HEAD_DIM, _LOGITS = 512, 8, 64, 8192
_TOKENS = (4, 64, 256, 1024)
_SEQUENCES = (32, 128, 256, 512, 1024)
_SMALLEST = (8, 32, 64, 128, 256, 512, 1024)  # dimension of a product
_WEIGHTS = 1 << 24  # elements: more than caches hold, as a model's
_FLAT = (1 << 12, 1 << 16, 1 << 20, 1 << 23)

Case = Callable[[], object]


def operator_cases(dtype: torch.dtype) -> Iterator[tuple[str, float, float, Case]]:
    """Yield operator, size, work and a case."""
    yield from _linears(dtype)
    makers: Mapping[str, Callable[[int, torch.dtype], tuple[int, Tensor, list[Tensor], Case]]] = {
        "norm": _norm,
        "rotary": _rotary,
        "activation": _activation,
        "loss": _loss,
        "attention": _attention,
    }
    for name, make in makers.items():
        for size in _SEQUENCES if name == "attention" else _TOKENS:
            work, out, inputs, forward = make(size, dtype)
            gradient = torch.ones_like(out)
            at = size if name == "attention" else work
            yield name, at, work, forward
            backward = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
            yield f"{name} backward", at, work, backward
    for numel in _FLAT:
        gradient, buffer = torch.ones(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        yield "accumulate", numel, numel, partial(buffer.copy_, gradient)
        weight = torch.zeros(numel).requires_grad_()
        weight.grad = torch.ones(numel)
        adamw = torch.optim.AdamW([weight], fused=True)
        yield "update", numel, numel, adamw.step


def core_seconds(run: Case) -> float:
    """See [Note: seconds of a core]."""
    run()
    count, begin_s = 0, time.thread_time()
    elapsed_s = 0.0
    while elapsed_s < _VISIT_S:
        run()
        count += 1
        elapsed_s = time.thread_time() - begin_s
    return elapsed_s / count


def _linears(dtype: torch.dtype) -> Iterator[tuple[str, float, float, Case]]:
    """A layer's three products. Weights come from memory, one after the other, as in a model."""
    for size in _SMALLEST:
        width = max(size, _HIDDEN)
        weights = cycle(torch.randn(max(1, _WEIGHTS // width**2), width, width, dtype=dtype).unbind())
        inputs, gradient = torch.randn(size, width, dtype=dtype), torch.randn(size, width, dtype=dtype)

        def products(weights: Iterator[Tensor] = weights, x: Tensor = inputs, g: Tensor = gradient) -> None:
            weight = next(weights)
            F.linear(x, weight)
            torch.mm(g, weight)
            torch.mm(g.t(), x)

        yield "linear", size, 6.0 * size * width**2, products


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def _norm(tokens: int, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor], Case]:
    """RMSNorm of torch operators, as in Transformers, after the addition of the residual."""
    stream, added = (_leaf(tokens, _HIDDEN, dtype=dtype) for _ in range(2))
    weight = _leaf(_HIDDEN, dtype=dtype)

    def forward() -> Tensor:
        wide = (stream + added).to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * (wide * scale).to(dtype)

    return tokens * _HIDDEN, forward(), [stream, added, weight], forward


def _rotary(tokens: int, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor], Case]:
    heads = _leaf(1, tokens, _HEADS, _HEAD_DIM, dtype=dtype)
    cos, sin = (torch.randn(1, 1, tokens, _HEAD_DIM, dtype=dtype) for _ in range(2))

    def forward() -> Tensor:
        x = heads.transpose(1, 2)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return heads.numel(), forward(), [heads], forward


def _activation(tokens: int, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor], Case]:
    gate, up = (_leaf(tokens, 3 * _HIDDEN, dtype=dtype) for _ in range(2))

    def forward() -> Tensor:
        return F.silu(gate) * up

    return gate.numel(), forward(), [gate, up], forward


def _loss(tokens: int, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor], Case]:
    logits, targets = _leaf(tokens, _LOGITS, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)

    def forward() -> Tensor:
        return cross_entropy(logits, targets, SINGLE_RANK, [(0, _LOGITS)])

    return logits.numel(), forward(), [logits], forward


def _attention(sequence: int, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor], Case]:
    query, key, value = (_leaf(1, _HEADS, sequence, _HEAD_DIM, dtype=dtype) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return _HEADS * _HEAD_DIM * sequence**2, forward(), [query, key, value], forward
