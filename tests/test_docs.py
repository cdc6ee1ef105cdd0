"""The documentation: public names are in it and described, pages can be reached, pictures are up to date."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import jvarlen
import torch_ref

ROOT = Path(jvarlen.__file__).parents[1]
DOCS = ROOT / "docs"
API = DOCS / "api"
PAGES = sorted(DOCS.rglob("*.md"))
# Of these modules every name is public, and not only those that pages name.
PUBLIC_MODULES = [
    "checkpoint",
    "datasets",
    "html_report",
    "models",
    "pipeline",
    "run_report",
    "sort_figures",
    "testing",
]


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("pictures")
        del sys.modules["pictures"]


def documented_names():
    """Full names in the order of the pages."""
    return [
        name
        for page in sorted(API.glob("*.md"))
        for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page.read_text(), re.M)
    ]


def found(full_name):
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def imported_by_pages():
    """Full names that the Python lines of the README and of the guides import from modules of ours."""
    for page in (ROOT / "README.md", *PAGES):
        for lines in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(lines)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith(("jvarlen", "torch_ref")):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(full_name):
    return inspect.ismodule(found(full_name))


def public_names():
    of_modules = [importlib.import_module(f"jvarlen.{name}") for name in PUBLIC_MODULES]
    exported = {f"{module.__name__}.{name}" for module in (jvarlen, torch_ref, *of_modules) for name in module.__all__}
    return exported | {name for name in imported_by_pages() if not is_module(name)}


def documented_functions():
    """Full name and function of all that is documented, methods of classes included."""
    for full_name in documented_names():
        value = found(full_name)
        if inspect.isclass(value):
            for name, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if not name.startswith("_") and inspect.isfunction(function):
                    yield f"{full_name}.{name}", function
        elif inspect.isfunction(value):
            yield full_name, value


def section(docstring, *names):
    match = re.search(rf"^(?:{'|'.join(names)}):\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    return match[1] if match else ""


def test_every_public_name_is_in_the_api():
    # By the objects: a name can have a shorter public one.
    documented = {id(found(name)) for name in documented_names()}
    assert [name for name in sorted(public_names()) if id(found(name)) not in documented] == []


def test_no_name_is_in_the_api_twice():
    names = documented_names()
    assert [name for name in names if names.count(name) > 1] == []


def test_everything_in_the_api_has_a_docstring_of_its_own():
    functions = dict(documented_functions())
    values = {name: found(name) for name in documented_names()} | functions
    generated = re.compile(r"\w+\(.*\)", re.DOTALL)  # what dataclasses and named tuples get where nothing is written
    without = [name for name, value in values.items() if not value.__doc__ or generated.fullmatch(value.__doc__)]
    assert without == []


def test_every_parameter_in_the_api_is_described():
    undescribed = []
    for name, function in documented_functions():
        described = re.findall(r"^ +\*{0,2}(\w+)(?: \(.*\))?:", section(inspect.getdoc(function), "Args"), re.MULTILINE)
        parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
        undescribed += [f"{name}({parameter})" for parameter in sorted(parameters - set(described))]
    assert undescribed == []


def test_what_functions_of_the_api_return_is_described():
    silent = []
    for name, function in documented_functions():
        signature = inspect.signature(function)
        nothing = signature.return_annotation in (None, "None", "Iterator[None]", inspect.Signature.empty)
        takes_any = set(signature.parameters) - {"self", "cls"}
        if takes_any and not nothing and not section(inspect.getdoc(function), "Returns", "Yields"):
            silent.append(name)
    assert silent == []


def test_every_page_is_in_a_table_of_contents():
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for names in re.findall(r"```\{toctree\}\n(?::.*\n)*\n([^`]*)```", page.read_text()):
            listed |= {page.parent / f"{name}.md" for name in names.split()}
    assert listed == set(PAGES)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page.parent / path if path else page
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor and file.exists() else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    assert broken == []


def test_pictures_of_the_example_are_what_the_library_draws(pictures):
    for name, svg in pictures.draw_example():
        saved = (DOCS / "pictures" / f"{name}.svg").read_text()
        assert saved == pictures.to_file(svg) + "\n", f"{name} is out of date: run `python docs/pictures.py`"


@pytest.mark.slow
def test_pictures_of_the_corpus_show_what_the_library_draws(pictures):
    """Their numbers depend on the standard library of the Python that drew them."""

    def words(svg):
        return re.findall(r">([a-z_% ]*[a-z]{2}[a-z_% ]*)<", svg)

    drawn = dict(pictures.draw_corpus())
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == {*drawn, *dict(pictures.draw_example())}
    for name, svg in drawn.items():
        assert words(svg) == words((DOCS / "pictures" / f"{name}.svg").read_text()) != []


def test_the_example_on_the_page_is_the_one_in_the_pictures(pictures):
    text = (DOCS / "how_a_plan_is_made.md").read_text()
    (lengths,) = re.findall(r"^lengths = (\[.*\])$", text, re.MULTILINE)
    assert ast.literal_eval(lengths) == pictures.EXAMPLE
    said = re.findall(r"(\d+\.\d) % padding|(\d+\.\d) %[;\]]", text)
    drawn = re.findall(r": (\d+\.\d)% padding", (DOCS / "pictures" / "buckets.svg").read_text())
    assert ["".join(each) for each in said][:4] == drawn


def test_the_lines_of_the_first_page_run(capsys):
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    exec(script, {})
    assert "padding" in capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_about_how_a_plan_is_made_run(capsys):
    names = {}
    for script in re.findall(r"```python\n(.*?)```", (DOCS / "how_a_plan_is_made.md").read_text(), re.DOTALL):
        exec(script, names)
    printed = capsys.readouterr().out
    for line in ("[16  1  8  4 13 19 ", "(1, 5)\n", "5×5 4×9 2×14 1×30\n", "5 23.5%\n", "ecb175badca2025b\n"):
        assert line in printed
    assert "[[16  8 13  0 22]\n [ 1  4 19 11 -1]]\n" in printed
    assert names["plan"].num_samples == len(names["corpus"])
