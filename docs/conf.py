"""Settings of Sphinx, for a site that loads nothing from elsewhere.

Pictures become part of their page, so that they take its colours.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

import jvarlen

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from pictures import DARK, LIGHT  # noqa: E402

project = "jvarlen"
author = "the authors of jvarlen"
version = release = jvarlen.__version__
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings"]
exclude_patterns = ["_build"]
nitpicky = True
# Hints name types of other packages, and shapes; our own names, in full, must exist.
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!(jvarlen|torch_ref)\.).*")]
default_role = "py:obj"  # a link where it names something public, else code
smartquotes_action = "D"  # dashes; quotation marks stay as they are

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # their docstrings say what they are
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
    """Puts pictures of ours into the page itself, so that they are dark where it is."""
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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-resolved", _inline_pictures)
