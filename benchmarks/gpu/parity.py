"""The same numbers on the device: `plait verify`, and losses of narrow precisions next to wider ones."""

import tempfile
from dataclasses import replace
from math import lcm
from pathlib import Path

import torch

import plait
from hardware import Json, selected
from llama import TOY
from plait.__main__ import main as plait_main
from plait.comm.launch import fork_ranks
from plait.parallel.context.kernels import BlockTensors, Scores, attend, attend_backward
from plait.verify import runner
from plait.verify.model_spec import parse_source
from plait.verify.result import Verdict
from plait.verify.worker import PRECISIONS, Case
from training import batch_of, engine_of

_LENGTH, _LAYERS, _STEPS = 16, 4, 3
_LOSSES, _LOSS_TOLERANCE = 20, 2e-2
_BLOCK_TOLERANCE = 5e-2


def verify(device: str, model: str, dtype: str, plans: list[str]) -> Json:
    """`plait verify --plans`: each plan's largest relative error, next to its tolerance.

    Ranks are processes on their own; one that dies costs the verdict of its plan only.
    """
    fork_ranks(plait_main)  # only where torch finds no GPU
    source = parse_source(model, layers=_LAYERS, length=_LENGTH)
    parsed = [replace(plait.Plan.parse(plan), precision=PRECISIONS[dtype]) for plan in plans]
    samples = 2 * lcm(*(plan.dp * plan.micro for plan in parsed))
    cases = [Case(source, str(plan), dtype, _STEPS, samples, _LENGTH, seed=0) for plan in parsed]
    options = runner.WorkerOptions(torch.device(device).type, find_suspects=False)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = runner.verify(cases, Path(folder), options)
    rows = [_row(verdict) for verdict in verdicts]
    wrong = [row["plan"] for row in rows if row["outcome"] != "same"]
    return {"rows": rows, "problem": f"not as in one process: {'; '.join(wrong)}" if wrong else None}


def _row(verdict: Verdict) -> Json:
    worst = verdict.worst_parameters[0] if verdict.worst_parameters else None
    return {
        "model": verdict.model,
        "plan": verdict.plan,
        "dtype": verdict.dtype,
        "outcome": verdict.outcome.value,
        "largest_error": verdict.max_error,
        "of_tolerance": worst.excess if worst is not None else None,
        "worst": worst.name if worst is not None else None,
        "message": " ".join(verdict.message.split())[:200] or None,
    }


def losses(device: str, precision: str, reference: str) -> Json:
    """Losses of a model in one precision next to those in another, on one batch. fp16 may skip steps."""
    on = selected(device)
    data, losses, skipped = batch_of(TOY, 8, on), {}, 0
    for each in (reference, precision):
        engine = engine_of(f"dp=1 precision={each}", TOY, on)
        taken = []
        while len(taken) < _LOSSES and engine.num_steps < 2 * _LOSSES + 10:
            result = engine.step(data)
            skipped += result.skipped
            taken += [] if result.skipped else [result.loss]
        losses[each] = taken
    found = losses[precision]
    apart = max(abs(a / b - 1) for a, b in zip(found, losses[reference], strict=True))
    row = {"largest_error": apart, "skipped": skipped, "first": found[0], "last": found[-1]}
    is_wrong = not apart < _LOSS_TOLERANCE or not row["last"] < row["first"]
    return {"rows": [row], "problem": f"{precision} does not train as {reference} does" if is_wrong else None}


def attention(device: str, dtype: str, head_size: int) -> Json:
    """Attention of a block of keys, as ranks of `cp` compute it, and its backward, next to float32."""
    generator = torch.Generator().manual_seed(0)
    q, gradient, k, v = (
        torch.randn(2, heads, _LENGTH * 64, head_size, generator=generator).to(selected(device))
        for heads in (8, 8, 2, 2)
    )
    rows = []
    for causal in (False, True):
        results = []
        for of in (torch.float32, getattr(torch, dtype)):
            block = BlockTensors(*(tensor.to(of) for tensor in (q, k, v)), causal)
            out, lse = attend(block, scores := Scores(head_size**-0.5))
            of_keys = attend_backward(
                gradient.to(of), block, out, lse + 0.5, scores
            )  # as if there were others
            results.append((out, lse, *of_keys))
        apart = [
            ((narrow - wide).abs().max() / wide.abs().max()).item()
            for wide, narrow in zip(*results, strict=True)
        ]
        rows.append({"causal": causal, "largest_error": max(apart)})
    is_wrong = not max(row["largest_error"] for row in rows) < _BLOCK_TOLERANCE
    return {"rows": rows, "problem": f"{dtype} differs from float32" if is_wrong else None}
