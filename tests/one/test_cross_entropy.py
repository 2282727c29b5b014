"""Cross entropy in one process, all columns on one rank: against torch, what it keeps, what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.errors import ModelError
from plait.parallel.tensor import cross_entropy as module
from plait.parallel.tensor.cross_entropy import SINGLE_RANK, cross_entropy

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 1e-3},
    "softcap": {"softcap": 5.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0, "ignore_index": 1},
}


def by_torch(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The same by torch's own operations, in float64."""
    z, cap = logits.double(), options.get("softcap")
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    ignored = options.get("ignore_index", -100)
    smoothing = options.get("label_smoothing", 0.0)
    total = F.cross_entropy(z, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="sum")
    squares = torch.logsumexp(z, 1).square() * (targets != ignored)
    return total + options.get("z_loss", 0.0) * squares.sum()


def ours(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits, targets, SINGLE_RANK, [(0, logits.shape[1])], **options)


def drawn(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    logits = (3 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return logits.requires_grad_(), targets.where(torch.rand(tokens, generator=generator) > 0.3, -100)


def with_gradient(loss: Any, logits: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    total = loss(leaf, targets, **options)
    (-1.5 * total).backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


@pytest.mark.parametrize("chunk", [1, 40, 1 << 17])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_torchs_function_in_float64(
    options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", chunk)
    logits, targets = drawn(23, 17)
    if "ignore_index" in options:
        targets = targets.where(targets >= 0, options["ignore_index"])
    loss, gradient = with_gradient(ours, logits, targets, **options)
    expected, its_gradient = with_gradient(by_torch, logits, targets, **options)
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    assert torch.allclose(gradient, its_gradient, rtol=1e-10, atol=1e-13)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 70), st.sampled_from(list(OPTIONS)), st.floats(-1e4, 1e4))
def test_any_size_and_any_offset_agrees_with_torch(
    tokens: int, vocabulary: int, name: str, offset: float
) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key != "ignore_index"}
    logits, targets = drawn(tokens, vocabulary)
    logits = logits.detach() + (0.0 if "softcap" in options else offset)
    loss, gradient = with_gradient(ours, logits, targets, **options)
    expected, its_gradient = with_gradient(by_torch, logits, targets, **options)
    assert torch.allclose(loss, expected, rtol=1e-11, atol=1e-9)
    assert torch.allclose(gradient, its_gradient, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_lose_nothing_but_their_gradients_rounding(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    logits, targets = drawn(50, 301, dtype)
    if "ignore_index" in options:
        targets = targets.where(targets >= 0, options["ignore_index"])
    loss, gradient = with_gradient(ours, logits, targets, **options)
    expected, wide = with_gradient(by_torch, logits.double(), targets, **options)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    spacing = torch.finfo(dtype).eps
    assert torch.allclose(gradient.double(), wide, rtol=spacing + 2e-6, atol=max(1e-7, spacing**2 / 64))


def test_logits_far_from_zero_lose_no_digits_in_float32() -> None:
    logits, targets = drawn(30, 100, torch.float32)
    far = (logits.detach().round() + 4096.0).requires_grad_()
    for options in ({}, OPTIONS["smoothing"]):
        loss, gradient = with_gradient(ours, far, targets, **options)
        expected, its_gradient = with_gradient(by_torch, far.double(), targets, **options)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(gradient.double(), its_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, -torch.inf])
def test_a_logit_that_is_no_number_gives_a_loss_that_is_none(bad: float) -> None:
    logits, _ = drawn(4, 9)
    targets = torch.tensor([3, 0, 2, 8])
    rows = logits.detach().clone()
    rows[1, 0 if bad < 0 else 5] = bad
    assert not ours(rows, targets).isfinite()


def test_masked_columns_take_no_part() -> None:
    logits, targets = drawn(7, 12)
    masked = logits.detach().clone()
    masked[:, 12 - 3 :] = -torch.inf
    targets = targets.clamp(max=8)
    loss, gradient = with_gradient(ours, masked, targets)
    expected, its_gradient = with_gradient(by_torch, masked[:, :9], targets)
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert torch.allclose(gradient[:, :9], its_gradient, rtol=1e-10)
    assert not gradient[:, 9:].any()


def test_without_a_target_loss_and_gradients_are_zero() -> None:
    logits, _ = drawn(6, 11, torch.float32)
    for options in OPTIONS.values():
        ignored = options.get("ignore_index", -100)
        loss, gradient = with_gradient(ours, logits, torch.full((6,), ignored), **options)
        assert loss.item() == 0
        assert not gradient.any()


@pytest.mark.parametrize("target", [11, -1, 1 << 40])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    logits, _ = drawn(3, 11)
    with pytest.raises(ModelError, match="not in the vocabulary") as caught:
        ours(logits, torch.tensor([2, target, -100]))
    assert str(target) in str(caught.value)
    assert "0 to 10" in str(caught.value)


def test_a_second_derivative_is_refused() -> None:
    logits, targets = drawn(3, 11)
    with pytest.raises(ModelError, match="no second derivative"):
        torch.autograd.grad(ours(logits, targets), logits, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_as_they_are_and_two_numbers_per_token_are_kept_also_on_meta(dtype: torch.dtype) -> None:
    logits, targets = drawn(40, 64, dtype)
    on_meta = logits.detach().to("meta").requires_grad_()
    for place, goal in ((logits, targets), (on_meta, targets.to("meta"))):
        kept: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor, to=kept: to.append(tensor) or tensor, lambda tensor: tensor):
            total = ours(place, goal, **OPTIONS["smoothing"])
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
        assert place.untyped_storage()._cdata in storages
        assert sum(storages.values()) == logits.nbytes + 40 * (8 + 4)
        total.backward()
        assert place.grad is not None
        assert place.grad.dtype == dtype


def test_logits_that_are_strided_in_memory_serve_too() -> None:
    wide, targets = drawn(14, 18)
    logits, targets = wide.detach()[::2, 3:14], targets[::2].clamp(max=10)
    loss, gradient = with_gradient(lambda z, t: ours(z.t().contiguous().t(), t), logits, targets)
    expected, its_gradient = with_gradient(by_torch, logits, targets)
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert torch.allclose(gradient, its_gradient, rtol=1e-10)


def test_a_graph_that_is_retained_gives_the_same_twice() -> None:
    logits, targets = drawn(5, 8)
    total = ours(logits, targets, **OPTIONS["all"] | {"ignore_index": -100})
    first = torch.autograd.grad(total, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(total, logits)[0])


def test_chunks_on_a_gpu_have_1024_tokens_as_far_as_they_fit() -> None:
    assert module.chunk_tokens(128_256, "cuda") == 1024
    assert module.chunk_tokens(1_000, "cuda") == (1 << 23) // 1_000
    assert module.chunk_tokens(1 << 20, "cuda") == 256  # 1 GiB in float32
    assert module.chunk_tokens(128_256, "cpu") == (1 << 17) * torch.get_num_threads() // 128_256
