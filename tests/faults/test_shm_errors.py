"""Errors of the host transport: ranks that call different things, or cannot share memory."""

import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    connect,
    gather,
    reduce,
    reduce_scatter,
    share,
    shares_memory,
    start_exchange,
    start_receive,
    start_send,
)
from plait.comm.shm.arena import as_tensor
from plait.comm.shm.native_lib import NativeCallInfo, call_text
from plait.comm.shm.transport import ShmTransport
from plait.errors import CommError
from support.pool import Pool

meet_module = sys.modules["plait.comm.shm.rendezvous"]


def _differ(what: str) -> str:
    """Rank 2 means another call than ranks 0 and 1."""
    world = connect(transport="host", timeout_s=10)
    group, other = world.group, world.rank == 2
    large = torch.ones(60_000)
    try:
        if what == "sizes":
            all_reduce(torch.ones(7 if other else 10), group, label="w")
        elif what == "one of them large":
            all_reduce(large if other else torch.ones(10), group, label="w")
        elif what == "dtypes":
            all_reduce(large.double() if other else large, group, label="w")
        elif what == "verbs":
            (broadcast if other else all_reduce)(large, group, label="w")
        elif what == "ops":
            all_reduce(large, group, "max" if other else "sum", label="w")
        elif what == "a mean":
            all_reduce(large, group, "mean" if other else "sum", label="w")
        elif what == "roots":
            broadcast(large, group, 1 if other else 0, label="w")
        elif what == "a barrier":
            barrier(group, label="w") if other else all_gather(
                torch.ones(30), torch.ones(10), group, label="w"
            )
        elif what == "reduce and gather":
            out = torch.empty(180_000) if world.rank == 0 else None
            reduce(large, group, label="w") if other else gather(out, large, group, label="w")
        else:
            given = torch.ones(30 if other else 60)
            for _ in start_exchange(given, group, label="w").into(torch.empty_like(given)):
                pass
    except CommError as error:
        return str(error)
    return "no error"


DIFFERENT = {
    "sizes": ("all-reduce (sum) of w, 10 x float32", "all-reduce (sum) of w, 7 x float32"),
    "one of them large": ("all-reduce (sum) of w, 10 x float32", "all-reduce (sum) of w, 60000 x float32"),
    "dtypes": ("all-reduce (sum) of w, 60000 x float32", "all-reduce (sum) of w, 60000 x float64"),
    "verbs": ("all-reduce (sum) of w, 60000 x float32", "broadcast of w with root 0, 240000 bytes"),
    "ops": ("all-reduce (sum) of w, 60000 x float32", "all-reduce (max) of w, 60000 x float32"),
    "a mean": ("all-reduce (sum) of w, 60000 x float32", "all-reduce (mean) of w, 60000 x float32"),
    "roots": ("broadcast of w with root 0, 240000 bytes", "broadcast of w with root 1, 240000 bytes"),
    "a barrier": ("all-gather of w, 40 bytes", "barrier of w"),
    "reduce and gather": (
        "gather of w with root 0, 240000 bytes",
        "reduce (sum) of w with root 0, 60000 x float32",
    ),
    "sums": ("sum of w, 60 x float32", "sum of w, 30 x float32"),
}


@pytest.mark.parametrize("what", [*DIFFERENT])
def test_an_error_about_different_calls_lists_every_ranks_call(pool: Pool, what: str) -> None:
    most, other = DIFFERENT[what]
    for message in pool.run(_differ, 3, what):
        assert "the ranks made different calls" in message
        for rank, said in enumerate((most, most, other)):
            assert f"rank {rank}: {said}\n" in message + "\n"


def _refused(what: str) -> str:
    """An invalid call on one rank raises there, before any message: the other ranks do not see it."""
    world = connect(transport="host", timeout_s=10)
    group, meta = world.group, torch.ones(4, device="meta")
    try:
        if what == "meta sum":
            start_exchange(meta, group, label="w")
        elif what == "sum of bool":
            all_reduce(torch.ones(4, dtype=torch.bool), group)
        elif what == "complex":
            all_reduce(torch.ones(4, dtype=torch.complex64), group)
        elif what == "pieces":
            reduce_scatter(torch.ones(3), torch.ones(4), group)
        elif what == "oneself":
            start_send(torch.ones(4), group, world.rank)
        elif what == "root":
            broadcast(torch.ones(4), group, 5)
        else:
            world.new_group((1 - world.rank, 3))
    except CommError as error:
        all_reduce(torch.ones(4), group)  # the group is as good as before
        return str(error)
    return "no error"


