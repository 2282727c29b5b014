"""The process of a command: signals, output and garbage collection, also of ranks that are forked from it."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from plait.cli.streams import finish_output, prepare_streams, print_interrupted

_INTERRUPTED = 130
_NEW_OBJECTS = 50_000  # until garbage is searched for: imports make 440,000 and little garbage


def run_program(program: Callable[[], object]) -> None:
    """Run `program` as the process's own. Ctrl-C ends it in one line, also while it still imports modules."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if ours:
            signal.signal(signal.SIGINT, _interrupt)
            # a rank starts with it blocked, see [Note: signals that are blocked at start] in comm/launch.py
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        prepare_streams()
        gc.set_threshold(_NEW_OBJECTS)  # Python's 700 take a fifth of the imports' time
        program()
    except KeyboardInterrupt:
        print_interrupted()
        sys.exit(_INTERRUPTED)
    except SystemExit as end:
        if not end.code:  # otherwise that code is the cause
            finish_output()
        raise
    finally:
        if ours:  # an exception in the interpreter's own exit would be printed with its traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(_signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. During an import exit instead: torch's C code, for one, ignores an exception
    in the import of numpy, and leaves it half imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            print_interrupted()
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
