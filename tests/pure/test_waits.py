"""Every wait in the sources has a row in docs/reliability.md that says what ends it."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "plait"

# Calls that block; `join` and `get` only without what a string's or a dictionary's have.
BLOCKS = {"wait", "wait_for", "wait_until", "acquire", "result", "flock", "synchronize", "communicate"}
BLOCKS |= {"waitid", "waitpid", "select", "shutdown", "sleep", "get", "join"}
BLOCKS_IN_C = re.compile(
    r"\b(?:nanosleep|pthread_join|pthread_cond_(?:timed)?wait|FUTEX_WAIT|(?<!void )pl_sleep)\b"
)
DEFINITION_IN_C = re.compile(r"^(?:static )?[a-z_0-9]+ \*?(\w+)\(.*\) \{$", re.M)


def blocking_calls(path: Path) -> Iterator[str]:
    """Yield `file.py: Class.function` of each call that may block."""

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield from visit(child, f"{name}.{child.name}".lstrip("."))
                continue
            if isinstance(child, ast.Call) and _blocks(child):
                yield f"{path.relative_to(SOURCES)}: {name}"
            yield from visit(child, name)

    yield from visit(ast.parse(path.read_text()), "")


def _blocks(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in BLOCKS
    if not isinstance(function, ast.Attribute):
        return False
    if ast.unparse(function) == "os.read":  # of a pipe
        return True
    if function.attr == "join":
        is_text = isinstance(function.value, ast.Constant) or any(isinstance(a, ast.List) for a in call.args)
        return not is_text and len(call.args) < 2
    return function.attr in BLOCKS and not (function.attr == "get" and call.args)


def blocking_calls_in_c(path: Path) -> Iterator[str]:
    text = path.read_text()
    for call in BLOCKS_IN_C.finditer(text):
        functions = [found[1] for found in DEFINITION_IN_C.finditer(text[: call.start()])]
        if functions and functions[-1] != "pl_sleep":
            yield f"{path.relative_to(SOURCES)}: {functions[-1]}"


def rows() -> dict[str, str]:
    """Return what ends a wait, by the pattern of its place."""
    text = (ROOT / "docs" / "reliability.md").read_text().partition("\n## Waits\n")[2].partition("\n## ")[0]
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for place in re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else ():
            found[place] = cells[-1]
    return found


def test_every_wait_is_listed_with_what_ends_it_and_nothing_else_is() -> None:
    places = {place for path in SOURCES.rglob("*.py") for place in blocking_calls(path)}
    places |= {place for path in SOURCES.rglob("*.c") for place in blocking_calls_in_c(path)}
    listed = rows()
    missing = sorted(p for p in places if not any(fnmatch(p, pattern) for pattern in listed))
    stale = sorted(pattern for pattern in listed if not any(fnmatch(p, pattern) for p in places))
    assert missing == [], "say in docs/reliability.md what ends these waits"
    assert stale == [], "nothing waits there any more"
    assert all(listed.values())


def test_the_list_finds_a_wait_without_a_limit(tmp_path: Path) -> None:
    calls = ["thread.join()", "queue.get()", "work.wait()", "time.sleep(1)", "os.read(fd, 1)"]
    others = ["', '.join(words)", "table.get(key)", "file.read(1)", "path.joinpath('a')"]
    found = [_blocks(ast.parse(text).body[0].value) for text in calls + others]  # type: ignore[attr-defined]
    assert found == [True] * len(calls) + [False] * len(others)
