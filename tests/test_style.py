"""Each module lists exactly the names that others may use."""

import ast
import re
from pathlib import Path

import jvarlen

ROOT = Path(jvarlen.__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("jvarlen", "torch_ref")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
}
PARSED = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
