"""Count what the structure of src/plait costs a reader, and fail where a limit is exceeded.

    python tools/structure.py [--list COUNT]

Prints one line per count; `--list` prints what is counted. Exit code 1 if a count exceeds its limit.

axis files       files that name an axis of the grid, apart from the table of axes and its roles: as a text,
                 or by a degree that is no key of a plan (`plan.rows`, `plan.cols`, `plan.shard_degree`)
budgets          lines of each package, at most those in BUDGETS
circles          sets of modules that import each other, also within functions or by a name in a text
dynamic imports  imports of this package's code by a text, apart from the table of optional products
torch modes      classes that derive from a Torch*Mode
report files     modules whose names say that they print or draw: report, figures, page, explain, plot, table
parameters       functions with more than 7 parameters
repeated         runs of six equal lines, blank ones and imports apart, that occur in two places
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"
AXIS_TABLE = ("plait/plan/axes.py",)
AXES = {"replicate", "row", "col"}  # `pp`, `shard`, `cp` are keys of a plan, too
DEGREES = {"rows", "cols", "shard_degree"}
OWNERS = {"plan", "grid", "part", "tensor"}  # names whose attributes of that name are degrees
NO_AXES = {  # files in which such a text is no axis
    "plait/data/index.py": "rows of a file",
    "plait/models/sharding/derive.py": "a style",
    "plait/models/sharding/families.py": "a style",
    "plait/models/sharding/layout.py": "a style",
    "plait/models/sharding/styles.py": "a style",
    "plait/plan/sharding.py": "a style",
}
IMPORTS_BY_TEXT = {  # files in which such an import is none of optional products
    "plait/__init__.py": "the public names, which modules of the package do not use",
    "plait/api.py": "the table of optional products",
    "plait/fileio.py": "a user's module",
}
LIMITS = {"axis files": 21, "circles": 0, "dynamic imports": 0}
# Lines of Python in a package; raising one is a commit of its own, with the reason.
BUDGETS = {
    "bench": 2015,
    "checkpoint": 3100,
    "cli": 3615,
    "comm": 7195,
    "compat": 1710,
    "data": 4580,
    "engine": 6434,
    "estimate": 600,
    "models": 11070,
    "optim": 1625,
    "pages": 275,
    "parallel": 15806,
    "plan": 7490,
    "planner": 5350,
    "server": 2250,
    "train": 6745,
    "verify": 1825,
}
ROOT_LINES = 1165  # of the modules next to the packages
REPORTS = re.compile(r"(report|figures|page|pages|explain\w*|\w*plot|\w*table)$")
MOST_PARAMETERS = 7
RUN = 6

Tree = ast.Module


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", metavar="COUNT", help="print what is counted")
    args = parser.parse_args()
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in sources.items()}
    counts = {
        "modules": [*trees],
        "axis files": [name for name, tree in trees.items() if names_axis(name, tree)],
        "circles": circles(imports(trees)),
        "dynamic imports": [where for name, tree in trees.items() for where in dynamic_imports(name, tree)],
        "torch modes": [where for name, tree in trees.items() for where in torch_modes(name, tree)],
        "report files": [name for name in trees if REPORTS.search(Path(name).stem)],
        "parameters": [where for name, tree in trees.items() for where in long_signatures(name, tree)],
        "repeated": repeated_runs(sources, trees),
    }
    print(f"{'lines':15}{sum(len(text.splitlines()) for text in sources.values()):6,}")
    for name, items in counts.items():
        limit = LIMITS.get(name)
        print(f"{name:15}{len(items):6,}" + (f"  at most {limit}" if limit is not None else ""))
        if args.list == name or (limit is not None and len(items) > limit):
            print("\n".join(f"    {item}" for item in items))
    too_large = over_budget(sources)
    print("\n".join(too_large), end="\n" if too_large else "")
    return int(bool(too_large) or any(len(counts[name]) > limit for name, limit in LIMITS.items()))


def over_budget(sources: dict[str, str]) -> list[str]:
    lines: Counter[str] = Counter()
    for name, text in sources.items():
        parts = Path(name).parts
        lines[parts[1] if len(parts) > 2 else ""] += len(text.splitlines())
    budgets = BUDGETS | {"": ROOT_LINES}
    return [
        f"src/plait/{package}: {number:,} lines of Python, at most {budgets.get(package, 0):,}"
        for package, number in sorted(lines.items())
        if number > budgets.get(package, 0)
    ]


def names_axis(name: str, tree: Tree) -> bool:
    if name in AXIS_TABLE or name in NO_AXES:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in AXES:
            return True
        if isinstance(node, ast.Attribute) and node.attr in DEGREES:
            owner = node.value
            text = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if text in OWNERS or node.attr == "shard_degree":
                return True
    return False


def imports(trees: dict[str, Tree]) -> dict[str, set[str]]:
    """The modules of the package that each imports, also in functions. A package counts as its `__init__`."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in trees}
    graph: dict[str, set[str]] = {}
    for module, name in modules.items():
        wanted = set(imported(trees[name]))
        graph[module] = {found for text in wanted if (found := known(text, modules)) and found != module}
    return graph


def imported(tree: Tree) -> Iterator[str]:
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def dynamic_imports(name: str, tree: Tree) -> Iterator[str]:
    """Calls of `import_module` and `__import__`, but those of another package by its name."""
    for node in ast.walk(tree) if name not in IMPORTS_BY_TEXT else ():
        if isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            module = node.args[0].value if isinstance(node.args[0], ast.Constant) else "plait"
            if str(module).partition(".")[0] == "plait":
                yield f"{name}:{node.lineno}"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def known(text: str, modules: dict[str, str]) -> str | None:
    parts = text.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in modules), None)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Strongly connected sets of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            start = stack.index(module)
            members = stack[start:]
            del stack[start:]
            if len(members) > 1:
                found.append(f"{len(members)} modules: {', '.join(members[:6])}")

    sys.setrecursionlimit(10_000)
    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def torch_modes(name: str, tree: Tree) -> Iterator[str]:
    for node in ast.walk(tree):
        bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
        if any(re.search(r"Torch\w*Mode$", base) for base in bases):
            yield f"{name}:{node.lineno}: {node.name}"


def long_signatures(name: str, tree: Tree) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            number = len([arg for arg in args if arg.arg not in ("self", "cls")])
            if number > MOST_PARAMETERS:
                yield f"{name}:{node.lineno}: {node.name}: {number}"


def repeated_runs(sources: dict[str, str], trees: dict[str, Tree]) -> list[str]:
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, text in sources.items():
        nodes = [node for node in ast.walk(trees[name]) if isinstance(node, ast.Import | ast.ImportFrom)]
        skipped = {number for node in nodes for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        lines = [
            (number, line.strip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and number not in skipped
        ]
        for at in range(len(lines) - RUN + 1):
            run = tuple(line for _, line in lines[at : at + RUN])
            places[run].append(f"{name}:{lines[at][0]}")
    return [" = ".join(where) for where in places.values() if len(where) > 1]


if __name__ == "__main__":
    sys.exit(main())
