"""All tests, in three processes at the same time that share the files among them.

Each process has files of its own: those of ranks; those of commands and pages, which are real jobs; and those
of one process. When it has run them, it takes files that another has not begun, so that no processor is idle
at the end. Jobs wait for time limits and for processes, and leave processors idle that the others use. The
report of the first process is shown as it comes, and those of the others after it; each ends with its slowest
tests. Exits with the first code that is not 0. Arguments go to all.

[Note: files one after another]  pytest finds the files of all processes, and imports one when its process
takes it, which is before the last test of the file before: each test is given the next one, so that what a
session makes once, as its pool of ranks, is kept from file to file. The names are in pipes, where a read
takes one from all processes. They share the server that forks commands and ranks, too, whose imports take
four seconds.

With --libraries, two more processes run the tests of libraries that are in folders of build/, and not in
.venv, where other tests would import them, too.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from _pytest.config import parse_warning_filter

TESTS = Path(__file__).resolve().parent.parent / "tests"
BUILD = TESTS.parent / "build"
JOBS = ("docs", "faults")
# Begun first: a long file that is begun last is one that the others wait for.
LONG = (
    "ranks/test_hybrid.py",
    "ranks/test_checkpoint_plans.py",
    "ranks/test_benchmarks.py",
    "ranks/test_tensor_compiled.py",
    "docs/test_documents.py",
    "contract/test_contract.py",
    "one/test_fuzz.py",
    "one/test_gpu_run.py",
)
LIBRARIES = {  # folders of build/, and the files that are run with them
    "torchao site-generator": "one/test_float8_torchao one/test_quantized_torchao docs/test_site",
    "compressed-tensors trl datasets lm-eval wandb": "one/test_compressed_tensors one/test_chat_templates "
    "one/test_data_hf one/test_wandb ranks/test_lm_eval",
}
NAME_BYTES = 128  # of a name in a pipe, filled up with blanks
NO_TESTS = 5  # pytest's exit code when the arguments select none of a process


def main() -> int:
    if sys.argv[1:2] == ["--pipes"]:
        pipes = [int(number) for number in sys.argv[2].split(",")]
        # Without percentages of numbers that are not known.
        options = ["--durations=10", "-o", "console_output_style=classic"]
        return int(pytest.main([*options, *sys.argv[3:], str(TESTS)], [SharedFiles(pipes)]))
    sys.path.insert(0, str(TESTS))
    from support import warm  # noqa: PLC0415 - of the tests' folder

    has_libraries = sys.argv[1:2] == ["--libraries"]
    arguments = sys.argv[1 + has_libraries :]
    os.environ["PLAIT_WARM"] = warm.server()
    with ExitStack() as stack:
        pipes = [filled_pipe(names) for names in file_names()]
        programs: list[tuple[list[str], dict[str, str]]] = []  # arguments of Python, and variables
        for number in range(len(pipes)):
            own_first = ",".join(map(str, pipes[number:] + pipes[:number]))
            programs.append(([__file__, "--pipes", own_first, *arguments], {}))
        for folders, names in LIBRARIES.items() if has_libraries else ():
            paths = os.pathsep.join(str(BUILD / folder) for folder in folders.split())
            files = [str(TESTS / f"{name}.py") for name in names.split()]
            programs.append((["-m", "pytest", "-rs", *arguments, *files], {"PYTHONPATH": paths}))
        reports = [None, *(stack.enter_context(tempfile.TemporaryFile()) for _ in programs[1:])]
        running = []
        for (program, variables), report in zip(programs, reports, strict=True):
            process = subprocess.Popen(
                [sys.executable, *program],
                stdout=report,
                stderr=subprocess.STDOUT if report else None,
                env=os.environ | variables,
                pass_fds=pipes,
            )
            running.append(process)
            stack.callback(process.kill)
        codes = [process.wait() for process in running]
        for report in filter(None, reports):
            report.seek(0)
            sys.stdout.buffer.write(report.read())
            sys.stdout.flush()
    failures = [code for code in codes if code not in (0, NO_TESTS)]
    return failures[0] if failures else min(codes)


def file_names() -> tuple[list[str], list[str], list[str]]:
    """The files of ranks, of jobs, and all others, each in the order in which they are begun."""
    found = sorted(str(path.relative_to(TESTS)) for path in TESTS.glob("*/test_*.py"))
    assert set(LONG) <= set(found), f"no such tests: {set(LONG) - set(found)}"
    ordered = [*LONG, *(name for name in found if name not in LONG)]
    ranks = [name for name in ordered if name.startswith("ranks/")]
    jobs = [name for name in ordered if name.startswith(JOBS)]
    return ranks, jobs, [name for name in ordered if name not in ranks and name not in jobs]


def filled_pipe(names: Sequence[str]) -> int:
    """The end of a pipe to read the names from."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # more names than a pipe can hold are an error
    for name in names:
        assert len(name.encode()) <= NAME_BYTES, name
        os.write(writing, name.encode().ljust(NAME_BYTES))
    os.close(writing)
    return reading


class SharedFiles:
    """Plugin of pytest that runs the files of pipes: of the first one as long as it has some.

    See [Note: files one after another].
    """

    def __init__(self, pipes: Sequence[int]) -> None:
        self._pipes = pipes
        self._found: dict[str, pytest.Module] = {}
        self._has_begun = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        """Only note the files that are found, without importing them."""
        if self._has_begun or not isinstance(collector, pytest.Module):
            return None
        self._found[str(collector.path.relative_to(TESTS))] = collector
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        missed = set(self._found).difference(*file_names())
        assert not missed, f"tests in no process's list: {missed}"
        if session.config.option.collectonly:
            return True
        self._has_begun = True
        items = self._items(session)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """The selected tests of the files that this process takes."""
        while name := next(filter(None, (os.read(pipe, NAME_BYTES) for pipe in self._pipes)), b""):
            with warnings.catch_warnings():
                for text in session.config.getini("filterwarnings"):
                    warnings.filterwarnings(*parse_warning_filter(text, escape=False))
                items = list(session.genitems(self._found[name.decode().rstrip()]))
            session.config.hook.pytest_collection_modifyitems(
                session=session, config=session.config, items=items
            )
            session.testscollected += len(items)
            yield from items


if __name__ == "__main__":
    sys.exit(main())
