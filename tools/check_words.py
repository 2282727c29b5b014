"""Check that code, tests and docs use the field's words and plain English; exit 1 with the offenders.

Four rules, for Python and C sources and Markdown pages (`docs/decisions/`, a diary, is not checked):
a list of words that are not used, in names, comments, docstrings and prose (`src` has a second one);
docstrings do not begin with a clause ("Of ...", "What ...", "Whether ..."); nor do names of tests, which are
claims; titles of notes are noun phrases. ALLOWED names the exceptions, each with the reason.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CODE = (".py", ".c", ".h", ".md")
PAGES = (".md", ".toml")
PLACES = {  # folder or file: the suffixes of what is read in it
    "src": CODE,
    "tests": CODE,
    "benchmarks": CODE,
    "examples": CODE,
    "tools": CODE,
    "docs": PAGES,
    "recipes": PAGES,
    "README.md": PAGES,
    "CHANGELOG.md": PAGES,
}
NOT_CHECKED = ("docs/decisions/", "tools/check_words.py")

# word -> what to write instead
WORDS = {
    "foretold": "estimated",
    "foretell": "estimate",
    "foretells": "estimates",
    "anew": "again",
    "nobody": "no rank, no process",
    "whoever": "the rank that",
    "hollow": "placeholder",
    "hollows": "placeholders",
    "twin": "meta copy",
    "deals": "assigns",
    "dealt": "assigned",
    "letter": "error, message",
    "letters": "errors, messages",
    "lies": "is",
    "stands": "is",
    "beside": "next to, alongside",
    "behind": "after, during",
    "mend": "fix",
    "mended": "fixed",
    "told": "received, given",
    "heard": "received",
    "hears": "receives",
    "uncut": "full, unsharded",
    "whom": "the rank that",
}
SRC_WORDS = {  # the same, in `src` only
    "piece": "shard, part",
    "pieces": "shards, parts",
    "whole": "full, unsharded, complete",
    "cut": "sharded, split",
}
PHRASES = {
    r"lets? go of": "frees, releases",
    r"comes? to life": "is materialized",
    r"comes? to its end": "ends",
    r"on (its|their) way": "in transfer",
    r"a small letter": "an error of four parts",
    r"ranks? (says?|speaks?|hears?|knows?)\b": "rank sends, receives, has",
}
CLAUSES = re.compile(r"(Of|What|Whether|Who|Whose|Whom|Which|Where|As if|That)\b")
NOTE = re.compile(r"\[Note: *(?:what|who|whose|when|where|why|whether|which|how)\b[^\]]*\]", re.I)
TEST = re.compile(r"test_(of|what|whatever|whether|who|whose|whoever)_")

# (file or folder, word): the reason
ALLOWED = {
    ("src/plait/cli/schedule_report.py", "letter"): "of the alphabet: an action's kind in a cell",
    ("src/plait/plan/plan.py", "whole"): "a value of earlier versions, in an error",
    ("src/plait/plan/plan.py", "cut"): "a value of earlier versions, in an error",
    ("docs/decisions.md", "foretold"): "a title in the diary",
    ("docs/decisions.md", "beside"): "a title in the diary",
}

_WORD = re.compile(r"[A-Za-z]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PHRASES = {re.compile(rf"\b{pattern}", re.I): better for pattern, better in PHRASES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true", help="print the number of offenders only")
    parser.add_argument("places", nargs="*", help="folders or files, instead of all of the project")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    found = [
        line for path in files(root, args.places) for line in offenders(path, str(path.relative_to(root)))
    ]
    print(len(found) if args.count else "\n".join(found), end="\n" if found or args.count else "")
    return 1 if found else 0


def files(root: Path, places: list[str]) -> Iterator[Path]:
    for place in places or PLACES:
        path, suffixes = root / place, PLACES.get(place.partition("/")[0], CODE)
        for each in [path] if path.is_file() else sorted(path.rglob("*")):
            if each.suffix in suffixes and not str(each.relative_to(root)).startswith(NOT_CHECKED):
                yield each


def offenders(path: Path, name: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    banned = WORDS | (SRC_WORDS if name.startswith("src/") else {})
    for number, line in enumerate(text.splitlines(), start=1):
        words = {word.lower() for long in _WORD.findall(line) for word in _CAMEL.sub(" ", long).split()}
        for word in sorted(words & banned.keys()):
            if not is_allowed(name, word):
                yield f"{name}:{number}: {word!r}: write {banned[word]}"
        for pattern, better in _PHRASES.items():
            match = pattern.search(line)
            if match is not None and not is_allowed(name, match[0]):
                yield f"{name}:{number}: {match[0]!r}: write {better}"
        for note in NOTE.findall(line):
            yield f"{name}:{number}: {note}: the title of a note is a noun phrase"
    if path.suffix == ".py":
        yield from clauses(ast.parse(text), name)


def clauses(tree: ast.Module, name: str) -> Iterator[str]:
    """Docstrings and names of tests that begin with a clause."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, kinds) else None
        if docstring and CLAUSES.match(docstring):
            first = docstring.splitlines()[0][:60]
            yield f"{name}:{getattr(node, 'lineno', 1)}: {first!r}: begin with a verb or a noun phrase"
        if isinstance(node, ast.FunctionDef) and TEST.match(node.name):
            yield f"{name}:{node.lineno}: {node.name}: name the claim, with a noun as its subject"


def is_allowed(name: str, word: str) -> bool:
    return any(word == allowed and name.startswith(place) for place, allowed in ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
