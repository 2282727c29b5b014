"""Optimizer states and master weights in host memory or on disk: no bit of a training changes.

On a CPU what is offloaded to host memory are tensors of their own all the same: the path is the real one.
"""

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import ConfigError, ModelError, RunError
from support import programs
from support.pool import Pool

ON_DEVICE = ("parameters", "gradients", "master", "optimizer")
STEPS = 3
CASES = [
    "dp=1 zero=0",
    "dp=1 zero=3 micro=3",
    "dp=2 zero=0",
    "dp=2 zero=0 micro=3",
    "dp=2 zero=1 micro=3",
    "dp=2 zero=2",
    "dp=2 zero=2 micro=3 accumulate=sharded",
    "dp=2 zero=2 micro=3 accumulate=unsharded",
    "dp=2 zero=3",
    "dp=2 zero=3 micro=3 accumulate=sharded prefetch=2",
    "dp=2 zero=3 micro=3 accumulate=unsharded reshard=step",
    "dp=4 zero=1 shard=2 micro=3",
    "dp=4 zero=2 shard=2 micro=3 accumulate=sharded",
    "dp=4 zero=3 shard=2",
    "dp=4 zero=3 shard=2 micro=3",
]


def engine_of(plan: str, folder: str | None = None, build: Any = programs.llama) -> plait.Engine:
    return plait.parallelize(
        build(),
        plan,
        optimizer_args=programs.ADAMW,
        clip_norm=programs.CLIP,
        loss=programs.summed_loss,
        offload_dir=folder,
        seed=3,
    )


def train(engine: plait.Engine, first: int = 0, last: int = STEPS) -> Any:
    """All results of some steps."""
    batches = programs.batches(last)[first:]
    results = [engine.step(programs.share_of(batch, engine)) for batch in batches]
    assert all(result.grad_norm > programs.CLIP for result in results), "clipping was not active"
    return results, engine.full_gradients(), engine.state()


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        assert mine.keys() == theirs.keys()
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []


def _compare(plan: str, offload: str, folder: str | None) -> None:
    words = f"{plan} offload={offload}"
    assert_same(train(engine_of(words, folder)), train(engine_of(plan)))


# --- host memory


@pytest.mark.parametrize("words", CASES)
def test_offload_to_host_memory_changes_no_bit(pool: Pool, words: str) -> None:
    pool.run(_compare, int(words[3]), f"{words} precision=fp64", "cpu", None)


@pytest.mark.parametrize(
    "words", ["dp=2 zero=1 micro=3 precision=bf16", "dp=2 zero=3 precision=bf16 optim_dtype=bf16"]
)
def test_offload_to_host_memory_changes_no_bit_in_bf16(pool: Pool, words: str) -> None:
    pool.run(_compare, 2, words, "cpu", None)


def _memory(plan: str, folder: str | None) -> Any:
    """Estimated and measured, and the number of elements; `home` and device never share a storage."""
    engine = engine_of(plan, folder, programs.wide_llama)
    estimated = engine.estimated_memory(
        (programs.SEQUENCES // engine.plan.dp // engine.plan.micro, programs.LENGTH)
    )
    train(engine)
    for unit in engine._parts.sharded.trained if engine.plan.offload == "cpu" else []:
        held = [unit.storage] + (
            [] if unit.grad_buffer.memory.tensor is None else [unit.grad_buffer.memory.tensor]
        )
        on_device = {tensor.untyped_storage().data_ptr() for tensor in held}
        at_home = {t.untyped_storage().data_ptr() for t in (unit.master, unit.grad_shard)}
        assert not on_device & at_home
    return estimated, engine.memory(), engine.num_parameters


def memory(pool: Pool, plan: str, folder: str | None = None) -> list[tuple[Any, int]]:
    """Bytes that each rank holds, equal to the estimate but for padded ends."""
    ranks = pool.run(_memory, int(plan[3]), plan, folder)
    for category in (*ON_DEVICE, "host", "disk"):
        most = max(getattr(measured, category) for _, measured, _ in ranks)
        assert most == pytest.approx(
            max(getattr(estimated, category) for estimated, _, _ in ranks), rel=0.02
        ), category
    assert all(measured.buffers <= estimated.buffers for estimated, measured, _ in ranks)
    return [(measured, numel) for _, measured, numel in ranks]


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        *((words, "bf16") for words in CASES),
        *((words, "fp32") for words in CASES[::3]),
        *(pytest.param(words, "fp32", marks=pytest.mark.sweep) for words in CASES if words not in CASES[::3]),
    ],
)
def test_nothing_of_masters_and_states_is_on_the_device(pool: Pool, words: str, precision: str) -> None:
    plan = plait.Plan.parse(words)
    compute = {"fp32": 4, "bf16": 2}[precision]
    # Moments, sums of gradients and master weights; at stage 3 in fp32 those are the parameters.
    host = (12 if precision == "fp32" and plan.zero == 3 else 16) + (compute if plan.zero == 3 else 0)
    for measured, numel in memory(pool, f"{words} precision={precision} offload=cpu"):
        assert (measured.master, measured.optimizer, measured.disk) == (0, 0, 0)
        assert measured.host == pytest.approx(host * numel / plan.shard_degree, rel=0.02)
        assert measured.parameters == pytest.approx(0 if plan.zero == 3 else compute * numel, rel=0.02)
        if not plan.keeps_full_grads:
            assert measured.gradients == 0


