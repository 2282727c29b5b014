"""The simulated device finds what it is for: short programs with and without an error, and waits left out."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.parallel.zero.buffers import CopyStream
from support import cuda_steps
from support.pool import Pool
from support.virtual_cuda.log import SYNCS, Entry, Kind
from support.virtual_cuda.races import Findings, analyze
from support.virtual_cuda.recording import recorded

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="real devices have no log")

NUMEL = 1000


def _findings(program: Callable[[Tensor, torch.cuda.Stream], None]) -> Findings:
    """Run a program with a tensor and a second stream."""
    tensor, stream = torch.zeros(NUMEL, device="cuda"), torch.cuda.Stream()
    with recorded() as recording:
        program(tensor, stream)
    assert recording is not None
    return recording.findings


# --- races


def _read_elsewhere(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    tensor.add_(1)
    with torch.cuda.stream(stream):
        tensor.sum()


def _read_after_wait(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    tensor.add_(1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor.sum()
    torch.cuda.current_stream().wait_event(stream.record_event())
    tensor.add_(1)


def _read_after_synchronize(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    tensor.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        tensor.sum()


def _disjoint_halves(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    tensor[: NUMEL // 2].add_(1)
    with torch.cuda.stream(stream):
        tensor[NUMEL // 2 :].add_(1)


def _free_in_use(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    buffer = torch.ones(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor.copy_(buffer)
    del buffer


def _free_recorded(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    buffer = torch.ones(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor.copy_(buffer)
    buffer.record_stream(stream)
    del buffer


def test_unordered_accesses_are_races_and_ordered_ones_are_not(pool: Pool) -> None:
    assert pool.run(_findings, 1, _read_elsewhere)[0].races.total() == 1
    for program in (_read_after_wait, _read_after_synchronize, _disjoint_halves):
        found = pool.run(_findings, 1, program)[0]
        assert not found.races, program.__name__


def test_a_block_that_another_stream_uses_is_freed_in_use_or_kept_by_record_stream(pool: Pool) -> None:
    in_use, kept = pool.run(_findings, 1, _free_in_use)[0], pool.run(_findings, 1, _free_recorded)[0]
    assert in_use.frees_in_use.total() == 1
    assert in_use.kept_bytes.total() == 0
    assert kept.frees_in_use.total() == 0
    assert kept.kept_bytes.total() == NUMEL * 4


# --- the host


def _host_reads(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    tensor.sum().item()  # 1
    tensor.cpu()  # 2
    tensor[0] = 3.0  # 3
    torch.tensor(3.0, device="cuda")  # 4
    tensor.copy_(torch.ones(NUMEL), non_blocking=True)  # 5: pageable memory
    tensor.fill_(3.0)
    tensor.copy_(torch.ones(NUMEL).pin_memory(), non_blocking=True)


def test_every_way_in_which_the_host_blocks_is_counted(pool: Pool) -> None:
    assert pool.run(_findings, 1, _host_reads)[0].syncs.total() == 5


def _read_early() -> tuple[bool, bool]:
    tensor, host = torch.ones(NUMEL, device="cuda"), torch.empty(NUMEL, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    early = bool(host.isnan().all())
    torch.cuda.current_stream().synchronize()
    return early, bool((host == 1).all())


def test_a_copy_to_the_host_is_nan_until_the_host_synchronizes(pool: Pool) -> None:
    assert pool.run(_read_early, 1)[0] == (True, True)


def _overwrite_source(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    host = torch.zeros(NUMEL, pin_memory=True)
    tensor.copy_(host, non_blocking=True)
    host.fill_(1)
    torch.cuda.synchronize()


def test_a_write_by_the_host_to_memory_that_a_copy_reads_is_a_race(pool: Pool) -> None:
    assert pool.run(_findings, 1, _overwrite_source)[0].races.total() == 1


def _draws() -> tuple[bool, bool]:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(8, device="cuda"), 0.5)
    on_device_only = torch.equal(before, torch.get_rng_state())
    state = torch.cuda.get_rng_state()
    first = torch.rand(8, device="cuda")
    torch.cuda.set_rng_state(state)
    return on_device_only, torch.equal(first, torch.rand(8, device="cuda"))


def test_random_numbers_on_the_device_come_from_its_own_generator(pool: Pool) -> None:
    assert pool.run(_draws, 1)[0] == (True, True)


# --- waits left out of a training


def _log_of(plan: str) -> list[Entry]:
    return cuda_steps.train("cuda", plan, cuda_steps.deep_llama, keep_log=True).recording.log


@pytest.mark.parametrize("plan", ["dp=2 zero=3 micro=2", "dp=2 zero=1 reduce=int8", "pp=2 micro=4"])
def test_a_training_without_the_waits_of_one_stream_races(pool: Pool, plan: str) -> None:
    log = pool.run(_log_of, 2, f"{plan} precision=bf16")[0]
    assert not analyze(log).races
    # Some waits are also ensured by a synchronization of the host, which may be removed one day.
    log = [entry for entry in log if entry.kind not in (*SYNCS, Kind.QUERY)]
    before = analyze(log)
    unnoticed = []
    for stream in {entry.stream for entry in log if entry.kind == Kind.WAIT}:
        found = analyze([entry for entry in log if entry.kind != Kind.WAIT or entry.stream != stream])
        if not found.races - before.races and not found.frees_in_use - before.frees_in_use:
            unnoticed.append({e.name for e in log if e.kind == Kind.OP and e.stream == stream})
    assert not unnoticed


def _without_drain() -> list[float]:
    with mock.patch.object(CopyStream, "synchronize"):
        return cuda_steps.train(
            "cuda", "dp=1 zero=1 offload=cpu precision=bf16", cuda_steps.deep_llama
        ).losses


def test_gradients_that_the_host_reads_before_they_have_arrived_are_nan(pool: Pool) -> None:
    losses = pool.run(_without_drain, 1)[0]
    assert any(loss != loss for loss in losses)
