"""Claims that hold for every plan on CUDA ranks, checked on one training under the plan."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from plait.plan import Plan
from support import cuda_steps, programs
from support.pool import Pool
from support.virtual_cuda.recording import Recording, order_errors
from support.virtual_cuda.timeline import replay

# Largest relative differences from the CPU ranks' losses, norms and last weights.
TOLERANCES = {
    "fp64": (1e-9, 1e-9, 1e-9),
    "fp32": (1e-5, 1e-4, 1e-4),
    "bf16": (1e-3, 1e-2, 2e-2),
    "fp16": (1e-3, 1e-2, 2e-2),
}


@dataclass(frozen=True)
class Case:
    """A plan, and its budget for one step of one rank. Budgets are upper bounds: lower them with the code's.

    `syncs`: how often the host blocks until the device is done. `kept_bytes`: freed memory that record_stream
    keeps from the pool of a host that is far ahead, without what NCCL itself records. `message_ctas`: thread
    blocks of sends and receives while the rank computes: a tenth of an H200's 132 multiprocessors.
    """

    ranks: int
    plan: str
    syncs: int
    kept_bytes: int = 0
    message_ctas: int = 13
    options: dict[str, Any] = field(default_factory=dict)  # of `cuda_steps.train`

    def __str__(self) -> str:
        return self.plan


def check(pool: Pool, case: Case) -> list[Recording]:
    """Train under a plan on CPU and on CUDA ranks, check results and recordings, and return these."""
    outcomes = pool.run(cuda_steps.train_on_both, case.ranks, case.plan, **case.options)
    losses, norms, weights = TOLERANCES[Plan.parse(case.plan).precision]
    for on_cpu, on_cuda in outcomes:
        assert on_cuda.losses == pytest.approx(on_cpu.losses, rel=losses)
        assert on_cuda.norms == pytest.approx(on_cpu.norms, rel=norms)
    on_cpu, on_cuda = outcomes[0]
    difference, name = programs.largest_difference(on_cuda.weights, on_cpu.weights)
    assert difference <= weights, f"weight {name} differs by {difference:.1e}"
    recordings = [on_cuda.recording for _, on_cuda in outcomes if on_cuda.recording is not None]
    for recording in recordings:
        check_recording(recording, case)
    assert not order_errors(recordings)
    check_replay(recordings, case)
    return recordings


def check_replay(recordings: list[Recording], case: Case) -> None:
    timeline = replay(recordings)
    assert not timeline.deadlock, timeline.deadlock
    ctas = [rank.message_ctas for rank in timeline.ranks]
    assert max(ctas, default=0) <= case.message_ctas, f"CTAs of messages, by rank: {ctas}"


def check_recording(recording: Recording, case: Case) -> None:
    found = recording.findings
    assert found.num_operations > 0
    assert not found.races, _lines(found.races)
    assert not found.frees_in_use, _lines(found.frees_in_use)
    assert found.syncs.total() <= case.syncs, _lines(found.syncs)
    kept = Counter(
        {text: number for text, number in found.kept_bytes.items() if not text.startswith("nccl:")}
    )
    assert kept.total() <= case.kept_bytes, _lines(kept)


def _lines(counter: Counter[str]) -> str:
    return "\n".join([f"{counter.total()} in all", *(f"{n} x {text}" for text, n in counter.most_common(20))])