# --- disk


@pytest.mark.parametrize(
    "words",
    [
        "dp=1 zero=0 precision=fp64",
        "dp=2 zero=0 precision=fp64 micro=3",
        "dp=2 zero=0 precision=bf16",
        "dp=2 zero=2 precision=fp64",
        "dp=2 zero=2 precision=bf16 micro=3",
        "dp=2 zero=3 precision=fp32 micro=3",
        pytest.param("dp=2 zero=3 precision=bf16", marks=pytest.mark.quick),
        "dp=2 zero=3 precision=bf16 optim_dtype=bf16",
        "dp=4 zero=3 shard=2 precision=bf16",
    ],
)
def test_offload_to_disk_changes_no_bit(pool: Pool, words: str, tmp_path: Path) -> None:
    pool.run(_compare, int(words[3]), words, "disk", str(tmp_path))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "on_disk"),  # bytes per element of the rank's range
    [
        ("dp=1 zero=0 precision=fp32", 8),
        ("dp=2 zero=0 precision=bf16", 12),
        ("dp=2 zero=2 precision=bf16", 12),
        ("dp=2 zero=3 precision=bf16", 12),
        ("dp=2 zero=3 precision=bf16 optim_dtype=bf16", 8),
        ("dp=1 zero=2 precision=bf16 optim_dtype=bf16", 8),
        ("dp=1 zero=2 precision=fp32 optim_dtype=bf16", 4),
    ],
)
def test_masters_and_states_are_on_disk_alone(pool: Pool, words: str, on_disk: int, tmp_path: Path) -> None:
    shards = plait.Plan.parse(words).shard_degree
    for measured, numel in memory(pool, f"{words} offload=disk", str(tmp_path)):
        assert (measured.master, measured.optimizer, measured.host) == (0, 0, 0)
        assert measured.disk == pytest.approx(on_disk * numel / shards, rel=0.03)  # in whole pages


def _saved(plan: str, folder: str | None) -> Any:
    engine = engine_of(plan, folder)
    train(engine, last=2)
    return engine.state()


def _resumed(plan: str, folder: str | None, state: dict[str, Tensor]) -> Any:
    engine = engine_of(plan, folder)
    train(engine, last=1)  # what it held is replaced
    engine.load_state(state)
    return train(engine, 2, 4)


def _straight(plan: str, folder: str | None) -> Any:
    engine = engine_of(plan, folder)
    results, gradients, state = train(engine, last=4)
    return results[2:], gradients, state


@pytest.mark.parametrize("words", ["zero=0 precision=bf16", "zero=2 precision=fp64", "zero=3 precision=bf16"])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_state_goes_from_offloaded_training_to_any_other_and_back(
    pool: Pool, words: str, offload: str, tmp_path: Path
) -> None:
    plain, folder = f"dp=2 {words}", str(tmp_path) if offload == "disk" else None
    offloaded = f"{plain} offload={offload}"
    expected = pool.run(_straight, 2, plain, None)[0]
    for source, target in ((offloaded, offloaded), (offloaded, plain), (plain, offloaded)):
        state = pool.run(_saved, 2, source, folder if "offload" in source else None)[0]
        found = pool.run(_resumed, 2, target, folder if "offload" in target else None, state)[0]
        assert_same(found, expected)


