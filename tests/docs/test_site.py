"""The documentation site. `make test` builds it, with its generator in PYTHONPATH; in any other run that test
is skipped, because pip installs the generator outside `.venv`."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
_OTHER_SERVER = re.compile(
    r'<(?:script|img|iframe)[^>]+src="?https?:|<link[^>]+(?:stylesheet|icon)[^>]+https?:'
)


def test_the_navigation_has_every_page_of_the_docs() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", str(CONFIG["nav"])))
    assert not [
        name for path in (ROOT / "docs").rglob("*.md") if (name := str(path.relative_to(ROOT))) not in listed
    ]


def test_a_link_to_a_missing_file_ends_the_build(tmp_path: Path) -> None:
    gather = runpy.run_path(str(ROOT / "tools" / "build_site.py"))["gather"]
    (tmp_path / "page.md").write_text(
        "`[no](link.md)`, [an inner](other.md#top), [a missing](src/missing.py)"
    )
    (tmp_path / "other.md").write_text("# Top")
    with pytest.raises(SystemExit, match=r"page.md: the link to src/missing.py is not to a file"):
        gather(tmp_path, tmp_path / "sources", ["page.md"])


def test_a_check_of_links_gathers_the_pages_without_the_generator_and_leaves_no_files(tmp_path: Path) -> None:
    """A link to a folder is an error: only files are gathered."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("nav: [{Home: README.md}, {Page: docs/page.md}]")
    (tmp_path / "README.md").write_text("[a page](docs/page.md)")
    (tmp_path / "docs" / "page.md").write_text("[a folder](../tools), `[none](none.md)`")
    program = tmp_path / "tools" / "build_site.py"
    program.write_text((ROOT / "tools" / "build_site.py").read_text(encoding="utf-8"))
    words = [sys.executable, str(program), "--links"]
    before = sorted(tmp_path.rglob("*"))
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (
        1,
        "docs/page.md: the link to ../tools is not to a file\n",
    )
    (tmp_path / "docs" / "page.md").write_text("[a program](../tools/build_site.py)")
    assert subprocess.run(words, check=False).returncode == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_the_site_builds_strictly_and_fetches_nothing_from_other_servers() -> None:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed")
    command = [sys.executable, str(ROOT / "tools" / "build_site.py")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list((ROOT / CONFIG["site_dir"]).rglob("*.html"))
    assert len(pages) > 30
    assert not [page for page in pages if _OTHER_SERVER.search(page.read_text(encoding="utf-8"))]
    assert (ROOT / CONFIG["site_dir"] / "search.js").read_text(encoding="utf-8").startswith("var __index = {")
    text = pages[0].read_text(encoding="utf-8")
    assert 0 < text.find("/of-files.js") < text.find("/javascripts/bundle"), "search without a server"


def test_parameters_in_a_docstring_are_a_table_of_the_reference() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "build_site.py"))["python_page"]()
    section = page[page.index("## plait.parallelize") :]
    assert "\n    clip_norm: float | None = None,\n" in section
    assert "| `clip_norm` | maximum global 2-norm of the gradient; `clip_value`: of an element |" in section
