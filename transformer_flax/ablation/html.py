"""A report in Markdown as one HTML file that needs nothing else: no network, no other file, no script to be read."""

import base64
import html
from collections.abc import Mapping

import markdown_it

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #d1d9e0; --shade: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; --shade: #151b23; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 72rem; color: var(--ink); background: var(--paper);
       font: 16px/1.55 system-ui, sans-serif; }
h1, h2 { line-height: 1.25; margin: 2.2rem 0 0.8rem; }
h1 { margin-top: 0; }
p, li { max-width: 46rem; }
p:has(img) { max-width: none; }
table { display: block; overflow-x: auto; margin: 1.5rem 0; border-collapse: collapse;
        font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { background: var(--shade); vertical-align: bottom; }
td:first-child, td[style] { white-space: nowrap; }
.sortable th { cursor: pointer; }
tbody tr:hover { background: var(--shade); }
code, pre { font: 0.85rem/1.5 ui-monospace, monospace; }
code { background: var(--shade); padding: 0.1rem 0.3rem; border-radius: 4px; }
pre { padding: 0.8rem 1rem; overflow-x: auto; background: var(--shade); border-radius: 6px; }
pre code { padding: 0; }
img { max-width: 100%; height: auto; }
"""

# Sorts a table by the column whose head is clicked: by the number that a cell begins with, or by its text.
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  table.classList.add("sortable");
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const key = row => row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
      if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || key(a).localeCompare(key(b));
      return x - y;
    };
    const order = head.dataset.order = head.dataset.order === "1" ? "-1" : "1";
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => order * compare(a, b)));
  }));
}
"""


def page(title: str, markdown: str, images: Mapping[str, bytes]) -> str:
    """Renders a report.

    Args:
      title: of the page.
      markdown: CommonMark with tables; HTML in it is shown, not obeyed.
      images: SVG by the name that an image of the Markdown has.
    """
    renderer = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = renderer.parse(markdown)
    for token in tokens:
        for child in token.children or []:
            if child.type == "image":
                encoded = base64.b64encode(images[str(child.attrs["src"])]).decode()
                child.attrs["src"] = f"data:image/svg+xml;base64,{encoded}"
    body = renderer.renderer.render(tokens, renderer.options, {})
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
