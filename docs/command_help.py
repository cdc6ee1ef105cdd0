"""The directive `commands`: a section for each command of `jvarlen`, of what its parser prints for `--help`."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from jvarlen.cli import COMMANDS, main


def help_of(command: str) -> list[tuple[str, str]]:
    """The groups of settings in a command's help, as title and text; the first has no title, and shows the usage."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # so that groups have frames
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([command, "--help"])
    shown.seek(0)
    before, *groups = re.split(r"^╭─ (.*?) ─+╮$", shown.read(), flags=re.MULTILINE)
    framed = [re.sub(r"^(│ ?| *╰.*)|\s*│?$", "", text, flags=re.MULTILINE).strip("\n") for text in groups[1::2]]
    return [("", before.strip()), *zip(groups[::2], framed, strict=True)]


class _Commands(Directive):
    def run(self) -> list[Any]:
        return [_section(command) for command in COMMANDS]


def _section(command: str) -> nodes.section:
    section = nodes.section(ids=[f"jvarlen-{command}"])
    section += nodes.title(text=f"jvarlen {command}")
    for title, text in help_of(command):
        if title:
            section += nodes.paragraph("", "", nodes.strong(text=title))
        section += nodes.literal_block(text, text, language="text")
    return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", _Commands)
    return {"parallel_read_safe": True}
