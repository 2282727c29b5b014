"""Pages of commands, as a browser shows them: one headless Chromium shows many pages, at several sizes and in
both schemes of colours, in frames of one document, and a script in it reports what is there."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIZES = (390, 820, 1400)  # widths: a phone, a tablet, a desk
_LIMIT_S = 240.0  # only a hang takes as long

# In every frame, before the page's own scripts: what the console would show.
_WATCH = """<script>window.problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
console.error = (...words) => problems.push(words.join(" "));</script>"""

# What is wrong in a frame, and what its controls do. Texts of one drawing may touch, but not overlap.
_INSPECT = """
const box = (node) => node.getBoundingClientRect();
function inspect(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, problems = [];
  if (!page.body.dataset.drawn) problems.push("not drawn");
  const { scrollWidth, clientWidth } = page.documentElement;
  if (scrollWidth > clientWidth) problems.push("wider than the window");
  for (const drawing of page.querySelectorAll("figure svg")) {
    const frame = box(drawing);
    const texts = [...drawing.querySelectorAll("text")].filter((text) => box(text).width);
    texts.forEach((text, at) => {
      const one = box(text), words = text.textContent;
      if (one.left < frame.left - 1 || one.right > frame.right + 1 || one.bottom > frame.bottom + 1 ||
        one.top < frame.top - 1) problems.push(`cut: ${words}`);
      for (const other of texts.slice(at + 1).map(box)) {
        const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (across > 1 && down > 3) problems.push(`overlaps: ${words}`);
      }
    });
  }
  for (const figure of page.querySelectorAll("figure")) {
    const readout = figure.querySelector("output");
    const target = figure.querySelector("canvas, svg[tabindex]");
    if (!target) {
      problems.push(`empty: ${figure.getAttribute("aria-label")}`);
      continue;
    }
    const before = readout.textContent, { left, top, width, height } = box(target);
    const changed = () => readout.textContent && readout.textContent !== before;
    for (let press = 0; press < 2; press++) {
      target.dispatchEvent(new view.KeyboardEvent("keydown", { key: "ArrowRight" }));
    }
    if (!changed()) problems.push(`keys read nothing: ${figure.getAttribute("aria-label")}`);
    const at = { clientX: left + width / 2, clientY: top + height / 2, bubbles: true };
    target.dispatchEvent(new view.PointerEvent("pointermove", at));
    const isIdle = target.tagName === "CANVAS"; // there may be no action in the middle
    if (!isIdle && !changed()) problems.push(`nothing is read at: ${figure.getAttribute("aria-label")}`);
  }
  return [...problems, ...view.problems];
}
"""


def chromium() -> str | None:
    """The command of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def values_of(page: Path) -> Any:
    """The JSON block of a page."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def show(
    pages: Mapping[str, Path], script: str, folder: Path, widths: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Show every page at every width, light and dark. Returns, by `page width scheme`: `problems`; `dark`,
    the scheme that the page saw; `drawn`, ms until it was drawn; `result`, what `script` returns at the end:
    the body of a function of the page's document and its window."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in pages.items()}
    frames = [
        f'<iframe name="{name} {width} {scheme}" style="width:{width}px;height:900px;color-scheme:{scheme}" '
        f'srcdoc="{html.escape(text.replace("<head>", "<head>" + _WATCH, 1))}"></iframe>'
        for name, text in texts.items()
        for width in widths
        for scheme in ("light", "dark")
    ]
    report = f"""<script>{_INSPECT}
addEventListener("load", () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, view = frame.contentWindow;
    let problems = [], result = null;
    try {{
      problems = inspect(frame);
      result = ((page, view) => {{ {script} }})(page, view);
    }} catch (error) {{ problems.push(String(error)); }}
    found[frame.name] = {{ problems, result, drawn: Number(page.body.dataset.drawn),
      dark: view.matchMedia("(prefers-color-scheme: dark)").matches }};
  }}
  const report = document.createElement("pre");
  report.textContent = JSON.stringify(found);
  document.body.replaceChildren(report);
}});</script>"""
    (folder / "frames.html").write_text(f"<!doctype html><body>{''.join(frames)}{report}", encoding="utf-8")
    command = [
        str(chromium()),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--window-size=1500,1000", "--dump-dom", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    )
    shown = re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert shown is not None, done.stderr
    found: dict[str, Any] = json.loads(html.unescape(shown[1]))
    return found