REFUSED = {
    "meta sum": "all-reduce of w of a tensor that is not in host memory",
    "sum of bool": "ranks cannot reduce tensors of this dtype",
    "complex": "ranks cannot reduce tensors of this dtype",
    "pieces": "the tensors of reduce-scatter have mismatched sizes",
    "oneself": "send to the same rank",
    "root": "broadcast with a rank outside the group",
    "group": "a rank cannot create a group without itself",
}


@pytest.mark.parametrize("what", [*REFUSED])
def test_an_invalid_call_is_refused_before_any_message(pool: Pool, what: str) -> None:
    for message in pool.run(_refused, 2, what):
        assert REFUSED[what] in message


def _calls_for_shapes(rank: int) -> float:
    """One rank alone calls verbs of tensors without values; then all of them one of a tensor with values."""
    world = connect()
    if world.rank == rank:
        meta = torch.ones(4, device="meta")
        all_reduce(meta, world.group)
        start_send(meta, world.group, 1 - rank).wait()
    ones = torch.ones(4)
    all_reduce(ones, world.group)
    return float(ones.sum())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_empty_tensor_is_neither_sent_nor_awaited(pool: Pool, rank: int) -> None:
    assert pool.run(_calls_for_shapes, 2, rank) == [8.0, 8.0]


def _described_outside(sends: bool) -> str:
    """Rank 1's tensor begins in its memory and ends after it."""
    world = connect(transport="host")
    transport = world.group.transport
    assert isinstance(transport, ShmTransport)
    tensor = world.empty(100_000, torch.uint8)
    if world.rank == 1:
        mapping = transport.arena.mapping
        tensor = as_tensor(mapping.address + mapping.num_bytes - 8, 100_000, torch.uint8, mapping)
    try:
        if not sends:
            all_reduce(tensor, world.group, label="w")
        elif world.rank == 1:
            start_send(tensor, world.group, 0, label="w").wait()
        else:
            start_receive(tensor, world.group, 1, label="w").wait()
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("sends", [False, True])
def test_a_description_that_was_overwritten_is_an_error_and_not_read(pool: Pool, sends: bool) -> None:
    for message in pool.run(_described_outside, 2, sends):
        assert "of w failed: the memory that the ranks share is damaged" in message
        assert "the description of rank 1's tensor points outside" in message


@pytest.mark.parametrize("field", ["op_type", "dtype", "op", "root"])
def test_an_overwritten_description_is_still_text(field: str) -> None:
    info = NativeCallInfo()
    assert call_text(info, (0, 1)) == "all-reduce (sum), 0 x float64"
    setattr(info, field, 0x5A5A5A5A)
    assert call_text(info, (0, 1)) == "a description that was overwritten"


# --- hosts whose ranks cannot share memory


def _limit(what: int, num_bytes: int) -> None:
    resource.setrlimit(what, (num_bytes, resource.getrlimit(what)[1]))


