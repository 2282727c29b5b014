"""Check that code and docs use the field's words and plain English; exit 1 with the offenders.

Three rules, for Python and C sources and Markdown pages (`docs/decisions.md`, a diary, is not checked):
a list of words that are not used, in names, comments, docstrings and prose; docstrings do not begin with a
clause ("Of ...", "What ...", "Whether ..."); titles of notes are noun phrases. ALLOWED names the exceptions,
each with the reason.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("src", "benchmarks", "examples", "tools")
PAGES = ("README.md", "CHANGELOG.md", "docs", "benchmarks", "examples", "recipes")
NOT_CHECKED = ("docs/decisions.md", "tools/check_words.py")

# word -> what to write instead
WORDS = {
    "foretold": "estimated",
    "foretell": "estimate",
    "anew": "again",
    "nobody": "no rank, no process",
    "whoever": "the rank that",
    "hollow": "placeholder",
    "hollows": "placeholders",
    "twin": "meta copy",
    "dealt": "assigned",
    "letters": "errors, messages",
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
PHRASES = {
    r"lets? go of": "frees, releases",
    r"comes? to life": "is materialized",
    r"comes? to its end": "ends",
    r"on (its|their) way": "in transfer",
    r"a small letter": "an error of four parts",
    r"ranks? (says?|speaks?|knows?)\b": "rank sends, receives, has",
}
CLAUSES = re.compile(r"(Of|What|Whether|Who|Whose|Whom|Which|Where|As if|That)\b")
NOTE = re.compile(r"\[Note: *(?:what|who|whose|when|where|why|whether|which|how)\b[^\]]*\]", re.I)

# (file or folder, word): the reason
ALLOWED: dict[tuple[str, str], str] = {}

_WORD = re.compile(r"[A-Za-z]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PHRASES = {re.compile(rf"\b{pattern}", re.I): better for pattern, better in PHRASES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true", help="print the number of offenders only")
    parser.add_argument("folders", nargs="*", help="instead of the sources and pages of the project")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    found = [
        line for path in files(root, args.folders) for line in offenders(path, str(path.relative_to(root)))
    ]
    print(len(found) if args.count else "\n".join(found), end="\n" if found or args.count else "")
    return 1 if found else 0


def files(root: Path, folders: list[str]) -> Iterator[Path]:
    for name in folders or (*SOURCES, *PAGES):
        path = root / name
        paths = [path] if path.is_file() else sorted(path.rglob("*"))
        suffixes = (".md", ".toml") if name in PAGES and name not in SOURCES else (".py", ".c", ".h", ".md")
        for each in paths:
            if each.suffix in suffixes and str(each.relative_to(root)) not in NOT_CHECKED:
                yield each


def offenders(path: Path, name: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        words = {word.lower() for long in _WORD.findall(line) for word in _CAMEL.sub(" ", long).split()}
        for word in sorted(words & WORDS.keys()):
            if not is_allowed(name, word):
                yield f"{name}:{number}: {word!r}: write {WORDS[word]}"
        for pattern, better in _PHRASES.items():
            match = pattern.search(line)
            if match is not None and not is_allowed(name, match[0]):
                yield f"{name}:{number}: {match[0]!r}: write {better}"
        for note in NOTE.findall(line):
            yield f"{name}:{number}: {note}: the title of a note is a noun phrase"
    if path.suffix == ".py":
        yield from clauses(ast.parse(text), name)


def clauses(tree: ast.Module, name: str) -> Iterator[str]:
    """Docstrings that begin with a clause."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, kinds) else None
        if docstring and CLAUSES.match(docstring):
            first = docstring.splitlines()[0][:60]
            yield f"{name}:{getattr(node, 'lineno', 1)}: {first!r}: begin with a verb or a noun phrase"


def is_allowed(name: str, word: str) -> bool:
    return any(word == allowed and name.startswith(place) for place, allowed in ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
