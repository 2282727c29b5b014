"""All tests, in three streams at the same time: most of those on a pool of ranks; those of commands and
pages, which are real jobs, and then the other ranks; and those of one process.

Jobs wait for time limits and for processes, and leave processors idle that the others use. The report of the
first stream, which takes longest, is shown as it comes, and those of the others after it; each ends with its
slowest tests. Exits with the first code that is not 0. Arguments go to all.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
# Some files of ranks are in the second stream: the first one would end last, with a processor idle.
MOVED = ("ranks/test_benchmarks.py", "ranks/test_verify.py", "ranks/test_zero*.py")
SECOND = ("docs", "faults", *MOVED)  # the third stream is all other folders
NO_TESTS = 5  # pytest's exit code when the arguments select none of a stream


def main() -> int:
    assert all(any(TESTS.glob(name)) for name in SECOND), f"no such tests among {SECOND}"
    second = [path for name in SECOND for path in sorted(TESTS.glob(name))]
    folders = sorted(path for path in TESTS.iterdir() if any(path.glob("test_*.py")))
    first = [path for path in sorted(TESTS.glob("ranks/test_*.py")) if path not in second]
    third = [path for path in folders if path not in second and path.name != "ranks"]
    streams = (first, second, third)
    command = [sys.executable, "-m", "pytest", "--durations=10", *sys.argv[1:]]
    with ExitStack() as stack:
        reports = [None, *(stack.enter_context(tempfile.TemporaryFile()) for _ in streams[1:])]
        running = []
        for stream, report in zip(streams, reports, strict=True):
            words = [*command, *map(str, stream)]
            errors = subprocess.STDOUT if report else None
            running.append(subprocess.Popen(words, stdout=report, stderr=errors))
            stack.callback(running[-1].kill)
        codes = [process.wait() for process in running]
        for report in filter(None, reports):
            report.seek(0)
            sys.stdout.buffer.write(report.read())
            sys.stdout.flush()
    failures = [code for code in codes if code not in (0, NO_TESTS)]
    return failures[0] if failures else min(codes)


if __name__ == "__main__":
    sys.exit(main())
