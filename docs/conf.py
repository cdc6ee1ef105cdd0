"""Sphinx settings, for a site that loads no external resources.

Pictures are inlined, and take the colours of their page.
"""

from __future__ import annotations

import gc
import html
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

import jvarlen

gc.disable()  # looking for garbage among the nodes of all pages takes a third of the time
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from pictures import DARK, LIGHT  # noqa: E402

project = "jvarlen"
author = "the authors of jvarlen"
version = release = jvarlen.__version__
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "command_help"]
exclude_patterns = ["_build"]
nitpicky = True
# Type hints name types of other packages, and shapes. Full names of our own must exist.
nitpick_ignore = [  # in signatures, and in no page
    ("py:class", name)
    for name in (
        "jvarlen._common.types.StepHalves",
        "jvarlen.batches.shapes.HasShapes",
        "jvarlen.compiling.programs.StepPart",
        "jvarlen.loading.plan_source.ReadStep",
        "jvarlen.parallel.portable.PortableForm",
        "jvarlen.parallel.schedules.Tables",
        "jvarlen.planning.buckets._Kind",
        "jvarlen.planning.steps.StepRows",
        "jvarlen.runs.config.Annotated",
        "jvarlen.runs.loop.Hook",
        "jvarlen.runs.plan_config.Annotated",
        "jvarlen.runs.plan_config.PlanSettings",
        "jvarlen.estimates.layout_table.LayoutTable",
        "jvarlen.estimates.memory_model.MemoryModel",
    )
]
suppress_warnings = ["ref.python"]  # `data` and the like are fields of several classes
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!(jvarlen|torch_ref)\.).*")]
default_role = "py:obj"  # a link if it names something public, otherwise code
smartquotes_action = "D"  # dashes only, no quotation marks

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # docstrings describe them
napoleon_use_rtype = False

html_theme = "furo"
html_theme_options = {"light_css_variables": LIGHT, "dark_css_variables": DARK}
html_title = f"jvarlen {version}"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False


def _inline_pictures(app: Sphinx, document: nodes.document, name: str) -> None:
    """Inlines our pictures, which then follow the page's light or dark theme."""
    for image in list(document.findall(nodes.image)):
        if app.builder.format == "html" and image["uri"].startswith("pictures/"):
            # Without styles, which would hold for the whole page, and without ids that several pictures have.
            svg = re.sub(r"<style.*?</style>|(?<=<g) id=\"[^\"]*\"", "", (HERE / image["uri"]).read_text())
            label = html.escape(image["alt"])
            image.replace_self(
                nodes.raw(
                    "", svg.replace("<svg ", f'<svg class="picture" role="img" aria-label="{label}" ', 1), format="html"
                )
            )


def _link_to_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes links to Markdown files outside of `docs/` downloads, because they are not pages of the site."""
    if "/" not in page:  # those in api/ link up to the guides
        source[0] = re.sub(r"\]\((\.\./[\w/.-]+\.md)\)", r"](path:\1)", source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _link_to_files)
    app.connect("doctree-resolved", _inline_pictures)
