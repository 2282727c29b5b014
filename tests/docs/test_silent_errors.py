"""The list of silent errors in the docs names tests that exist, and every test written for the list."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def section() -> str:
    """The section of the page that lists the errors."""
    _, title, found = PAGE.read_text(encoding="utf-8").partition("\n## Silent errors\n")
    assert title, f"{PAGE.name} has no section on silent errors"
    return found


def named() -> set[tuple[str, str]]:
    """(file, function) of every test that the page names."""
    return set(re.findall(r"`([\w/]+\.py)::(\w+)`", section()))


def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_test_that_the_page_names_exists() -> None:
    assert not [f"{file}::{name}" for file, name in sorted(named()) if name not in functions_of(file)]


@pytest.mark.quick
def test_every_entry_has_a_test() -> None:
    rows = [line for line in section().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    assert not [row for row in rows if "::test_" not in row]


def test_every_test_that_was_written_for_the_list_is_on_the_page() -> None:
    files = sorted((TESTS / "ranks").glob("test_silent_*.py"))
    assert len(files) == 3
    found = {(f"ranks/{file.name}", name) for file in files for name in functions_of(f"ranks/{file.name}")}
    assert not found - named()
