"""torch.cuda on the simulated device. Importing this module loads it, and must come before torch's import.

[Note: before torch]
torch asks for CUDA's hooks once, when it is imported. So the library registers them while it is loaded, and
its symbols are global, because torch finds its registries by name. Real hooks are in a library that a torch
for CUDA loads; the simulated ones work with a torch that was built without CUDA only.
"""

import ctypes
import importlib.util
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from support.virtual_cuda.build import MODULE, library

assert "torch" not in sys.modules, "the simulated device must be loaded before torch is imported"
_path = str(library())
ctypes.CDLL(_path, ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

_spec = importlib.util.spec_from_file_location(MODULE, _path)
assert _spec is not None
assert _spec.loader is not None
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)
sys.modules[MODULE] = native

NUM_DEVICES = 64
TOTAL_BYTES = 141 << 30


class Stream(torch.Stream):
    """`torch.cuda.Stream`. torch's class calls the simulated device's guard."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> "Stream":
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, _device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> "Event":
        return super().__new__(cls, _device(), enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        """The host computes what it queues, so its time is the device's."""
        self.time_s = time.perf_counter()
        super().record(stream)

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.time_s - self.time_s)


class StreamContext:
    """`torch.cuda.stream(stream)`."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.accelerator.current_stream()
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)


class Device:
    """`torch.cuda.device(device)`."""

    def __init__(self, device: Any) -> None:
        self._index = _device(device).index

    def __enter__(self) -> None:
        self._before = native.current_device()
        native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        native.set_device(self._before)


def _device(device: Any = None) -> torch.device:
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device("cuda" if device is None else device)
    return torch.device("cuda", native.current_device() if found.index is None else found.index)


def current_stream(device: Any = None) -> Stream:
    stream = torch.accelerator.current_stream(_device(device))
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_device(device).index, device_type=current_stream().device_type)


def _seed_all(seed: int) -> None:
    for generator in torch.cuda.default_generators:
        generator.manual_seed(int(seed))


def _memory_stats(*_: Any) -> dict[str, int]:
    now, peak = native.allocated_bytes(), native.peak_bytes()
    found = {"num_alloc_retries": 0, "num_ooms": 0}
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        found |= {f"{name}.all.current": now, f"{name}.all.peak": peak}
    return found


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H200",
        uuid=f"simulated-{_device(device).index}",
        total_memory=TOTAL_BYTES,
        multi_processor_count=132,
        major=9,
        minor=0,
    )


FUNCTIONS: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": StreamContext,
    "device": Device,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": torch.accelerator.set_stream,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "_lazy_call": lambda call, **_: call(),
    "_is_compiled": lambda: False,  # torch.compile would import functions of torch._C
    "_initialized": True,
    "device_count": lambda: NUM_DEVICES,
    "current_device": lambda: native.current_device(),
    "set_device": lambda device: native.set_device(_device(device).index),
    "synchronize": lambda *_: native.sync_device("torch.cuda.synchronize"),
    "get_device_capability": lambda *_: (9, 0),
    "get_device_name": lambda *_: "NVIDIA H200",
    "get_device_properties": _properties,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "default_generators": tuple(native.default_generator(index) for index in range(NUM_DEVICES)),
    "manual_seed": lambda seed: torch.cuda.default_generators[native.current_device()].manual_seed(int(seed)),
    "manual_seed_all": _seed_all,
    "seed_all": lambda: _seed_all(torch.seed()),
    "initial_seed": lambda: torch.cuda.default_generators[native.current_device()].initial_seed(),
    "get_rng_state": lambda device="cuda": torch.cuda.default_generators[_device(device).index].get_state(),
    "set_rng_state": lambda state, device="cuda": torch.cuda.default_generators[
        _device(device).index
    ].set_state(state),
    "memory_allocated": lambda *_: native.allocated_bytes(),
    "max_memory_allocated": lambda *_: native.peak_bytes(),
    "memory_reserved": lambda *_: native.allocated_bytes(),
    "max_memory_reserved": lambda *_: native.peak_bytes(),
    "reset_peak_memory_stats": lambda *_: native.reset_peak(),
    "memory_stats": _memory_stats,
    "mem_get_info": lambda *_: (TOTAL_BYTES - native.allocated_bytes(), TOTAL_BYTES),
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
}


def _only_cuda(name: str, simulated: Callable[..., Any], owner: Any) -> None:
    """Replace a method for tensors or storages of the device: torch compiles these for CUDA only."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = simulated if self.device.type == "cuda" else original
        return chosen(self, *args, **kwargs)

    setattr(owner, name, method)


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    native.resize_storage(storage._cdata, int(size))
    return storage


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return source.clone().untyped_storage()


def _install() -> None:
    for name, value in FUNCTIONS.items():
        setattr(torch.cuda, name, value)
    for name in ("memory_allocated", "max_memory_allocated", "memory_stats", "reset_peak_memory_stats"):
        setattr(torch.cuda.memory, name, FUNCTIONS[name])
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, FUNCTIONS[name])
    _only_cuda("resize_", _resize_storage, torch.UntypedStorage)
    _only_cuda("clone", _clone_storage, torch.UntypedStorage)


_install()
