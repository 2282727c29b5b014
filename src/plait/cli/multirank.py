"""Commands on several ranks, under torchrun or started by `launch_local`: one error for all ranks."""

import contextlib
import functools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from plait.cli.common import LOST_RANK, USER_ERROR, show_error
from plait.cli.program import run_program
from plait.errors import CommError, ConfigError, PlaitError, PlanError

if TYPE_CHECKING:
    import typer

    from plait.comm.world import World

_ERROR, _ERROR_SHOWN = "plait: error", "plait: error shown"
_STORE_TIMEOUT_S = 5.0  # after that, the store is taken to be unreachable
_MIN_FILES, _MANY_FILES = 64, 65536  # open files that a rank needs at least, and that are always enough
_MIN_ADDRESS_BYTES = 5 * 2**28  # torch, transformers and a small model
_RANK_0_SHOWS_S = 10.0  # for rank 0 to print the same error, and for its launcher to end the others


def check_limits() -> None:
    """Raise the limit of open files as far as this process may: each file of tokens needs one. Raises
    ConfigError if this limit or that of addresses is too small for any rank, before torch fails."""
    files, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_files = _MANY_FILES if hard_files == resource.RLIM_INFINITY else min(hard_files, _MANY_FILES)
    if files != resource.RLIM_INFINITY and files < most_files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard_files))
            files = most_files
    if files != resource.RLIM_INFINITY and files < _MIN_FILES:
        raise ConfigError(
            "too few open files are allowed",
            given=f"{files} for each process (ulimit -n)",
            expected=f"at least {_MIN_FILES}",
            hint="ulimit -n 1024, or the limits of your batch system",
        )
    address_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_bytes != resource.RLIM_INFINITY and address_bytes < _MIN_ADDRESS_BYTES:
        raise ConfigError(
            "too few addresses are allowed",
            given=f"{address_bytes / 2**20:.0f} MiB for each process (ulimit -v)",
            expected=f"at least {_MIN_ADDRESS_BYTES / 2**20:.0f} MiB, and more than a rank's memory",
            hint="ulimit -v unlimited: limit the memory that is used with a cgroup instead",
        )


def rank_entry(call: "typer.Context") -> Callable[[], object]:
    """Return the program of a rank that is forked from this command: this command line, with the arguments
    in `sys.argv`."""
    return functools.partial(run_program, call.find_root().command)


def check_ranks(ranks: int | None) -> None:
    """Check `--ranks` against the world size of torchrun. Raises PlanError when they differ."""
    world_size = os.environ["WORLD_SIZE"]
    if ranks is not None and str(ranks) != world_size:
        raise PlanError(
            "torchrun has started another number of ranks",
            given=f"--ranks {ranks}, WORLD_SIZE={world_size}",
            expected="the ranks that torchrun has started",
            hint="no --ranks under torchrun",
        )


@contextlib.contextmanager
def first_rank_first() -> Iterator[None]:
    """Let rank 0 alone report an error that every rank finds before the process group exists."""
    try:
        yield
    except PlaitError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_RANK_0_SHOWS_S)
        raise


def report_once(work: Callable[[], int], world: "World", *, debug: bool) -> int:
    """Run `work` and return its exit code. If every rank raises the same error, one of them prints it. After
    an error the world cannot be used any more."""
    try:
        code = work()
    except PlaitError as error:
        if not isinstance(error, CommError):
            _show_once(error, world, debug=debug)
            world.abort()
            return USER_ERROR
        # The network may be down, and the store with it: do not wait for the store in this thread.
        thread = threading.Thread(
            target=_show_once, args=(error, world), kwargs={"debug": debug}, daemon=True
        )
        thread.start()
        thread.join(_STORE_TIMEOUT_S)
        if thread.is_alive():
            show_error(error, debug=debug)
            os._exit(LOST_RANK)  # the thread is blocked in the store and would keep the process alive
        world.abort()
        return LOST_RANK
    except BaseException:  # Ctrl-C
        world.abort()
        raise
    world.close()
    return code


def _show_once(error: PlaitError, world: "World", *, debug: bool) -> None:
    """Print the error, or wait until another rank has: the first rank that exits ends all others."""
    try:
        is_first = world.store.claim(_ERROR)
        if not is_first:
            world.store.wait_for(_ERROR_SHOWN, int(world.store.get(_ERROR) or 0))
    except CommError:  # no store to coordinate through
        is_first = True
    if is_first:
        show_error(error, debug=debug)
        with contextlib.suppress(CommError):
            world.store.set(_ERROR_SHOWN)
