"""Interactive pages: HTML files that open without a network or a server.

A page is its values, as one JSON block, and the scripts that draw them: `kit.js`, `timeline.js` and that of
its kind. Values are drawn as text, never as HTML, and the page's content policy lets it load nothing.
"""

from plait.pages.page import render_page, write_page

__all__ = ["render_page", "write_page"]
