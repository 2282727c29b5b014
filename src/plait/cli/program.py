"""The process of a command, and of ranks that are forked from it: signals, garbage collection, and standard
streams whose text cannot be written.

[Note: output that ends before the command]
A pipe's reader may end (`plait explain | head`), a disk may fill up, and a shell may start a command without
standard output (`>&-`). For most commands the output is the result: a closed pipe ends them without a
message, as it ends `cat`, with the exit code of SIGPIPE; any other error of the stream is an error of the
command. A training run (`outlive_output`) does not need it, as it writes metrics.jsonl and checkpoints: the
run continues, after one line on standard error. Errors of standard error itself are ignored.

In all cases the descriptor is replaced by /dev/null, for text that is still buffered and for the output of
libraries. A descriptor that is closed at start is opened on /dev/null before a file takes its number.

The streams are wrapped below their buffers, which all writes reach, also the last one at exit.
"""

import contextlib
import errno
import gc
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from plait.errors import printable

INTERRUPTED = 130
_NEW_OBJECTS = 50_000  # until garbage is searched for: imports make 440,000 and little garbage
_OUTPUT, _ERROR = 1, 2
_CLOSED_PIPE = 128 + signal.SIGPIPE  # a shell's exit code for a program that SIGPIPE has ended

_PACKAGE = Path(__file__).parents[1]  # plait's own code

_format_warning = warnings.formatwarning  # Python's

_outlives = False  # see `outlive_output`


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
        sys.exit(INTERRUPTED)
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
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def prepare_streams() -> None:
    """Set up standard output and error of this process, once. Characters that they cannot encode are
    replaced. See [Note: output that ends before the command]."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number
    sys.stdout, sys.stderr = _checked(sys.stdout, _OUTPUT), _checked(sys.stderr, _ERROR)
    # Log records and warnings of libraries may contain names and keys of files.
    logging.setLogRecordFactory(_printable_record)
    warnings.formatwarning = _printable_warning


def _printable_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = logging.LogRecord(*args, **kwargs)
    with contextlib.suppress(TypeError, ValueError):  # of a wrong format, which the handler reports
        record.msg, record.args = printable(record.getMessage()), None
    return record


def _printable_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if category is UserWarning and Path(filename).is_relative_to(_PACKAGE):
        return printable(f"warning: {message}\n")  # for the user of a command, who did not write that line
    return printable(_format_warning(message, category, filename, lineno, line))


def outlive_output() -> None:
    """Let this process continue after its standard output has ended."""
    global _outlives
    _outlives = True


def finish_output() -> None:
    """Flush standard output. Raises SystemExit if it has ended, except after `outlive_output`."""
    sys.stdout.flush()


def _checked(stream: TextIO | None, descriptor: int) -> Any:
    if stream is None:  # it was closed when Python started
        return io.TextIOWrapper(_buffered(descriptor), "utf-8", "replace", line_buffering=True)
    if not isinstance(stream, io.TextIOWrapper) or isinstance(
        getattr(stream.buffer, "raw", None), _Descriptor
    ):
        return stream  # of a test, a notebook, or checked already
    with contextlib.suppress(OSError, ValueError):
        if stream.fileno() == descriptor:
            stream.flush()
            is_strict = stream.errors in ("strict", "surrogateescape")
            return io.TextIOWrapper(
                _buffered(descriptor),
                stream.encoding,
                "replace" if is_strict else stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
    return stream


def _buffered(descriptor: int) -> io.BufferedWriter:
    return io.BufferedWriter(_Descriptor(descriptor, "w", closefd=False))


class _Descriptor(io.FileIO):
    """A standard stream's descriptor. See [Note: output that ends before the command]."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == _OUTPUT:
                _on_lost_output(error)
            return len(data)


def _on_lost_output(error: OSError) -> None:
    reason = f"standard output cannot be written: {error.strerror}"
    if _outlives:
        _print_error(f"warning: {reason}; the run goes on, and metrics.jsonl has its metrics")
    elif error.errno == errno.EPIPE:
        raise SystemExit(_CLOSED_PIPE)
    else:
        _print_error(reason)
        raise SystemExit(1)


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_ERROR, f"{text}\n".encode(errors="replace"))


def print_interrupted() -> None:
    """Print on standard error that Ctrl-C ended the command; not on a rank, whose launcher prints it."""
    if "PLAIT_LAUNCHER_PID" not in os.environ:
        _print_error("interrupted")
