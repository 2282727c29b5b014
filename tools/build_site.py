"""Build the documentation site of mkdocs.yml: `make docs` installs the generator and runs this.

The sources are gathered in one folder first: the pages of the navigation, every file to which they link, at
the same path as in the repository, so that relative links hold without a rewrite; and the pages of the
reference, which are written from the code. Then the generator, Zensical, builds it: strictly, so that a
broken link is an error. It reads the configuration of MkDocs, and fetches nothing. `make check` only gathers,
with `--links`: a page that is missing and a link to no file are errors then, too.
"""

import dataclasses
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
_CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1`*~* *$|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
_ANNOTATED = re.compile(r"Annotated\[([\w.]+), [^\]]*\]")
_WORKER_OF_FILES = """if (location.protocol === "file:") {
  const worker = URL.createObjectURL(new Blob([%s]));
  window.Worker = class extends Worker { constructor() { super(worker); } };
}
"""
_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")  # before a name
_COLUMNS = re.compile(r"^(\w[\w, ]*?) {2,}(\S.*(?:\n {4,}.*)*)", re.M)  # of names and their meanings
_KEY = re.compile(r"^(\w+) +(\S.*(?:\n  +.*)*)", re.M)  # of the keys in Plan's docstring


def main() -> int:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    wanted = [page for page in pages(config["nav"]) if page not in REFERENCE]
    if sys.argv[1:] == ["--links"]:
        with tempfile.TemporaryDirectory() as sources:
            gather(ROOT, Path(sources), wanted)
        return 0
    if importlib.util.find_spec("zensical") is None:
        sys.exit("The site's generator, Zensical, is not installed: pip could not get it.")
    sources = ROOT / config["docs_dir"]
    shutil.rmtree(sources, ignore_errors=True)
    gather(ROOT, sources, wanted)
    for name, write in REFERENCE.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(write(), encoding="utf-8")
    shutil.copyfile(ROOT / "docs" / "site.css", sources / "docs" / "site.css")
    code = subprocess.call([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT)
    if code == 0:
        write_search_of_files(ROOT / config["site_dir"])
    return code


def write_search_of_files(site: Path) -> None:
    """Make the search work in pages that are opened from files, where a browser reads no other file than a
    script: write the index as `search.js`, which the pages ask for, and the worker as a script's text."""
    index = (site / "search.json").read_text(encoding="utf-8")
    (site / "search.js").write_text(f"var __index = {index};\n", encoding="utf-8")
    [worker] = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    script = worker.with_name("of-files.js")
    script.write_text(_WORKER_OF_FILES % json.dumps(worker.read_text(encoding="utf-8")), encoding="utf-8")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        added = r'<script src="\1/workers/of-files.js"></script>\g<0>'
        text = re.sub(r'<script src="([^"]*/javascripts)/bundle', added, text)
        page.write_text(text, encoding="utf-8")


def pages(nav: list[dict[str, Any]]) -> Iterator[str]:
    """The files of a navigation, in order."""
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages(value)


def gather(root: Path, sources: Path, wanted: list[str]) -> None:
    """Copy the files and all to which they link, directly or not. Exits at a link to none."""
    done = set[str]()
    while wanted:
        name = wanted.pop()
        if name in done:
            continue
        done.add(name)
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, sources / name)
        for link in links(root / name) if name.endswith(".md") else ():
            path = (root / name).parent.joinpath(link).resolve()
            if str(path.relative_to(root)) not in REFERENCE:
                if not path.is_file():
                    sys.exit(f"{name}: the link to {link} is not to a file")
                wanted.append(str(path.relative_to(root)))


def links(page: Path) -> list[str]:
    """The relative links of a page, without their anchors."""
    return _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))


def plan_page() -> str:
    """The keys of a plan: their defaults from the fields, their meanings from the docstring."""
    from plait.plan import Plan  # noqa: PLC0415
    from plait.plan.plan import show_value  # noqa: PLC0415

    meanings = dict(_KEY.findall(inspect.getdoc(Plan) or ""))
    rows = [
        (f"`{field.name}`", f"`{show_value(field.name, field.default)}`", meanings[field.name])
        for field in dataclasses.fields(Plan)
    ]
    about = "From the docstring of `plait.Plan`. [Plans](../plans.md) lists combinations that are rejected."
    return f"# Plan keys\n\n{about}\n\n{table(('key', 'default', 'meaning'), rows)}"


def recipe_page() -> str:
    """The keys of a recipe with their types and defaults."""
    from plait.train.config import Recipe  # noqa: PLC0415

    rows = [(f"`{key}`", f"`{kind}`", default) for key, kind, default in recipe_keys(Recipe, "")]
    about = "Types and defaults, from the code. [Recipes](../recipes.md) explains the keys."
    return f"# Recipe keys\n\n{about}\n\n{table(('key', 'type', 'default'), rows)}"


def recipe_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if inner:
            yield from recipe_keys(inner[0], f"{prefix}{name}.")
        else:
            kind = _ANNOTATED.sub(r"\1", inspect.formatannotation(field.annotation))
            default = "required" if field.is_required() else f"`{field.default!r}`"
            yield f"{prefix}{name}", re.sub(r"\b(\w+\.)+", "", kind), default


def commands_page() -> str:
    """The help texts of all commands."""
    from typer.main import get_command  # noqa: PLC0415

    from plait.cli.main import app  # noqa: PLC0415

    return "# Commands\n\nThe help texts, from the code.\n\n" + "\n".join(commands(get_command(app), "plait"))


def commands(command: Any, name: str) -> Iterator[str]:
    """The section of a command, and those of its subcommands."""
    yield f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n"
    context = typer.Context(command, info_name=name)
    yield f"```text\n{' '.join(['usage:', name, *command.collect_usage_pieces(context)])}\n```\n"
    records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    if records:
        yield table(("option", "meaning"), [(f"`{option}`", meaning) for option, meaning in records])
    for sub, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, f"{name} {sub}")


def python_page() -> str:
    """The signatures and docstrings of the names that `plait` exports, as `help` shows them."""
    plait = importlib.import_module("plait")
    sections = ["# Python API", "The public names of `plait`, with their docstrings."]
    for name in sorted(set(plait.__all__) - {"__version__"}, key=str.lower):
        sections += [f"## plait.{name}", documented(name, value := getattr(plait, name))]
        members = value.__dict__.items() if isinstance(value, type) else ()
        for member, inner in members:
            if not member.startswith("_") and is_method(inner) and inner.__doc__:
                sections += [f"### {name}.{member}", documented(member, inner)]
    return "\n\n".join(sections) + "\n"


def is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def documented(name: str, value: Any) -> str:
    """Signature, with a parameter per line, and docstring, with its columns as a table."""
    inner = getattr(value, "__func__", value)
    text = f"{name}: property"
    if not isinstance(inner, property):
        signature = inspect.signature(inner)
        parameters = [
            re.sub(r"<class '(.*)'>", r"\1", _MODULE.sub("", str(parameter)))
            for parameter in signature.parameters.values()
        ]
        lines = "".join(f"    {parameter},\n" for parameter in parameters)
        returned = signature.return_annotation
        end = "" if returned is inspect.Signature.empty else f" -> {inspect.formatannotation(returned)}"
        text = f"{name}(\n{lines}){_MODULE.sub('', end)}" if lines else f"{name}(){_MODULE.sub('', end)}"
    paragraphs = (inspect.getdoc(inner) or "").split("\n\n")
    return "\n\n".join([f"```python\n{text}\n```", *map(paragraph, paragraphs)])


def paragraph(text: str) -> str:
    """A paragraph of a docstring: prose, columns of names as a table, or else a block of text."""
    if rows := _COLUMNS.findall(text):
        before = text[: _COLUMNS.search(text).start()].strip()
        meanings = [(f"`{name}`", escaped(" ".join(meaning.split()))) for name, meaning in rows]
        return "\n\n".join(filter(None, [escaped(before), table(("name", "meaning"), meanings)]))
    if re.search(r"^( |[-*] )", text, re.M):
        return f"````text\n{text}\n````"
    return escaped(text)


def escaped(text: str) -> str:
    """Prose as Markdown: marks outside of code are characters."""
    parts = text.split("`")
    return "`".join(part if n % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for n, part in enumerate(parts))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    lines = (
        "| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in row) + " |" for row in cells
    )
    return "\n".join(lines) + "\n"


REFERENCE: dict[str, Callable[[], str]] = {
    "docs/reference/plan.md": plan_page,
    "docs/reference/recipe.md": recipe_page,
    "docs/reference/commands.md": commands_page,
    "docs/reference/python.md": python_page,
}

if __name__ == "__main__":
    sys.exit(main())
