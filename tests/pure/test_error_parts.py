"""Errors of the tree in errors.py have their four parts (STYLE 17) wherever they are created."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import plait.errors

SOURCE = Path(plait.errors.__file__).parent
CLASSES = {
    name
    for name, kind in inspect.getmembers(plait.errors, inspect.isclass)
    if issubclass(kind, plait.errors.PlaitError)
}
PARTS = {"given", "expected", "hint"}

# Class, file or folder: why its errors may lack a part.
_OF_A_PEER = "about another process: what it sent, or that it ended; no argument was given, and none is right"
EXEMPT = {
    "DDPError": "torch's own texts, whose first line says what is expected and what to try",
    "checkpoint/saver.py": "an unexpected error, as text for the ranks that did not raise it",
    "comm/comm_thread.py": _OF_A_PEER,
    "comm/launch_function.py": "the text of an exception that cannot be pickled",
    "comm/connection.py": _OF_A_PEER,
    "comm/shm/rendezvous.py": _OF_A_PEER,
    "comm/shm/transport.py": _OF_A_PEER,
    "comm/store.py": _OF_A_PEER,
    "comm/torch_transport.py": _OF_A_PEER,
    "data/workers.py": "never shown: it ends the workers after the error of another",
    "server": _OF_A_PEER,
}


def _may_be_nothing(part: ast.expr) -> bool:
    """True for an expression that gives None or no text for some arguments; `nearest` gives None."""
    match part:
        case ast.Constant(value=value):
            return value in (None, "")
        case ast.IfExp(body=body, orelse=orelse):
            return _may_be_nothing(body) or _may_be_nothing(orelse)
        case ast.BoolOp(op=ast.Or(), values=[*_, last]):
            return _may_be_nothing(last)
        case ast.JoinedStr(values=[ast.FormattedValue(value=value)]):
            return _may_be_nothing(value)
        case ast.Call(func=function):
            return getattr(function, "id", getattr(function, "attr", "")) == "nearest"
        case _:
            return False


def _incomplete(path: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Yield line, class and missing parts of each error. Calls with `**parts` rebuild a received error."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = {k.arg for k in node.keywords if not _may_be_nothing(k.value)}
            if name in CLASSES and None not in given and (missing := PARTS - given):
                yield node.lineno, name, missing


def test_every_error_is_raised_with_its_four_parts() -> None:
    used, incomplete = set(), []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        for line, name, missing in _incomplete(path):
            exempt = {key for key in EXEMPT if name == key or f"{place}/".startswith(f"{key}/")}
            used |= exempt
            if not exempt:
                incomplete.append(f"{place}:{line}: {name} without {', '.join(sorted(missing))}")
    assert not incomplete, "\n".join(incomplete)
    assert used == EXEMPT.keys(), f"not exempt any more: {EXEMPT.keys() - used}"
