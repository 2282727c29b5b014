"""Masks of transformers as rules, and attention by blocks of keys against torch's own."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForQuestionAnswering,
    masking_utils,
)

import plait
from plait.comm import Group
from plait.engine.inputs import check_targets
from plait.engine.spec import Arguments, validate
from plait.errors import ModelError, PlanError
from plait.models.attention import AttentionCall, MaskRule, attention_by, dispatch_attention
from plait.models.mask_decisions import install_decisions
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.parallel.context import attention, kernels, tokens
from plait.parallel.context.dropout import Dropout, DropoutStream
from plait.plan import Plan
from plait.plan.context import TokenOrder
from support import hf_models, own_context, programs

LENGTH = 24
ALL = slice(None)


def test_masks_of_transformers_are_read_as_rules() -> None:
    padding = torch.zeros(1, dtype=torch.long)
    rules = {
        MaskRule(after=0): masking_utils.causal_mask_function,
        MaskRule(): masking_utils.bidirectional_mask_function,
        MaskRule(before=8, after=0): masking_utils.sliding_window_causal_mask_function(8),
        MaskRule(before=9, after=8): masking_utils.sliding_window_bidirectional_mask_function(8),
        MaskRule(chunk=4, after=0): masking_utils.chunked_causal_mask_function(4, padding),
        MaskRule(after=0, packed=True): masking_utils.packed_sequence_compatibility_function(
            masking_utils.causal_mask_function, padding[None], padding[None]
        ),
    }
    assert [MaskRule.read(function) for function in rules.values()] == list(rules)


@pytest.mark.parametrize(
    "function",
    [
        lambda *index: index[3] <= index[2],
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.causal_mask_function),
        masking_utils.blockwise_overlay(torch.zeros(1, 4)),
    ],
)
def test_other_masks_are_refused(function: Any) -> None:
    with pytest.raises(ModelError, match="follows from more than positions"):
        MaskRule.read(function)


class _Recorder:
    def __init__(self) -> None:
        self.rules: list[MaskRule] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.rules.append(call.rule)
        return call.q.new_zeros(*call.q.shape[:-1], call.v.shape[-1])


def test_a_handler_computes_attention_and_without_one_transformers_does() -> None:
    model = hf_models.model_of("gemma2", on_meta=False)
    ids, saved = torch.arange(LENGTH)[None], model.config.to_dict()
    expected = model(ids, use_cache=False).logits
    dispatch_attention(model)
    install_decisions()  # as every step has it
    recorder = _Recorder()
    with attention_by(recorder):
        model(ids, use_cache=False)
    assert recorder.rules == [MaskRule(before=8, after=0, packed=True), MaskRule(after=0, packed=True)]
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert model.config.to_dict() == saved


def _mask(rule: MaskRule) -> Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= distance < (LENGTH if rule.before is None else rule.before)
    return seen & (distance >= -(LENGTH if rule.after is None else rule.after))


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rule", [MaskRule(after=0), MaskRule(), MaskRule(before=5, after=0)], ids=str)
def test_blocks_compute_attention_and_its_gradients(
    rule: MaskRule, sinks: bool, softcap: float | None, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads on two kv heads, values narrower than keys, tiles shorter than the window."""
    monkeypatch.setattr("plait.plan.context.TILE", 3)
    monkeypatch.setattr(kernels, "_TILE", 5)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, LENGTH, size, dtype=torch.float64, generator=generator).requires_grad_()
        for heads, size in ((6, 8), (2, 8), (2, 4))
    )
    sink_H = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_() if sinks else None
    given = [q, k, v] if sink_H is None else [q, k, v, sink_H]
    share = tokens.SequenceShare(
        TokenOrder(LENGTH, 1, 2), 0, [[(0, LENGTH)]], [(0, LENGTH)], torch.device("cpu")
    )
    scores, at = kernels.Scores(0.3, softcap), share.positions(None)
    dropout = Dropout(rate, 5 << 40 | 3, torch.arange(2), torch.arange(6), at, at) if rate else None
    work, keys = [share.work(rule, None)], attention.RingKeys(Group((0,), 0, None))
    ours = attention._Attention.apply(q, k, v, sink_H, work, [dropout], scores, keys)
    s_BHQN = q @ k.repeat_interleave(3, 1).mT * 0.3
    s_BHQN = s_BHQN if softcap is None else softcap * torch.tanh(s_BHQN / softcap)
    s_BHQN = s_BHQN.masked_fill(~_mask(rule), -torch.inf)
    if sink_H is not None:
        s_BHQN = torch.cat([s_BHQN, sink_H[:, None, None].expand(2, 6, LENGTH, 1)], -1)
    p_BHQN = F.softmax(s_BHQN, -1)[..., :LENGTH]
    p_BHQN = p_BHQN if dropout is None else p_BHQN * dropout.factors(ALL, ALL, torch.float64)
    expected = p_BHQN @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_attention_is_computed_once_where_a_block_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    share = tokens.SequenceShare(
        TokenOrder(LENGTH, 1, 1), 0, [[(0, LENGTH)]], [(0, LENGTH)], torch.device("cpu")
    )
    given = MaskRule(after=0), kernels.Scores(0.5), attention.RingKeys(Group((0,), 0, None))
    num_calls = 0

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = super().forward(x).view(1, LENGTH, 2, 12).transpose(1, 2).chunk(3, -1)
            return attention._Attention.apply(q, k, v, None, [share.work(given[0], None)], [None], *given[1:])

    def counted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return kernels.attend(*args)

    monkeypatch.setattr(attention, "attend", counted)
    block = Block(8, 24, dtype=torch.float64)
    x = torch.randn(1, LENGTH, 8, dtype=torch.float64)
    expected = torch.autograd.grad(block(x).square().sum(), block.weight)[0]
    assert num_calls == 1
    for recompute in ("full", "selective"):
        again = Block(8, 24, dtype=torch.float64)
        again.load_state_dict(block.state_dict())
        recompute_blocks([again], recompute)
        loss = again(x).square().sum()
        for retain in (True, False):  # a second backward computes it again
            gradient = torch.autograd.grad(loss, again.weight, retain_graph=retain)[0]
            assert torch.equal(gradient, expected)
        assert num_calls == {"full": 3, "selective": 5}[recompute]


