"""The parts of an eager decoder block and of a step, as `plait.plan.host_profile.OPERATORS`, on CPU ranks.

[Note: seconds of a core]
A case's time is the processor's, not the clock's: other programs of the host do not count, but what they and
the other ranks take of caches and memory does. Ranks that share a core get it in turns.

[Note: cold operands]
Between two uses of a weight, a saved activation or a gradient's buffer, a step touches more memory than a
core caches. A case that ran on the same tensors again and again would find them there, and be too fast:
cases have copies, used in turn.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_FLAT = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_COLD, MOST_COPIES = 1 << 22, 16  # elements of a case's copies: more than a core's caches hold

Case = Callable[[], object]
Operator = tuple[Tensor, list[Tensor], Case]  # result, inputs with gradients, forward


def operator_cases(dtype: torch.dtype) -> Iterator[tuple[str, float, float, Callable[[], Case]]]:
    """Yield operator, size, work and a maker of the case. See [Note: cold operands]."""
    for size in _SMALLEST:
        width = max(size, _HIDDEN)
        yield "linear", size, 6.0 * size * width**2, partial(linear_case, size, width, dtype)
    kinds: Mapping[str, tuple[int, Callable[[int, torch.dtype], Operator]]] = {
        "norm": (_HIDDEN, _norm),
        "rotary": (_HIDDEN, _rotary),
        "activation": (3 * _HIDDEN, _activation),
        "loss": (_LOGITS, _loss),
    }
    for name, (width, make) in kinds.items():
        for tokens in _TOKENS:
            numel = tokens * width
            yield name, numel, numel, partial(_forward, make, tokens, numel, dtype)
            yield f"{name} backward", numel, numel, partial(_backward, make, tokens, numel, dtype)
    for sequence in _SEQUENCES:
        numel, work = _HIDDEN * sequence, _HIDDEN * sequence**2
        yield "attention", sequence, work, partial(_forward, _attention, sequence, numel, dtype)
        yield "attention backward", sequence, work, partial(_backward, _attention, sequence, numel, dtype)
    for numel in _FLAT:
        yield "accumulate", numel, numel, partial(_accumulate, numel, dtype)
        yield "update", numel, numel, partial(_update, numel)


def in_turn(cases: Sequence[Case]) -> Case:
    turns = cycle(cases)
    return lambda: next(turns)()


def _num_copies(numel: int) -> int:
    return max(1, min(MOST_COPIES, _COLD // numel))


def _forward(make: Callable[[int, torch.dtype], Operator], size: int, numel: int, dtype: torch.dtype) -> Case:
    return in_turn([make(size, dtype)[2] for _ in range(_num_copies(numel))])


def _backward(
    make: Callable[[int, torch.dtype], Operator], size: int, numel: int, dtype: torch.dtype
) -> Case:
    cases = []
    for _ in range(_num_copies(numel)):
        out, inputs, _ = make(size, dtype)
        gradient = torch.ones_like(out)
        cases.append(partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True))
    return in_turn(cases)


def _accumulate(numel: int, dtype: torch.dtype) -> Case:
    copies = torch.zeros(_num_copies(numel), 2, numel, dtype=dtype).unbind()
    return in_turn([partial(buffer.copy_, gradient) for buffer, gradient in copies])


def _update(numel: int) -> Case:
    weight = torch.zeros(numel).requires_grad_()
    weight.grad = torch.ones(numel)
    return torch.optim.AdamW([weight], fused=True).step


def linear_case(size: int, width: int, dtype: torch.dtype) -> Case:
    """A layer's three products."""

    def products(weight: Tensor, x: Tensor, gradient: Tensor) -> None:
        F.linear(x, weight)
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    shapes = ((width, width), (size, width), (size, width))
    copies = [[torch.randn(*shape, dtype=dtype) for shape in shapes] for _ in range(_num_copies(width**2))]
    return in_turn([partial(products, *tensors) for tensors in copies])


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


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def _norm(tokens: int, dtype: torch.dtype) -> Operator:
    """RMSNorm of torch operators, as in Transformers, after the addition of the residual."""
    stream, added = (_leaf(tokens, _HIDDEN, dtype=dtype) for _ in range(2))
    weight = _leaf(_HIDDEN, dtype=dtype)

    def forward() -> Tensor:
        wide = (stream + added).to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * (wide * scale).to(dtype)

    return forward(), [stream, added, weight], forward


def _rotary(tokens: int, dtype: torch.dtype) -> Operator:
    heads = _leaf(1, tokens, _HEADS, _HEAD_DIM, dtype=dtype)
    cos, sin = (torch.randn(1, 1, tokens, _HEAD_DIM, dtype=dtype) for _ in range(2))

    def forward() -> Tensor:
        x = heads.transpose(1, 2)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return forward(), [heads], forward


def _activation(tokens: int, dtype: torch.dtype) -> Operator:
    gate, up = (_leaf(tokens, 3 * _HIDDEN, dtype=dtype) for _ in range(2))

    def forward() -> Tensor:
        return F.silu(gate) * up

    return forward(), [gate, up], forward


def _loss(tokens: int, dtype: torch.dtype) -> Operator:
    logits, targets = _leaf(tokens, _LOGITS, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)

    def forward() -> Tensor:
        return cross_entropy(logits, targets, SINGLE_RANK, [(0, _LOGITS)])

    return forward(), [logits], forward


def _attention(sequence: int, dtype: torch.dtype) -> Operator:
    query, key, value = (_leaf(1, _HEADS, sequence, _HEAD_DIM, dtype=dtype) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return forward(), [query, key, value], forward
