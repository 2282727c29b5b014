"""What commands share that run on several ranks: under torchrun, or started by `launch_local`."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from plait.cli.common import LOST_RANK, USER_MISTAKE, show_error
from plait.comm import World
from plait.errors import CommError, PlaitError, PlanError

_LETTER, _LETTER_SHOWN = "plait: letter", "plait: letter shown"
_STORE_ANSWERS_S = 5.0  # else it is not there any more


def check_ranks(ranks: int | None) -> None:
    """Raises PlanError when `--ranks` asks for others than torchrun has started."""
    started = os.environ["WORLD_SIZE"]
    if ranks is not None and str(ranks) != started:
        raise PlanError(
            "torchrun has started another number of ranks",
            given=f"--ranks {ranks}, WORLD_SIZE={started}",
            hint="without --ranks, which is for ranks that plait starts",
        )


@contextlib.contextmanager
def first_rank_first() -> Iterator[None]:
    """For what ranks do before they meet: a mistake that each of them finds is told by the first."""
    try:
        yield
    except PlaitError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)  # the first rank finds the same, tells it, and its launcher then ends us all
        raise


def told_by_one(work: Callable[[], int], world: World, *, debug: bool) -> int:
    """The exit code: what `work` returns. A mistake that every rank finds is told by one of them."""
    try:
        code = work()
    except PlaitError as error:
        if not isinstance(error, CommError):
            _tell(error, world, debug=debug)
            return USER_MISTAKE
        # It may be the network that is gone, and the store with it: a rank that waited for that would stay.
        teller = threading.Thread(target=_tell, args=(error, world), kwargs={"debug": debug}, daemon=True)
        teller.start()
        teller.join(_STORE_ANSWERS_S)
        if teller.is_alive():
            show_error(error, debug=debug)
            os._exit(LOST_RANK)  # the thread is in the store's hands, and would keep the process from ending
        return LOST_RANK
    world.close()
    return code


def _tell(error: PlaitError, world: World, *, debug: bool) -> None:
    """Shows the letter, or waits until another rank has: one that ends takes the others down."""
    try:
        is_ours = world.claim(_LETTER)
        if not is_ours:
            world.wait_for(_LETTER_SHOWN)
    except CommError:  # nobody to agree with
        is_ours = True
    if is_ours:
        show_error(error, debug=debug)
        with contextlib.suppress(CommError):
            world.announce(_LETTER_SHOWN)
