"""Saving: every rank writes what it owns, the first one makes a checkpoint of it.

[Note: saving behind a step]
With `background`, a save takes as long as a copy of what the rank owns, into memory that stays for the
next one (pinned where there is a GPU); a thread writes it from there while training goes on. It talks to
nobody but through files, and through the job's store, where it says that it has failed: communication belongs
to the thread that trains, in one order on all ranks. The next save waits for the last one. Whether that came
to be is known to all ranks by `finish`; that it has ended, to the first rank before that: `has_ended`.
"""

import contextlib
import errno
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

from plait.checkpoint.directory import (
    Keep,
    commit,
    prune,
    record_score,
    remove_partial,
    save_lock,
    step_path,
)
from plait.checkpoint.manifest import MANIFEST, Manifest, RankFiles
from plait.checkpoint.writer import write_rank_files
from plait.comm import World, broadcast, packed, raise_on_all, unpacked
from plait.errors import CheckpointError
from plait.fileio import sync_folder, write_text
from plait.parallel import StateShard

_ALIGNMENT = 64
_POLL_S = 0.005
_VISIBLE_TIMEOUT_S = 60.0  # until another host sees a directory of a shared file system
_Source = Callable[[StateShard], Tensor]


@dataclass(frozen=True)
class _Save:
    """One of them, on one rank."""

    partial: Path
    step: int
    kept: Sequence[StateShard]
    source: _Source
    facts: dict[str, Any]
    score: float | None


