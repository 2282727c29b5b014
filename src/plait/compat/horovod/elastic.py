"""Horovod's elastic training on torchrun: a failed job goes back to its last commit.

    torchrun --max-restarts 3 ... train.py

[Note: commits outlive processes]
Horovod's driver keeps the processes that survive, with their memory. torchrun restarts all of them. So the
first rank of each host also writes the commit to a private file of its host, named after its torchrun
process. After a restart all ranks load the newest commit of any host. `run` deletes the file at the end.
A file is JSON and tensors (safetensors): reading it runs no code.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from plait.comm import all_gather
from plait.compat.horovod.job import init, job, shutdown
from plait.compat.horovod.objects import broadcast_value
from plait.compat.values import decode, encode
from plait.launchers import make_private, private_folder, process_identity

__all__ = ["ElasticSampler", "TorchState", "init", "reset", "run", "shutdown"]


class TorchState:
    """A model, an optimizer and plain values (epoch, batch) that are committed and restored together.

    Everything with a `state_dict` is saved by it; other values must be plain: see `broadcast_object`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._tracked = {"model": model, "optimizer": optimizer, **values}
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commit: tuple[Any, list[Tensor]] = (None, [])
        self._number = 0  # of commits in this job
        for name, value in self._tracked.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these after a restart, perhaps with another number of ranks."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, in memory and for a restart. All ranks call it at the same point."""
        self.save()
        self._number += 1
        path = _commit_file()
        if path is not None and job().world.local_rank == 0:
            encoded, tensors = self._commit
            metadata = {"state": json.dumps(encoded), "number": str(self._number)}
            partial = path.with_suffix(".partial")
            save_file({str(i): tensor for i, tensor in enumerate(tensors)}, partial, metadata)
            partial.replace(path)

    def check_host_updates(self) -> None:
        """Do nothing: torchrun restarts the ranks when hosts come or go."""

    def save(self) -> None:
        """Save the state in memory."""
        tensors: list[Tensor] = []
        self._commit = (encode(self._values(), tensors), tensors)

    def restore(self) -> None:
        """Go back to the last commit."""
        self._load(decode(*self._commit))

    def sync(self) -> None:
        """Load the newest commit of any host, or without one rank 0's state, on all ranks. Collective."""
        own, found = job(), _read_commit()
        number = torch.tensor([found[0] if found else 0], device=own.world.device)
        numbers = number.new_empty(own.group.size)
        all_gather(numbers, number, own.group, label="commits")
        self._number = int(numbers.max().item())
        source = numbers.tolist().index(self._number)
        values = found[1] if found and source == own.world.rank and self._number else self._values()
        self._load(broadcast_value(values, source))
        self.save()

    @staticmethod
    def was_restarted() -> bool:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def _values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._tracked}
        return {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in values.items()}

    def _load(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if hasattr(getattr(self, name), "load_state_dict"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function(state, ...)` that begins with the last commit: `@hvd.elastic.run`."""

    @functools.wraps(function)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        if state.was_restarted():
            state.on_reset()
        result = function(state, *args, **kwargs)
        path = _commit_file()
        if path is not None and job().world.local_rank == 0:
            path.unlink(missing_ok=True)
        return result

    return wrapper


def reset() -> None:
    """Leave the job and join again."""
    shutdown()
    init()


def _commit_file() -> Path | None:
    """Return the path of this job's commit on this host; None without torchrun, which alone restarts."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    make_private(private_folder())
    identity = process_identity(os.getppid()).replace(" ", "-").replace("/", "-")
    return private_folder() / f"commit-{identity}.safetensors"


def _read_commit() -> tuple[int, dict[str, Any]] | None:
    path = _commit_file()
    if path is None or not path.exists():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = [file.get_tensor(str(index)) for index in range(len(file.keys()))]
    return int(metadata["number"]), decode(json.loads(metadata["state"]), tensors)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distributes a dataset over the ranks; after a restart, what of the epoch has not been processed.

    Put it into the `TorchState`, call `record_batch` after each batch and `set_epoch` after each epoch.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002
        """Count a batch that every rank has processed."""
        self.processed_num += batch_size * job().world.size

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute what is left over the present ranks."""
        indices = torch.arange(len(self.dataset))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(indices), generator=generator)
        left = indices[self.processed_num :].tolist()
        world = job().world
        padding = -len(left) % world.size
        repeated = (left * (padding // max(1, len(left)) + 1))[:padding]
        self._indices = [*left, *repeated][world.rank :: world.size]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
