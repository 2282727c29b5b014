"""Every command and Python snippet of README.md and docs/**/*.md does what the page says: it runs.

The blocks of a page are run in order, in one temporary directory that has the repository's `recipes`,
`examples` and `tools`: those in bash by `bash -euo pipefail` each, those in Python all in one process, which
keeps its names. A `make` target is not run (this test is part of one) but has to exist, and `plait bench
device` measures small cases. An HTML comment before a block changes how it is run:

    <!-- test: shortened by `--set run.steps=3` -->    appends these words to its `plait train` commands
    <!-- test: needs several hosts -->                 is not run; the reason is one of NOT_RUN
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import pytest

from support import small_device, warm

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = ("needs several hosts", "needs a GPU", "needs the network")
LIMIT_S = 300

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<language>[\w+-]*).*$")
_COMMENT = re.compile(r"^ *<!-- test: (?P<text>.*?) *-->$")
_SHORTENED = re.compile(r"^shortened by `(?P<words>[^`]+)`$")
_TRAIN = re.compile(r"(?:^|\s)(?:plait|-m plait) train\b")
_DEVICE = re.compile(r"\bplait bench device\b")
_TARGET = re.compile(r"^([a-z][\w-]*):", re.M)


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    language: str  # "bash" or "python"
    text: str
    comment: str  # of `<!-- test: comment -->` before it, or ""

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def more_words(self) -> str:
        match = _SHORTENED.match(self.comment)
        return match["words"] if match else ""


def blocks_of(document: Path) -> Iterator[Block]:
    """The fenced blocks in bash, sh and python."""
    comment, fence, begin, lines = "", None, 0, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if fence is not None:
            if line.strip() != fence["ticks"]:
                lines.append(line.removeprefix(fence["indent"]))
                continue
            language = {"sh": "bash", "bash": "bash", "python": "python"}.get(fence["language"])
            if language:
                yield Block(document, begin, language, "\n".join(lines) + "\n", comment)
            comment, fence = "", None
        elif found := _FENCE.match(line):
            fence, begin, lines = found, number, []
        elif found := _COMMENT.match(line):
            comment = found["text"]
        elif line.strip():
            comment = ""
    assert fence is None, f"{document.name}:{begin}: this block has no end"


def documents() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]


BLOCKS = [block for document in documents() for block in blocks_of(document)]


class Page:
    """A document being run: in order, every block once."""

    def __init__(self, blocks: list[Block], folder: Path) -> None:
        self._folder = folder
        self._environment = environment()
        (folder / ".bin").mkdir()
        path = os.pathsep.join((str(folder / ".bin"), self._environment["PATH"]))
        self._environment |= {"PATH": path, **warm.install(folder / ".bin", "plait", "python")}
        self._to_run = blocks
        self._complaints: dict[Block, str] = {}
        self._python: Python | None = None
        for name in ("README.md", "docs", "examples", "recipes", "src", "tests", "tools"):
            (folder / name).symlink_to(ROOT / name)

    def complaint(self, block: Block) -> str:
        """Return an error text, empty if the block ran well. The blocks before it are run first."""
        while self._to_run and block not in self._complaints:
            other = self._to_run.pop(0)
            self._complaints[other] = self._run(other)
        return self._complaints[block]

    def close(self) -> None:
        if self._python is not None:
            self._python.close()

    def _run(self, block: Block) -> str:
        if block.comment and not block.more_words:
            known = block.comment in NOT_RUN
            return "" if known else f"`{block.comment}` is not a reason; these are: {NOT_RUN}"
        if block.language == "bash":
            try:
                return run_bash(shell_text(block), self._folder, self._environment)
            except UnknownTarget as error:
                return str(error)
        if self._python is None or self._python.process.poll() is not None:
            self._python = Python(self._folder)
        return self._python.run(block)


def run_bash(text: str, folder: Path, env: dict[str, str]) -> str:
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"has not ended within {LIMIT_S} s:\n{process.communicate()[0][-4000:]}"
    return f"ended with {process.returncode}:\n{output[-4000:]}" if process.returncode else ""


class Python:
    """The process that a page's Python blocks are run in."""

    PROGRAM = Path(__file__).with_name("page_python.py")

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = warm.Popen(
                [str(theirs.fileno())],
                script=self.PROGRAM,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = connection.Connection(ours.detach())

    def run(self, block: Block) -> str:
        lines_before = "\n" * block.line  # so that a traceback names the page's lines
        self._connection.send((str(block.document), lines_before + block.text))
        if not self._connection.poll(LIMIT_S):
            self.close()
            return f"has not ended within {LIMIT_S} s"
        try:
            complaint: str = self._connection.recv()
        except EOFError:
            return f"ended Python with exit code {self.process.wait()}"
        return complaint

    def close(self) -> None:
        self._connection.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def pages() -> Iterator[dict[Path, Page]]:
    with tempfile.TemporaryDirectory(prefix="plait-docs-") as folder:
        opened, data = {}, Path(folder) / "data"
        data.mkdir()
        for document in documents():
            page_folder = Path(folder) / document.parent.name / document.stem
            page_folder.mkdir(parents=True)
            (page_folder / "data").symlink_to(data)  # the first page that needs tokens builds them for all
            blocks = [block for block in BLOCKS if block.document == document]
            opened[document] = Page(blocks, page_folder)
        yield opened
        for page in opened.values():
            page.close()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_runs(block: Block, pages: dict[Path, Page]) -> None:
    if complaint := pages[block.document].complaint(block):
        pytest.fail(f"{block} {complaint}", pytrace=False)


def environment() -> dict[str, str]:
    """The user's, with this interpreter's commands first; what is not installed is not found."""
    bin_first = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": bin_first}


def shell_text(block: Block) -> str:
    """The commands to run: prompts taken off, `make` lines checked and left out, trainings and the
    measurement of devices shortened."""
    kept = []
    for number, line in enumerate(re.sub(r"\\\n\s*", "", block.text).splitlines(), 1):
        command = _DEVICE.sub(f"python {small_device.__file__} bench device", line.removeprefix("$ "))
        if re.match(r"\s*make\b", command):
            check_targets(block.line + number, command)
        elif block.more_words and _TRAIN.search(command):
            kept.append(f"{command.partition(' #')[0]} {block.more_words}")
        else:
            kept.append(command)
    return "\n".join(kept) + "\n"


class UnknownTarget(Exception):
    """A page names a make target that there is none of."""


def check_targets(line: int, command: str) -> None:
    known = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    asked = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word and word[0] != "-"]
    if not set(asked) <= known:
        raise UnknownTarget(f"has `{command.strip()}` in line {line}; the Makefile knows {sorted(known)}")