class Saver:
    """Saves one job's checkpoints into a folder. Every rank has one and calls it alike.

    [Note: lifetimes] A save's thread reads the staging memory until it ends, and `finish` joins it before
    that memory is written again.
    """

    def __init__(
        self, folder: str | Path, world: World, *, keep: Keep | None = None, background: bool = False
    ) -> None:
        """`folder` is the same one on all hosts. `keep`: which checkpoints stay, None for all."""
        self._folder = Path(folder)
        self._world = world
        self._keep = keep
        self._background = background
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._under_way: str | None = None  # the name of the directory that is being written
        self._bug: BaseException | None = None
        self._lock = contextlib.ExitStack()  # from a save's beginning to its end, on the first rank

    def save(
        self, step: int, kept: Sequence[StateShard], facts: Mapping[str, Any], *, score: float | None = None
    ) -> None:
        """Saves what the ranks keep as the checkpoint of `step`; see [Note: saving behind a step].

        `facts` is JSON. `score`: lower is better, for `Keep.best`. Raises CheckpointError, on all ranks, when
        this one (or, in the background, the last one) cannot be written: the earlier ones then stand as they
        stood.
        """
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise CheckpointError("a checkpoint's facts are JSON", given=error) from error
        self.finish()
        partial = self._begin(step, sum(each.num_bytes for each in kept))
        source = self._copied(kept) if self._background else StateShard.cpu
        save = _Save(partial, step, kept, source, dict(facts), score)
        self._under_way = partial.name
        if self._background:
            self._thread = threading.Thread(target=self._run, args=(save,), name="plait-save", daemon=True)
            self._thread.start()
            return
        self._run(save)
        self.finish()

    def reserve(self, num_bytes: int) -> None:
        """For saves in the background: takes the memory for a copy of so many bytes, behind the next steps.
        The first save's pause is then no longer than the others'."""
        if self._background and self._thread is None and self._staging.numel() < num_bytes:
            self._thread = threading.Thread(target=self._take, args=(num_bytes,), daemon=True)
            self._thread.start()

    def _take(self, num_bytes: int) -> None:
        taken = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._staging = taken.zero_()  # the kernel gives memory out when it is written

    @property
    def has_ended(self) -> bool:
        """Whether a save in the background has, whichever way: `finish` would not wait. Known on the first
        rank, and False on the others."""
        is_over = self._thread is not None and not self._thread.is_alive()
        return self._world.rank == 0 and self._under_way is not None and is_over

    def finish(self) -> None:
        """Waits for the save under way. Raises CheckpointError on all ranks when it has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._under_way is None:
            return
        name, self._under_way = self._under_way, None
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug
        if verdict := self._world.wait_for(f"{name} ended"):
            raise unpacked(verdict)

    # --- one save

    def _begin(self, step: int, num_bytes: int) -> Path:
        """The directory to write into, which the first rank makes; the others wait for it as they write."""
        group, device = self._world.group, self._world.device
        random = torch.zeros(1, dtype=torch.int64, device=device)
        problem: CheckpointError | None = None
        if group.rank == 0:
            try:
                random.fill_(self._make(step, num_bytes * group.size))
            except OSError as error:
                problem = write_error(error, self._folder, step)
            except CheckpointError as error:
                problem = error
            if problem is not None:
                self._lock.close()
                random.fill_(-1)
        broadcast(random, group)
        number = int(random.item())
        if number < 0:
            raise_on_all(problem, group, device)
        return self._partial(step, number)

    def _make(self, step: int, about_bytes: int) -> int:
        """Makes the directory, of a random number, which it returns. Raises CheckpointError, OSError."""
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True)
            sync_folder(self._folder.parent)
        self._lock.enter_context(save_lock(self._folder))
        remove_partial(self._folder)
        _check_space(self._folder, about_bytes)
        number = secrets.randbits(48)
        self._partial(step, number).mkdir()
        return number

    def _partial(self, step: int, number: int) -> Path:
        return self._folder / f"{step_path(self._folder, step).name}.tmp-{number:012x}"

    def _copied(self, kept: Sequence[StateShard]) -> _Source:
        """Copies of what is kept, in memory of our own."""
        ends = list(accumulate((_aligned(each.num_bytes) for each in kept), initial=0))
        if self._staging.numel() < ends[-1]:
            self._take(ends[-1])
        copies = {}
        for each, place in zip(kept, ends, strict=False):
            copy = self._staging[place : place + each.num_bytes].view(each.dtype)
            copies[each] = copy.copy_(each.read(), non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        return copies.__getitem__

    def _run(self, save: _Save) -> None:
        """In the background, or not. Whatever becomes of it, `finish` learns it."""
        try:
            try:
                self._write(save)
            finally:
                if self._world.rank == 0:
                    self._conclude(save)
        except BaseException as error:  # the store is gone
            self._bug = self._bug or error

    def _write(self, save: _Save) -> None:
        """This rank's files."""
        problem: CheckpointError | None = None
        try:
            self._await(save.partial)
            part = write_rank_files(save.partial, self._world.rank, save.kept, save.source)
            write_text(_rank_manifest_path(save.partial, self._world.rank), part.model_dump_json())
        except OSError as error:
            problem = write_error(error, self._folder, save.step)
        except CheckpointError as error:
            problem = error
        except BaseException as error:  # an error of ours, or Ctrl-C: all ranks end with it
            self._bug = error
            problem = CheckpointError("a checkpoint cannot be written", given=repr(error))
        if problem is not None:
            self._world.tell(f"{save.partial.name} failed", packed(problem))

    def _await(self, partial: Path) -> None:
        """Until this host sees what the first rank has made."""
        limit_s = time.monotonic() + _VISIBLE_TIMEOUT_S
        while not partial.is_dir():
            is_over = self._world.heard(f"{partial.name} ended") is not None
            if is_over or time.monotonic() > limit_s:
                raise CheckpointError(
                    "the folder of checkpoints is not the same one on all hosts",
                    given=f"{partial}, which rank 0 has made, is not there for rank {self._world.rank}",
                    expected="a file system that all hosts share",
                )
            time.sleep(_POLL_S)

    def _conclude(self, save: _Save) -> None:
        """The first rank makes a checkpoint of what all have written, and tells what came of it."""
        verdict = ""
        try:
            parts = self._parts(save.partial)
            if parts is None:
                verdict = self._world.heard(f"{save.partial.name} failed") or ""
            else:
                self._complete(save, Manifest.of(save.step, save.facts, parts))
        except OSError as error:
            verdict = packed(write_error(error, self._folder, save.step))
        except BaseException as error:
            self._bug = error
            verdict = packed(CheckpointError("a checkpoint cannot be written", given=repr(error)))
        finally:
            if verdict:
                shutil.rmtree(save.partial, ignore_errors=True)
            self._lock.close()
        self._world.tell(f"{save.partial.name} ended", verdict)

    def _parts(self, partial: Path) -> list[RankFiles] | None:
        """What each rank has written, when all have; None when one has failed."""
        found: list[RankFiles] = []
        while len(found) < self._world.size:
            said = _rank_manifest_path(partial, len(found))
            if said.exists():
                with contextlib.suppress(ValidationError):  # another host may see a name before the content
                    found.append(RankFiles.model_validate_json(said.read_bytes()))
                    continue
            if self._world.heard(f"{partial.name} failed") is not None:
                return None
            time.sleep(_POLL_S)
        return found

    def _complete(self, save: _Save, manifest: Manifest) -> None:
        """See [Note: how a checkpoint becomes complete]."""
        problem = manifest.problem()
        assert problem is None, f"ranks do not own what a checkpoint needs: {problem}"
        for rank in range(self._world.size):
            _rank_manifest_path(save.partial, rank).unlink()
        write_text(save.partial / MANIFEST, manifest.text())
        sync_folder(save.partial)
        commit(save.partial, step_path(self._folder, save.step))
        if self._keep is not None:
            try:
                if self._keep.best and save.score is not None:
                    record_score(self._folder, save.step, save.score)
                prune(self._folder, self._keep)
            except OSError as error:  # it is saved all the same
                warnings.warn(f"older checkpoints cannot be looked after: {error}", stacklevel=2)


def staged_bytes(kept: Iterable[StateShard]) -> int:
    """What a copy of it takes."""
    return sum(_aligned(each.num_bytes) for each in kept)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _rank_manifest_path(partial: Path, rank: int) -> Path:
    """Where a rank says what it has written."""
    return partial / f"rank-{rank:05d}.json"


def _check_space(folder: Path, num_bytes: int) -> None:
    need_bytes = num_bytes + num_bytes // 64 + 2**20
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise CheckpointError(
            "not enough disk for a checkpoint",
            given=f"{free_bytes / 2**20:.1f} MiB free at {folder}",
            expected=f"{need_bytes / 2**20:.1f} MiB",
            hint="free some space: older checkpoints go when a new one is whole, or by hand; then --resume",
        )


def write_error(error: Exception, folder: Path, step: int) -> CheckpointError:
    """What the user is told of an error of the file system."""
    full = any(text in str(error) for text in ("No space left", "File too large", "Disk quota"))
    full = full or getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return CheckpointError(
        "not enough disk for a checkpoint" if full else "a checkpoint cannot be written",
        given=f"step {step} in {folder}: {error}",
        hint="free some space, then --resume: the checkpoints before this one are whole" if full else None,
    )
