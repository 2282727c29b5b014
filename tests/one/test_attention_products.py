"""Attention by matrix products: torch's numbers, and the calls in graphs that it replaces."""

from typing import Any

import pytest
import torch
import torch._inductor.decomposition  # a pass runs when torch's compiler has loaded it
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from plait.parallel.attention_products import AttentionProducts, gradients, outputs

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _tensors(queries: int, keys: int, dtype: torch.dtype, heads: int = 3) -> list[Tensor]:
    """Gradient of the output, queries, keys, values: (2, heads, tokens, 8)."""
    torch.manual_seed(1)
    lengths = (queries, queries, keys, keys)
    return [torch.randn(2, length, heads, 8, dtype=dtype).transpose(1, 2) for length in lengths]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (300, 300), (150, 260), (260, 150)])
def test_products_give_torchs_attention_and_its_gradients(
    queries: int, keys: int, is_causal: bool, scale: float | None
) -> None:
    """In float64, over several ranges of queries, the last one shorter."""
    grad, q, k, v = _tensors(queries, keys, torch.float64)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    output, lse = outputs(q, k, v, is_causal, scale)
    assert (output - expected.detach()).abs().max() < 1e-12
    scores = q @ k.mT * (8**-0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(queries, keys).tril().bool(), -torch.inf)
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-12
    for found, wanted in zip(
        gradients(grad, q, k, v, output, lse, is_causal, scale), expected_grads, strict=True
    ):
        assert (found - wanted).abs().max() < 1e-12


def _graphs(*tensors: Tensor, **options: Any) -> list[torch.fx.GraphModule]:
    """Graphs of torch's kernel and of its backward, as torch.compile makes them."""

    def forward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return KERNEL(q, k, v, 0.0, True, **options)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        output, lse = KERNEL(q, k, v, 0.0, True, **options)
        return KERNEL_BACKWARD(grad, q, k, v, output, lse, 0.0, True, **options)

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        return [make_fx(function)(*fakes) for function in (forward, backward)]


def test_a_graph_with_torchs_kernel_gets_products_with_its_results() -> None:
    tensors = _tensors(200, 200, torch.bfloat16)
    for module in _graphs(*tensors):
        expected = module(*tensors)
        AttentionProducts()(module.graph)
        module.graph.lint()
        module.recompile()
        targets = {node.target for node in module.graph.nodes}
        assert not targets & {KERNEL, KERNEL_BACKWARD}
        assert torch.ops.aten.bmm.default in targets
        for found, wanted in zip(module(*tensors), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert (found - wanted).double().norm() < 0.01 * wanted.double().norm()


@pytest.mark.parametrize("why", ["float32", "long", "mask"])
def test_a_call_that_products_do_not_make_faster_stays(why: str) -> None:
    length = 513 if why == "long" else 200
    tensors = _tensors(length, length, torch.float32 if why == "float32" else torch.bfloat16)
    mask = torch.zeros(200, 200, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        options = {"attn_mask": mode.from_tensor(mask)} if why == "mask" else {}

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return KERNEL(q, k, v, 0.0, why != "mask", **options)

        module = make_fx(forward)(*map(mode.from_tensor, tensors[1:]))
    before = str(module.graph)
    AttentionProducts()(module.graph)
    assert str(module.graph) == before
    assert "flash_attention" in before
