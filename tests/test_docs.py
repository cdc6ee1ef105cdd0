"""The documentation: public names are in it and described, pages can be reached, pictures are up to date."""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

import jvarlen
import torch_ref

ROOT = Path(jvarlen.__file__).parents[1]
DOCS = ROOT / "docs"
API = DOCS / "api"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])
EXPERIMENTAL = ROOT / "jvarlen" / "experimental"
READMES = sorted(EXPERIMENTAL.glob("**/README.md"))
TEXTS = [ROOT / "README.md", *PAGES, *READMES]
FOR_CONTRIBUTORS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")]
# Every name of these modules is public, and not only those that pages name.
PUBLIC_MODULES = ["models", "parallel", "testing", "training.checkpoint"]


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("pictures")
        del sys.modules["pictures"]


@pytest.fixture(scope="module")
def of_the_example(pictures):
    return dict(pictures.draw_example())


@pytest.fixture(scope="module")
def of_schedules(pictures):
    return dict(pictures.draw_schedules())


def documented_names():
    """Full names in the order of the pages."""
    return [
        name
        for page in sorted(API.glob("*.md"))
        for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page.read_text(), re.M)
    ]


def experimental_names():
    """Full names of what the packages of `jvarlen.experimental` export, with the README that describes each."""
    for path in sorted(EXPERIMENTAL.glob("*/__init__.py")):
        package = f"jvarlen.experimental.{path.parent.name}"
        names = importlib.import_module(package).__all__
        yield from ((f"{package}.{name}", path.parent / "README.md") for name in names)


def found(full_name):
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def named_by_pages():
    """Full names of ours that the README, the guides and the examples import from modules, or write in full.

    Without those that are experimental, which are in no API.
    """
    for full_name in all_named_by_pages():
        if not full_name.startswith("jvarlen.experimental"):
            yield full_name


def all_named_by_pages():
    programs = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    for page in TEXTS:
        text = page.read_text()
        programs += re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        yield from re.findall(r"\b(?:jvarlen|torch_ref)(?:\.[a-z]\w*)*\.[A-Za-z]\w*", text)
    for program in programs:
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(("jvarlen", "torch_ref")):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(full_name):
    return inspect.ismodule(found(full_name))


def public_names():
    of_modules = [importlib.import_module(f"jvarlen.{name}") for name in PUBLIC_MODULES]
    exported = {f"{module.__name__}.{name}" for module in (jvarlen, torch_ref, *of_modules) for name in module.__all__}
    return exported | {name for name in named_by_pages() if not is_module(name)}


def hidden_methods():
    """Full names of methods that the pages leave out of their classes."""
    text = "".join(page.read_text() for page in API.glob("*.md"))
    for full_name, option, names in re.findall(r"^\.\. autoclass:: (\S+)\n   :([\w-]*members): (.*)$", text, re.M):
        named = set(names.split(", "))
        hidden = named if option == "exclude-members" else set(vars(found(full_name))) - named
        yield from (f"{full_name}.{name}" for name in hidden)


def documented_functions():
    """Full name and function of all that is documented, methods of classes included."""
    hidden = set(hidden_methods())
    for full_name in [*documented_names(), *dict(experimental_names())]:
        value = found(full_name)
        if inspect.isclass(value):
            for name, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if not name.startswith("_") and inspect.isfunction(function) and f"{full_name}.{name}" not in hidden:
                    yield f"{full_name}.{name}", function
        elif inspect.isfunction(value):
            yield full_name, value


def described_fields(value):
    """Names of the fields of a class, and of those it inherits: listed as attributes, or each with a docstring."""
    for base in inspect.getmro(value):
        if base.__module__.startswith(("jvarlen", "torch_ref")):
            yield from re.findall(r"^ +(\w+):", section(inspect.getdoc(base), "Attributes"), re.MULTILINE)
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, below in zip(definition.body, definition.body[1:], strict=False):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and is_text:
                    yield field.target.id


