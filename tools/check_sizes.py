"""Check sizes of files, functions and lines of prose, and the tree in the docs; exit 1 with offenders.

A file, of Python or of C, has at most 600 lines; a Python function at most 60, counted from its `def`, and
nine in ten at most 40. A line of prose in README.md, CHANGELOG.md and docs/*.md has at most 100 columns,
unless it is one link; headings, tables, code blocks and the diary (docs/decisions/) have no limit. The tree
in docs/architecture.md names every folder under src/plait. Two test modules have different names, as one
process imports them.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "benchmarks", "tools", "examples")
SUFFIXES = (".py", ".c", ".h")
FILE_LINES = 600
FUNCTION_LINES = 60
MOST_FUNCTIONS_LINES = 40
MOST = 0.9
PROSE_COLUMNS = 100
_FENCE = re.compile(r"\s*(```|~~~)")
_NO_PROSE = re.compile(r"\s*(#|\||!?\[[^\]]*\]\([^)]*\)$|\S+$)")  # a heading, a table, one link


def main(root: Path) -> int:
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.*"))]
    offenders, lengths = [], []
    for path in (path for path in files if path.suffix in SUFFIXES):
        name = path.relative_to(root)
        source = path.read_text(encoding="utf-8")
        num_lines = len(source.splitlines())
        if num_lines > FILE_LINES:
            offenders.append(f"{name}: {num_lines} lines, at most {FILE_LINES}")
        for function in functions(source, path):
            length = function.end_lineno - function.lineno + 1
            lengths.append(length)
            if length > FUNCTION_LINES:
                where = f"{name}:{function.lineno}: {function.name}"
                offenders.append(f"{where}: {length} lines, at most {FUNCTION_LINES}")
    short = sum(length <= MOST_FUNCTIONS_LINES for length in lengths)
    if short < MOST * len(lengths):
        offenders.append(
            f"{len(lengths) - short} of {len(lengths)} functions have over {MOST_FUNCTIONS_LINES} lines, "
            "at most one in ten"
        )
    for page in (root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md"))):
        offenders += long_lines(page, str(page.relative_to(root)))
    offenders += missing_from_tree(root)
    offenders += modules_of_one_name(root)
    print("\n".join(offenders), end="\n" if offenders else "")
    return 1 if offenders else 0


def functions(source: str, path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    if path.suffix != ".py":
        return []
    tree = ast.parse(source, str(path))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def long_lines(page: Path, name: str) -> Iterator[str]:
    """Lines of prose on a page that are too long."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        is_code ^= bool(_FENCE.match(line))
        if not is_code and len(line) > PROSE_COLUMNS and not _NO_PROSE.match(line):
            yield f"{name}:{number}: {len(line)} columns, at most {PROSE_COLUMNS}"


def modules_of_one_name(root: Path) -> list[str]:
    """Test modules with the name of another one."""
    found = sorted((root / "tests").glob("*/test_*.py"))
    modules = Counter(path.stem for path in found)
    return [f"{path.relative_to(root)}: also in another folder" for path in found if modules[path.stem] > 1]


def missing_from_tree(root: Path) -> list[str]:
    """Folders with code under src/plait that no line of the tree in the docs begins with."""
    page = root / "docs/architecture.md"
    if not page.exists():
        return []
    # In a tree, a folder's name comes first, after at most the branches that lead to it.
    lines = [line.lstrip(" │├└─|`-+") for line in page.read_text(encoding="utf-8").splitlines()]
    named = {line.split()[0].rstrip("/").rpartition("/")[2] for line in lines if "/" in line.split(" ")[0]}
    folders = sorted({path.parent for path in (root / "src/plait").rglob("*.py")})
    return [
        f"docs/architecture.md: {folder.relative_to(root)}/ is not in the tree"
        for folder in folders
        if folder.name not in named
    ]


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
