"""Interactive pages: HTML files that open without a network or a server.

A page is its values, as one JSON block, and the scripts that draw them: `kit.js`, `timeline.js` and that of
its kind. Values are drawn as text, never as HTML, and the page's content policy lets it load nothing.
"""

import json
from html import escape
from pathlib import Path
from typing import Any, Literal

from plait.errors import printable
from plait.fileio import finite_json, write_text

Kind = Literal["schedule", "plan", "explain", "runs", "figures"]

_FOLDER = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}
<title>{title}</title>
<style>
{style}</style>
</head>
<body data-kind="{kind}">
<h1>{title}</h1>
<main><noscript>This page draws its values with JavaScript.</noscript></main>
<script type="application/json" id="values">{values}</script>
<script>
{scripts}start();
</script>
</body>
</html>
"""


def render_page(kind: Kind, title: str, values: Any, *, refresh_s: int = 0) -> str:
    """Return a page of JSON values. `refresh_s`: seconds after which a browser loads it again; 0: never."""
    text = json.dumps(finite_json(values), separators=(",", ":"), allow_nan=False)
    names = ("kit.js", "timeline.js", f"{kind}.js")
    return _PAGE.format(
        policy=_POLICY,
        refresh=f'\n<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else "",
        title=escape(printable(title)),
        style=_read("page.css"),
        kind=kind,
        values=text.replace("<", "\\u003c"),  # no text can end the block
        scripts="".join(map(_read, names)),
    )


def write_page(path: Path, kind: Kind, title: str, values: Any) -> None:
    """Write a page. Raises OSError."""
    write_text(path, render_page(kind, title, values))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
