"""Every wait in the sources has a row in docs/reliability.md that says what ends it."""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "plait"

# Calls that block; `join` and `get` only without what a string's or a dictionary's have.
BLOCKS = {"wait", "wait_for", "wait_until", "acquire", "result", "flock", "synchronize", "communicate"}
BLOCKS |= {"waitid", "waitpid", "select", "shutdown", "sleep", "get", "join"}
BLOCKS |= {"recv", "recv_into", "accept", "sendall", "create_connection", "getaddrinfo"}  # of sockets
BLOCKS |= {"poll"}  # with a time
# Of torch's stores and process groups, which have no limit, or one of their own.
MAKES_STORE = {"FileStore", "TCPStore", "rendezvous", "init_process_group"}
READS_STORE = {"get", "set", "add", "check", "compare_set", "wait", "multi_get"}
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
            if isinstance(child, ast.Call) and _blocks(child, stores):
                yield f"{path.relative_to(SOURCES)}: {name}"
            is_limited = isinstance(child, ast.Call) and getattr(child.func, "attr", "") == "_call"
            if not is_limited:  # JobStore's calls, in its thread
                yield from visit(child, name)

    text = path.read_text()
    tree = ast.parse(text)
    stores = raw_stores(tree) if "dist.Store" in text or "Store(" in text else set()
    yield from visit(tree, "")


def raw_stores(tree: ast.AST) -> set[str]:
    """Return names and attributes of stores of torch: annotated, made, or assigned from one of these."""
    found = set()
    for _ in range(2):  # an attribute may be assigned from an argument that is found later
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation and "dist.Store" in ast.unparse(node.annotation):
                found.add(node.arg)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                value = ast.unparse(node.value)
                if re.search(r"\bdist\.\w*Store\(|_get_default_store\(", value) or value in found:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    found |= {ast.unparse(target) for target in targets}
    return found


def _blocks(call: ast.Call, stores: Collection[str] = ()) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in MAKES_STORE:
        return ast.unparse(function.value) == "dist"
    if isinstance(function, ast.Name):
        return function.id in BLOCKS
    if not isinstance(function, ast.Attribute):
        return False
    if ast.unparse(function) == "os.read":  # of a pipe
        return True
    if function.attr in READS_STORE and ast.unparse(function.value) in stores:
        return True
    if "blocking=False" in map(ast.unparse, call.keywords):
        return False
    if function.attr == "poll":
        return bool(call.args)
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
    others = ["', '.join(words)", "table.get(key)", "file.read(1)", "lock.acquire(blocking=False)"]
    found = [_blocks(ast.parse(text).body[0].value) for text in calls + others]  # type: ignore[attr-defined]
    assert found == [True] * len(calls) + [False] * len(others)


def test_the_list_finds_waits_of_raw_stores_and_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCES", tmp_path)
    (tmp_path / "waits.py").write_text(WAITS)
    expected = {"made", "attribute", "argument", "opened", "socket", "Kept.later"}
    assert {place.removeprefix("waits.py: ") for place in blocking_calls(tmp_path / "waits.py")} == expected


WAITS = """
def made(store):
    hosts = dist.PrefixStore("host of", store)
    return hosts.get("0")

def attribute(self):
    return self._store.get("0")

def argument(store: dist.Store | None):
    store.set("0", "")

def opened():
    return dist.FileStore("path", 2)

def socket(server):
    return server.accept()[0].recv(16)

def limited(self, values: dict):
    self._call(lambda: store.get("0"))
    return values.get("0"), self.job_store.get("0")

class Kept:
    def __init__(self, store: dist.Store):
        self._store = store

    def later(self):
        return self._store.check(["0"])
"""
