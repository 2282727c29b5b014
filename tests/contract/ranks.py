"""Rank side: run one of torch's cases with a replacement for DistributedDataParallel.

torch's module of cases reads BACKEND and WORLD_SIZE when it is imported, so it is imported here, in a rank.
"""

import contextlib
import functools
import importlib
import os
import time
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from contract import cases
from contract.stand_in import Gates, cpu_for_gpus

COMMON = "torch.testing._internal.common_distributed"
CASES = "torch.testing._internal.distributed.distributed_test"


@dataclass(frozen=True)
class Variant:
    """Class under test: torch's own, or plait's with a transport; and the compiler of cases that compile."""

    which: str  # torch, plait or unsynced
    transport: str = "auto"
    compiler: str = "inductor"  # aot_eager: the graphs are made and split, and run without C++

    def __str__(self) -> str:
        return f"plait {self.transport}" if self.which == "plait" else self.which


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case on a rank where it did not fail."""

    status: str  # passed or skipped
    reason: str = ""  # torch's reason for a skip
    ran_on: str = "cpu"  # or "stand-in": the CPU in place of requested GPUs
    num_built: int = 0  # instances of the class under test
    elapsed_s: float = 0.0


def list_cases() -> list[str]:
    module, _ = _torch_cases()
    return cases.rank_cases(module) + cases.unit_cases(module)


def run_case(name: str, variant: Variant, folder: Path) -> Outcome:
    """Run a case as torch's own test does on a rank. Raises what the case raises."""
    begin_s = time.monotonic()
    module, gates = _torch_cases()
    for subfolder in ("barrier", "test_dir", "init_dir"):
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
    os.environ.update(BACKEND="gloo", TEMP_DIR=str(folder), GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    dist.set_debug_level_from_env()  # an earlier case may have changed it
    torch._dynamo.reset()
    if cases.is_unit(name):
        outcome = _run_unit(module, name)
    else:
        outcome = _run_on_ranks(module, gates, name, variant, folder)
    return replace(outcome, elapsed_s=time.monotonic() - begin_s)


@functools.cache  # a second import would see other decorators
def _torch_cases() -> tuple[ModuleType, Gates]:
    os.environ["BACKEND"] = "gloo"
    gates = Gates()
    with gates.installed(importlib.import_module(COMMON)):
        return importlib.import_module(CASES), gates


def _run_unit(module: ModuleType, name: str) -> Outcome:
    class_name, _, method = name.partition(".")
    try:
        getattr(module, class_name)(method).debug()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    return Outcome("passed")


def _run_on_ranks(module: ModuleType, gates: Gates, name: str, variant: Variant, folder: Path) -> Outcome:
    suite = type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    case = suite(name)
    case.rank = int(os.environ["RANK"])
    case.file_name = str(folder / "rendezvous")
    method = getattr(case, name)
    if getattr(method, "__unittest_skip__", False):
        return Outcome("skipped", method.__unittest_skip_why__)
    timeout_s = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", case.init_method, timedelta(seconds=timeout_s), world_size=world_size, rank=case.rank
    )
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=variant.compiler)):
        outcome = _call(module, method, _class_under_test(variant, keep_devices=True))
        if outcome.status == "skipped" and gates.can_open(outcome.reason):
            with cpu_for_gpus(gates, num_gpus=world_size):
                retried = _call(module, method, _class_under_test(variant, keep_devices=False))
            outcome = replace(retried, ran_on="stand-in")
    return outcome


def _call(module: ModuleType, method: Any, replacement: type) -> Outcome:
    importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
    module.Barrier.barrier_id = 0
    try:
        with _patched_class(module, replacement):
            method()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    except SystemExit as end:
        reasons = {skip.exit_code: skip.message for skip in module.TEST_SKIPS.values()}
        return Outcome("skipped", reasons[end.code])
    return Outcome("passed", num_built=replacement.num_built)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _patched_class(module: ModuleType, replacement: type) -> Iterator[None]:
    """Install the class under the names that users and cases import.

    torch's own modules keep theirs: they must treat the class as a DistributedDataParallel.
    """
    with (
        mock.patch.object(torch.nn.parallel, cases.CLASS, replacement),
        mock.patch.object(module, cases.CLASS, replacement),
    ):
        yield


def _class_under_test(variant: Variant, keep_devices: bool) -> type:
    """Subclass that counts its instances, selects the transport and, on the stand-in, drops devices."""
    base, options = _class_of(variant)
    on_cpu = {} if keep_devices else {"device_ids": None, "output_device": None}

    class DistributedDataParallel(base):  # type: ignore[misc, valid-type]
        num_built = 0

        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            type(self).num_built += 1
            super().__init__(module, *args, **(kwargs | on_cpu | options))

    DistributedDataParallel.__module__ = torch.nn.parallel.__name__  # pickle looks it up there
    DistributedDataParallel.__qualname__ = cases.CLASS
    return DistributedDataParallel


def _class_of(variant: Variant) -> tuple[type, dict[str, Any]]:
    if variant.which == "torch":
        return torch.nn.parallel.DistributedDataParallel, {}
    if variant.which == "unsynced":
        return Unsynced, {}
    return importlib.import_module("plait").DistributedDataParallel, {"transport": variant.transport}


class Unsynced(torch.nn.parallel.DistributedDataParallel):
    """torch's class without synchronization: no gradient is ever averaged."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*args, **kwargs)
