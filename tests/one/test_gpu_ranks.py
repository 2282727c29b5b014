"""A rank chooses its GPU, its backend and its processors, in a process that has no GPU."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait.comm.device
import plait.comm.world
from plait.cli.multirank import LOST_RANK, USER_ERROR, report_once
from plait.comm import World, launch
from plait.comm.device import (
    NodeBinding,
    check_backend,
    claim_device,
    processors_near,
    select_device,
    use_processors,
)
from plait.comm.stats import describe_trace
from plait.comm.store import JobStore
from plait.comm.torch_transport import _guard, backend_of
from plait.comm.transport import Call, OpType
from plait.comm.world import Connection
from plait.errors import CommError, DataError

CUDA = torch.device("cuda")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with a number of visible GPUs."""

    def see(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    return see


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with a backend's name: a process group of the program with it."""

    def make(name: str, bound: torch.device | None = None) -> Any:
        monkeypatch.setattr(dist, "get_backend", lambda _: name)
        return SimpleNamespace(bound_device_id=bound)

    return make


def test_a_rank_that_sees_one_gpu_uses_it_whatever_its_local_rank(gpus: Any) -> None:
    gpus(1)
    assert [select_device(None, local_rank).index for local_rank in (0, 3, 7)] == [0, 0, 0]
    gpus(4)
    assert [select_device(None, local_rank).index for local_rank in (0, 3)] == [0, 3]
    with pytest.raises(CommError, match="a rank has no GPU"):
        select_device(None, 4)


def test_two_ranks_on_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uuids = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}
    buses = [0x1B, 0x1B, 0x1B, 0x2C]  # the last GPU has another's UUID, as on some drivers

    def properties(device: torch.device) -> Any:
        uuid = uuids.get(device.index, "GPU-a")
        return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=buses[device.index], pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(plait.comm.device, "_BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another host")
    store = JobStore(dist.HashStore(), 0, 60.0)
    claim_device(torch.device("cuda", 0), store, 9)
    (tmp_path / "boot_id").write_text("this host")
    claim_device(torch.device("cuda", 3), store, 3)
    for rank in (0, 1, 1):  # again by the same rank: it has connected a second time
        claim_device(torch.device("cuda", rank), store, rank)
    with pytest.raises(CommError, match="two ranks use the same GPU") as caught:
        claim_device(torch.device("cuda", 2), store, 2)
    assert "ranks 0 and 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cpu", "cuda"),
    [("gloo", "gloo", "gloo"), ("cpu:gloo,cuda:nccl", "gloo", "nccl"), ("nccl", None, "nccl")],
)
def test_the_backend_is_that_of_the_tensors_device(
    group_of: Any, name: str, cpu: str | None, cuda: str | None
) -> None:
    group = group_of(name)
    assert (backend_of(group, torch.device("cpu")), backend_of(group, CUDA)) == (cpu, cuda)


def test_a_program_with_a_gloo_group_trains_on_the_cpu_unless_it_asks(gpus: Any, group_of: Any) -> None:
    gpus(2)
    assert select_device(None, 1, group_of("gloo")).type == "cpu"
    assert select_device("cuda", 1, group_of("gloo")) == torch.device("cuda", 1)
    assert select_device(None, 1, group_of("cpu:gloo,cuda:nccl")) == torch.device("cuda", 1)
    bound = torch.device("cuda", 0)
    assert select_device(None, 1, group_of("nccl", bound)) == bound


def test_a_process_group_without_a_backend_for_the_device_is_an_error(group_of: Any) -> None:
    check_backend(group_of("gloo"), torch.device("cpu"))
    with pytest.raises(CommError, match="does not communicate tensors of cuda") as error:
        check_backend(group_of("cpu:gloo"), CUDA)
    assert "'cpu:gloo'" in error.value.given
    with pytest.raises(CommError, match="does not communicate tensors of cpu"):
        check_backend(group_of("nccl"), torch.device("cpu"))


def test_an_error_of_the_gpu_is_not_taken_for_a_lost_rank() -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    call = Call(OpType.ALL_REDUCE, label="h3")
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        _guard(call, lambda: fail("CUDA error: device-side assert triggered"))
    assert not isinstance(caught.value, CommError)
    assert "all-reduce of h3, which did not cause it" in caught.value.__notes__[0]
    with pytest.raises(CommError, match="a rank is gone"):
        _guard(call, lambda: fail("NCCL error: remote process exited"))


