"""Save checkpoints: every rank writes the shards it owns, and rank 0 completes the checkpoint.

[Note: saving in the background]
With `background`, a save blocks only for a copy of the rank's shards, into staging memory that is reused by
the next save (pinned if there is a GPU); a thread writes it to files during the next steps. On a GPU the copy
itself runs on a side stream. The thread waits for its event on the host, and the current stream before it
goes on, unless `update_after` takes the event: then the copy runs during the next forward and backward, and
only the next update of the weights waits. The thread communicates only through files, and through the job's
store, where it records failures: collectives belong to the training thread, in one order on all ranks. The
next save waits for the last one. `finish` raises on all ranks if it failed; rank 0 knows before that whether
it has ended: `has_ended`.

[Note: waits of a save]
A rank may write for hours, so waits have no time limit; but each ends when the rank that is waited for is
lost, which the job's store tells: rank 0 waits for every rank's part, the others for rank 0's result. A save
whose rank is lost fails on all others, with a CommError.
"""

import contextlib
import errno
import functools
import json
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from plait.checkpoint.directory import Keep, commit, prune, record_score, remove_partial, save_lock, step_path
from plait.checkpoint.manifest import MANIFEST, Manifest, RankFiles
from plait.checkpoint.writer import write_rank_files
from plait.comm import World, broadcast, decode_error, encode_error, raise_on_all
from plait.errors import CheckpointError, CommError, PlaitError
from plait.fileio import WRITABLE, disk_hint, sync_folder, write_text
from plait.parallel.zero.state_io import StateShard

_ALIGNMENT = 64
_POLL_S = 0.005
_VISIBLE_TIMEOUT_S = 60.0  # until another host sees a directory of a shared file system
_Source = Callable[[StateShard], Tensor]  # a shard's elements, on the CPU


@dataclass(frozen=True)
class _Save:
    """One save, on one rank."""

    partial: Path
    step: int
    shards: Sequence[StateShard]
    source: _Source
    facts: dict[str, Any]
    score: float | None


