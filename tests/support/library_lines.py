"""Counts the lines of a program that have to do with the library.

A line counts if it holds a name imported from jvarlen or torch_ref, or a variable assigned from an expression that
holds such a name or variable. A function that returns one is such a variable too; parameters are not.

`python -m tests.support.library_lines FILE …` prints the counts.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("jvarlen", "torch_ref")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef)


def library_lines(source: str) -> set[int]:
    """The numbers of the physical lines that count."""
    return _look(ast.parse(source), frozenset())[0]


def _look(scope: ast.AST, outer: frozenset[str]) -> tuple[set[int], bool]:
    """The lines of a scope that count, and whether it returns something of the library, given such names around it."""
    nodes = list(_own_nodes(scope))
    assigned = [(name, value) for node in nodes for name, value in _assignments(node)]
    imported = [(alias, name) for node in nodes for alias, name in _imports(node)]
    shadowed = {name for name, _ in assigned} | set(_parameters(scope))
    names, before = (outer - shadowed) | {name for _, name in imported}, frozenset()
    while names != before:
        before = names
        names |= {name for name, value in assigned if _holds(value, names)}
        names |= {node.name for node in nodes if isinstance(node, FUNCTIONS[:2]) and _look(node, names)[1]}
    lines = {alias.lineno for alias, _ in imported}
    lines |= {node.lineno for node in nodes if isinstance(node, ast.Name) and node.id in names}
    inner = [_look(node, names) for node in nodes if isinstance(node, SCOPES)]
    returned = [node.value for node in nodes if isinstance(node, ast.Return | ast.Yield) and node.value]
    returned += [scope.body] if isinstance(scope, ast.Lambda) else []
    return lines.union(*(of_inner for of_inner, _ in inner)), any(_holds(value, names) for value in returned)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those inside the functions and classes in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)
        else:  # what is evaluated outside
            waiting += getattr(node, "decorator_list", []) + getattr(node, "bases", [])


def _imports(node: ast.AST) -> Iterator[tuple[ast.alias, str]]:
    for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
        module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
        if module.split(".")[0] in LIBRARIES:
            yield alias, (alias.asname or alias.name).split(".")[0]


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Names that a node assigns, and from what."""
    match node:
        case ast.Assign(targets=targets, value=value):
            pass
        case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
            targets = [target]
        case ast.NamedExpr(target=target, value=value):
            targets = [target]
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            targets = [target]
        case ast.comprehension(target=target, iter=value):
            targets = [target]
        case ast.withitem(optional_vars=target, context_expr=value) if target:
            targets = [target]
        case _:
            return
    for target in targets:
        for part in ast.walk(target):  # of `a.b[c] = …`, a
            if isinstance(part, ast.Name) and not (isinstance(part.ctx, ast.Load) and part is not _base(target)):
                yield part.id, value


def _base(target: ast.AST) -> ast.AST:
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        target = target.value
    return target


def _parameters(scope: ast.AST) -> Iterator[str]:
    return (
        (node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg))
        if isinstance(scope, FUNCTIONS)
        else iter(())
    )


def _holds(value: ast.AST | None, names: frozenset[str]) -> bool:
    return value is not None and any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(value))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        print(f"{len(library_lines(path.read_text())):3}  {path}")
