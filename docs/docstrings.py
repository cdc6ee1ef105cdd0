"""How Sphinx shows docstrings and signatures.

Type hints are shown as in the source, with shorter ones for arrays. Text in single backticks is code, and a link if it
names something documented here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from typing import Any, is_typeddict

from docutils import nodes
from sphinx.addnodes import desc_annotation
from sphinx.application import Sphinx

_PACKAGES = ("jvarlen", "jvarlen.models", "jvarlen.testing", "torch_ref", "torch_ref.parallel")
_ARRAY = re.compile(r"(\w+)\[(?:np\.|jax\.)?(?:ndarray|Array), ' ?([^']*)'\]")
_CODE_OR_BAR = re.compile(r"(?<![`:\w])`([^`]+)`(?![`_])|\|")


def _public_places() -> dict[str, str]:
    """Full names of the definitions of exported objects, mapped to the names under which they are documented."""
    return {
        f"{value.__module__}.{value.__qualname__}": f"{package}.{name}"
        for package in _PACKAGES
        for name in importlib.import_module(package).__all__
        if hasattr(value := getattr(importlib.import_module(package), name), "__qualname__")
    }


_PUBLIC_PLACES = _public_places()


def _place_of(value: Any) -> str | None:
    """The full name of a class or function of ours, the public one if it has one."""
    if not inspect.isroutine(value) and not inspect.isclass(value):
        return None
    place = f"{value.__module__}.{value.__qualname__}"
    return _PUBLIC_PLACES.get(place, place) if place.startswith(("jvarlen.", "torch_ref.")) else None


def _short(hint: str, names: dict[str, Any]) -> str:
    """Writes `Int64[np.ndarray, ' R_plus_1']` as `int64[R+1]`, and links classes of ours by their full names."""

    def array(match: re.Match[str]) -> str:
        sides = match[2].replace("_plus_", "+").split()
        return f"{match[1].lower()}[{', '.join('...' if side.startswith('*') else side for side in sides)}]"

    def linked(match: re.Match[str]) -> str:
        value = names.get(match[0])
        place = _place_of(value) if inspect.isclass(value) and not is_typeddict(value) else None
        return f"~{place}" if place else match[0]

    short = (
        _ARRAY.sub(array, hint).replace("npt.", "").replace("ndarray[tuple[Any, ...], dtype[int64]]", "NDArray[int64]")
    )
    return re.sub(r"(?<![\w.'])[A-Z]\w+", linked, short)


def _signature(function: Any) -> tuple[str, str]:
    """The arguments and the returned type, with the hints as in the source."""
    function = inspect.unwrap(function)
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    for default in ast.walk(arguments):
        if isinstance(default, ast.Name) and default.id.startswith("_"):
            default.id = "..."  # a private name says nothing
    returned = ast.unparse(definition.returns) if definition.returns else ""
    names = function.__globals__
    return f"({_short(ast.unparse(arguments), names)})", _short(returned, names)


def _in_short(app: Sphinx, what: str, name: str, obj: Any, *_: Any) -> tuple[str, str] | None:
    if inspect.isfunction(inspect.unwrap(obj)) or inspect.ismethod(obj):
        return _signature(obj)
    if not inspect.isclass(obj) or issubclass(obj, BaseException | dict):  # a TypedDict has no signature
        return None
    if dataclasses.is_dataclass(obj) and "Attributes:" not in obj.__doc__:
        return "", ""  # each field has a description of its own
    if dataclasses.is_dataclass(obj) or issubclass(obj, tuple):
        parameters = inspect.signature(obj).parameters  # their hints are in the docstring
        star = "*, " if any(each.kind is each.KEYWORD_ONLY for each in parameters.values()) else ""
        return f"({star}{', '.join(parameters)})", ""
    return (_signature(obj.__init__)[0], "") if "Args:" in obj.__doc__ else ("", "")  # else functions make it


def _without_type(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keeps napoleon from reading the text before a colon as the type of a property."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def _as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns text in backticks into code, and into a link if it is a public name."""
    package = importlib.import_module(name.partition(".")[0])
    around = vars(sys.modules[getattr(obj, "__module__", None) or package.__name__])

    def as_rst(match: re.Match[str]) -> str:
        if match[0] == "|":
            return r"\|"  # text between two bars is not a substitution
        content = " ".join(match[1].split())
        end = r"\ " if match.string[match.end() : match.end() + 1].isalnum() else ""  # as in `Subset`s
        place = _place_of(getattr(package, content) if content in package.__all__ else around.get(content))
        if place:
            return f":py:obj:`{content} <{place}>`{end}"
        # A lower-case name alone may be an attribute of several classes.
        is_name = re.fullmatch(r"[A-Z]\w*|[A-Za-z_]\w*(\.\w+)+", content)
        return f"`{content}`{end}" if is_name else f"``{content}``{end}"

    paragraphs = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(
        each if each.lstrip().startswith(">>>") else _CODE_OR_BAR.sub(as_rst, each) for each in paragraphs
    ).split("\n")


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Skips fields of named tuples, which the docstring of the class describes."""
    return True if type(obj).__name__ in ("_tuplegetter", "member_descriptor") else None


def _shorten_properties(app: Sphinx, document: nodes.document) -> None:
    """Shortens types of properties, which autodoc does not process as signatures."""
    for hint in document.findall(desc_annotation):
        text = hint.astext()
        if (short := _short(text, {})) != text:
            hint.children = [nodes.Text(short)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _in_short)
    app.connect("autodoc-process-docstring", _without_type, priority=400)  # before napoleon, whose priority is 500
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-read", _shorten_properties)
    return {"parallel_read_safe": True}