def test_the_processors_near_a_gpu_are_those_of_its_numa_node(tmp_path: Path) -> None:
    for address, node in (("0000:1b:00.0", 1), ("0000:2c:00.0", -1)):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text("8-10,24\n")
    assert processors_near("0000:1b:00.0", tmp_path) == {8, 9, 10, 24}
    assert processors_near("0000:2c:00.0", tmp_path) == set()


def _affinities() -> list[set[int]]:
    return [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]


def test_threads_run_near_the_gpu_until_the_world_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allowed = os.sched_getaffinity(0)
    address = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**address))
    (tmp_path / "bus/pci/devices/0000:1b:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("0\n")
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    # One of this machine's processors, and one that the process may not use.
    (tmp_path / "devices/system/node/node0/cpulist").write_text(f"{min(allowed)},{max(allowed) + 1}")
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(2)]
    threads[0].start()
    binding = NodeBinding.near(CUDA, tmp_path)
    threads[1].start()
    bound = _affinities()
    World(0, 1, 0, torch.device("cpu"), Connection(binding=binding)).close()
    released = _affinities()
    end.set()
    assert len(bound) >= 3
    assert all(each == {min(allowed)} for each in bound)
    assert all(each == allowed for each in released)


def test_ranks_on_one_node_share_its_processors_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["another host"]
    monkeypatch.setattr(plait.comm.world, "gather_texts", lambda text, *_, **__: [text, *others, text])
    monkeypatch.setattr(plait.comm.world, "allowed_processors", lambda: {*range(8, 24)})
    shares: list[int] = []
    monkeypatch.setattr(plait.comm.world, "use_processors", shares.append)
    world = World.alone(torch.device("cpu"))
    world.use_processors()
    world.device = CUDA
    world.use_processors()
    assert shares == [8]


def test_only_torchruns_single_thread_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    use_processors(8)
    assert threads == [1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    use_processors(8)
    use_processors(16)
    assert threads == [1, 8]


def test_the_launcher_sets_expandable_segments_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    environment = launch._rank_environment(2, Path("/nowhere"))
    assert ("PYTORCH_ALLOC_CONF" in environment) == torch.accelerator.is_available()
    for name in ("is_available", "init"):  # start the driver, which a fork of this process could not use then
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("CUDA's driver was started"))
    monkeypatch.setattr(torch.accelerator, "is_available", torch.cuda.is_available)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert launch._rank_environment(2, Path("/nowhere"))["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in launch._rank_environment(2, Path("/nowhere"))


def test_collectives_in_progress_are_read_from_the_flight_recorder() -> None:
    entry = {"profiling_name": "nccl:all_reduce", "process_group": ["7", "x"], "collective_seq_id": 12}
    trace = {"entries": [{**entry, "state": "completed"}, {**entry, "state": "started", "is_p2p": False}]}
    assert describe_trace(str(trace).replace("'", '"').replace("False", "false").encode()) == [
        "all_reduce number 12 of group 7, started"
    ]
    assert describe_trace(b"[]") == describe_trace(b"?") == []


class _GpuWorld(World):
    """A world of one rank that is as if it had NCCL."""

    def __init__(self, *, owns_process_group: bool) -> None:
        super().__init__(0, 1, 0, torch.device("cpu"), Connection(owns_process_group=owns_process_group))
        self.device = CUDA
        self._process_group = SimpleNamespace()  # type: ignore[assignment]

    def is_alive(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("no text"), USER_ERROR), (CommError("a rank is gone"), LOST_RANK)]
)
def test_an_error_of_a_command_aborts_communications_of_our_own_group_only(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    aborts: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborts.append("abort"))

    def fail() -> int:
        raise error

    worlds = [_GpuWorld(owns_process_group=False), World(0, 1, 0, torch.device("cpu"), Connection())]
    assert [report_once(fail, world, debug=False) for world in worlds] == [code, code]
    assert aborts == []
    assert report_once(fail, _GpuWorld(owns_process_group=True), debug=False) == code
    assert aborts == ["abort"]
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        report_once(fail, _GpuWorld(owns_process_group=True), debug=False)
    assert aborts == ["abort"] * 2
