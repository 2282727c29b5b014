"""Documents of packed rows: a changed token of one moves no output of another, and a row trains as its
documents do alone; for every family, mask and mix."""

import contextlib
import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

import plait
from plait.engine import inputs
from plait.errors import ModelError
from plait.models import check_documents_apart
from plait.models.mask_decisions import Documents, documents_of
from plait.parallel.activation_checkpoint import COMPARED
from plait.parallel.context import tokens
from plait.plan import Plan
from plait.verify import Outcome, Verdict
from plait.verify.packed import Leak
from plait.verify.result import summary
from support import hf_models, programs, verify_models
from support.pool import Pool

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "opt", "gpt_neox", "phi", "mixtral", "gpt_oss")
OWN_ATTENTION = ("gptj", "gpt_neo", "falcon")
LENGTHS = ((5, 1, 6, 9, 3), (11, 2, 11))
MASKS = ("none", "ones", "padded", "left")
_PADDING = {"padded": slice(-1), "left": slice(1, None)}  # the documents that it leaves


def packed(mask: str = "none", seed: int = 0) -> dict[str, Tensor]:
    """Rows of documents; `padded`, `left`: the last one of each is padding, or the first."""
    ids = torch.randint(3, programs.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    if mask != "none":
        batch["attention_mask"] = torch.ones_like(ids)
    if mask in _PADDING:
        for row, lengths in enumerate(LENGTHS):
            hidden = slice(-lengths[-1], None) if mask == "padded" else slice(lengths[0])
            batch["attention_mask"][row, hidden] = 0
            labels[row, hidden] = -100
            positions[row, hidden] = 0
    return batch


def alone(steps: int, mask: str) -> list[list[dict[str, Tensor]]]:
    """Each document of each step as a batch."""
    found = []
    for step in range(steps):
        batch, parts = packed(mask, step), []
        for row, lengths in enumerate(LENGTHS):
            for number, length in [*enumerate(lengths)][_PADDING.get(mask, slice(None))]:
                start = sum(lengths[:number])
                of = slice(start, start + length)
                if length > 1:
                    parts.append({key: batch[key][row : row + 1, of] for key in ("input_ids", "labels")})
        found.append(parts)
    return found


def build(family: str, implementation: str = "") -> nn.Module:
    model = hf_models.model_of(family)
    if implementation:
        model.set_attn_implementation(implementation)  # type: ignore[operator]
    return model


def largest_leak(family: str, plan: str, mask: str, implementation: str = "") -> tuple[float, float]:
    """The largest change of other documents' logits, and the smallest of its own, when a token is changed."""
    engine = plait.parallelize(build(family, implementation), f"{plan} precision=fp64")
    batch = packed(mask)
    before = engine.outputs(batch, lambda outputs: outputs.logits)
    leak, moved = 0.0, float("inf")
    for number in range(2):
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        others = torch.ones(2, 24, dtype=torch.bool)
        for row, lengths in enumerate(LENGTHS):
            start = sum(lengths[:number])
            changed["input_ids"][row, start] = (changed["input_ids"][row, start] + 1) % programs.VOCABULARY
            others[row, start : start + lengths[number]] = False
        moves = (engine.outputs(changed, lambda outputs: outputs.logits) - before).abs().amax(-1)
        leak, moved = max(leak, float(moves[others].max())), min(moved, float(moves[~others].max()))
    return leak, moved


def check_apart(pool: Pool, ranks: int, *args: Any) -> None:
    for leak, moved in pool.run(largest_leak, ranks, *args):
        assert leak < 1e-12
        assert moved > 1e-4


_COVERING = [
    *(("dp=1", "ones", family) for family in (*FAMILIES, *OWN_ATTENTION)),
    *(("cp=2", mask, family) for mask, family in zip(MASKS * 4, FAMILIES, strict=False)),
    ("cp=2 cp_method=ulysses", "ones", "opt"),
    ("dp=1", "none", "opt"),
    ("dp=1", "padded", "opt"),
    ("pp=2", "ones", "llama"),
    ("tp=2 sp=true", "padded", "llama"),
]
_PLANS = ("dp=1", "cp=2", "cp=2 cp_method=ulysses")
_ALL = [
    pytest.param(plan, mask, family, marks=pytest.mark.sweep)
    for plan in _PLANS
    for mask in MASKS
    for family in FAMILIES
    if (plan, mask, family) not in _COVERING
]


@pytest.mark.parametrize(("plan", "mask", "family"), [*_COVERING, *_ALL])
def test_a_changed_token_moves_no_output_of_another_document(
    pool: Pool, plan: str, mask: str, family: str
) -> None:
    check_apart(pool, 1 if plan == "dp=1" else 2, family, plan, mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_are_apart_in_every_implementation(pool: Pool, implementation: str, mask: str) -> None:
    check_apart(pool, 1, "mistral", "dp=1", mask, implementation)


def _leak_without_documents(*args: Any) -> tuple[float, float]:
    def one(batch: dict[str, Tensor]) -> Documents | None:
        found = documents_of(batch)
        in_order = torch.arange(24).expand(2, -1)
        return found and replace(found, starts_BS=in_order == 0, positions_BS=in_order)

    with mock.patch.object(inputs, "documents_of", one), mock.patch.object(tokens, "documents_of", one):
        return largest_leak(*args)


def _verdict(plan: str, *, mutated: bool) -> Verdict | None:
    with contextlib.ExitStack() as stack:
        for module in (inputs, tokens) if mutated else ():
            stack.enter_context(mock.patch.object(module, "documents_of", return_value=None))
        return verify_models.verify_on_ranks(verify_models.TIED_LLAMA, plan, packed=True)


@pytest.mark.parametrize("plan", ["dp=1", "cp=2"])
def test_verify_proves_that_documents_are_apart_or_finds_that_they_are_not(pool: Pool, plan: str) -> None:
    ranks = 1 if plan == "dp=1" else 2
    right = pool.run(_verdict, ranks, plan, mutated=False)[0]
    assert (right.outcome, right.leak) == (Outcome.SAME, 0.0)
    assert right.max_error < 1e-12
    assert "with each document alone" in summary(right)
    wrong = pool.run(_verdict, ranks, plan, mutated=True)[0]
    assert wrong.outcome is Outcome.DIFFERS
    assert wrong.leak > 1e-4


def _flash(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: Any) -> tuple[Tensor, None]:
    """FlashAttention on a CPU: causal, in documents of given lengths, which are those of all rows."""
    assert mask is None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, tokens = q.shape[0], q.shape[2]
    document = torch.zeros(rows * tokens, dtype=torch.long)
    if (borders := given.get("cu_seq_lens_q")) is not None:
        assert borders.dtype == torch.int32
        assert given["max_length_q"] == borders.diff().max()
        document = torch.bucketize(torch.arange(rows * tokens), borders.long(), right=True)
    document = document.view(rows, 1, tokens, 1)
    sees = torch.ones(tokens, tokens, dtype=torch.bool).tril() & (document == document.mT)
    scores = (q @ k.mT * given["scaling"]).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


def _flash_llama(recompute: str, *, on_meta: bool = True) -> nn.Module:
    model: Any = hf_models.model_of("llama", on_meta=on_meta)
    model.config._attn_implementation_internal = "flash_attention_2"
    if recompute == "of the model":
        model.activation_checkpointing_enable()
    return model


def _train_with_flash(recompute: str) -> programs.Trace:
    plan = "dp=1 precision=fp64" + ("" if recompute == "of the model" else f" recompute={recompute}")
    build = functools.partial(_flash_llama, recompute)
    task = programs.Task(build, _whole_rows_then_packed, steps=COMPARED + 2, own_loss=True)
    with mock.patch.dict(AttentionInterface._global_mapping, {"flash_attention_2": _flash}):
        return programs.train_task(task, plan)


def _whole_rows_then_packed(steps: int) -> list[dict[str, Tensor]]:
    rows = [packed(seed=step) for step in range(steps)]
    return [{key: batch[key] for key in ("input_ids", "labels")} for batch in rows[:-1]] + rows[-1:]


def _whole_rows_then_alone(steps: int) -> list[Any]:
    return [*_whole_rows_then_packed(steps)[:-1], alone(steps, "none")[-1]]


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "of the model"])
def test_flash_attention_is_given_the_documents_of_all_rows_in_backward_too(
    pool: Pool, recompute: str
) -> None:
    """The search of transformers finds them in batches of one row only. Recomputed outputs are compared in
    the first steps."""
    ours = pool.run(_train_with_flash, 1, recompute)[0]
    task = programs.Task(
        hf_models.builder("llama"), _whole_rows_then_alone, steps=COMPARED + 2, own_loss=True
    )
    programs.assert_same(ours, programs.one_process_task(task, ours.first_weights, 1))


