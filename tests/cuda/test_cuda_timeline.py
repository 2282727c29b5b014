"""The replay of recordings: durations, exposed communication, and deadlocks."""

import sys
from dataclasses import replace

import pytest
import torch

from support import cuda_steps
from support.pool import Pool
from support.virtual_cuda import step_time
from support.virtual_cuda.build import MODULE
from support.virtual_cuda.log import Entry, Kind
from support.virtual_cuda.recording import Recording, order_errors
from support.virtual_cuda.timeline import Hardware, replay

HARDWARE = Hardware(  # a byte a second
    memory=1.0,
    nvlink=1.0,
    kernel_s=0.0,
    collective_s=0.0,
    launch_s=0.0,
    collective_launch_s=0.0,
    sync_s=0.0,
)
NCCL_CTAS = HARDWARE.nccl_ctas
LATE = replace(HARDWARE, launch_s=2.0, collective_launch_s=5.0, sync_s=1.0)
BOTH = (0, 1)


def entry(
    kind: Kind, stream: int = 0, id: int = 0, name: str = "kernel", num_bytes: int = 0, **rest: int
) -> Entry:
    spans = [(0, num_bytes, True)] if num_bytes else []
    return Entry(kind, stream, id, rest.get("number", 0), name, "", spans, 0.0, 2, rest.get("peer", -1))


def kernel(num_bytes: int, stream: int = 0) -> Entry:
    return entry(Kind.OP, stream, num_bytes=num_bytes)


def collective(name: str, number: int, num_bytes: int, stream: int, *, communicator: int = 0) -> Entry:
    return entry(Kind.OP, stream, communicator, f"nccl:{name}", num_bytes, number=number)


def message(name: str, number: int, peer: int, stream: int) -> Entry:
    return entry(Kind.OP, stream, 0, f"nccl:{name}", 1, number=number, peer=peer)


def after(event: int, recorded_on: int, waiting: int) -> list[Entry]:
    return [entry(Kind.RECORD, recorded_on, event), entry(Kind.WAIT, waiting, event)]


def recording(*log: Entry) -> Recording:
    return Recording(communicators=[("all", BOTH), ("other", BOTH)], log=[*log])


def test_communication_is_exposed_when_no_kernel_runs_meanwhile() -> None:
    gather = collective("all_gather", 1, 8, stream=1)  # 4 seconds: half of the bytes are sent
    log = [kernel(3), *after(1, 0, 1), gather, kernel(2), *after(2, 1, 0), kernel(1)]
    time = replay([recording(*log), recording(*log)], HARDWARE).ranks[0]
    assert (time.step_s, time.compute_s, time.communication_s, time.exposed_s) == (8, 6, 4, 2)


def test_a_collective_begins_with_its_last_rank() -> None:
    gather = collective("all_gather", 1, 2, stream=0)
    fast, slow = replay([recording(kernel(1), gather), recording(kernel(5), gather)], HARDWARE).ranks
    assert (fast.step_s, slow.step_s) == (6, 6)
    assert (fast.communication_s, slow.communication_s) == (5, 1)


def test_a_receive_is_resident_until_its_message_comes() -> None:
    receives = [message("recv", number, 1, stream=number) for number in (1, 2)]
    sends = [message("send", number, 0, stream=0) for number in (1, 2)]
    receiver, sender = replay([recording(*receives), recording(kernel(3), *sends)], HARDWARE).ranks
    assert (receiver.resident, sender.resident) == (2, 1)


def test_the_device_waits_for_a_host_that_launches_more_slowly_than_kernels_run() -> None:
    time = replay([recording(kernel(1), kernel(1))], LATE).ranks[0]
    assert (time.step_s, time.compute_s, time.idle_s, time.launch_s) == (5, 2, 3, 4)


def test_a_synchronization_costs_the_lead_of_the_host() -> None:
    ahead = replay([recording(kernel(10), kernel(10))], LATE).ranks[0]
    joined = replay([recording(kernel(10), entry(Kind.SYNC_STREAM), kernel(10))], LATE).ranks[0]
    assert (ahead.step_s, ahead.idle_s) == (22, 2)
    assert (joined.step_s, joined.idle_s) == (25, 5)  # the host returns after 1, and launches in 2


def test_a_collective_takes_the_host_longer_to_launch_than_a_kernel() -> None:
    rank = recording(collective("all_reduce", 1, 0, stream=1), kernel(1))
    assert replay([rank, rank], LATE).ranks[0].launch_s == 7