def section(docstring, *names):
    match = re.search(rf"^(?:{'|'.join(names)}):\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    return match[1] if match else ""


def test_every_public_name_is_in_the_api():
    documented = set(documented_names())
    # What a package exports may be imported from its module as well.
    shorter = {id(found(name)) for name in documented if name.count(".") == 1}
    missing = [name for name in public_names() if name not in documented and id(found(name)) not in shorter]
    assert sorted(missing) == []


def test_the_page_of_names_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    page = importlib.import_module("names").names_page()
    assert (API / "names.md").read_text() == page, "run `python docs/names.py`"


def test_no_name_is_in_the_api_twice():
    names = documented_names()
    assert [name for name in names if names.count(name) > 1] == []


def test_everything_in_the_api_has_a_docstring_of_its_own():
    functions = dict(documented_functions())
    values = {name: found(name) for name in [*documented_names(), *dict(experimental_names())]} | functions
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


def test_every_field_in_the_api_is_described():
    undescribed = []
    for name in [*documented_names(), *dict(experimental_names())]:
        value = found(name)
        if not inspect.isclass(value):
            continue
        is_data = dataclasses.is_dataclass(value)
        fields = [field.name for field in dataclasses.fields(value)] if is_data else getattr(value, "_fields", ())
        undescribed += [f"{name}.{field}" for field in fields if field not in described_fields(value)]
    assert undescribed == []


def test_what_is_experimental_is_in_the_readme_of_its_folder():
    listed = (EXPERIMENTAL / "README.md").read_text()
    folders = {path.parent.name for path in EXPERIMENTAL.glob("*/__init__.py")}
    assert [name for name in folders if f"({name}/README.md)" not in listed] == []
    without = [name for name, page in experimental_names() if name.rpartition(".")[2] not in page.read_text()]
    assert without == []


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


@pytest.mark.parametrize("page", [*TEXTS, *FOR_CONTRIBUTORS], ids=lambda page: str(page.relative_to(ROOT)))
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


def test_pictures_of_the_example_are_what_the_library_draws(pictures, of_the_example):
    for name, svg in of_the_example.items():
        saved = (DOCS / "pictures" / f"{name}.svg").read_text()
        assert saved == pictures.to_file(svg) + "\n", f"{name} is out of date: run `python docs/pictures.py`"


def test_pictures_of_schedules_show_what_the_library_draws(of_schedules):
    """Their texts; shapes depend on the version of Matplotlib."""
    for name, svg in of_schedules.items():
        drawn, saved = (
            re.findall(r"<text[^>]*>([^<]+)<", text) for text in (svg, (DOCS / "pictures" / f"{name}.svg").read_text())
        )
        assert drawn == saved != [], f"{name} is out of date: run `python docs/pictures.py`"


def test_pictures_of_the_corpus_show_what_the_library_draws(pictures, of_the_example, of_schedules):
    """Their numbers depend on the standard library of the Python that drew them."""

    def words(svg):
        return re.findall(r">([a-z_% ]*[a-z]{2}[a-z_% ]*)<", svg)

    drawn = dict(pictures.draw_corpus())
    of_guides = {"layouts-memory", "simulation"}  # compared where the guides run
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == {
        *drawn,
        *of_the_example,
        *of_schedules,
        *of_guides,
    }
    for name, svg in drawn.items():
        assert words(svg) == words((DOCS / "pictures" / f"{name}.svg").read_text()) != []


def test_the_example_on_the_page_is_the_one_in_the_pictures(pictures):
    text = (DOCS / "how_a_plan_is_made.md").read_text()
    (lengths,) = re.findall(r"^lengths = (\[.*\])$", text, re.MULTILINE)
    assert ast.literal_eval(lengths) == pictures.EXAMPLE
    said = re.findall(r"(\d+\.\d) % padding|(\d+\.\d) %[;\]]", text)
    drawn = re.findall(r": (\d+\.\d)% padding", (DOCS / "pictures" / "buckets.svg").read_text())
    assert ["".join(each) for each in said][:4] == drawn


def test_pages_for_contributors_name_every_package_and_modules_that_are_there():
    text = (DOCS / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "jvarlen").glob("*/__init__.py")}
    table = text.split("## Packages")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (\[`[^|]*) \|", table, re.MULTILINE))))
    assert packages | {"cli"} == named
    text += (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`(\w+/\w+\.py)`", text)
    missing = [path for path in paths if not any((folder / path).exists() for folder in (ROOT / "jvarlen", ROOT))]
    assert not missing


def test_the_table_of_decisions_names_functions_that_are_there():
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`(\w+/\w+\.py)`\]\([^)]*\):((?: `[\w.]+`,?)+)", text)
    assert len(named) > 30
    missing = [
        f"{path}: {name}"
        for path, names in named
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names)
        if not re.search(rf"^ *(?:def|class) {name}\b", (ROOT / "jvarlen" / path).read_text(), re.MULTILINE)
    ]
    assert not missing


def test_the_contract_names_tests_that_are_there():
    missing, path = [], ""
    named = re.findall(r"`([\w/]+\.py)?::(\w+)`", (DOCS / "contract.md").read_text())
    for given, test in named:
        path = given or path
        file = ROOT / (path if path.startswith("tests/") else f"tests/parity/{path}")
        if not file.exists() or f"\ndef {test}(" not in file.read_text():
            missing.append(f"{path}::{test}")
    assert len(named) > 80
    assert not missing