@pytest.mark.parametrize("plan", _PLANS)
def test_the_probe_finds_documents_that_see_each_other(pool: Pool, plan: str) -> None:
    for leak, _ in pool.run(_leak_without_documents, 1 if plan == "dp=1" else 2, "llama", plan, "ones"):
        assert leak > 1e-4


_METHODS = ("cp=2 cp_method=allgather", "cp=3 cp_method=ring", "cp=2 cp_method=ulysses", "cp=4 cp_method=2x2")


@pytest.mark.parametrize(
    ("family", "plan", "mask"),
    [
        *((family, "dp=1", mask) for family in ("llama", "opt") for mask in MASKS),
        *(("gemma2", "cp=2", mask) for mask in MASKS),
        *(("llama", plan, mask) for plan, mask in zip(_METHODS, MASKS, strict=True)),
        *(("gpt_oss", plan, mask) for plan, mask in zip(_METHODS, (*MASKS[1:], MASKS[0]), strict=True)),
        ("llama4_text", "dp=1", "left"),
    ],
)
def test_a_packed_row_trains_as_its_documents_alone(pool: Pool, family: str, plan: str, mask: str) -> None:
    """Losses, gradients and weights, under every method of `cp`."""
    build, ranks = hf_models.builder(family), Plan.parse(plan).num_ranks
    task = programs.Task(build, functools.partial(_data, mask), steps=2, own_loss=True)
    ours = pool.run(programs.train_task, ranks, task, f"{plan} precision=fp64")[0]
    of_documents = programs.Task(build, functools.partial(alone, mask=mask), steps=2, own_loss=True)
    programs.assert_same(ours, programs.one_process_task(of_documents, ours.first_weights, 1))