def test_pairs_are_hashed_as_integers_of_32_bits_are() -> None:
    low, seed, at = (1 << 32) - 1, 0xDEADBEEF << 31 | 0x7EADBEEF, torch.arange(5)

    def hashed(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & low
        x = (x ^ x >> 15) * 0x735A2D97 & low
        return x ^ x >> 15

    def number(half: int, *indices: int) -> int:
        for index in indices:
            half = hashed(half ^ index)
        return half

    def is_kept(*indices: int, key: int) -> bool:
        a, b = number(seed >> 32, *indices) | 1, number(seed & low ^ 1 << 31, *indices)
        return (hashed(a * key + b & low) ^ 1 << 31) >= 0.4 * 2**32

    found = Dropout(0.4, seed, at, at, at, at * 1000).factors(ALL, ALL, torch.float64) > 0
    for sample, head, query, key in itertools.product(range(5), repeat=4):
        assert found[sample, head, query, key] == is_kept(sample, head, query, key=key * 1000)


def test_dropout_is_the_same_for_a_pair_in_every_tile() -> None:
    at = torch.arange(40)
    full = Dropout(0.25, 1 << 50 | 9, torch.arange(3), torch.arange(4), at, at + 7)
    every = full.factors(ALL, ALL, torch.float64)
    part = Dropout(0.25, 1 << 50 | 9, torch.tensor([2]), torch.tensor([1, 3]), at[5:30], at[11:] + 7)
    assert torch.equal(part.factors(slice(4, 9), ALL, torch.float64), every[2:, 1::2, 9:14, 11:])
    assert {*every.unique().tolist()} == {0.0, 1 / 0.75}


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropped_pairs_are_as_many_as_independent_draws_would_give(rate: float) -> None:
    """Over samples, heads, rows, columns and calls; and one pair tells nothing about its neighbours."""
    at = torch.arange(512)
    given = torch.arange(2), torch.arange(4), at, at
    dropped = Dropout(rate, 7 << 33 | 5, *given).factors(ALL, ALL, torch.float64) == 0
    of_next_call = Dropout(rate, 7 << 33 | 6, *given).factors(ALL, ALL, torch.float64) == 0
    deviations = (dropped.double() - rate) / (rate * (1 - rate)) ** 0.5  # of variance one
    assert abs(deviations.mean()) * deviations.numel() ** 0.5 < 4
    for dim in (-1, -2):  # sums over a row or column, of variance one
        assert (deviations.sum(dim) / 512**0.5).var() == pytest.approx(1, abs=0.1)
    neighbours = [(of_next_call.double() - rate) / (rate * (1 - rate)) ** 0.5]
    neighbours += [deviations.roll(1, dim) for dim in range(4)]
    for other in neighbours:
        assert abs((deviations * other).mean()) * deviations.numel() ** 0.5 < 4


def test_seeds_of_calls_follow_from_those_of_the_pass() -> None:
    streams = [DropoutStream({}), DropoutStream({})]
    drawn: list[list[int]] = [[], []]
    for stream, seeds in zip(streams, drawn, strict=True):
        for step in range(3):
            stream.seed(1, step, 0)
            seeds += [stream.draw() for _ in range(4)]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0]}) == 12
    assert all(0 <= seed < 2**63 for seed in drawn[0])


