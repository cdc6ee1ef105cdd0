"""Writes api/names.md, the public names with their arguments and what they are: `python docs/names.py`."""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

API = Path(__file__).parent / "api"
_HEAD = """# All names

Each public name with its arguments, its first line and its file below the checkout, where the whole docstring is. Made
by `python docs/names.py`.
"""


def names_page() -> str:
    """The page, in the order of the index."""
    pages = re.findall(r"^((?!names)[a-z_]+)$", (API / "index.md").read_text(), re.MULTILINE)
    parts = [_HEAD]
    for page in pages:
        text = (API / f"{page}.md").read_text()
        if found := re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE):
            parts += ["\n" + text.splitlines()[0].replace("#", "##") + "\n", *map(_line, found)]
    return "\n".join(parts) + "\n"


def _line(full_name: str) -> str:
    """The line of a name."""
    value = pkgutil.resolve_name(full_name)
    first = " ".join(inspect.cleandoc(value.__doc__).split("\n\n")[0].split())
    arguments, file = "", ""
    if callable(value):
        file = f" In {Path(inspect.getsourcefile(inspect.unwrap(value)) or '').relative_to(API.parents[1])}."
        if inspect.isfunction(value):
            given = inspect.signature(value).parameters.values()
            names = [str(each.replace(annotation=each.empty, default=each.empty)) for each in given]
            arguments = f"({', '.join(names)})"
    line = f"- `{full_name}{arguments}`: {first}{file}"
    return textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    (API / "names.md").write_text(names_page())