class Saver:
    """Saves one job's checkpoints into a folder. Every rank makes the same calls.

    [Note: lifetimes] A save's thread reads the staging memory until it ends, and `finish` joins it before
    that memory is written again.
    """

    def __init__(
        self, folder: str | Path, world: World, *, keep: Keep | None = None, background: bool = False
    ) -> None:
        """`folder`: the same on all hosts. `keep`: the checkpoints to retain, None for all."""
        self._folder = Path(folder)
        self._world = world
        self._keep = keep
        self._background = background
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._in_flight: str | None = None  # the name of the directory that is being written
        self._unexpected_error: BaseException | None = None
        self._lock = contextlib.ExitStack()  # held during a save, on rank 0
        self._stream: torch.cuda.Stream | None = None  # of the copies

    def save(
        self,
        step: int,
        shards: Sequence[StateShard],
        facts: Mapping[str, Any],
        *,
        score: float | None = None,
        update_after: Callable[[torch.cuda.Event], object] | None = None,
    ) -> None:
        """Save the ranks' shards as the checkpoint of `step`; see [Note: saving in the background].

        `update_after`: `Engine.update_after`, or another function that gets the event of the copy and lets
        the next change of the shards wait for it; by default, all that the device does next waits for it.
        `facts` is JSON. `score`: lower is better, for `Keep.best`. Raises CheckpointError on all ranks if
        this checkpoint (or, in the background, the last one) cannot be written: earlier ones are then
        unchanged.
        """
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "a checkpoint's facts must be JSON",
                given=error,
                expected="a dict of texts, numbers, lists and dicts",
                hint="facts={'note': 'text'}",
            ) from error
        self.finish()
        partial = self._begin(step, sum(shard.num_bytes for shard in shards))
        source: _Source = StateShard.cpu
        in_background, copied = self._background, None
        if in_background:
            try:
                source, copied = self._copy(shards)
            except BaseException as error:  # too little memory, on this rank alone: the save fails on all
                source, in_background = functools.partial(_raise, error), False
        save = _Save(partial, step, shards, source, dict(facts), score)
        self._in_flight = partial.name
        if in_background:
            self._thread = threading.Thread(target=self._run, args=(save,), name="plait-save", daemon=True)
            self._thread.start()
            if copied is not None:
                (update_after or torch.cuda.Event.wait)(copied)
            return
        self._run(save)
        self.finish()

    def preallocate(self, num_bytes: int) -> None:
        """Allocate staging memory for background saves in a thread, during the next steps. The first save's
        pause is then no longer than the others'."""
        if self._background and self._thread is None and self._staging.numel() < num_bytes:
            self._thread = threading.Thread(target=self._allocate, args=(num_bytes,), daemon=True)
            self._thread.start()

    def _allocate(self, num_bytes: int) -> None:
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._world.device.type == "cuda")
        self._staging = staging.zero_()  # the kernel allocates pages when they are first written

    @property
    def has_ended(self) -> bool:
        """On rank 0, True once a background save has ended, so that `finish` would not block."""
        is_done = self._thread is not None and not self._thread.is_alive()
        return self._world.rank == 0 and self._in_flight is not None and is_done

    def finish(self) -> None:
        """Wait for the save in flight. Raises CheckpointError on all ranks if it has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._in_flight is None:
            return
        name, self._in_flight = self._in_flight, None
        error, self._unexpected_error = self._unexpected_error, None
        if error is not None:
            raise error
        if failure := self._world.store.wait_for(f"{name} ended"):
            raise decode_error(failure)

    # --- one save

    def _begin(self, step: int, num_bytes: int) -> Path:
        """Create the directory on rank 0 and return its path; the others wait for it before they write."""
        group, device = self._world.group, self._world.device
        random = torch.zeros(1, dtype=torch.int64, device=device)
        problem: PlaitError | None = None
        if group.rank == 0:
            try:
                random.fill_(self._create_partial(step, num_bytes * group.size))
            except (OSError, CheckpointError) as error:
                problem = self._problem(error, step)
                self._lock.close()
                random.fill_(-1)
        broadcast(random, group)
        number = int(random.item())
        if number < 0:
            raise_on_all(problem, group, device)
        return self._partial(step, number)

    def _create_partial(self, step: int, estimated_bytes: int) -> int:
        """Create the directory and return the random number in its name. Raises CheckpointError, OSError."""
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True)
            sync_folder(self._folder.parent)
        self._lock.enter_context(save_lock(self._folder))
        remove_partial(self._folder)
        _check_space(self._folder, estimated_bytes)
        number = secrets.randbits(48)
        self._partial(step, number).mkdir()
        return number

    def _partial(self, step: int, number: int) -> Path:
        return self._folder / f"{step_path(self._folder, step).name}.tmp-{number:012x}"

    def _copy(self, shards: Sequence[StateShard]) -> tuple[_Source, torch.cuda.Event | None]:
        """Start to copy the shards to staging memory. On a GPU, what a forward may write is copied on its
        stream, and the rest, after all work that is queued, on a stream of its own."""
        offsets = list(accumulate((_aligned(shard.num_bytes) for shard in shards), initial=0))
        if self._staging.numel() < offsets[-1]:
            self._allocate(offsets[-1])
        copies = {
            shard: self._staging[offset : offset + shard.num_bytes].view(shard.dtype)
            for shard, offset in zip(shards, offsets, strict=False)
        }
        is_cuda = self._world.device.type == "cuda"
        for shard, copy in copies.items():
            if shard.forward_may_write or not is_cuda:
                copy.copy_(shard.read(), non_blocking=True)
        if not is_cuda:
            return copies.__getitem__, None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._world.device)
        self._stream.wait_stream(torch.cuda.current_stream(self._world.device))
        with torch.cuda.stream(self._stream):
            for shard, copy in copies.items():
                if not shard.forward_may_write:
                    copy.copy_(shard.read(), non_blocking=True)
        copied = self._stream.record_event()

        def source(shard: StateShard) -> Tensor:
            copied.synchronize()
            return copies[shard]

        return source, copied

    def _run(self, save: _Save) -> None:
        """Run a save, in the background or not. `finish` raises its error, if any."""
        try:
            try:
                self._write(save)
            finally:
                if self._world.rank == 0:
                    self._complete_or_remove(save)
        except BaseException as error:  # the store is gone
            self._unexpected_error = self._unexpected_error or error

    def _write(self, save: _Save) -> None:
        try:
            self._wait_for_directory(save.partial)
            written = write_rank_files(save.partial, self._world.rank, save.shards, save.source)
            write_text(_rank_manifest_path(save.partial, self._world.rank), written.model_dump_json())
        except BaseException as error:
            failure = encode_error(self._problem(error, save.step))
            self._world.store.set(f"{save.partial.name} failed", failure)

    def _wait_for_directory(self, partial: Path) -> None:
        """Wait until the directory that rank 0 has created is visible on this host."""
        deadline_s = time.monotonic() + _VISIBLE_TIMEOUT_S
        while not partial.is_dir():
            has_ended = self._world.store.get(f"{partial.name} ended") is not None
            if has_ended or time.monotonic() > deadline_s:
                raise CheckpointError(
                    "the folder of checkpoints is not the same one on all hosts",
                    given=f"{partial}, created by rank 0, is missing on rank {self._world.rank}",
                    expected="a file system that all hosts share",
                    hint="a folder on a shared file system (NFS, Lustre), under the same path",
                )
            time.sleep(_POLL_S)

    def _complete_or_remove(self, save: _Save) -> None:
        """On rank 0: complete the checkpoint once all ranks have written, and publish the result."""
        failure = ""
        try:
            self._complete(save, self._rank_manifests(save.partial))
        except BaseException as error:
            failure = encode_error(self._problem(error, save.step))
        finally:
            if failure:
                shutil.rmtree(save.partial, ignore_errors=True)
            self._lock.close()
        self._world.store.set(f"{save.partial.name} ended", failure)

    def _rank_manifests(self, partial: Path) -> list[RankFiles]:
        """Wait for all ranks and return what each has written. Raises the error of one that has failed, and
        CommError if one is lost."""

        def read(rank: int) -> RankFiles | None:
            path = _rank_manifest_path(partial, rank)
            if path.exists():
                with contextlib.suppress(ValidationError):  # another host may see a name before the content
                    return RankFiles.model_validate_json(path.read_bytes())
            if (failure := self._world.store.get(f"{partial.name} failed")) is not None:
                raise decode_error(failure)
            return None

        wait_until = self._world.store.wait_until
        return [wait_until(functools.partial(read, rank), rank) for rank in range(self._world.size)]

    def _complete(self, save: _Save, ranks: Sequence[RankFiles]) -> None:
        """See [Note: atomic completion of a checkpoint] in `directory.py`."""
        manifest = Manifest.from_ranks(save.step, save.facts, ranks)
        problem = manifest.problem()
        assert problem is None, f"the ranks' shards do not form a checkpoint: {problem}"
        for rank in range(self._world.size):
            _rank_manifest_path(save.partial, rank).unlink()
        write_text(save.partial / MANIFEST, manifest.to_json())
        sync_folder(save.partial)
        commit(save.partial, step_path(self._folder, save.step))
        if self._keep is not None:
            try:
                if self._keep.best and save.score is not None:
                    record_score(self._folder, save.step, save.score)
                prune(self._folder, self._keep)
            except OSError as error:  # the new one is saved
                warnings.warn(f"older checkpoints cannot be pruned: {error}", stacklevel=2)

    def _problem(self, error: BaseException, step: int) -> PlaitError:
        """The error that all ranks raise for this one, which `finish` raises here if it is unexpected."""
        if isinstance(error, CheckpointError | CommError):
            return error
        if not isinstance(error, OSError):  # an internal error, or Ctrl-C
            self._unexpected_error = error
            return CheckpointError("a checkpoint cannot be written", given=repr(error))
        is_full = any(text in str(error) for text in ("No space left", "File too large", "Disk quota"))
        is_full = is_full or error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        hint = "free some space, then --resume: the checkpoints before this one are complete"
        return CheckpointError(
            "not enough disk for a checkpoint" if is_full else "a checkpoint cannot be written",
            given=f"step {step} in {self._folder}: {error}",
            expected=WRITABLE,
            hint=hint if is_full else disk_hint(self._folder),
        )


def _raise(error: BaseException, _shard: StateShard) -> Tensor:
    raise error


def staged_bytes(shards: Iterable[StateShard]) -> int:
    """The staging memory for a copy of the shards."""
    return sum(_aligned(shard.num_bytes) for shard in shards)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _rank_manifest_path(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"


def _check_space(folder: Path, num_bytes: int) -> None:
    need_bytes = num_bytes + num_bytes // 64 + 2**20
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise CheckpointError(
            "not enough disk for a checkpoint",
            given=f"{free_bytes / 2**20:.1f} MiB free at {folder}",
            expected=f"{need_bytes / 2**20:.1f} MiB",
            hint="free some space, then --resume: old checkpoints are removed after a new one is complete",
        )