def _refused(model: Any, plan: str, **options: Any) -> str:
    with pytest.raises((ModelError, PlanError)) as caught:
        validate(Arguments(model, Plan.parse(plan), **options), num_ranks=Plan.parse(plan).num_ranks)
    return str(caught.value)


def test_attention_and_losses_that_cp_does_not_compute_are_refused_before_a_rank_starts() -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config = AutoConfig.for_model("bert", **sizes)  # with dropout of attention
    with torch.device("meta"):
        answers = AutoModelForQuestionAnswering.from_config(config)
    assert "no sum over tokens" in _refused(answers, "cp=2")
    assert "two halves" in _refused(hf_models.model_of("llama"), "cp=2", loss=programs.summed_loss)
    assert "no known task" in _refused(own_context.gpt(), "cp=2")
    assert "the heads do not divide" in _refused(hf_models.model_of("llama"), "cp=3 cp_method=ulysses")
    model = hf_models.model_of("llama")
    AttentionInterface.register("halved", lambda *_, **__: None)
    model.config._attn_implementation = "halved"
    assert "another implementation" in _refused(model, "cp=2")


def test_the_method_that_sends_less_is_chosen() -> None:
    def chosen(plan: str) -> str:
        given = Arguments(hf_models.model_of("llama"), Plan.parse(plan))  # 4 heads, 2 kv heads
        return validate(given, num_ranks=Plan.parse(plan).num_ranks).plan.cp_method

    assert [chosen(plan) for plan in ("cp=2", "cp=4", "cp=3", "cp=2 tp=2")] == [
        *("allgather", "ulysses", "allgather", "allgather")
    ]


def test_a_target_of_a_token_that_sees_nothing_is_refused_where_it_counts() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    batch = {"attention_mask": mask, "labels": torch.tensor([[-100, 5, 5, -100], [5, 5, 5, -100]])}
    with pytest.raises(ModelError, match="sees nothing, has a target"):
        check_targets(batch)
    batch["labels"][0, 1] = -100
    check_targets(batch)


