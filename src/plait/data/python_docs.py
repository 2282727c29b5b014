"""Conversations about Python's standard library: what its classes and functions do, by their docstrings; and
pairs of answers to these questions.

They depend on the version of Python only. Nothing is imported.
"""

import ast
import inspect
import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plait.errors import DataError

LONGEST = 600  # characters of an answer
TURNS = 3  # questions of a conversation
EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def library_files() -> list[Path]:
    """List the source files of Python's standard library, without its tests. Raises DataError for none."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            "Python's standard library is installed without sources",
            given=f"no .py file under {root}",
            expected="its .py files",
            hint="text files as the source",
        )
    return sorted(found)


def conversations(file: Path, content: bytes) -> Iterator[dict[str, Any]]:
    """Yield a row of messages for each public class and function of a file; a class's has also its first
    methods. A file that this Python cannot parse has none."""
    *parents, name = file.relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts
    module = ".".join(parents if name == "__init__" else [*parents, name])
    try:
        statements = [] if module.startswith("__") else ast.parse(content).body
    except (SyntaxError, ValueError):
        return
    for node in statements:
        if not isinstance(node, _Definition) or not (turn := _turn(node, module)):
            continue
        methods = node.body if isinstance(node, ast.ClassDef) else []
        turns = [turn, *(_turn(each, f"{module}.{node.name}") for each in methods)]
        yield {"messages": list(itertools.chain.from_iterable(list(filter(None, turns))[:TURNS]))}


def pairs(file: Path, content: bytes) -> Iterator[dict[str, Any]]:
    """Yield a row of preferences for the first question of each conversation: its answer is chosen, and the
    answer with its words from the last to the first is rejected. (An answer to another question would be
    chosen in one row and rejected in the next.)"""
    for row in conversations(file, content):
        question, chosen = row["messages"][:2]
        words = chosen["content"].split()
        if words != words[::-1]:
            rejected = {**chosen, "content": " ".join(reversed(words))}
            yield {"prompt": [question], "chosen": [chosen], "rejected": [rejected]}


def answers(file: Path, content: bytes) -> Iterator[dict[str, Any]]:
    """Yield each answer of `pairs` as a row: chosen ones are good, rejected ones bad."""
    for row in pairs(file, content):
        for name in ("chosen", "rejected"):
            yield {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}


def _turn(node: ast.stmt, prefix: str) -> list[dict[str, str]]:
    """A question and its answer; [] for what is private or has no docstring."""
    if not isinstance(node, _Definition) or node.name.startswith("_"):
        return []
    answer = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0][:LONGEST].strip()
    if not answer:
        return []
    name = f"{prefix}.{node.name}"
    question = (
        f"What is the class {name}?"
        if isinstance(node, ast.ClassDef)
        else f"What does {name}({ast.unparse(node.args)}) do?"
    )
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
