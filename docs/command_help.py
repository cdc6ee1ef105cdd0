"""The directive `commands`: a section for each command of `jvarlen`, with what it prints for `--help-all`."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from jvarlen.cli import COMMANDS, main


def help_of(command: str) -> str:
    """All options of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main([command, "--help-all"])
    return shown.getvalue()


class _Commands(Directive):
    def run(self) -> list[Any]:
        return [_section(command) for command in COMMANDS]


def _section(command: str) -> nodes.section:
    section = nodes.section(ids=[f"jvarlen-{command}"])
    section += nodes.title(text=f"jvarlen {command}")
    section += nodes.literal_block(text := help_of(command), text, language="text")
    return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", _Commands)
    return {"parallel_read_safe": True}