class _Flash:
    """Stand-in for ATen, with no device that has FlashAttention: a factor changes log-sum-exps."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert dropout == 0.0
        out, lse = kernels._plain(kernels.BlockTensors(q, k, v, causal), kernels.Scores(scale))
        return out, lse * self._factor

    def _scaled_dot_product_flash_attention_backward(self, *args: Any, scale: float) -> Any:
        gradient, q, k, v, out, lse = args[:6]
        return kernels._plain_backward(
            gradient, kernels.BlockTensors(q, k, v, args[11]), out, lse, kernels.Scores(scale)
        )


def test_flash_attention_is_used_only_if_its_results_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.device("cpu"), torch.bfloat16
    monkeypatch.setattr(kernels, "_ATEN", _Flash(1.0))
    assert kernels._flash_is_right(*given, 20)
    monkeypatch.setattr(kernels, "_ATEN", _Flash(1.1))
    with pytest.warns(
        UserWarning, match=r"without FlashAttention, and takes longer: its results differ by 1\.0"
    ):
        assert not kernels._flash_is_right(*given, 28)


def test_flash_attention_has_one_head_size() -> None:
    """On the meta device: ATen's own shapes of results."""
    q, k, v = (
        torch.empty(2, heads, tokens, size, device="meta", dtype=torch.bfloat16)
        for heads, tokens, size in ((4, 64, 20), (2, 96, 20), (2, 96, 12))
    )
    block = kernels.BlockTensors(q, k, v)
    out, lse_BHQ = kernels._flash(block, 0.3)
    assert (out.shape, lse_BHQ.shape, lse_BHQ.dtype) == ((2, 4, 64, 12), (2, 4, 64), torch.float32)
    gradients = kernels._flash_backward(torch.empty_like(out), block, out, lse_BHQ, 0.3)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in (q, k, v)]


@pytest.mark.parametrize("which", range(4))
def test_elements_of_a_head_may_be_apart_in_memory(which: int) -> None:
    """Queries, keys, values and gradients; two head sizes would have them copied."""
    generator = torch.Generator().manual_seed(1)
    given = [
        torch.randn(2, heads, LENGTH, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    ]

    def results(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
        block, scores = kernels.BlockTensors(q, k, v, causal=True), kernels.Scores(0.3)
        out, lse_BHQ = kernels.attend(block, scores)
        return [out, lse_BHQ, *kernels.attend_backward(gradient, block, out, lse_BHQ, scores)]

    expected = results(*given)
    given[which] = given[which].mT.contiguous().mT
    for ours, theirs in zip(results(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_attention_of_ones_own_is_refused_for_other_shapes() -> None:
    ok = torch.zeros(2, 4, 8, 6)
    for q, k, v in (
        (ok, ok[:, :3], ok[:, :3]),
        (ok, ok[:, :2], ok),
        (ok, ok[:, :, :5], ok[:, :, :5]),
        (ok[0], ok[0], ok[0]),
    ):
        with pytest.raises(ModelError, match="not queries, keys and values of one sequence"):
            plait.attention(q, k, v)
    assert plait.attention(ok, ok[:, :2], ok[:, :2, :, :3]).shape == (2, 4, 8, 3)


def test_a_mask_of_pairs_of_tokens_is_refused_as_one() -> None:
    batch = {"input_ids": torch.zeros(2, 8), "attention_mask": torch.ones(2, 1, 8, 8)}
    with pytest.raises(ModelError, match="mask of pairs of tokens cannot be divided") as caught:
        tokens.SequenceShare.of_batch(batch, batch.keys(), Group((0, 1), 0, None), "ring")
    assert "position_ids that start again" in str(caught.value)


def test_outputs_with_tokens_in_other_dims_are_refused() -> None:
    """Rows of a router's logits, and scores of attention, on a rank with 4 of 8 tokens of 2 samples."""
    share = tokens.SequenceShare(TokenOrder(8, 2, 2), 0, [], [], torch.device("cpu"))
    group: Any = None  # nothing is sent
    pooled = torch.zeros(2, 5)
    assert share.complete({"pooled": pooled}, group, 2)["pooled"] is pooled
    for others in (torch.zeros(2 * 4, 5), torch.zeros(2, 3, 4, 8)):
        with pytest.raises(ModelError, match="tokens in a dim from which cp does not gather"):
            share.complete([others], group, 2)