def _after_failure(plan: str, folder: str) -> Any:
    """A disk is full in the middle of an update; the state of before is loaded into the same engine."""
    engine = engine_of(plan, folder)
    train(engine, last=2)
    state, writes, count = engine.state(), os.pwritev, itertools.count()

    def write_or_fail(*arguments: Any) -> int:
        if next(count) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writes(*arguments)

    with (
        mock.patch.object(os, "pwritev", write_or_fail),
        pytest.raises(RunError, match="cannot be written: this step's update is incomplete"),
    ):
        train(engine, 2, 3)
    with pytest.raises(ModelError, match="weights are inconsistent"):
        train(engine, 2, 3)
    with pytest.raises(ModelError, match="weights are inconsistent"):
        engine.state()
    engine.load_state(state)
    return train(engine, 2, 4)


def test_an_update_that_a_full_disk_interrupted_is_refused_until_a_state_is_loaded(
    pool: Pool, tmp_path: Path
) -> None:
    plan = "dp=1 precision=bf16"
    found = pool.run(_after_failure, 1, f"{plan} offload=disk", str(tmp_path))[0]
    assert_same(found, pool.run(_straight, 1, plan, None)[0])


def _refused(plan: str, folder: str | None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        engine_of(plan, folder)
    return caught.value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unusable_folders_are_errors_before_training(pool: Pool, precision: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    for folder, fact in ((tmp_path / "missing", "No such file"), (tmp_path / "plain", "Not a directory")):
        for message in pool.run(_refused, 2, f"dp=2 zero=3 precision={precision} offload=disk", str(folder)):
            assert fact in str(message)
            assert str(folder) in str(message)


@pytest.mark.parametrize(
    ("plan", "folder"), [("offload=disk", None), ("offload=cpu", "/tmp"), ("dp=1", "/tmp")]
)
def test_a_folder_and_a_plan_that_offloads_to_disk_belong_together(plan: str, folder: str | None) -> None:
    assert "belong together" in _refused(plan, folder).fact


# --- whole processes

BIG = """
import sys
from pathlib import Path
import torch
import plait

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def engine_of(width):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, device="meta") for _ in range(16)])
    plan = "zero=3 precision=bf16 offload=disk"
    return plait.parallelize(model, plan, loss=loss, offload_dir=sys.argv[1])

def loss(out, batch):
    return out.float().square().sum(), len(out)

def backward(engine, width):
    out = engine.model(torch.ones(2, width, dtype=torch.bfloat16))
    engine.backward(*loss(out, None))

def update_growth(engine, width):
    '''The peak of resident memory in an update, minus what there was before it.'''
    backward(engine, width)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    engine.update()
    return resident("VmHWM") - before

torch.set_num_threads(1)
small, width = engine_of(64), int(sys.argv[2])
update_growth(small, 64)  # what libraries load once
libraries = resident("RssFile")
engine = engine_of(width)
growths = [update_growth(engine, width) for _ in range(2)]
print(*growths, resident("RssFile") - libraries, engine.memory().disk, flush=True)
sys.stdin.read()
"""


def _big(folder: Path, width: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BIG, str(folder), str(width)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_an_update_on_disk_needs_a_fraction_of_its_states_in_memory(tmp_path: Path) -> None:
    """400 MB of moments and 200 MB of master weights are read and written, 12 MB of weights at a time."""
    with _big(tmp_path, 1768) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    *growths, stay_mapped, on_disk = map(int, output.split())
    assert on_disk >= 600_000_000
    assert max(growths) < 60_000_000
    assert stay_mapped < 30_000_000


def test_a_killed_run_leaves_the_folder_empty(tmp_path: Path) -> None:
    with _big(tmp_path, 256) as run:
        assert run.stdout is not None
        assert run.stdout.readline()
        assert str(tmp_path) in Path(f"/proc/{run.pid}/maps").read_text(), "it was not on disk"
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    assert [*tmp_path.iterdir()] == []