def test_messages_occupy_multiprocessors_as_long_as_they_wait() -> None:
    receives = [message("recv", number, 1, stream=number) for number in (1, 2)]
    sends = [message("send", number, 0, stream=0) for number in (1, 2)]
    limited, other = recording(*receives, kernel(2)), recording(kernel(3), *sends, kernel(1, stream=1))
    limited.max_ctas = {0: 4}
    receiver, sender = replay([limited, other], HARDWARE).ranks
    assert (receiver.message_ctas, sender.message_ctas) == (8, 0)  # the sender's kernels end before it sends
    assert replay([recording(*receives, kernel(2)), other], HARDWARE).ranks[0].message_ctas == 2 * NCCL_CTAS


@pytest.mark.parametrize("streams", [1, 2])
def test_receives_before_sends_on_one_stream_are_a_deadlock(streams: int) -> None:
    logs = [
        recording(message("recv", 1, 1 - rank, stream=0), message("send", 2, 1 - rank, stream=streams - 1))
        for rank in BOTH
    ]
    assert bool(replay(logs, HARDWARE).deadlock) == (streams == 1)


def test_a_collective_without_one_of_its_ranks_never_ends() -> None:
    assert replay([recording(collective("all_reduce", 1, 4, 0)), recording()], HARDWARE).deadlock


def test_two_orders_of_collectives_on_two_communicators_are_found() -> None:
    first, second = (collective("all_reduce", 1, 4, stream, communicator=stream - 1) for stream in (1, 2))
    one, other = recording(), recording()
    one.collectives = [(it.id, it.name, it.bytes) for it in (first, second)]
    other.collectives = [(it.id, it.name, it.bytes) for it in (second, first)]
    assert not order_errors([one, one])
    assert len(order_errors([one, other])) == 1


# --- streams of which several share one


def _with_pool_of_streams(plan: str) -> Recording | None:
    native = sys.modules[MODULE]
    native.set_stream_pool(32)  # torch's number
    try:
        return cuda_steps.train("cuda", plan, cuda_steps.deep_llama, keep_log=True).recording
    finally:
        native.set_stream_pool(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="real devices have no log")
def test_pipelines_on_the_streams_of_torchs_pool_do_not_deadlock(pool: Pool) -> None:
    plan = "pp=2 dp=2 micro=3 chunks=2 schedule=interleaved zero=1 precision=bf16"
    assert not replay(pool.run(_with_pool_of_streams, 4, plan)).deadlock


# --- models of full size


@pytest.mark.skipif(torch.cuda.is_available(), reason="real devices have no log")
def test_a_step_of_a_large_model_is_replayed_with_all_its_products(pool: Pool) -> None:
    layers, length = 2, 2048
    recordings = pool.run(cuda_steps.sized_step, 2, "dp=2 zero=3 precision=bf16", "1b", 1, length, layers)
    timeline = replay(recordings)
    assert not timeline.deadlock
    hidden, ffn, _, heads, kv_heads = cuda_steps.SIZES["1b"]
    block = 2 * hidden * hidden * (1 + kv_heads / heads) + 3 * hidden * ffn
    products = layers * block + hidden * cuda_steps.VOCABULARY
    attention = layers * 7 * length * length * hidden  # with a causal mask: 2 forward, 5 backward
    for rank, recording in zip(timeline.ranks, recordings, strict=True):
        assert rank.flops == pytest.approx(6 * length * products + attention, rel=0.02)
        assert 0 <= rank.exposed_s < rank.communication_s < rank.step_s
        # The shards' states at least, and all gradients at most twice.
        assert 1 < recording.findings.peak_bytes / (products * 8) < 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="real devices have no log")
@pytest.mark.parametrize("case", step_time.SMALLEST, ids=lambda case: case.plan)
def test_a_step_of_all_layers_is_on_the_line_through_steps_of_few(pool: Pool, case: step_time.Case) -> None:
    found, estimated = (step_time.measure(pool, each) for each in (case, replace(case, layers=(4, 6))))
    assert isinstance(found, step_time.Numbers), found
    assert isinstance(estimated, step_time.Numbers), estimated
    for name, value in vars(found).items():
        if name == "slow_idle_s":  # the head shortens it, by as much as the host is late
            continue
        assert getattr(estimated, name) == pytest.approx(value, rel=0.02, abs=1e-5), name
    assert len(step_time.row(case, found)) == len(step_time.HEADER)


@pytest.mark.skipif(torch.cuda.is_available(), reason="real devices have no log")
@pytest.mark.parametrize("case", step_time.SMALL, ids=lambda case: case.plan)
def test_a_step_of_a_small_model_waits_for_the_device_once_and_the_device_for_its_host(
    pool: Pool, case: step_time.Case
) -> None:
    found = step_time.measure(pool, replace(case, layers=(4,)))
    assert isinstance(found, step_time.Numbers), found
    assert found.syncs == 1
    assert found.kept_bytes < 1e8
    assert 0 <= found.idle_s < found.slow_idle_s < 3 * found.launch_s
    assert len(step_time.row(case, found)) == len(step_time.HEADER)
