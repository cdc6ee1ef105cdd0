"""One HTML file of texts, pictures and tables that loads nothing and works offline.

Text from elsewhere is escaped by `text`.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from jvarlen import __version__
from jvarlen._common.files import write_atomically

__all__ = ["data_table", "figure", "figure_grid", "key_figures", "printable", "table_row", "text", "write_page"]

# The policy is a second guard: a browser that reads it runs no script and loads nothing, whatever stands in the page.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{summary}</p>
</header>
<main>
{sections}
</main>
<footer>
{footer}
</footer>
</body>
</html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --ink: #1d232b; --muted: #5a6573; --line: #d6dbe2;
  --first: #2a6ebb; --second: #c8590a; --third: #1d8348;
  --fourth: #8e44ad; --fifth: #c2255c; --sixth: #0b7f8c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1c2128; --ink: #e7eaef; --muted: #9ea9b6; --line: #38404b;
    --first: #74b0f0; --second: #f5a25d; --third: #6fce93;
    --fourth: #c9a2f2; --fifth: #f78fb3; --sixth: #5fd3dc;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1080px; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 0; }
h2 { font-size: 1.1rem; line-height: 1.3; margin: 0 0 0.5rem; }
header p, figcaption p, section > p, footer { color: var(--muted); font-size: 0.9rem; }
header p { margin: 0.25rem 0 1rem; }
dl { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0.75rem; margin: 0 0 1rem; }
@media (min-width: 640px) { dl { grid-template-columns: repeat(4, minmax(0, 1fr)); } }
dl div, figure, section.table { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; }
dl div { padding: 0.6rem 0.8rem; }
dt { color: var(--muted); font-size: 0.85rem; }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--muted); font-size: 0.8rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: 1rem; min-width: 0; break-inside: avoid; }
figcaption p { margin: 0.5rem 0 0; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
section.table { margin: 1rem 0; padding: 1rem; }
section.table p { margin: 0.5rem 0 0; }
.scroll { overflow-x: auto; }
table {
  border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal;
}
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
thead th { color: var(--muted); font-weight: 600; font-size: 0.85rem; }
tbody th { font-weight: 400; }
tfoot th, tfoot td, tr.best th, tr.best td { font-weight: 600; }
tfoot th, tfoot td { border-bottom: 0; }
td.problem { text-align: left; color: var(--muted); white-space: normal; min-width: 16rem; }
footer { margin-top: 1.5rem; }
footer p { margin: 0.25rem 0; }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; margin: 0 0 0.4rem; padding: 0; list-style: none; }
.legend li { display: flex; align-items: center; gap: 0.4rem; color: var(--muted); font-size: 0.85rem; min-width: 0; }
.legend span { min-width: 0; }
.legend svg { display: inline-block; flex: none; width: 1.75rem; height: 0.6rem; vertical-align: middle; }
.unknown { color: var(--muted); padding: 2rem 0; text-align: center; }
.wide :is(td, th) { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
summary { cursor: pointer; color: var(--muted); }
details .scroll { margin-top: 0.5rem; }
"""


def write_page(
    path: str | os.PathLike[str], *, title: str, summary: str, sections: Iterable[str], footer: Sequence[str] = ()
) -> None:
    """Writes a page, atomically.

    Args:
      path: the file; its directory must exist, and an existing file is replaced.
      title: plain text.
      summary: plain text under the title.
      sections: HTML, as the other functions here make it.
      footer: HTML of its paragraphs; the version follows them.

    Raises:
      OSError: the file cannot be written; an existing file stays.
    """
    page = _PAGE.format(
        title=text(title),
        style=_STYLE,
        summary=text(summary),
        sections="\n".join(sections),
        footer="\n".join(f"<p>{each}</p>" for each in (*footer, text(f"jvarlen {__version__}"))),
    )
    with write_atomically(Path(path)) as file:
        file.write(page.encode())


def text(plain: str) -> str:
    """Plain text as HTML, for content and for attributes in double quotes.

    Example:
      >>> text('<b> & "c"')
      '&lt;b&gt; &amp; &quot;c&quot;'
    """
    return html.escape(printable(plain))


def printable(plain: str) -> str:
    """Text without characters that act on terminals or browsers: controls, direction marks, lone surrogates."""
    return "".join(character if character.isprintable() else "\ufffd" for character in plain)


def key_figures(figures: Iterable[tuple[str, str, str]]) -> str:
    """Boxes with a name, a value and a note, all plain text."""
    entries = "\n".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(more)}</small></dd></div>"
        for name, value, more in figures
    )
    return f"<dl>\n{entries}\n</dl>"


def figure_grid(figures: Iterable[str]) -> str:
    """Figures side by side, as many as fit the window."""
    return f'<div class="figures">\n{"".join(figures)}</div>'


def figure(name: str, title: str, caption: str, svg: str, *, legend: str = "") -> str:
    """A picture in a box; title and caption describe it to readers who cannot see it.

    Args:
      name: of letters and hyphens, unlike that of any other.
      title: plain text.
      caption: plain text.
      svg: an `<svg>` element; empty if there is nothing to show.
      legend: HTML above the picture.
    """
    picture = '<p class="unknown">not known</p>'
    if svg:
        before, after = svg.split(">", 1)
        picture = f'{before} aria-describedby="{name}-caption">{after}'
    return (
        f'<figure id="{name}">\n<h2 id="{name}-title">{text(title)}</h2>\n{legend}{picture}\n'
        f'<figcaption><p id="{name}-caption">{text(caption)}</p></figcaption>\n</figure>\n'
    )


def data_table(
    name: str,
    title: str,
    header: Iterable[str],
    body: str,
    *,
    foot: str = "",
    note: str = "",
    is_wide: bool = False,
    is_closed: bool = False,
) -> str:
    """A table in a box of its own, which scrolls where the window is narrow.

    Args:
      name: of letters, digits and hyphens, unlike that of any other.
      title: plain text.
      header: plain text of each column.
      body: rows, as `table_row` makes them.
      foot: the last row, set apart.
      note: plain text below.
      is_wide: cells hold text that may be long, and is wrapped.
      is_closed: only the title shows until it is clicked.
    """
    heads = "".join(f'<th scope="col">{text(each)}</th>' for each in header)
    footer = f"<tfoot>\n{foot}\n</tfoot>\n" if foot else ""
    says = f"<p>{text(note)}</p>\n" if note else ""
    table = (
        f'<div class="scroll{" wide" if is_wide else ""}" role="region" aria-labelledby="{name}-title" tabindex="0">\n'
        f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n{footer}</table>\n</div>\n{says}"
    )
    heading = f'<h2 id="{name}-title">{text(title)}</h2>\n'
    if is_closed:
        table = f"<details>\n<summary>Show</summary>\n{table}</details>\n"
    return f'<section class="table" id="{name}">\n{heading}{table}</section>'


def table_row(cells: Iterable[str], *, is_best: bool = False) -> str:
    """A row of plain texts, the first of which names it."""
    first, *others = cells
    best = ' class="best"' if is_best else ""
    return f'<tr{best}><th scope="row">{text(first)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in others)}</tr>'