@pytest.fixture
def complaints(tmp_path: Path) -> Iterator[Callable[[str], list[str]]]:
    """A function that returns one error text per block of a page with the given text."""
    opened = []

    def complaints(text: str) -> list[str]:
        document = tmp_path / f"page-{len(opened)}.md"
        document.write_text(text, encoding="utf-8")
        folder = tmp_path / document.stem
        folder.mkdir()
        blocks = list(blocks_of(document))
        opened.append(Page([*blocks], folder))
        return [opened[-1].complaint(block) for block in blocks]

    yield complaints
    for page in opened:
        page.close()


Complaints = Callable[[str], list[str]]


def test_a_failing_command_in_the_middle_fails_the_block(complaints: Complaints) -> None:
    wrong, right = complaints(
        "words\n```bash\necho fine\nfalse | cat\necho never\n```\n```bash\ntest -d recipes\n```\n"
    )
    assert wrong == "ended with 1:\nfine\n"
    assert right == ""


def test_python_snippets_of_a_page_build_on_each_other(complaints: Complaints) -> None:
    first, second = "```python\nx = 1\n```\n", "- item\n\n  ```python\n  assert x == 1\n  ```\n"
    assert complaints(first + second) == ["", ""]
    [complaint] = complaints(second)
    assert 'page-1.md", line 4, in <module>' in complaint
    assert "NameError: name 'x' is not defined" in complaint
    assert complaints("```python\nimport os\nos._exit(3)\n```\n") == ["ended Python with exit code 3"]


def test_trainings_are_shortened_only_where_the_page_allows_it(tmp_path: Path) -> None:
    comment = "<!-- test: shortened by `--set run.steps=3` -->\n"
    commands = "```sh\n$ plait train \\\n  r.toml  # two minutes\nls\n```\n"
    (tmp_path / "page.md").write_text(comment + commands + commands, encoding="utf-8")
    short, full = blocks_of(tmp_path / "page.md")
    assert shell_text(short) == "plait train r.toml  --set run.steps=3\nls\n"
    assert shell_text(full) == "plait train r.toml  # two minutes\nls\n"


def test_only_known_reasons_keep_a_block_from_running(complaints: Complaints) -> None:
    block = "\n```bash\nfalse\n```\n"
    assert complaints(f"<!-- test: needs a GPU -->\n{block}") == [""]
    [complaint] = complaints(f"<!-- test: is hard to run -->\n{block}")
    assert "`is hard to run` is not a reason" in complaint


def test_make_targets_are_not_run_but_exist(complaints: Complaints) -> None:
    assert complaints("```bash\nmake test PYTHON=python3  # all\n```\n") == [""]
    [complaint] = complaints("```bash\nls\nmake coffee\n```\n")
    assert "`make coffee` in line 3" in complaint