def _data(mask: str, steps: int) -> list[dict[str, Tensor]]:
    return [packed(mask, step) for step in range(steps)]


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("mamba", "MambaMixer (backbone.layers.0.mixer): convolution"),
        ("qwen3_next", "Qwen3NextGatedDeltaNet (model.layers.0.linear_attn): convolution"),
        ("lfm2", "Lfm2ShortConv"),
    ],
)
def test_a_model_in_which_documents_meet_is_refused_by_the_module(family: str, module: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_documents_apart(hf_models.model_of(family))
    assert module in raised.value.given
    assert raised.value.fact == "documents of a row would see each other"


@pytest.mark.parametrize(
    ("positions", "mask", "starts"),
    [
        ([0, 1, 2, 0, 1, 0], None, [0, 3, 5]),
        ([0, 1, 2, 0, 1, 0], [1] * 6, [0, 3, 5]),
        ([5, 6, 9, 0, 1, 2], [1] * 6, [0, 2, 3]),  # of a packed row each jump begins a document
        ([0, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 2, 4]),
        ([0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 2, 3, 4]),
        ([1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 1, 1], None),  # padding on the left, as in generation
        ([0, 1, 2, 7, 8, 9], [1] * 6, None),  # positions that the user jumps
        ([0, 1, 2, 7, 8, 9], None, None),  # transformers divides these
        ([3, 4, 5, 6, 7, 8], None, None),
    ],
)
def test_a_packed_row_is_one_whose_positions_start_again(
    positions: list[int], mask: list[int] | None, starts: list[int] | None
) -> None:
    batch = {"input_ids": torch.zeros(1, 6).long(), "position_ids": torch.tensor([positions])}
    if mask is not None:
        batch["attention_mask"] = torch.tensor([mask])
    found = documents_of(batch)
    assert (found is None) == (starts is None)
    if found is not None:
        assert [start for start, _ in found.intervals[0]] == starts


def test_a_probe_says_what_it_does_not_show() -> None:
    assert Leak(0.0, 0.35).problem("bf16") == ""
    assert "moves other documents by 1.0e-01" in Leak(0.1, 0.35).problem("bf16")
    assert "its own document by 1.0e-02 only" in Leak(0.0, 0.01).problem("bf16")
