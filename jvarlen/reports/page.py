"""One HTML file of texts, pictures and tables that loads nothing and works offline.

`page.html.jinja` is its template. Jinja2 escapes all text.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jvarlen import __version__
from jvarlen._common.files import write_atomically
from jvarlen.reports.figures import COLOURS, DARK, LINES, Picture, style_of_colours

__all__ = ["Table", "printable", "write_page"]


class Table(NamedTuple):
    """A table in a box of its own, which scrolls where the window is narrow. All text is plain."""

    name: str  # of letters, digits and hyphens, unlike that of any other
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]  # of cells, the first of which names the row; the last one fills a row that is short
    foot: Sequence[str] = ()  # the last row, set apart
    note: str = ""  # a line below
    best: int | None = None  # the place of a row that is set apart
    is_wide: bool = False  # cells hold text that may be long, and is wrapped
    texts: Sequence[str] = ()  # headers of columns of text, wrapped at spaces and slashes only, in a wide window
    is_closed: bool = False  # only the title shows until it is clicked


def write_page(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: str,
    pictures: Sequence[Picture],
    tables: Sequence[Table],
    key_figures: Sequence[tuple[str, str, str]] = (),
    first_table: Table | None = None,
    names: Sequence[str] = (),
    digest: str = "",
) -> None:
    """Writes a page, atomically; key figures are a name, a value and a note, and `names` those of runs for a legend."""
    import jinja2  # here: what prints no page does without

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # a Markup is another type
    )
    environment.filters["base64"] = lambda plain: base64.b64encode(str(plain).encode()).decode()
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    content: dict[str, Any] = {"title": title, "summary": summary, "pictures": pictures, "tables": tables}
    content |= {
        "key_figures": key_figures,
        "first_table": first_table,
        "names": names,
        "digest": digest,
        "lines": LINES,
    }
    colours = {"light": style_of_colours(COLOURS), "dark": style_of_colours(DARK)}
    page = environment.from_string(template).render(content, **colours, version=__version__)
    with write_atomically(Path(path)) as file:
        file.write(page.encode())


def printable(plain: str) -> str:
    """Text without characters that act on terminals or browsers: controls, direction marks, lone surrogates."""
    return "".join(character if character.isprintable() else "\ufffd" for character in plain)
