"""Cross entropy of logits that are cut over the vocabulary, against torch on whole ones; what it sends."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm import Call, Group, connect
from plait.engine.loss import choose_loss
from plait.models import causal_lm_on_meta
from plait.parallel.tensor.cross_entropy import cross_entropy
from support.pool import Pool

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 1e-3},
    "softcap": {"softcap": 5.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0, "ignore_index": 1},
}
CUTS = {"2": (0, 9, 17), "3 uneven": (0, 3, 16, 17), "3 one without": (0, 8, 8, 17), "4": (0, 5, 9, 13, 17)}
TOKENS = 23


class Counted:
    """A group's transport that counts calls and elements."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.sent: Counter[str] = Counter()

    def run(self, call: Call) -> None:
        self.sent[f"{call.op_type.value} {call.op}"] += call.input.numel()
        self.sent["calls"] += 1
        self._link.run(call)


def whole_logits(dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(TOKENS, 17, generator=generator, dtype=torch.float64) + offset).to(dtype)
    targets = torch.randint(17, (TOKENS,), generator=generator)
    return logits, targets.where(torch.rand(TOKENS, generator=generator) > 0.3, -100)


def cut_loss(
    edges: tuple[int, ...], logits: Tensor, targets: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Counter[str], Counter[str]]:
    """Loss, gradient of this rank's columns, and what was sent in forward and until the end of backward."""
    group = connect().group
    counted = Counted(group.transport_or_none)
    group = replace(group, transport_or_none=counted)
    columns = list(pairwise(edges))
    piece = logits[:, slice(*columns[group.rank])].clone().requires_grad_()
    loss = cross_entropy(piece, targets, group, columns, **options)
    sent = Counter(counted.sent)
    (-1.5 * loss).backward()
    assert piece.grad is not None
    return loss.detach(), piece.grad, sent, counted.sent


def by_torch(logits: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    z, cap, ignored = leaf, options.get("softcap"), options.get("ignore_index", -100)
    if cap is not None:
        z = cap * torch.tanh(leaf / cap)
    smoothing = options.get("label_smoothing", 0.0)
    total = F.cross_entropy(z, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="sum")
    squares = torch.logsumexp(z, 1).square() * (targets != ignored)
    total = total + options.get("z_loss", 0.0) * squares.sum()
    (-1.5 * total).backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("edges", CUTS.values(), ids=CUTS)
def test_columns_on_several_ranks_give_torchs_loss_and_gradient(
    pool: Pool, edges: tuple[int, ...], name: str
) -> None:
    logits, targets = whole_logits(torch.float64)
    options = OPTIONS[name]
    if "ignore_index" in options:
        targets = targets.where(targets >= 0, options["ignore_index"])
    results = pool.run(cut_loss, len(edges) - 1, edges, logits, targets, options)
    expected, its_gradient = by_torch(logits, targets, **options)
    assert all(torch.equal(loss, results[0][0]) for loss, *_ in results)
    assert torch.allclose(results[0][0], expected, rtol=1e-12, atol=0)
    gradient = torch.cat([piece for _, piece, *_ in results], 1)
    assert torch.allclose(gradient, its_gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_token_costs_one_number_and_then_two_or_three_and_none_in_backward(pool: Pool, name: str) -> None:
    logits, targets = whole_logits(torch.float32)
    for _, _, forward, whole in pool.run(cut_loss, 2, CUTS["2"], logits, targets.clamp(min=0), OPTIONS[name]):
        sums = 3 if "label_smoothing" in OPTIONS[name] else 2
        assert forward == {"all-reduce max": TOKENS, "all-reduce sum": sums * TOKENS, "calls": 2}
        assert whole == forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_cut_logits_far_from_zero_keep_their_digits(pool: Pool, dtype: torch.dtype) -> None:
    logits, targets = whole_logits(dtype, offset=500.0)
    results = pool.run(cut_loss, 3, CUTS["3 uneven"], logits, targets, {"label_smoothing": 0.1})
    expected, its_gradient = by_torch(logits, targets, label_smoothing=0.1)
    assert results[0][0].dtype == torch.float32
    assert results[0][0].item() == pytest.approx(expected.item(), rel=1e-6)
    gradient = torch.cat([piece for _, piece, *_ in results], 1)
    assert gradient.dtype == dtype
    rounding = torch.finfo(dtype).eps + 2e-6
    assert torch.allclose(gradient.double(), its_gradient, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_on_one_rank_is_seen_by_all(pool: Pool, bad: float) -> None:
    logits, targets = whole_logits(torch.float32)
    for place in (2, 16):
        broken = logits.clone()
        broken[targets.argmax(), place] = bad
        results = pool.run(cut_loss, 2, CUTS["2"], broken, targets, {})
        assert not any(loss.isfinite() for loss, *_ in results)


def test_a_rank_whose_columns_are_all_masked_has_no_part(pool: Pool) -> None:
    logits, targets = whole_logits(torch.float64)
    logits[:, 13:] = -torch.inf  # all columns of the last of four ranks
    targets = targets.clamp(max=12)
    results = pool.run(cut_loss, 4, CUTS["4"], logits, targets, {})
    expected, its_gradient = by_torch(logits[:, :13], targets)
    assert torch.allclose(results[0][0], expected, rtol=1e-12, atol=0)
    gradient = torch.cat([piece for _, piece, *_ in results], 1)
    assert torch.allclose(gradient[:, :13], its_gradient, rtol=1e-10, atol=1e-13)
    assert not gradient[:, 13:].any()


def _next_token_loss(edges: tuple[int, ...], logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    group: Group = connect().group
    columns = list(pairwise(edges))
    loss = choose_loss(_causal_lm(), None, group=group, columns=columns)
    total, count = loss(_Outputs(logits[..., slice(*columns[group.rank])]), {"labels": labels})
    return total, torch.as_tensor(count)


class _Outputs:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def _causal_lm() -> Any:
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 17}
    return causal_lm_on_meta(config | {"bos_token_id": 0, "eos_token_id": 0})


def test_a_causal_models_loss_takes_cut_logits(pool: Pool) -> None:
    logits, targets = whole_logits(torch.float32)
    logits, labels = logits[:20].reshape(4, 5, 17), targets[:20].reshape(4, 5)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    for total, count in pool.run(_next_token_loss, 2, CUTS["2"], logits, labels):
        assert total.item() == pytest.approx(expected.item(), rel=1e-6)
        assert count.item() == (labels[:, 1:] != -100).sum().item()
