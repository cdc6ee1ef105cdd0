"""The rules of the source that linters don't know: names that modules list, sizes, types, sentences, state."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import jvarlen

ROOT = Path(jvarlen.__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("jvarlen", "torch_ref")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
}
PARSED = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

CORE = {name: path for name, path in MODULES.items() if name.startswith("jvarlen.") and ".experimental." not in name}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 60
# A loop over equations of a trace, whose phases share all that it knows.
LONG_FUNCTIONS = {"jvarlen.parallel.own_leaves._run_by_layers"}
# Texts that people read, but for results of benchmarks, which stay as they were written.
TEXTS = [
    path
    for ending in ("py", "md")
    for folder in ("jvarlen", "torch_ref", "tests", "benchmarks", "examples", "docs", ".")
    for path in (ROOT.glob(f"*.{ending}") if folder == "." else (ROOT / folder).rglob(f"*.{ending}"))
    if "results" not in path.parts and "_build" not in path.parts
]


def listed(module):
    """The names in `__all__`; None where there is none."""
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


def defined(module):
    """The functions and classes of a module, by name."""
    return {node.name: node for node in module.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}


def assigned_or_imported(module):
    """The other names of a module: constants, types, and what it takes from elsewhere."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return names


def imported_names(module):
    """The modules and names of all that is used of this project's other modules, imported wherever."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    for node in imports:
        if node.module in PARSED:
            yield from ((node.module, alias.name) for alias in node.names)
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and modules.get(node.value.id) in PARSED
        ):
            yield modules[node.value.id], node.attr


def test_a_module_lists_all_that_others_use_and_nothing_else():
    problems = []
    for name, module in PARSED.items():
        names = listed(module)
        if names is None:
            problems.append(f"{name} has no __all__")
            continue
        problems += [f"{name} lists {each} twice" for each in {each for each in names if names.count(each) > 1}]
        public = {each for each in defined(module) if not each.startswith("_")}
        problems += [f"{name}.{each} is neither listed nor private" for each in sorted(public - set(names))]
        private = [each for each in names if each.startswith("_") and each != "__version__"]
        problems += [f"{name} lists {each}, which is private" for each in private]
    problems += [
        f"{name} uses {source}.{each}, which is not listed there"
        for name, module in PARSED.items()
        for source, each in imported_names(module)
        if each not in (listed(PARSED[source]) or ())
    ]
    assert not problems


def test_what_is_listed_is_there_and_documented():
    problems = []
    for name, module in PARSED.items():
        definitions, others = defined(module), assigned_or_imported(module)
        for each in listed(module) or ():
            if each not in definitions and each not in others:
                problems.append(f"{name}.{each} is not there")
            elif each in definitions and not ast.get_docstring(definitions[each]):
                problems.append(f"{name}.{each} is not documented")
    assert not problems


def test_packages_list_their_modules():
    """In the lists of their docstrings, before colons. That of `torch_ref` itself has none."""
    problems = []
    for path in [*ROOT.glob("jvarlen/*/**/__init__.py"), *ROOT.glob("torch_ref/*/**/__init__.py")]:
        docstring = " ".join(ast.get_docstring(ast.parse(path.read_text())).split())
        named = re.findall(r"\w+", " ".join(re.findall(r"(?:`\w+`, )*`\w+`(?=:)", docstring)))
        modules = {each.stem for each in path.parent.glob("*.py")} - {"__init__"}
        modules |= {each.parent.name for each in path.parent.glob("*/__init__.py")}
        problems += [f"{path.parent.name} lists {each}" for each in named if each not in modules]
        problems += [f"{path.parent.name} does not list {each}" for each in modules - {*named}]
    assert not problems


def test_modules_are_short():
    """A module holds one idea."""
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    too_long = {name: number for name, number in lines.items() if number > MOST_LINES}
    assert not too_long


def test_functions_fit_a_screen():
    """Without their docstrings."""
    too_long = {}
    for name, module in PARSED.items():
        for node in ast.walk(module):
            if isinstance(node, FUNCTIONS):
                has_docstring = ast.get_docstring(node) is not None
                docstring = node.body[0].end_lineno - node.body[0].lineno + 1 if has_docstring else 0
                number = node.end_lineno - node.lineno + 1 - docstring
                if number > MOST_LINES_OF_A_FUNCTION:
                    too_long[f"{name}.{node.name}"] = number
    assert too_long.keys() <= LONG_FUNCTIONS, too_long


def core_lines_with(pattern):
    """Places in the core whose line has a pattern."""
    return [
        f"{name}, line {number}"
        for name, path in CORE.items()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize(("pattern", "most"), [(r"dict\[str, Any\]", 10), (r"\bAny\b", 250)])
def test_few_lines_are_typed_loosely(pattern, most):
    lines = core_lines_with(pattern)
    assert len(lines) <= most, lines[-20:]


def test_no_ambient_state_changes_a_program():
    assert not core_lines_with(r"\bContextVar\b")


def test_settings_of_a_run_do_not_change_once_they_are_resolved():
    changing = core_lines_with(r"\breplace\((?:self\.)?(?:config|resolved|settings)\b")
    of_runs = {place.partition(",")[0] for place in changing if place.startswith("jvarlen.runs.")}
    assert of_runs <= {"jvarlen.runs.settings"}  # which resolves them


def test_the_core_names_nothing_experimental_but_in_the_commands():
    lines = core_lines_with(r"\bjvarlen\.experimental\b|[\"']experimental\.")
    assert {line.partition(",")[0] for line in lines} <= {"jvarlen.cli"}


def test_sentences_begin_with_their_subjects():
    """None begins with a preposition in place of its subject: say "For pairs, these are the two sizes"."""
    fronted = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in TEXTS
        for line in path.read_text().splitlines()
        if re.search(r"(?<!\w )\bOf (?!course)", line)
    ]
    assert not fronted


def without_lazy_tables(module):
    """The parts of a package's `__init__` that are not its table of names imported when they are first used."""
    return [
        node for node in module.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]


def imports_between_modules():
    """The modules that each module imports, wherever in it, for types as well."""
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts): ast.parse(path.read_text())
        for package in ("jvarlen", "torch_ref")
        for path in (ROOT / package).rglob("__init__.py")
    }
    bodies = {name: module.body for name, module in PARSED.items()}
    bodies |= {name: without_lazy_tables(module) for name, module in packages.items()}
    imports = {}
    for name, body in bodies.items():
        named = set()
        for node in itertools.chain.from_iterable(map(ast.walk, body)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of_names = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= of_names if of_names <= bodies.keys() else of_names | {node.module}
        imports[name] = (named & bodies.keys()) - {name}
    return imports


def test_no_modules_import_each_other_in_a_circle():
    left = imports_between_modules()
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    # What is left is in a circle, or imports one.
    assert not left