def _without(what: str, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Takes from one rank what sharing needs."""
    if rank != 1:
        return
    if what == "library":
        patch.setattr("plait.comm.shm.native_lib._find", lambda folder: (None, f"{folder} has no library"))
    elif what == "addresses":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _limit(resource.RLIMIT_AS, used + (1 << 30))
    else:
        _limit(resource.RLIMIT_FSIZE, 1 << 20)


def _fall_back(what: str, transport: str) -> tuple[list[str], str, list[float]]:
    limits = {which: resource.getrlimit(which) for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _without(what, int(os.environ["RANK"]), patch)
        tensor = torch.ones(1000)
        try:
            world = connect(transport=transport, timeout_s=20)
            assert not shares_memory(world.group)
            all_reduce(tensor, world.group)
            all_reduce(world.empty(10, torch.float32).fill_(1.0), world.group)
        except CommError as error:
            return [], str(error), []
        finally:
            for which, limit in limits.items():
                resource.setrlimit(which, limit)
        return [str(warning.message) for warning in caught], world.group.transport.name, tensor[:1].tolist()


REASONS = {
    "library": "has no library",
    "addresses": "no address space for the memory",
    "sizes": "File too large",
}


@pytest.mark.parametrize("what", [*REASONS])
def test_where_memory_cannot_be_shared_one_rank_warns_and_all_take_gloo(pool: Pool, what: str) -> None:
    results = pool.run(_fall_back, 3, what, "auto")
    assert [(name, value) for _, name, value in results] == [("gloo", [3.0])] * 3
    (caught,), *others = [warned for warned, _, _ in results]
    assert others == [[], []]
    assert "ranks of one host communicate through Gloo, which is slower" in caught
    assert REASONS[what] in caught


@pytest.mark.parametrize("what", [*REASONS])
def test_memory_that_must_be_shared_and_cannot_is_an_error(pool: Pool, what: str) -> None:
    for _, message, _ in pool.run(_fall_back, 2, what, "host"):
        assert "ranks of one host cannot share memory" in message
        assert REASONS[what] in message


def _share_too_much() -> str:
    with pytest.MonkeyPatch.context() as patch:
        world = connect(transport="host", timeout_s=10)
        patch.setattr("plait.comm.shm.arena.available_bytes", lambda: 1 << 20)
        try:
            share(1 << 20, torch.float64, world.group)
        except CommError as error:
            all_reduce(torch.ones(4), world.group)  # all have refused together
            return str(error)
    return "no error"


def test_too_little_memory_to_share_is_an_error_on_every_rank(pool: Pool) -> None:
    first, *others = pool.run(_share_too_much, 3)
    assert "8.0 MiB more are needed, 1.0 MiB are free" in first
    assert all("too little memory for the ranks' shared memory" in other for other in others)


def _share_different_sizes() -> str:
    world = connect(transport="host", timeout_s=10)
    try:
        share(10 + world.rank, torch.float64, world.group)
    except CommError as error:
        return str(error)
    return "no error"


def test_a_shared_tensor_of_different_sizes_is_an_error(pool: Pool) -> None:
    """A rank that writes beyond the end of the file would be killed by the system."""
    first, second = pool.run(_share_different_sizes, 2)
    assert "barrier" in first
    assert "the ranks share a tensor of different sizes" in second
    assert "88 bytes, and 80 on the group's first rank" in second


# --- several hosts


def test_a_namespace_of_its_own_is_a_host_of_its_own() -> None:
    """A container's; here only its network and its users."""
    unshare = shutil.which("unshare")
    ask = [
        sys.executable,
        "-c",
        "from plait.comm.shm.rendezvous import host_identity; print(host_identity())",
    ]
    if unshare is None or subprocess.run([unshare, "-Urn", "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow namespaces")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(
        [unshare, "-Urn", *ask], env=environment, capture_output=True, text=True, check=True
    )
    assert len(there.stdout.split()) == len(meet_module.host_identity().split())
    assert there.stdout.strip() != meet_module.host_identity()


def _two_hosts() -> dict[str, Any]:
    """Ranks 0 and 1 think that they are on one host, 2 and 3 on another."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meet_module, "host_identity", lambda: f"host {rank // 2}")
        world = connect(transport="host", timeout_s=20)
    mine = (0, 1) if rank < 2 else (2, 3)
    within, across = world.new_group(mine), world.new_group((rank % 2, rank % 2 + 2))
    found = {"names": [g.transport.name for g in (world.group, within, across)]}
    sums = []
    for group in (world.group, within, across):
        all_reduce(tensor := world.empty(70_000, torch.float32).fill_(rank + 1.0), group)
        sums.append(tensor.mean().item())
    return found | {"sums": sums}


def test_ranks_of_two_hosts_share_memory_within_and_take_gloo_between(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(_two_hosts, 4)):
        assert found["names"] == ["gloo", "host", "gloo"]
        assert found["sums"] == [10.0, 3.0 if rank < 2 else 7.0, [4.0, 6.0][rank % 2]]
